"""Measures the Triton kernels on a GPU, relative to the card's copy bandwidth and to torch's flash attention.

    python -m bench kernels

The benchmark needs only torch with CUDA, and Triton. Results are written after every case, so that an interrupted run
keeps its measurements. Each module runs in its own process, and a case that crashes the process affects only this case.
Results are written to bench/results/gpu_kernels_bench.CARD.json.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bench.goals import said
from bench.gpu.device_timer import measure
from bench.report import parser_of
from testing.kernel_checks import MODULES
from testing.kernel_checks.case import COPY, MATMUL, BenchCase
from testing.ledger import path_of
from testing.part import Case, Report, UnavailableError, describe, run_on_device, run_part
from testing.record import RESULTS

SECONDS = 450.0
DEVICE = "device"  # used in place of a module, for the measurements of the device itself
_MATMUL_SIZE = 8192
_COPY_BYTES = 1 << 30


def judge(results: Sequence[dict]) -> list[dict]:
    """Return every goal with its value and whether it is met. The value is None if either side was not measured."""
    seconds = {result["name"]: result["seconds"] for result in results if "seconds" in result}
    by_name = {result["name"]: result for result in results}
    goals = []
    for result in results:
        for goal in result.get("goals", ()):
            value = None
            if goal["of"] in seconds:
                value = share(result, by_name[goal["of"]])
            goals.append(
                {
                    "name": result["name"],
                    "of": goal["of"],
                    "goal": goal["share"],
                    "value": value,
                    "met": value is not None and value >= goal["share"],
                }
            )
    return goals


def share(result: dict, other: dict) -> float:
    """Return the share of the copy's bandwidth or of the matmul's rate, or for other cases the speed ratio to that
    case."""
    if other["name"] == COPY:
        return result["bytes_moved"] / result["seconds"] / (other["bytes_moved"] / other["seconds"])
    if other["name"] == MATMUL:
        return result["flops"] / result["seconds"] / (other["flops"] / other["seconds"])
    return other["seconds"] / result["seconds"]


def print_goals(goals: Sequence[dict]) -> None:
    for goal in goals:
        value = "not measured" if goal["value"] is None else f"{goal['value']:.2f}"
        print(f"{said(goal['met']):7} {goal['name']}: {value} of {goal['of']} (goal: at least {goal['goal']:g})")


# The following functions run in the process of a module.


def bench(case: BenchCase, device: torch.device) -> dict:
    if device.type != "cuda":
        raise UnavailableError(f"there is nothing to time on {device}")
    try:
        calls = case.make(device)
    except NotImplementedError as error:
        raise UnavailableError(str(error)) from error
    figures = asdict(measure(calls))
    goals = [asdict(goal) for goal in case.goals]
    return {**figures, "bytes_moved": case.bytes_moved, "flops": case.flops, "goals": goals}


def reference_cases() -> Iterator[BenchCase]:
    """Yield cases that measure the device itself: a copy and a read far larger than its cache, and a large matmul."""

    def copy(device: torch.device) -> list[Callable[[], object]]:
        source, target = torch.randint(0, 99, (2, _COPY_BYTES // 4), dtype=torch.int32, device=device)
        return [lambda: target.copy_(source)]

    def read(device: torch.device) -> list[Callable[[], object]]:
        source = torch.randn(_COPY_BYTES // 4, device=device)
        return [lambda: source.sum()]

    def matmul(device: torch.device) -> list[Callable[[], object]]:
        left, right = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, device=device).bfloat16()
        return [lambda: left @ right]

    yield BenchCase(COPY, copy, bytes_moved=2 * _COPY_BYTES)
    yield BenchCase("read", read, bytes_moved=_COPY_BYTES)
    yield BenchCase(MATMUL, matmul, flops=2 * _MATMUL_SIZE**3)


def run_modules(modules: Sequence[str], device: str, report: Report, seconds: float, pause_at: float = math.inf) -> int:
    """Time the cases of each module in turn, and judge all results. Return the exit status."""
    deadline = time.monotonic() + seconds
    for module in modules:
        command = [sys.executable, "-m", "bench", "kernels", "--device", device, "--part", module, "--done"]
        run_part(module, command, report, deadline, pause_at)
        report.end([module])
        report.put(goals=judge([result for part in report.parts.values() for result in part["results"]]))
    return 1 if report.num_failed else 0


def run_one(module: str, device: torch.device, done: Sequence[str]) -> None:
    cases = reference_cases() if module == DEVICE else importlib.import_module(module).bench_cases()
    run_on_device((Case(case.name, partial(bench, case, device)) for case in cases), device, done)


def main(flags: Sequence[str]) -> int:
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--modules", nargs="+", default=MODULES, help="modules with cases (default: all)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit in seconds (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS}/gpu_kernels_bench.CARD.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args(flags)
    device = torch.device(options.device)
    if options.part is not None:
        run_one(options.part, device, options.done)
        return 0
    if device.type != "cuda":
        parser.error(f"there is nothing to time on {device}; use a CUDA device")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine that has one, with torch built for it")
    modules, heading = (DEVICE, *options.modules), describe(device)
    report = Report(options.output or path_of("kernels_bench", heading["card"]), heading, modules)
    status = run_modules(modules, options.device, report, options.seconds)
    print_goals(judge([result for part in report.parts.values() for result in part["results"]]))
    return status
