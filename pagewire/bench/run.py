"""The load generator of the benchmarks: sends requests and records the arrival times of tokens.

All times are in seconds from the start of the run.
"""

import asyncio
import contextlib
import itertools
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagewire.bench.workload import PlannedRequest, Workload
from pagewire.cli import FAILURE, INTERRUPTED, SUCCESS
from pagewire.client.client import AsyncClient
from pagewire.client.errors import CommandError, PagewireError
from pagewire.client.sampling_params import SamplingParams
from pagewire.client.server_info import ServerInfo
from pagewire.progress import Progress

MAX_SHOWN_ERRORS = 10


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of one message of a response stream: the time at which it arrived, and the number of tokens in the
    message."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The timing of one request of a benchmark.

    A failed request has an `error`. A request with neither an `error` nor `is_finished` was interrupted.
    """

    num_prompt_tokens: int
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
        """The time from sending the request to the first token in seconds, or None if no token arrived."""
        return self.arrivals[0].at - self.sent_at if self.arrivals else None

    @property
    def itls(self) -> list[float]:
        """The times between consecutive messages of the response in seconds. Each message has at least one token."""
        return [after.at - before.at for before, after in itertools.pairwise(self.arrivals)]

    @property
    def latency(self) -> float:
        return self.ended_at - self.sent_at


@dataclass(frozen=True, slots=True)
class Run:
    """The timing of the requests that a benchmark sent, in order.

    `duration` is the time in seconds from the start to the end of the last request, or to the interruption.
    """

    records: tuple[RequestRecord, ...]
    duration: float
    was_interrupted: bool = False


async def run(
    client: AsyncClient,
    requests: Sequence[PlannedRequest],
    sampling: SamplingParams,
    progress: Progress,
    *,
    max_concurrency: int | None = None,
) -> Run:
    """Send the requests of a benchmark to the server and return their timing. At most `max_concurrency` requests run at
    a time.

    If the coroutine is cancelled, as by Ctrl-C, it returns the measurements so far and does not raise CancelledError.
    """
    sender = _Sender(client, sampling, progress, max_concurrency)
    was_interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(sender.send(index, request))
    except asyncio.CancelledError:
        was_interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    duration = sender.now() if was_interrupted else max(record.ended_at for record in sender.records.values())
    records = tuple(sender.records[index] for index in sorted(sender.records))
    return Run(records, duration, was_interrupted)


class _Sender:
    """Sends the requests of one benchmark run and records their timing."""

    def __init__(
        self,
        client: AsyncClient,
        sampling: SamplingParams,
        progress: Progress,
        max_concurrency: int | None,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._progress = progress
        self._slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        # Equal seeds give equal prompts. The random salt keeps a run from hitting the cached prefixes of an earlier
        # run.
        self._cache_salt = f"bench-{uuid.uuid4().hex}"
        self._started_at = time.perf_counter()
        self.records: dict[int, RequestRecord] = {}

    def now(self) -> float:
        return time.perf_counter() - self._started_at

    async def send(self, index: int, request: PlannedRequest) -> None:
        async with self._slots:
            sent_at = self.now()
            arrivals: list[Arrival] = []
            record = RequestRecord(len(request.prompt_token_ids), sent_at, sent_at, (), False)
            stream = self._client.stream(
                None,
                replace(self._sampling, max_tokens=request.num_output_tokens, seed=request.seed),
                prompt_token_ids=request.prompt_token_ids,
                cache_salt=self._cache_salt,
            )
            try:
                async with contextlib.aclosing(stream) as outputs:
                    async for output in outputs:
                        if num_tokens := len(output.token_ids):
                            arrivals.append(Arrival(self.now(), num_tokens))
                            self._progress.add(num_tokens, has_ended=False)
                record = replace(record, is_finished=True)
            except PagewireError as error:
                record = replace(record, error=f"{error.code.name}: {error}")
            finally:
                self.records[index] = replace(record, ended_at=self.now(), arrivals=tuple(arrivals))
                self._progress.add(0, has_ended=True)


def check_fits(workload: Workload, info: ServerInfo) -> None:
    """Raise CommandError if a request of the benchmark could exceed the server's context length."""
    if workload.max_sequence_len > info.max_model_len:
        raise CommandError(
            f"--random-prefix-len, --input-len and --output-len with --random-range-ratio allow up to "
            f"{workload.max_prompt_len} + {workload.output_len.max} tokens, but max_model_len of the server is "
            f"{info.max_model_len}: lower them"
        )


def exit_code(measured: Run) -> int:
    """Print the errors of failed requests to standard error, and return the exit code of the benchmark.

    The exit code is INTERRUPTED if the run was interrupted. Otherwise, it is SUCCESS if at least one request finished,
    and FAILURE if none did.
    """
    errors = [record.error for record in measured.records if record.error is not None]
    for error in errors[:MAX_SHOWN_ERRORS]:
        print(f"a request failed: {error}", file=sys.stderr)
    if len(errors) > MAX_SHOWN_ERRORS:
        print(f"and {len(errors) - MAX_SHOWN_ERRORS} more failed", file=sys.stderr)
    if measured.was_interrupted:
        has_measured = any(record.arrivals for record in measured.records)
        text = "the figures cover what was measured so far" if has_measured else "nothing was measured yet"
        print(f"interrupted: {text}", file=sys.stderr)
        return INTERRUPTED
    return SUCCESS if any(record.is_finished for record in measured.records) else FAILURE
