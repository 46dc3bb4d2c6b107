"""Puts a workload on a server: sends requests at their times, and notes when tokens came.

All times are in seconds from the start of the run.
"""

import asyncio
import contextlib
import itertools
import math
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pagewire.bench.workload import PlannedRequest, Workload
from pagewire.cli import FAILURE, INTERRUPTED, SUCCESS
from pagewire.client import AsyncClient
from pagewire.completion import Usage
from pagewire.errors import CommandError, PagewireError
from pagewire.progress import Progress
from pagewire.sampling_params import SamplingParams
from pagewire.server import ServerInfo

MAX_SHOWN_ERRORS = 10


class Server(Protocol):
    """A server that answers requests, in the way of `pagewire.AsyncClient`."""

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came in one message."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A message of a server that counts tokens only at the end, in `usage`."""

    has_text: bool
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The times of a request. It has failed if there is an `error`; without one and `is_finished` it was cut off."""

    num_prompt_tokens: int
    planned_at: float
    sent_at: float
    ended_at: float
    arrivals: tuple[Arrival, ...]
    is_finished: bool
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """The time to the first token, or None without one."""
        return self.arrivals[0].at - self.sent_at if self.arrivals else None

    @property
    def itls(self) -> list[float]:
        """The times between two messages, each of one token or more."""
        return [after.at - before.at for before, after in itertools.pairwise(self.arrivals)]

    @property
    def latency(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """The time per output token but the first, or None with fewer than two."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency - (self.ttft or 0.0)) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """The requests that were sent, in that order. `duration` is from the start to the end of the last one, or to the
    interruption."""

    records: tuple[RequestRecord, ...]
    duration: float
    was_interrupted: bool = False


async def run(
    server: Server,
    requests: Sequence[PlannedRequest],
    sampling: SamplingParams,
    progress: Progress,
    *,
    request_id_prefix: str | None = None,
    max_concurrency: int | None = None,
) -> Run:
    """Sends each request at its time, though never more than `max_concurrency` at once.

    Cancelling it, as Ctrl-C does, loses nothing: it returns what has been measured until then.
    """
    sender = _Sender(server, sampling, progress, request_id_prefix, max_concurrency)
    was_interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                await asyncio.sleep(max(0.0, request.send_at - sender.now()))
                group.create_task(sender.send(index, request))
    except asyncio.CancelledError:
        was_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    duration = sender.now() if was_interrupted else max(record.ended_at for record in sender.records.values())
    records = tuple(sender.records[index] for index in sorted(sender.records))
    return Run(records, duration, was_interrupted)


def counted(arrivals: Sequence[Arrival], num_tokens: int, ended_at: float) -> list[Arrival]:
    """Returns the arrivals with that many tokens in all, shared out evenly where a message was taken for one token.

    Where no message had any text, all tokens arrive with the end.
    """
    if sum(arrival.num_tokens for arrival in arrivals) == num_tokens:
        return list(arrivals)
    if not arrivals:
        return [Arrival(ended_at, num_tokens)]
    shares = [num_tokens * index // len(arrivals) for index in range(len(arrivals) + 1)]
    return [
        Arrival(arrival.at, after - before)
        for arrival, (before, after) in zip(arrivals, itertools.pairwise(shares), strict=True)
    ]


class _Sender:
    """Sends the requests of one run, and keeps their records."""

    def __init__(
        self,
        server: Server,
        sampling: SamplingParams,
        progress: Progress,
        request_id_prefix: str | None,
        max_concurrency: int | None,
    ) -> None:
        self._server = server
        self._sampling = sampling
        self._progress = progress
        self._request_id_prefix = request_id_prefix
        self._slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        # Equal seeds give equal prompts, and without a salt of its own a run would find in the cache what an earlier
        # one has computed.
        self._cache_salt = f"bench-{uuid.uuid4().hex}"
        self._started_at = time.perf_counter()
        self.records: dict[int, RequestRecord] = {}

    def now(self) -> float:
        return time.perf_counter() - self._started_at

    async def send(self, index: int, request: PlannedRequest) -> None:
        async with self._slots:
            sent_at = self.now()
            arrivals: list[Arrival] = []
            record = RequestRecord(request.num_prompt_tokens, request.send_at, sent_at, sent_at, (), False)
            usage: Usage | None = None
            try:
                async with contextlib.aclosing(self._stream(index, request)) as outputs:
                    async for output in outputs:
                        usage = output.usage or usage
                        num_tokens = int(output.has_text) if isinstance(output, Chunk) else len(output.token_ids)
                        if num_tokens:
                            arrivals.append(Arrival(self.now(), num_tokens))
                            self._progress.add(num_tokens, has_ended=False)
                record = replace(record, is_finished=True)
            except PagewireError as error:
                record = replace(record, error=f"{error.code.name}: {error}")
            finally:
                ended_at = self.now()
                if usage is not None and request.text is not None:
                    record = replace(record, num_prompt_tokens=usage.prompt_tokens)
                    arrivals = counted(arrivals, usage.completion_tokens, ended_at)
                self.records[index] = replace(record, ended_at=ended_at, arrivals=tuple(arrivals))
                self._progress.add(0, has_ended=True)

    def _stream(self, index: int, request: PlannedRequest) -> Any:
        prefix = self._request_id_prefix
        return self._server.stream(
            request.text,
            replace(self._sampling, max_tokens=request.num_output_tokens, seed=request.seed),
            prompt_token_ids=request.prompt_token_ids if request.text is None else None,
            request_id=None if prefix is None else f"{prefix}{index}",
            cache_salt=self._cache_salt,
        )


@dataclass(frozen=True, slots=True)
class LoadTest:
    """A workload and how it is sent. `num_warmups` requests of it go first, unmeasured."""

    name: str
    workload: Workload
    sampling: SamplingParams
    max_concurrency: int | None = None
    num_warmups: int = 0
    request_id_prefix: str | None = None
    shows_progress: bool = True

    @property
    def warm_up(self) -> Workload:
        return replace(self.workload, num_prompts=self.num_warmups, request_rate=math.inf)


async def put(load: LoadTest, client: AsyncClient) -> tuple[ServerInfo, Run]:
    """Runs a load test, and returns the server's description and the measurements. Raises CommandError if a request
    cannot fit the server."""
    async with client:
        info = await client.info()
        check_fits(load.workload, info)
        requests, warm_ups = (part.requests(info.vocab_size) for part in (load.workload, load.warm_up))
        return info, await send(load, client, requests, warm_ups)


def check_fits(workload: Workload, info: ServerInfo) -> None:
    """Raises CommandError if some request may be longer than the server allows."""
    if workload.max_sequence_len > info.max_model_len:
        raise CommandError(
            f"--random-prefix-len, --input-len and --output-len with --random-range-ratio come to up to "
            f"{workload.max_prompt_len} + {workload.output_len.max} tokens, but max_model_len of the server is "
            f"{info.max_model_len}: lower them"
        )


async def send(
    load: LoadTest, server: Server, requests: Sequence[PlannedRequest], warm_ups: Sequence[PlannedRequest]
) -> Run:
    """Sends the warm-up requests, and then those that are measured."""
    if warm_ups:
        warmed = await _send(replace(load, name=f"{load.name} (warming up)", request_id_prefix=None), server, warm_ups)
        if warmed.was_interrupted:
            return Run((), 0.0, was_interrupted=True)
    return await _send(load, server, requests)


async def _send(load: LoadTest, server: Server, requests: Sequence[PlannedRequest]) -> Run:
    line = Progress(len(requests), sys.stderr if load.shows_progress else None, title=load.name)
    measured = await run(
        server,
        requests,
        load.sampling,
        line,
        request_id_prefix=load.request_id_prefix,
        max_concurrency=load.max_concurrency,
    )
    line.close()
    return measured


def exit_code(measured: Run) -> int:
    """Says on standard error which requests failed, and returns the exit code. A run in which nothing finished is a
    failure, unless it was interrupted."""
    errors = [record.error for record in measured.records if record.error is not None]
    for error in errors[:MAX_SHOWN_ERRORS]:
        print(f"a request failed: {error}", file=sys.stderr)
    if len(errors) > MAX_SHOWN_ERRORS:
        print(f"and {len(errors) - MAX_SHOWN_ERRORS} more failed", file=sys.stderr)
    if measured.was_interrupted:
        has_measured = any(record.arrivals for record in measured.records)
        text = "the figures are those of what was measured until then" if has_measured else "nothing was measured yet"
        print(f"interrupted: {text}", file=sys.stderr)
        return INTERRUPTED
    return SUCCESS if any(record.is_finished for record in measured.records) else FAILURE
