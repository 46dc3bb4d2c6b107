"""Measures grammars within one process: computing masks, sampling with masks, and trials of hostile grammars.

    python -m bench grammars

The vocabulary has 151,936 tokens, like the vocabulary of Qwen3. Masks are computed along outputs for the schemas of
tests/schemas. The tokens of an output are drawn from the allowed tokens by Zipf's law, because BPE numbers tokens
roughly in order of their frequency. The raw numbers are written to bench/results/grammars.INSTRUCTIONS.json.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.goals import verdict
from bench.peers.peers import compute_with
from bench.tokenizer import trained_tokenizer
from pagewire.common.grammars import GrammarCompiler, GrammarLimitError, MaskJob, MaskQueue
from pagewire.common.grammars.trial import Trials
from pagewire.kernels.cpu.sampler import CpuSampler, TokenHistory
from pagewire.kernels.sampling import FLOATS, INTEGERS, SamplingColumns
from testing.grammars.hostile import HOSTILE
from worker_service.startup.cpu_kernels import load_cpu_kernels

VOCAB_SIZE = 151_936
END = (0,)
SCHEMAS = Path("tests/schemas/schemas.jsonl")
NUM_ROWS = 32
MAX_MEAN_US, MAX_P99_US, MAX_SAMPLING_US, MAX_TRIAL_S = 120.0, 1500.0, 30.0, 0.1

Mask = NDArray[np.int32]


def schemas() -> list[Any]:
    return [json.loads(line)["schema"] for line in SCHEMAS.read_text().splitlines()]


def without_max_length(schema: Any) -> Any:
    """Return a schema without `maxLength` bounds, like most schemas that clients send."""
    if isinstance(schema, dict):
        return {key: without_max_length(value) for key, value in schema.items() if key != "maxLength"}
    return list(map(without_max_length, schema)) if isinstance(schema, list) else schema


def mask_seconds(
    compiler: GrammarCompiler, given: list[Any], seed: int, num_tokens: int
) -> tuple[list[float], list[Mask], int]:
    """Measure the masks along an output of every schema.

    Return the duration of each mask in seconds, the last mask of each schema, and the number of outputs that exceeded a
    grammar limit.
    """
    rng = random.Random(seed)
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    seconds, kept, num_limited = [], [], 0
    for schema in given:
        matcher = compiler.compile("json_schema", json.dumps(schema), END)
        for _ in range(num_tokens):
            began = time.perf_counter()
            try:
                matcher.fill_mask(mask.ctypes.data, mask.nbytes)
            except GrammarLimitError:
                num_limited += 1
                break
            seconds.append(time.perf_counter() - began)
            matcher.consume([_draw(rng, mask)])
            if matcher.end_token_id is not None:
                break
        kept.append(mask.copy())
    return seconds, kept, num_limited


def _draw(rng: random.Random, mask: Mask) -> int:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    weights = np.cumsum(1.0 / (allowed + 1))
    return int(allowed[np.searchsorted(weights, rng.random() * weights[-1])])


def together_seconds(compiler: GrammarCompiler, num_rounds: int) -> list[float]:
    """Return the duration in seconds of each round that computes the masks of 32 rows together.

    Each row has its own schema and is at the beginning of its output.
    """
    texts = list(map(json.dumps, schemas()[-NUM_ROWS:]))
    queue, seconds = MaskQueue(), []
    for _ in range(num_rounds):
        matchers = [compiler.compile("json_schema", schema, END) for schema in texts]
        began = time.perf_counter()
        jobs = [MaskJob(matcher, (), 4 * -(-VOCAB_SIZE // 32)) for matcher in matchers]
        for job in jobs:
            queue.put(job)
        queue.finish(jobs, None)
        seconds.append(time.perf_counter() - began)
    queue.close()
    return seconds


def sampling_seconds(kept: list[Mask], temperature: float, num_rounds: int) -> dict[str, list[float]]:
    """Return the durations in seconds of sampling 32 rows, with masks and without. The two arms alternate."""
    kernels = load_cpu_kernels()
    if kernels is None:
        raise RuntimeError("the CPU kernels are not available on this machine")
    sampler = CpuSampler(kernels.library)
    columns = _columns(temperature)
    history = TokenHistory(np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
    lines = torch.from_numpy(np.stack(kept[-NUM_ROWS:]))
    arms = {"none": columns, "masks": columns._replace(masks=lines, mask_lines=torch.arange(NUM_ROWS).int())}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    generator = torch.Generator().manual_seed(0)
    for index in range(num_rounds + 3):
        logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
        for arm in arms if index % 2 else reversed(arms):
            given = logits.clone()
            began = time.perf_counter()
            sampler.sample(given, arms[arm], history)
            if index >= 3:  # the first rounds warm up
                seconds[arm].append(time.perf_counter() - began)
    return seconds


def _columns(temperature: float) -> SamplingColumns:
    """Return sampling columns for rows that only set a temperature."""
    values = {"temperature": temperature, "top_p": 1.0, "repetition_penalty": 1.0, "slots": -1, "num_logprobs": -1}
    return SamplingColumns.of(
        [torch.full((NUM_ROWS,), float(values.get(name, 0.0))) for name in FLOATS],
        [torch.full((NUM_ROWS,), int(values.get(name, 0)), dtype=torch.int32) for name in INTEGERS],
        torch.arange(NUM_ROWS),
        torch.full((NUM_ROWS,), 100, dtype=torch.int32),
    )


def trial_seconds(tokenizer_json: str) -> dict[str, float]:
    """Return the CPU seconds of reading each hostile grammar, by name: the median of 5 trials.

    The system counts CPU time in hundredths of a second.
    """
    trials = Trials(tokenizer_json, VOCAB_SIZE, END)
    try:
        assert trials._process is not None
        pid, found = trials._process.pid, {}
        for name, (kind, text) in HOSTILE.items():
            seconds = []
            for _ in range(5):
                before = _children_seconds(pid)
                assert trials.run(kind, text, END), f"{name} was not refused"
                seconds.append(_children_seconds(pid) - before)
            found[name] = statistics.median(seconds)
    finally:
        trials.close()
    return found


def _children_seconds(pid: int) -> float:
    """Return the CPU time of the terminated children of a process, in seconds."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(columns[13]) + int(columns[14])) / os.sysconf("SC_CLK_TCK")


