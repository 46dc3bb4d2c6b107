"""Measures whether a shared prefix is computed once and, after eviction from the device, returns from the host.

    python -m bench prefix-tier

Both services run as processes. The requests of a burst share a prefix and differ in a few tokens. Other prompts then
fill the device's blocks, so that the prefix is evicted. A second burst shares the same prefix. Every round has a new
prefix. The server's own counters report the number of computed tokens. The raw numbers are written to
bench/results/prefix_tier.json.
"""

import argparse
import asyncio
import random
import statistics
import time

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from pagewire import AsyncClient, SamplingParams
from testing.services import running

VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
PREFIX_LENGTH, SUFFIX_LENGTH = 2000, 15
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 448, 1024
OTHER_LENGTH = 1000
GOAL_ONCE, GOAL_AGAIN = 1.0, 0.05


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=length)


async def burst(client: AsyncClient, prompts: list[list[int]]) -> dict[str, float]:
    """Return the numbers of prompt tokens by source, and the seconds until the last request has its token."""
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    before, start = await client.loads(), time.perf_counter()
    await asyncio.gather(*(client.complete(None, sampling, prompt_token_ids=prompt) for prompt in prompts))
    seconds, after = time.perf_counter() - start, await client.loads()
    num_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    num_cached = after.num_cached_prompt_tokens - before.num_cached_prompt_tokens
    num_suffix = sum(map(len, prompts)) - len(prompts) * PREFIX_LENGTH
    return {
        "seconds": seconds,
        "prompt_tokens": num_tokens,
        "computed": num_tokens - num_cached,
        "from_host": after.num_host_cached_prompt_tokens - before.num_host_cached_prompt_tokens,
        "prefix_computed": (num_tokens - num_cached - num_suffix) / PREFIX_LENGTH,
    }


async def run_round(client: AsyncClient, index: int, num_requests: int) -> dict[str, dict[str, float]]:
    rng = random.Random(index)
    prefix = random_tokens(rng, PREFIX_LENGTH)
    figures = {}
    for name in ("first", "second"):
        prompts = [prefix + random_tokens(rng, SUFFIX_LENGTH) for _ in range(num_requests)]
        figures[name] = await burst(client, prompts)
        if name == "first":
            # A third more than the device's blocks. The prefix is not used meanwhile and is evicted first.
            num_others = NUM_DEVICE_BLOCKS * 16 * 4 // 3 // OTHER_LENGTH
            for _ in range(num_others):
                await burst(client, [random_tokens(rng, OTHER_LENGTH)])
    return figures


async def measure(arguments: argparse.Namespace) -> dict:
    worker = ["--num-device-blocks", NUM_DEVICE_BLOCKS, "--num-host-blocks", NUM_HOST_BLOCKS]
    rounds = []
    with running(random_checkpoint("54M"), worker=worker) as system:
        async with AsyncClient(system.url) as client:
            for index in range(arguments.rounds + 1):
                figures = await run_round(client, index, arguments.num_requests)
                print(f"round {index}: {figures}", flush=True)
                if index:  # round 0 warms up
                    rounds.append(figures)
    median = {
        name: {key: statistics.median(figures[name][key] for figures in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }
    load = {
        "model": "54M",
        "num_requests": arguments.num_requests,
        "prefix_length": PREFIX_LENGTH,
        "suffix_length": SUFFIX_LENGTH,
        "num_device_blocks": NUM_DEVICE_BLOCKS,
        "num_host_blocks": NUM_HOST_BLOCKS,
        "rounds": arguments.rounds,
    }
    return {"load": load, "median": median, "rounds": rounds}


def report(figures: dict) -> None:
    load = figures["load"]
    print(
        f"{load['num_requests']} requests share {load['prefix_length']:,} tokens and have {load['suffix_length']} of "
        f"their own, 54M shape; medians of {load['rounds']} rounds"
    )
    for name, goal in (("first", GOAL_ONCE), ("second", GOAL_AGAIN)):
        row = figures["median"][name]
        print(
            f"  {name:6} burst: {row['seconds']:5.2f} s, {row['prompt_tokens']:,.0f} prompt tokens, "
            f"{row['computed']:,.0f} computed, {row['from_host']:,.0f} from the host; the prefix was computed "
            f"{row['prefix_computed']:.3f} times {verdict(row['prefix_computed'], goal, at_least=False)}"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=64, help="requests of a burst (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: 3)")
