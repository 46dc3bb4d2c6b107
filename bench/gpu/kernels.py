"""Runs the Triton kernels on a GPU: `python -m bench.gpu.kernels check` against the reference, `bench` against goals.

Needs torch with CUDA and Triton, nothing else. Results are written after every case, so that a run which is cut short
leaves what it has measured; each module runs in a process of its own, and a case that kills it costs that case alone.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from testing.kernel_checks.case import COPY, MATMUL
from testing.part import Report, describe, run_part
from testing.record import RESULTS

CHECKS = "testing.kernel_checks"
MODULES = (
    "decode_attention",
    "prefill_attention",
    "cache",
    "blocks",
    "gathering",
    "sampler",
    "fused",
    "experts",
    "linear",
    "scaled",
)
SECONDS = 450.0


def judge(results: Sequence[dict]) -> list[dict]:
    """Returns every goal with its value, None where either side was not measured, and whether it is met."""
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
    """Returns the share of the copy's bandwidth or the product's rate; of other cases, how many times as fast it is."""
    if other["name"] == COPY:
        return result["bytes_moved"] / result["seconds"] / (other["bytes_moved"] / other["seconds"])
    if other["name"] == MATMUL:
        return result["flops"] / result["seconds"] / (other["flops"] / other["seconds"])
    return other["seconds"] / result["seconds"]


def print_goals(goals: Sequence[dict]) -> None:
    for goal in goals:
        value = "not measured" if goal["value"] is None else f"{goal['value']:.2f}"
        verdict = "met" if goal["met"] else "MISSED"
        print(f"{verdict:7} {goal['name']}: {value} of {goal['of']} (goal: at least {goal['goal']:g})")


def run_checks(modules: Sequence[str], device: str, report: Report, deadline: float, jobs: int) -> int:
    with ThreadPoolExecutor(jobs) as pool:
        for future in [
            pool.submit(run_part, module, command_of("check", module, device), report, deadline) for module in modules
        ]:
            future.result()
    print(f"{len(report.results) - report.num_failed} cases agree with the reference, {report.num_failed} do not")
    return 1 if report.num_failed else 0


def run_benchmarks(modules: Sequence[str], device: str, report: Report, deadline: float) -> int:
    for module in modules:
        run_part(module, command_of("bench", module, device), report, deadline)
    goals = judge([result for part in report.parts.values() for result in part["results"]])
    print_goals(goals)
    report.put(goals=goals)
    return 1 if report.num_failed else 0


def command_of(command: str, module: str, device: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu.kernel_process", command, module, device]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("check", "bench"))
    parser.add_argument("--modules", nargs="+", default=[f"{CHECKS}.{name}" for name in MODULES], help="of checks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing more is run")
    parser.add_argument("--jobs", type=int, default=len(MODULES), help="processes that check at a time")
    parser.add_argument("--output", type=Path, help="defaults to bench/results/gpu_kernels_COMMAND.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine that has one, with torch built for it")
    if device.type != "cuda" and options.command == "bench":
        parser.error(f"there is nothing to time on {device}; use a CUDA device")
    path = options.output or RESULTS / f"gpu_kernels_{options.command}.json"
    modules = ["device", *options.modules] if options.command == "bench" else options.modules
    report = Report(path, describe(device), modules)
    deadline = time.monotonic() + options.seconds
    if options.command == "check":
        return run_checks(modules, options.device, report, deadline, options.jobs)
    return run_benchmarks(modules, options.device, report, deadline)


if __name__ == "__main__":
    sys.exit(main())
