"""Many concurrent streams, and workers that end during them."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pagewire import AsyncClient, SamplingParams
from testing.services import System

NUM_STREAMS = 100
Served = TypeVar("Served")
Request = tuple[list[int], SamplingParams]  # a prompt and its sampling parameters


def requests_of(
    seed: int,
    vocab_size: int,
    *,
    num_requests: int = NUM_STREAMS,
    max_suffix: int = 56,
    max_tokens: tuple[int, int] = (60, 120),
) -> list[Request]:
    """Return requests, half of them greedy and half of them seeded.

    Prompts have 1 to 64 + `max_suffix` tokens, and some share a prefix.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(64)]
    requests = []
    for i in range(num_requests):
        prompt = shared[: rng.choice((0, 0, 32, 64))] + [
            rng.randrange(vocab_size) for _ in range(rng.randint(1, max_suffix))
        ]
        temperature = 0.0 if i % 2 else 0.8
        sampling = SamplingParams(temperature=temperature, seed=i, max_tokens=rng.randint(*max_tokens), ignore_eos=True)
        requests.append((prompt, sampling))
    return requests


class Progress:
    """A counter of the tokens that have arrived, on which a task can wait for a given count."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._goals: list[tuple[int, asyncio.Event]] = []

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        for goal, reached in self._goals:
            if self.num_tokens >= goal:
                reached.set()

    async def until(self, num_tokens: int) -> None:
        reached = asyncio.Event()
        self._goals.append((num_tokens, reached))
        self.add(0)
        await reached.wait()


async def until_connected(client: AsyncClient, connected: bool) -> None:
    while (await client.loads()).worker_connected is not connected:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.02)


async def until_lost(client: AsyncClient, num_losses: int) -> None:
    while (await client.loads()).num_worker_losses < num_losses:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.005)


async def run_streams(
    client: AsyncClient, requests: Sequence[Request], progress: Progress | None = None
) -> list[list[int]]:
    """Return the tokens of every stream. The client itself raises if a token is lost or repeated."""

    async def stream(i: int) -> list[int]:
        prompt, sampling = requests[i]
        tokens: list[int] = []
        async for output in client.stream(None, sampling, prompt_token_ids=prompt):
            assert output.first_token == len(tokens)
            tokens.extend(output.token_ids)
            if progress is not None:
                progress.add(len(output.token_ids))
        assert len(tokens) == sampling.max_tokens
        return tokens

    return await asyncio.gather(*(stream(i) for i in range(len(requests))))


@dataclass(frozen=True, slots=True)
class DisturbedRun:
    """The tokens of an undisturbed run and of the runs during which the worker ended repeatedly.

    `seconds_to_recover` is the median time from an end of the worker to the next connection.
    """

    calm: list[list[int]]
    disturbed: list[list[list[int]]]
    seconds_to_recover: float


async def run_with_ends(
    running: Callable[..., AbstractContextManager[System]],
    model: Path,
    requests: Sequence[Request],
    num_ends: int,
    *,
    kills: bool = True,
    **flags: Any,
) -> DisturbedRun:
    """Run the requests, then run them again while the worker is ended `num_ends` times.

    If `kills` is set, the worker is killed, else it is stopped by a signal. `running` starts the services, for example
    `testing.services.running`.
    """
    with running(model, **flags) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_streams(client, requests)
            disturbed, seconds = await run_while_ending(
                system, client, requests, [0] * num_ends, run_streams, kills=kills
            )
            loads = await client.loads()
    assert loads.num_worker_losses >= num_ends
    assert loads.num_held_blocks == 0
    return DisturbedRun(calm, disturbed, statistics.median(seconds))


async def run_while_ending(
    system: System,
    client: AsyncClient,
    requests: Sequence[Request],
    ranks: Sequence[int],
    run: Callable[[AsyncClient, Sequence[Request], Progress], Awaitable[Served]],
    *,
    kills: bool = True,
) -> tuple[list[Served], list[float]]:
    """Run the requests while the given ranks of the worker are ended in turn.

    Each end waits until another share of the tokens has arrived, including some tokens since the previous end. Return
    the results of each run of the requests, and the seconds from each end to the next connection. If the requests
    finish before the last end, they are run again.
    """
    progress = Progress()
    share = sum(sampling.max_tokens for _, sampling in requests) // (len(ranks) + 2)

    async def end_repeatedly() -> list[float]:
        goal, seconds = 0, []
        for num_ends, rank in enumerate(ranks, start=1):
            await progress.until(max(goal, share * num_ends))
            started = time.monotonic()
            if kills:
                system.workers[rank].kill()
            else:
                assert await asyncio.to_thread(system.workers[rank].stop) == 0
            system.restart_worker(rank)
            await until_lost(client, num_ends)
            await until_connected(client, True)
            seconds.append(time.monotonic() - started)
            goal = progress.num_tokens + len(requests)
        return seconds

    ending = asyncio.create_task(end_repeatedly())
    runs = [await run(client, requests, progress)]
    while not ending.done():
        runs.append(await run(client, requests, progress))
    return runs, await ending
