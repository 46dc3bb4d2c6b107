"""Measures the gaps between tokens of 8 streams, with and without prompts that arrive meanwhile.

    python -m bench interference

Both services run as processes, with and without `--max-decode-slowdown`. Eight requests stream, in turns alone and
while prompts arrive one after the other. The raw numbers are written to bench/results/interference.json.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from bench.measure import in_turns, medians
from pagewire import AsyncClient, SamplingParams
from testing.services import running

VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
NUM_STREAMS, INPUT_LEN, PROMPT_LEN = 8, 100, 2000
PAUSE_S = 0.5  # between the end of one prompt and the next
GOAL = 2.0
ARMS = ("alone", "with prompts")
SLOWDOWNS = (None, 1.5)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=length)


async def stream(client: AsyncClient, prompt: list[int], num_tokens: int) -> list[float]:
    """Return the seconds between the messages of a stream, each of which contains one token."""
    gaps, last = [], None
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for output in client.stream(None, sampling, prompt_token_ids=prompt):
        if output.token_ids:
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    return gaps


def gap_quantiles(streams: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return quantiles of the seconds between tokens of streams that began together.

    The first gaps of each stream are excluded, because they occur while the prompts themselves are computed.
    """
    gaps = sorted(gap for of_stream in streams for gap in of_stream[len(streams) :])
    return {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "max": gaps[-1]}


async def send_prompts(client: AsyncClient, rng: random.Random, seconds: list[float]) -> None:
    """Send prompts until cancelled. Each prompt's time to its token is appended to `seconds`."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    while True:
        start = time.perf_counter()
        await client.complete(None, sampling, prompt_token_ids=random_prompt(rng, PROMPT_LEN))
        seconds.append(time.perf_counter() - start)
        await asyncio.sleep(PAUSE_S)


async def run_round(client: AsyncClient, arm: str, rng: random.Random, num_tokens: int) -> dict[str, float]:
    prompts = [random_prompt(rng, INPUT_LEN) for _ in range(NUM_STREAMS)]
    seconds: list[float] = []
    sender = asyncio.create_task(send_prompts(client, rng, seconds)) if arm == "with prompts" else None
    try:
        streams = await asyncio.gather(*(stream(client, prompt, num_tokens) for prompt in prompts))
    finally:
        if sender is not None:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender
    return gap_quantiles(streams) | ({"prompt": statistics.median(seconds), "prompts": len(seconds)} if seconds else {})


async def measure_slowdown(slowdown: float | None, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    rng = random.Random(0)
    flags = [] if slowdown is None else ["--max-decode-slowdown", slowdown]
    worker = ["--num-device-blocks", 2048, "--num-threads", arguments.num_threads]
    with running(random_checkpoint("54M"), worker=worker, scheduler=flags) as system:
        async with AsyncClient(system.url) as client:
            for index, arm in in_turns(ARMS, arguments.rounds):
                figures = await run_round(client, arm, rng, arguments.output_len)
                if index > 0:
                    rounds[arm].append(figures)
    return rounds


async def measure(arguments: argparse.Namespace) -> dict:
    found = {}
    for slowdown in SLOWDOWNS:
        rounds = await measure_slowdown(slowdown, arguments)
        median = medians(rounds)
        ratio = median["with prompts"]["p99"] / median["alone"]["p99"]
        found[str(slowdown)] = {"median": median, "p99_ratio": ratio, "rounds": rounds}
    load = {"model": "54M", "streams": NUM_STREAMS, "prompt_len": PROMPT_LEN, "rounds": arguments.rounds}
    return {"load": load, "max_decode_slowdown": found}


def report(figures: dict) -> None:
    print(f"gaps between tokens of {NUM_STREAMS} streams, in ms, medians of {figures['load']['rounds']} rounds")
    for slowdown, found in figures["max_decode_slowdown"].items():
        print(f"--max-decode-slowdown {slowdown}")
        for arm, median in found["median"].items():
            prompt = f", a prompt takes {median['prompt']:.2f} s" if "prompt" in median else ""
            gaps = ", ".join(f"{key} {median[key] * 1000:.1f}" for key in ("p50", "p99", "max"))
            print(f"  {arm:12} {gaps}{prompt}")
        goal = verdict(found["p99_ratio"], GOAL, at_least=False) if slowdown != "None" else ""
        print(f"  p99 with prompts is {found['p99_ratio']:.2f} times the p99 without {goal}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-len", type=int, default=400, help="tokens of a stream (default: 400)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each arm (default: 3)")
    parser.add_argument("--num-threads", type=int, default=2, help="CPU threads of the worker (default: 2)")
