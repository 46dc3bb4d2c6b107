"""Measures the effect of one client's long texts on another client's stream, and their memory use.

    python -m bench long-text

A scheduler with the bundled byte-level BPE tokenizer and a simulated worker of 4 ms per step streams to one client.
Another client, in a separate process, sends texts: two at a time in a loop, or many at once. Each text is sent as a
prompt and to Tokenize. The prompt exceeds the model's context and is refused before tokenization. Tokenize accepts
texts up to --max-prompt-bytes, by default 1 MiB. The raw numbers are written to bench/results/long_text.json.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from itertools import pairwise

import grpc.aio

from bench.goals import verdict
from bench.services.front_end import MODEL, Child
from pagewire.cli import GRPC_EXPERIMENTS
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

# By name: the bytes of a text, the number of concurrent texts, and whether they are sent in a loop.
ATTACKS = {
    "1 MiB in a loop": (1 << 20, 2, True),
    "4 MB in a loop": (4_000_000, 2, True),
    "20 of 1 MiB at once": (1 << 20, 20, False),
}
GOAL_GAP_MS, GOAL_MEMORY_MB = 50.0, 50.0
SETTLE_S = 10.0
MESSAGE_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
NUM_TOKENS = 1900
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


def text_of(num_bytes: int, rng: random.Random) -> str:
    """Return a text of random words, so that the tokenizer's cache does not help."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 12))) for _ in range(num_bytes // 7)]
    text = " ".join(words)
    return (text * (1 + num_bytes // len(text)))[:num_bytes]


async def attack(address: str, num_bytes: int, num_at_once: int, is_loop: bool) -> None:
    text = text_of(num_bytes, random.Random(0))
    print("ready on nothing", flush=True)
    async with grpc.aio.insecure_channel(address, MESSAGE_OPTIONS) as channel:
        stub = pb_grpc.SchedulerServiceStub(channel)

        async def send() -> None:
            for call in (stub.Generate(pb.GenerateRequest(text=text)).read, lambda: stub.Tokenize(tokenize)):
                try:
                    await call()
                except grpc.aio.AioRpcError as error:
                    if error.code() not in REFUSALS:
                        raise

        async def send_all() -> None:
            await send()
            while is_loop:
                await send()

        tokenize = pb.TokenizeRequest(texts=[text])
        await asyncio.gather(*(send_all() for _ in range(num_at_once)))


async def stream_gaps(address: str) -> list[float]:
    """Return the seconds between the messages of one stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(300, 364)), sampling=sampling)
        arrivals = [time.monotonic() async for _ in pb_grpc.SchedulerServiceStub(channel).Generate(request)]
    return [later - earlier for earlier, later in pairwise(arrivals)]


async def run_arm(scheduler: Child, attack_of: tuple[int, int, bool] | None) -> dict[str, float]:
    before = scheduler.resident_bytes()
    attacker = None
    if attack_of is not None:
        size, num_at_once, is_loop = attack_of
        arguments = ["--attack", scheduler.address, str(size), str(num_at_once), str(int(is_loop))]
        attacker = await asyncio.to_thread(Attacker, arguments)
    try:
        gaps = sorted(gap * 1000 for gap in await stream_gaps(scheduler.address))
    finally:
        ended = await asyncio.to_thread(attacker.stop) if attacker is not None else 0
    assert not ended, f"the attacker ended with {ended}"
    await asyncio.sleep(SETTLE_S)
    kept = (scheduler.resident_bytes() - before) / 1e6
    return {"p50_ms": gaps[len(gaps) // 2], "p99_ms": gaps[int(len(gaps) * 0.99)], "max_ms": gaps[-1], "kept_mb": kept}


class Attacker:
    """A process that sends texts at the lowest priority, as a substitute for a separate machine."""

    def __init__(self, arguments: list[str]) -> None:
        command = ["nice", "-n", "19", sys.executable, "-m", "bench", "long_text", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._process.stdout.readline()

    def stop(self) -> int:
        """Kill the process. Return its exit code if it had already failed, else 0."""
        failed = self._process.poll()
        self._process.kill()
        self._process.wait()
        return failed or 0


async def measure(arguments: argparse.Namespace) -> dict | None:
    if arguments.attack is not None:
        address, size, num_at_once, is_loop = arguments.attack
        return await attack(address, int(size), int(num_at_once), bool(int(is_loop)))
    return {"attacks": ATTACKS, "rounds": await run_rounds(arguments.rounds)}


async def run_rounds(num_rounds: int) -> dict[str, list[dict[str, float]]]:
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    worker = Child("bench.services.scripted_worker", MODEL)
    flags = ["--worker", worker.address, "--port", "0", "--metrics-port", "0", "--log-level", "warning"]
    scheduler = Child("pagewire", "scheduler", "--model", MODEL, *flags)
    figures: dict[str, list[dict[str, float]]] = {arm: [] for arm in ("calm", *ATTACKS)}
    try:
        await run_arm(scheduler, None)  # warm-up
        for _ in range(num_rounds):
            for arm, of_arm in figures.items():
                of_arm.append(await run_arm(scheduler, ATTACKS.get(arm)))
                told = ", ".join(f"{name} {value:.1f}" for name, value in of_arm[-1].items())
                print(f"  {arm:18} {told}", flush=True)
    finally:
        scheduler.stop()
        worker.stop()
    return figures


def report(found: dict) -> None:
    rounds = found["rounds"]
    longest = max(figures["max_ms"] for arm in ATTACKS for figures in rounds[arm])
    kept = max(figures["kept_mb"] for arm in ATTACKS for figures in rounds[arm])
    calm = max(figures["max_ms"] for figures in rounds["calm"])
    print(f"longest gap during long texts {longest:.1f} ms {verdict(longest, GOAL_GAP_MS, at_least=False)}")
    print(f"longest gap without them {calm:.1f} ms")
    print(f"memory kept {SETTLE_S:g} s later {kept:.1f} MB {verdict(kept, GOAL_MEMORY_MB, at_least=False)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every attack (default: 3)")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