def summary(seconds: list[float], num_limited: int) -> dict[str, float]:
    """Return statistics of mask durations, and the number of outputs that exceeded a grammar limit."""
    quantiles = {f"p{100 * share:g}": sorted(seconds)[int(len(seconds) * share)] for share in (0.5, 0.95, 0.99)}
    figures = {"mean": statistics.fmean(seconds), **quantiles, "max": max(seconds)}
    return {"num": len(seconds), "limited": num_limited, **figures}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer_json = trained_tokenizer(VOCAB_SIZE).read_text(encoding="utf-8")
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE)
    mask_seconds(compiler, schemas(), 0, 4)  # warms up
    seconds, kept, num_limited = mask_seconds(compiler, schemas(), arguments.seed, arguments.num_tokens)
    unbounded = list(map(without_max_length, schemas()))
    free_seconds, _, num_free_limited = mask_seconds(compiler, unbounded, arguments.seed, arguments.num_tokens)
    together = together_seconds(compiler, arguments.rounds)
    sampling = {
        f"temperature {temperature:g}": {
            arm: statistics.median(of_arm)
            for arm, of_arm in sampling_seconds(kept, temperature, arguments.rounds).items()
        }
        for temperature in (0.0, 1.0)
    }
    return {
        "seed": arguments.seed,
        "masks": summary(seconds, num_limited),
        "masks_without_max_length": summary(free_seconds, num_free_limited),
        "masks_of_32_rows": statistics.median(together),
        "sampling_of_32_rows": sampling,
        "trials": trial_seconds(tokenizer_json),
    }


def variant() -> str:
    return compute_with()[0]


def report(found: dict[str, Any]) -> None:
    for what, part in (("", "masks"), (" without maxLength", "masks_without_max_length")):
        masks = {name: 1e6 * value for name, value in found[part].items() if name not in ("num", "limited")}
        print(f"{found[part]['num']} masks of {VOCAB_SIZE} tokens{what}, in us:", end=" ")
        print(", ".join(f"{name} {value:.0f}" for name, value in masks.items()))
        print(f"  {found[part]['limited']} outputs exceeded the limit of a step")
        print(f"  mean {verdict(masks['mean'], MAX_MEAN_US, at_least=False)}")
        print(f"  p99 {verdict(masks['p99'], MAX_P99_US, at_least=False)}")
    print(f"masks of {NUM_ROWS} rows at once: {1e6 * found['masks_of_32_rows']:.0f} us")
    for name, median in found["sampling_of_32_rows"].items():
        added = 1e6 * (median["masks"] - median["none"]) / NUM_ROWS
        print(f"sampling at {name}: {1e6 * median['none'] / NUM_ROWS:.1f} us a row, masks add {added:.1f} us", end=" ")
        print(verdict(added, MAX_SAMPLING_US, at_least=False))
    longest = round(max(found["trials"].values()), 2)
    print(f"CPU time of reading a hostile grammar: at most {longest:.2f} s", end=" ")
    print(verdict(longest, MAX_TRIAL_S, at_least=False))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-tokens", type=int, default=64, help="longest output of a schema (default: 64)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of sampling and of 32 masks (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the outputs (default: 1)")
