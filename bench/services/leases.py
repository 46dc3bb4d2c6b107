"""Measures what leases save, and how long new requests wait for them.

    python -m bench leases

Both services run as processes, once with leases and once with one step in a plan. One request streams alone, then eight
stream while others arrive at random times. The two systems are measured in turns; figures are medians of the rounds.
The scheduler's CPU time includes its side of the wire. The raw numbers are written to bench/results/leases.json.
"""

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections.abc import Sequence

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from bench.measure import cpu_seconds, in_turns, medians
from pagewire import AsyncClient, SamplingParams
from testing.services import System, running

VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
NUM_STREAMS, INPUT_LEN = 8, 20
ARMS = {"one step": ["--max-lease-ms", 0], "leases": []}
# Goals: leases relative to one step.
CPU_GOAL, WAIT_GOAL = 0.5, 1.2


async def stream(
    client: AsyncClient, rng: random.Random, num_tokens: int, gaps: list[float], ended: asyncio.Event | None = None
) -> int:
    """Stream a request until it or `ended` is over, and append the seconds between its messages to `gaps`. Return the
    number of its tokens."""
    prompt = rng.choices(range(VOCAB_SIZE), k=INPUT_LEN)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    num_received, last = 0, None
    async with contextlib.aclosing(client.stream(None, sampling, prompt_token_ids=prompt)) as outputs:
        async for output in outputs:
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            num_received, last = num_received + len(output.token_ids), now
            if ended is not None and ended.is_set():
                break
    return num_received


async def alone(client: AsyncClient, system: System, rng: random.Random, num_tokens: int) -> dict[str, float]:
    """Return the speed of one stream, and the CPU time of the scheduler and of this client for a token."""
    pids, gaps, start = (system.scheduler.pid, os.getpid()), [], time.perf_counter()
    before = [cpu_seconds(pid) for pid in pids]
    await stream(client, rng, num_tokens, gaps)
    seconds = time.perf_counter() - start
    scheduler, own = (cpu_seconds(pid) - cpu for pid, cpu in zip(pids, before, strict=True))
    return {
        "tokens_per_s": num_tokens / seconds,
        "scheduler_us": scheduler / num_tokens * 1e6,
        "client_us": own / num_tokens * 1e6,
        "messages_per_token": len(gaps) / num_tokens,
    }


async def with_arrivals(client: AsyncClient, rng: random.Random, arguments: argparse.Namespace) -> dict[str, float]:
    """Return how long requests wait for their first token that arrive while others stream, and the gaps of the
    others."""
    ended, gaps, counts = asyncio.Event(), [], []

    async def stream_again_and_again(rng: random.Random) -> None:
        while not ended.is_set():
            counts.append(await stream(client, rng, arguments.output_len, gaps, ended))

    async def arrive(rng: random.Random) -> float:
        start = time.perf_counter()
        await stream(client, rng, 1, [])
        return time.perf_counter() - start

    start = time.perf_counter()
    streams = [asyncio.create_task(stream_again_and_again(random.Random(rng.random()))) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(1)
    arrivals = []
    for _ in range(arguments.num_arrivals):
        await asyncio.sleep(rng.expovariate(arguments.rate))
        arrivals.append(asyncio.create_task(arrive(random.Random(rng.random()))))
    waits = sorted(await asyncio.gather(*arrivals))
    ended.set()
    await asyncio.gather(*streams)
    return {
        "streams_tokens_per_s": sum(counts) / (time.perf_counter() - start),
        "first_token_p50": waits[len(waits) // 2],
        "first_token_p99": waits[int(len(waits) * 0.99)],
        "longest_gap": max(gaps),
    }


async def run_rounds(systems: Sequence[System], arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(system.url)) for system in systems]
        sides = dict(zip(ARMS, zip(clients, systems, strict=True), strict=True))
        for index, arm in in_turns(list(ARMS), arguments.rounds):
            client, system = sides[arm]
            rng = random.Random(index)  # the same for both arms
            figures = await alone(client, system, rng, arguments.output_len)
            if index > 0:
                rounds[arm].append(figures | await with_arrivals(client, rng, arguments))
    return rounds


async def measure(arguments: argparse.Namespace) -> dict:
    model = random_checkpoint("54M")
    worker = ["--num-device-blocks", 2048, "--num-threads", arguments.num_threads]
    with contextlib.ExitStack() as stack:
        systems = [stack.enter_context(running(model, worker=worker, scheduler=flags)) for flags in ARMS.values()]
        rounds = await run_rounds(systems, arguments)
    load = {name: getattr(arguments, name) for name in ("output_len", "num_arrivals", "rate", "rounds")}
    return {"load": {"model": "54M", "streams": NUM_STREAMS, **load}, "median": medians(rounds), "rounds": rounds}


def report(figures: dict) -> None:
    load, median = figures["load"], figures["median"]
    print(f"54M Qwen3 shape, medians of {load['rounds']} rounds")
    for arm, of_arm in median.items():
        cpu = f"CPU for a token: scheduler {of_arm['scheduler_us']:.0f} us, client {of_arm['client_us']:.0f} us"
        print(f"  {arm:8}  alone: {of_arm['tokens_per_s']:.0f} tokens/s, {of_arm['messages_per_token']:.2f} messages")
        print(f"  {'':8}  {cpu}")
        waits = ", ".join(f"{name} {of_arm[f'first_token_{name}'] * 1e3:.1f}" for name in ("p50", "p99"))
        speed = f"{of_arm['streams_tokens_per_s']:.0f} tokens/s, longest gap {of_arm['longest_gap'] * 1e3:.1f} ms"
        print(f"  {'':8}  {load['streams']} streams and {load['num_arrivals']} arrivals: {speed}")
        print(f"  {'':8}  first token after {waits} ms")
    one, leases = (median[arm] for arm in ARMS)
    cpu_ratio = sum(leases[key] for key in ("scheduler_us", "client_us")) / (one["scheduler_us"] + one["client_us"])
    print(f"CPU for a token with leases {cpu_ratio:.2f} {verdict(cpu_ratio, CPU_GOAL, at_least=False)}")
    for name in ("p50", "p99"):
        ratio = leases[f"first_token_{name}"] / one[f"first_token_{name}"]
        print(f"first token {name} with leases {ratio:.2f} {verdict(ratio, WAIT_GOAL, at_least=False)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-len", type=int, default=400, help="tokens of a stream (default: 400)")
    parser.add_argument("--num-arrivals", type=int, default=200, help="requests that arrive in a round (default: 200)")
    parser.add_argument("--rate", type=float, default=5.0, help="requests that arrive in a second (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each arm (default: 5)")
    parser.add_argument("--num-threads", type=int, default=2, help="threads of the worker (default: 2)")
