"""Measures the garbage collection pauses of a scheduler with much state, and the gaps between its tokens.

    python -m bench garbage

The scheduler has a simulated worker of 4 ms per step that computes nothing. First, prompts fill 500,000 blocks of the
prefix cache. Then 20,000 requests wait while 64 requests stream. The pauses are from the scheduler's own metric, for
all collections since its first request. The gaps are the times between messages of the running streams. The raw numbers
are written to bench/results/garbage.json.
"""

import argparse
import asyncio
import gc
import os
import random
import re
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc.aio

from bench.goals import verdict
from bench.services.front_end import MODEL, Child
from pagewire.cli import GRPC_EXPERIMENTS
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

BLOCK_SIZE, PROMPT_BLOCKS = 16, 127
NUM_RUNNING = 64
GOAL_MS = 5.0
PAUSES, CPU_TIMES = "pagewire:gc_pause_seconds", "pagewire:gc_cpu_seconds"


def submission(stream_id: int, prompt: list[int], max_tokens: int) -> pb.GenerateManyRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    return pb.GenerateManyRequest(submit=pb.Submission(stream_id=stream_id, request=request, token_only=True))


async def fill(stub: pb_grpc.SchedulerServiceStub, num_blocks: int, rng: random.Random) -> None:
    """Send prompts until `num_blocks` blocks are in the prefix cache."""
    num_prompts = -(-num_blocks // PROMPT_BLOCKS)
    room = asyncio.Semaphore(NUM_RUNNING)

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        for stream_id in range(num_prompts):
            await room.acquire()
            yield submission(stream_id, rng.choices(range(300, 1000), k=PROMPT_BLOCKS * BLOCK_SIZE + 1), 1)

    num_ended = 0
    async for message in stub.GenerateMany(requests()):
        for delta in message.deltas:
            if delta.delta.HasField("usage"):
                num_ended += 1
                room.release()
        assert not message.failures, message.failures[0].message
    assert num_ended == num_prompts


async def stream(
    stub: pb_grpc.SchedulerServiceStub, num_waiting: int, seconds: float, rng: random.Random
) -> list[float]:
    """Let `num_waiting` requests wait while other requests run. Return the seconds between messages after all are
    queued."""
    done = asyncio.Event()

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        for stream_id in range(NUM_RUNNING + num_waiting):
            yield submission(stream_id, rng.choices(range(300, 1000), k=64), 1800)
        await done.wait()

    arrivals: list[float] = []
    call = stub.GenerateMany(requests())
    started_at, queued = time.monotonic(), None
    async for message in call:
        assert not message.failures, message.failures[0].message
        arrivals.append(time.monotonic())
        if queued is None and (await stub.GetLoads(pb.GetLoadsRequest())).num_waiting >= num_waiting:
            queued = time.monotonic()
            print(f"{num_waiting} requests wait after {queued - started_at:.1f} s", flush=True)
        if queued is not None and time.monotonic() - queued > seconds:
            break
    call.cancel()
    done.set()
    assert queued is not None
    times = [arrival for arrival in arrivals if arrival > queued]
    return [later - earlier for earlier, later in pairwise(times)]


def pauses(metrics_port: int, name: str = PAUSES) -> dict[str, float]:
    """Return cumulative counts of collections by upper bound of their duration in seconds, as in the metric's
    histogram."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
        text = page.read().decode()
    return {bound: float(count) for bound, count in re.findall(rf'{name}_bucket{{.*le="(.*?)".*}} (\S+)', text)}


def pauses_since(before: dict[str, dict[str, float]], metrics_port: int) -> dict[str, dict[str, float]]:
    """Return the increase of each histogram bucket since `before`, by metric and upper bound."""
    now = {name: pauses(metrics_port, name) for name in before}
    return {name: {bound: now[name][bound] - before[name][bound] for bound in now[name]} for name in now}


async def measure(arguments: argparse.Namespace) -> dict:
    rng = random.Random(0)
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    num_blocks = str(arguments.num_blocks + 20_000)
    worker = Child("bench.services.scripted_worker", MODEL, "--num-device-blocks", num_blocks)
    metrics_port = free_port("127.0.0.1")
    flags = ["--max-num-seqs", str(NUM_RUNNING), "--max-num-batched-tokens", "65536", "--log-level", "warning"]
    flags += ["--max-waiting-requests", str(arguments.num_waiting + 1000), "--metrics-port", str(metrics_port)]
    scheduler = Child("pagewire", "scheduler", "--model", MODEL, "--worker", worker.address, "--port", "0", *flags)
    try:
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(scheduler.address, options) as channel:
            stub = pb_grpc.SchedulerServiceStub(channel)
            await fill(stub, PROMPT_BLOCKS, rng)
            before = {name: pauses(metrics_port, name) for name in (PAUSES, CPU_TIMES)}
            await fill(stub, arguments.num_blocks, rng)
            print(f"{(await stub.GetLoads(pb.GetLoadsRequest())).num_cached_blocks} blocks are cached", flush=True)
            gc.disable()  # of this process, whose own pauses would appear as pauses of the scheduler
            gaps = await stream(stub, arguments.num_waiting, arguments.seconds, rng)
            counts = pauses_since(before, metrics_port)
    finally:
        scheduler.stop()
        worker.stop()
    gaps_ms = sorted(gap * 1000 for gap in gaps)
    quantiles = {"median": statistics.median(gaps_ms), "p99": gaps_ms[int(len(gaps) * 0.99)], "longest": gaps_ms[-1]}
    load = {name: value for name, value in vars(arguments).items() if name != "output"}
    return {"load": load, "pauses": counts[PAUSES], "cpu": counts[CPU_TIMES], "gaps_ms": quantiles}


def report(figures: dict) -> None:
    counts, gaps = figures["pauses"], figures["gaps_ms"]
    longest = next(bound for bound, count in counts.items() if count == counts["+Inf"])
    print(f"{counts['+Inf']:.0f} garbage collections, all within {longest} s")
    print(verdict(float(longest) * 1000, GOAL_MS, at_least=False))
    print(
        f"{num_longer(counts):.0f} of them took longer than {GOAL_MS:g} ms, {num_longer(figures['cpu']):.0f} on the CPU"
    )
    print(f"ms between messages: median {gaps['median']:.1f}, p99 {gaps['p99']:.1f}, longest {gaps['longest']:.1f}")


def num_longer(counts: dict[str, float]) -> float:
    """Return the number of collections that took longer than the goal."""
    return counts["+Inf"] - counts[str(GOAL_MS / 1000)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-blocks", type=int, default=500_000, help="blocks in the cache (default: 500000)")
    parser.add_argument("--num-waiting", type=int, default=20_000, help="requests that wait (default: 20000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of streaming meanwhile (default: 20)")
