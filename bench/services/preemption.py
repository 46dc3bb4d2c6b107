"""Measures serving with a third of the needed blocks: with swapping, recomputation, and a choice per victim.

    python -m bench preemption

Both services run as processes, a pair for each mode. All requests of a round arrive at once, and the modes serve the
same requests in turns. Useful throughput counts the tokens that reach clients, not the tokens that were computed again.
The raw numbers are written to bench/results/preemption.json.
"""

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from bench.checkpoint import SHAPES, random_checkpoint
from bench.goals import verdict
from bench.measure import medians
from pagewire import AsyncClient, SamplingParams
from testing.services import running

MODES = ("swap", "recompute", "auto")
GOAL = 0.97
BLOCK_SIZE = 16
VOCAB_SIZE = SHAPES["54M"]["vocab_size"]
# Prompt and output tokens of the requests. The lengths are the same in every round, so that every round needs the same
# number of blocks.
PROMPT_LENGTHS, OUTPUT_LENGTHS = (32, 160), (64, 128)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a round."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def num_blocks(self) -> int:
        """The number of blocks that all requests together occupy at their ends."""
        lengths = zip(self.prompts, self.output_lengths, strict=True)
        return sum(-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt, num_tokens in lengths)


def load_of(round_index: int, num_requests: int) -> Load:
    lengths, content = random.Random(0), random.Random(f"round {round_index}")
    prompts, output_lengths = [], []
    for _ in range(num_requests):
        prompts.append(content.choices(range(VOCAB_SIZE), k=lengths.randint(*PROMPT_LENGTHS)))
        output_lengths.append(lengths.randint(*OUTPUT_LENGTHS))
    return Load(prompts, output_lengths)


async def serve(client: AsyncClient, load: Load) -> dict[str, float]:
    """Serve a round and return its figures. Every request must end with all its tokens.

    The longest wait of a request is its longest time to the first token or between two tokens.
    """

    async def one(prompt: list[int], num_tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        longest, last, num_seen = 0.0, time.perf_counter(), 0
        async for output in client.stream(None, sampling, prompt_token_ids=prompt):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            num_seen += len(output.token_ids)
        assert num_seen == num_tokens
        return longest

    before, start = await client.loads(), time.perf_counter()
    waits = await asyncio.gather(*map(one, load.prompts, load.output_lengths))
    seconds, after = time.perf_counter() - start, await client.loads()
    return {
        "tokens_per_s": sum(load.output_lengths) / seconds,
        "longest_wait_s": max(waits),
        "seconds": seconds,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "swaps": after.num_swap_preemptions - before.num_swap_preemptions,
    }


async def measure(arguments: argparse.Namespace) -> dict:
    model, num_blocks = random_checkpoint("54M"), load_of(0, arguments.num_requests).num_blocks
    worker = ["--num-device-blocks", num_blocks // 3, "--num-host-blocks", 2 * num_blocks, "--block-size", BLOCK_SIZE]
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with ExitStack() as services:
        async with AsyncExitStack() as clients:
            systems = {
                mode: services.enter_context(running(model, worker=worker, scheduler=["--preemption", mode]))
                for mode in MODES
            }
            client_of = {
                mode: await clients.enter_async_context(AsyncClient(system.url)) for mode, system in systems.items()
            }
            for index in range(arguments.rounds + 1):
                load = load_of(index, arguments.num_requests)
                for mode in MODES[index % 3 :] + MODES[: index % 3]:
                    figures = await serve(client_of[mode], load)
                    print(f"round {index} {mode}: {figures['tokens_per_s']:.0f} tokens/s", flush=True)
                    if index:  # round 0 warms up, and the scheduler learns the rates of swapping and recomputing
                        rounds[mode].append(figures)
    pairs = [
        auto["tokens_per_s"] / max(swap["tokens_per_s"], recompute["tokens_per_s"])
        for swap, recompute, auto in zip(*(rounds[mode] for mode in MODES), strict=True)
    ]
    return {
        "load": {
            "model": "54M",
            "num_requests": arguments.num_requests,
            "prompt_lengths": PROMPT_LENGTHS,
            "output_lengths": OUTPUT_LENGTHS,
            "num_blocks_needed": num_blocks,
            "num_device_blocks": num_blocks // 3,
            "rounds": arguments.rounds,
        },
        "median": medians(rounds),
        "longest_wait_s": {mode: max(figures["longest_wait_s"] for figures in rounds[mode]) for mode in MODES},
        "auto_to_better": statistics.median(pairs),
        "pairs": pairs,
        "rounds": rounds,
    }


def report(figures: dict) -> None:
    load = figures["load"]
    print(
        f"{load['num_requests']} requests at once, 54M shape, {load['num_device_blocks']} blocks of "
        f"{load['num_blocks_needed']} needed; medians of {load['rounds']} rounds"
    )
    print(f"  {'mode':10} {'tokens/s':>9} {'longest wait':>13} {'of a round':>11} {'preemptions':>12} {'by swap':>8}")
    for mode, median in figures["median"].items():
        print(
            f"  {mode:10} {median['tokens_per_s']:9.1f} {figures['longest_wait_s'][mode]:11.1f} s "
            f"{median['seconds']:9.1f} s {median['preemptions']:12.0f} {median['swaps']:8.0f}"
        )
    ratio = figures["auto_to_better"]
    print(f"  auto / the better of the others {ratio:.3f} {verdict(ratio, GOAL, at_least=True)}; every request ended")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=20, help="requests of a round (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each mode (default: 5)")
