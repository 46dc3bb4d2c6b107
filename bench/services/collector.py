"""Measures a scheduler's memory and garbage collection pauses while a trace collector is dead or silent.

    python -m bench collector

A scheduler, with a worker that computes nothing, traces 100,000 requests. Four of five requests share one stream, and
each of the others has its own RPC. The traces go to an address on which no process listens, and to a server that never
answers. The raw numbers are written to bench/results/collector.json.
"""

import argparse
import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import closing

import grpc.aio

from bench.goals import verdict
from bench.services.front_end import MODEL, Child
from bench.services.garbage import CPU_TIMES, GOAL_MS, PAUSES, num_longer, pauses, pauses_since, submission
from pagewire.cli import GRPC_EXPERIMENTS
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

NUM_RUNNING, NUM_TOKENS = 64, 3
MANY, SINGLE = 800, 200  # requests on one stream, and on RPCs of their own, in turns
WARM_UP = 5_000  # requests after which the memory should stay constant
NUM_BLOCKS = 4_000  # size of the prefix cache; both the cache and the scheduler's index of it are full by then
GOAL_MIB = 5.0


async def measure(arguments: argparse.Namespace) -> dict:
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    figures = {}
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        for name, port in (("dead", free_port("127.0.0.1")), ("silent", silent.getsockname()[1])):
            figures[name] = await _serve_beside(name, port, arguments.num_requests)
    return figures


def report(figures: dict) -> None:
    for name in ("dead", "silent"):
        memory, counts = figures[name]["resident_mib"], figures[name]["pauses"]
        grown = memory[-1][1] - memory[0][1]
        print(f"{name}: {memory[0][1]:.1f} MiB after {memory[0][0]} requests, {grown:+.1f} after {memory[-1][0]}")
        print(verdict(grown, GOAL_MIB, at_least=False))
        num_slow = num_longer(figures[name]["cpu"])
        print(f"{num_longer(counts):.0f} of {counts['+Inf']:.0f} garbage collections took longer than {GOAL_MS:g} ms")
        print(f"{num_slow:.0f} of them took longer than that in CPU time")
        print(verdict(num_slow, 0, at_least=False))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-requests", type=int, default=100_000, help="requests for each collector (default: 100000)"
    )


async def _serve_beside(name: str, port: int, num_requests: int) -> dict:
    worker = Child("bench.services.scripted_worker", MODEL, "--num-device-blocks", str(NUM_BLOCKS))
    metrics_port = free_port("127.0.0.1")
    flags = ["--max-num-seqs", str(NUM_RUNNING), "--log-level", "error", "--metrics-port", str(metrics_port)]
    flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{port}"]
    scheduler = Child("pagewire", "scheduler", "--model", MODEL, "--worker", worker.address, "--port", "0", *flags)
    memory: list[tuple[int, float]] = []  # requests, MiB
    rng = random.Random(0)
    try:
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            stub = pb_grpc.SchedulerServiceStub(channel)
            before = {name: pauses(metrics_port, name) for name in (PAUSES, CPU_TIMES)}
            for num_served in range(MANY + SINGLE, num_requests + 1, MANY + SINGLE):
                await _serve_many(stub, rng)
                await asyncio.gather(*(_serve_one(stub, rng) for _ in range(SINGLE)))
                if num_served % WARM_UP == 0:
                    memory.append((num_served, scheduler.resident_bytes() / 2**20))
                    print(f"{name}: {num_served} requests, {memory[-1][1]:.1f} MiB", flush=True)
            counts = pauses_since(before, metrics_port)
            return {"resident_mib": memory, "pauses": counts[PAUSES], "cpu": counts[CPU_TIMES]}
    finally:
        scheduler.stop()
        worker.stop()


async def _serve_many(stub: pb_grpc.SchedulerServiceStub, rng: random.Random) -> None:
    room = asyncio.Semaphore(NUM_RUNNING)

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        for stream_id in range(MANY):
            await room.acquire()
            yield submission(stream_id, _prompt(rng), NUM_TOKENS)

    async for message in stub.GenerateMany(requests()):
        assert not message.failures, message.failures[0].message
        for delta in message.deltas:
            if delta.delta.HasField("usage"):
                room.release()


async def _serve_one(stub: pb_grpc.SchedulerServiceStub, rng: random.Random) -> None:
    async for _ in stub.Generate(submission(0, _prompt(rng), NUM_TOKENS).submit.request):
        pass


def _prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(300, 1000), k=40)
