"""Puts a workload on a server: checks that it fits, warms up, runs it, and says how it ended."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagewire.bench import target
from pagewire.bench.progress import ProgressLine
from pagewire.bench.run import Run, Server, run
from pagewire.bench.workload import PlannedRequest, Workload
from pagewire.cli import FAILURE, INTERRUPTED, SUCCESS
from pagewire.client import AsyncClient
from pagewire.sampling import SamplingParams
from pagewire.server import ServerInfo

MAX_SHOWN_ERRORS = 10


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


async def put(load: LoadTest, client: AsyncClient) -> tuple[ServerInfo, Run]:
    """Runs a load test, and returns the server's description and the measurements. Raises CommandError if a request
    cannot fit the server."""
    async with client:
        info = await client.info()
        target.check_fits(load.workload, info)
        warm_up = replace(load.workload, num_prompts=load.num_warmups, request_rate=float("inf"))
        warm_ups = warm_up.requests(info.vocab_size) if load.num_warmups else []
        return info, await send(load, client, load.workload.requests(info.vocab_size), warm_ups)


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
    line = ProgressLine(load.name, len(requests), sys.stderr if load.shows_progress else None)
    measured = await run(
        server,
        requests,
        load.sampling,
        line,
        cache_salt=target.new_cache_salt(),
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
