"""Measures the time until eight samples of one prompt begin, which should be the time of one prefill.

    python -m bench fork

Both services run as processes. In turns, a request with a new random prompt asks for one token of one sample, and
another request asks for one token of each of eight samples. For comparison, eight requests with n = 1 and different
prompts show the cost without sharing. The raw numbers are written to bench/results/fork.json.
"""

import argparse
import asyncio
import random
import statistics
import time

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from bench.measure import in_turns, medians
from pagewire import AsyncClient, SamplingParams
from testing.services import running

VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
NUM_SAMPLES = 8
GOAL_PREFILLS = 1.01  # each additional sample recomputes one token of the prompt
ARMS = ("n = 1", "n = 8", "8 requests")


async def begin(client: AsyncClient, arm: str, rng: random.Random, length: int) -> dict[str, float]:
    """Return the seconds until every sample has its first token, and the number of computed prompt tokens."""
    n = NUM_SAMPLES if arm == "n = 8" else 1
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for _ in range(NUM_SAMPLES if arm == "8 requests" else 1)]
    sampling = SamplingParams(temperature=0.8, seed=1, n=n, max_tokens=1, ignore_eos=True)
    before, start = await client.loads(), time.perf_counter()
    await asyncio.gather(*(client.complete(None, sampling, prompt_token_ids=prompt) for prompt in prompts))
    seconds, after = time.perf_counter() - start, await client.loads()
    num_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    num_cached = after.num_cached_prompt_tokens - before.num_cached_prompt_tokens
    return {"seconds": seconds, "computed": num_tokens - num_cached}


async def measure(arguments: argparse.Namespace) -> dict:
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    rng, length = random.Random(0), arguments.input_len
    with running(random_checkpoint("54M"), worker=["--num-device-blocks", 2048]) as system:
        async with AsyncClient(system.url) as client:
            for index, arm in in_turns(ARMS, arguments.rounds):
                figures = await begin(client, arm, rng, length)
                if index > 0:
                    rounds[arm].append(figures)
    median = medians(rounds)
    return {
        "load": {"model": "54M", "input_len": length, "num_samples": NUM_SAMPLES, "rounds": arguments.rounds},
        "median": median,
        "prefills": median["n = 8"]["computed"] / length,
        "time_ratio": statistics.median(
            eight["seconds"] / one["seconds"] for one, eight in zip(rounds["n = 1"], rounds["n = 8"], strict=True)
        ),
        "rounds": rounds,
    }


def report(figures: dict) -> None:
    load = figures["load"]
    print(f"until every sample has a token, prompts of {load['input_len']} tokens, medians of {load['rounds']} rounds")
    for arm, median in figures["median"].items():
        print(f"  {arm:10} {median['seconds'] * 1000:7.0f} ms, {median['computed']:6,.0f} prompt tokens computed")
    prefills = figures["prefills"]
    print(f"  n = 8 costs {prefills:.3f} prefills {verdict(prefills, GOAL_PREFILLS, at_least=False)}")
    print(f"  and {figures['time_ratio']:.2f} times the time of n = 1 (median of pairs)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=1000, help="prompt tokens (default: 1000)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each arm (default: 7)")
