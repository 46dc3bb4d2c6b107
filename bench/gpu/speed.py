"""Measures the speed of a worker and of both services on a GPU, and compares it with goals for an H200.

    python -m bench speed [--parts decode_small throughput]

The benchmark needs torch with CUDA, Triton, transformers and grpcio, and no package that only this repository would
install. Weights are random and created on the device. Parts run one after the other, each in its own process, which
ends after --seconds at the latest. Results and goals are written to bench/results/gpu_speed.CARD.json as they arrive.
Parts that are not run keep their last results. The kernels have a separate benchmark: make gpu-bench-kernels. With
--device cpu and an --output file, the run is a rehearsal of the same code with a tiny model, and no goal is judged.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers

from bench.goals import said
from bench.gpu import measurements, peer_steps, prompts
from bench.gpu.measurements import (
    IDLE,
    ON_GPU,
    PEER,
    PINNED_COPY,
    REHEARSAL,
    SWAP,
    SWAP_BESIDE_DECODE,
    THROUGHPUT,
    Setting,
    decode_name,
)
from testing.part import Report, run_cases, run_part
from testing.part_command import open_report, part_parser

COMMAND = "bench speed"
PARTS = {**measurements.PARTS, **prompts.PARTS, **peer_steps.PARTS}
Results = Mapping[str, Mapping[str, Any]]  # by the name of the case; failed cases are left out


@dataclass(frozen=True)
class Goal:
    """A goal for a measured value, as a bound for an H200.

    Attributes:
        is_at_least: whether the bound is a minimum; otherwise it is a maximum.
        value: computes the value from the results; raises KeyError if a required case was not measured.
    """

    name: str
    bound: float
    unit: str
    is_at_least: bool
    value: Callable[[Results], float]


@dataclass(frozen=True)
class Judgement:
    """The comparison of a value with its goal. `value` and `is_met` are None if it was not measured on a GPU."""

    name: str
    goal: str
    value: float | None
    is_met: bool | None


def _step_goal(shape: str, batch: int, most: float) -> Goal:
    name = decode_name(shape, batch)
    return Goal(f"{name}, 1k context", most, "ms", False, lambda results: results[name]["step_seconds"] * 1000)


GOALS = (
    _step_goal("Qwen3-0.6B", 1, 1.2),
    _step_goal("Qwen3-0.6B", 256, 10),
    _step_goal("Qwen3-8B", 1, 5.4),
    _step_goal("Qwen3-8B", 32, 6.6),
    _step_goal("Qwen3-8B", 256, 18.5),
    Goal(THROUGHPUT, 20_000, "output tok/s", True, lambda results: results[THROUGHPUT]["tokens_per_s"]),
    Goal(
        f"{THROUGHPUT}, beside transformers generate_batch",
        4,
        "times",
        True,
        lambda results: results[PEER]["times_as_fast"],
    ),
    Goal(
        "device idle between decoding steps at depth 2, batch 64",
        3,
        "% of the step",
        False,
        lambda results: results[IDLE]["idle_share"] * 100,
    ),
    Goal(
        f"{SWAP}, beside pinned copies",
        80,
        "% of their bandwidth",
        True,
        lambda results: results[SWAP]["bytes_per_s"] / results[PINNED_COPY]["bytes_per_s"] * 100,
    ),
    Goal(
        "decoding of others beside swaps is slower by",
        10,
        "%",
        False,
        lambda results: results[SWAP_BESIDE_DECODE]["slowdown"] * 100,
    ),
)


def judge(results: Results, *, is_gpu: bool) -> list[Judgement]:
    judged = []
    for goal in GOALS:
        text = f"at {'least' if goal.is_at_least else 'most'} {goal.bound:,g} {goal.unit}"
        try:
            value = goal.value(results) if is_gpu else None
        except KeyError:
            value = None
        is_met = None if value is None else value >= goal.bound if goal.is_at_least else value <= goal.bound
        judged.append(Judgement(goal.name, text, value, is_met))
    return judged


def print_goals(judged: Sequence[Judgement]) -> None:
    for judgement in judged:
        value = "not measured" if judgement.value is None else f"{judgement.value:,.3g}"
        print(f"{said(judgement.is_met):7} {judgement.name}: {value} (goal: {judgement.goal})")


def measured(report: Report) -> Results:
    every = [result for part in report.parts.values() for result in part["results"]]
    return {result["name"]: result for result in every if "error" not in result and "unavailable" not in result}


def run_all(parts: Sequence[str], device: str, report: Report, seconds: float, pause_at: float = math.inf) -> int:
    for part in parts:
        command = [sys.executable, "-m", *COMMAND.split(), "--device", device, "--part", part, "--done"]
        run_part(part, command, report, time.monotonic() + seconds, pause_at)
        report.end([part])
        report.put(goals=[asdict(judgement) for judgement in judge(measured(report), is_gpu=device == "cuda")])
    return 1 if report.num_failed else 0


def run_one(part: str, device: str, done: Sequence[str]) -> None:
    """Run a part in this process."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as directory:
        sizes = ON_GPU if device == "cuda" else REHEARSAL
        run_cases(PARTS[part](Setting(device, Path(directory), sizes)), done)


def main(flags: Sequence[str]) -> int:
    parser = part_parser(COMMAND, __doc__, PARTS)
    options = parser.parse_args(flags)
    if options.part is not None:
        run_one(options.part, options.device, options.done)
        return 0
    report = open_report(COMMAND, parser, options)
    status = run_all(options.parts, options.device, report, options.seconds)
    print_goals(judge(measured(report), is_gpu=options.device == "cuda"))
    return status
