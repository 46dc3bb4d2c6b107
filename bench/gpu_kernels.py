"""The Triton kernels on a GPU: `python -m bench.gpu_kernels check` against the reference, `bench` against goals.

Needs torch with CUDA and Triton, nothing else. Results are written after every case, so that a run which is cut short
leaves what it has measured; each module runs in a process of its own, and a case that kills it costs that case alone.
"""

import argparse
import datetime
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.gpu_process import MARK
from bench.record import RESULTS, machine, write
from tests.kernels.triton.checks.case import COPY, MATMUL

CHECKS = "tests.kernels.triton.checks"
MODULES = ("decode_attention", "prefill_attention", "cache", "blocks", "sampler", "fused")
SECONDS = 450.0


def describe(device: torch.device) -> dict:
    """Card, driver, versions and date."""
    import triton  # only now: whoever imports this module may still choose its interpreter

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "card": card,
        "driver": driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(),
    }


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


class Report:
    """What is known so far, in a file."""

    def __init__(self, path: Path, heading: dict) -> None:
        self._path = path
        self._figures = {**heading, "results": []}
        self._lock = threading.Lock()
        write(path, self._figures)

    @property
    def results(self) -> list[dict]:
        return self._figures["results"]

    def add(self, result: dict) -> None:
        with self._lock:
            self.results.append(result)
            write(self._path, self._figures)
            print(line(result), flush=True)


def line(result: dict) -> str:
    if "error" in result:
        return f"FAILED  {result['name']}: {result['error'].splitlines()[0]}"
    if "unavailable" in result:
        return f"-       {result['name']}: {result['unavailable']}"
    if "seconds" not in result:
        return f"ok      {result['name']} ({result['wall_seconds']:.1f} s)"
    rate = f", {result['bytes_moved'] / result['seconds'] / 1e9:,.0f} GB/s" if result["bytes_moved"] else ""
    rate += f", {result['flops'] / result['seconds'] / 1e12:,.0f} TFLOP/s" if result["flops"] else ""
    host = ", the host's part included" if result["includes_host"] else ""
    return f"{result['seconds'] * 1e6:10.1f} us  {result['name']}{rate}{host}"


def run_module(command: str, module: str, device: str, report: Report, deadline: float) -> None:
    """Runs its cases in a process, and in the next one where that dies; at the deadline the rest is left."""
    done = 0
    while True:
        arguments = [sys.executable, "-m", "bench.gpu_process", command, module, device, str(done)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(max(0.1, deadline - time.monotonic()), process.kill)
        timer.start()
        started, finished = read_results(process, module, report)
        status = process.wait()
        timer.cancel()
        done += finished
        if status == 0:
            return
        if time.monotonic() >= deadline:
            report.add({"name": started or module, "module": module, "error": "out of time, with all behind it"})
            return
        if started is None and finished == 0:
            report.add({"name": module, "module": module, "error": f"its process ended with status {status}"})
            return
        if started is not None:
            report.add({"name": started, "module": module, "error": f"its process died with status {status}"})
            done += 1


def read_results(process: subprocess.Popen, module: str, report: Report) -> tuple[str | None, int]:
    """Name of the case that was begun and not ended, and how many ended."""
    started, finished = None, 0
    assert process.stdout is not None
    for text in process.stdout:
        if not text.startswith(MARK):
            print(text, end="", file=sys.stderr)
            continue
        result = json.loads(text[len(MARK) :])
        if result.get("started"):
            started = result["name"]
        else:
            report.add({"module": module, **result})
            started, finished = None, finished + 1
    return started, finished


def judge(results: Sequence[dict]) -> list[dict]:
    """Every goal with its value, None where either side was not measured, and whether it is met."""
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
    """Of the copy's bandwidth or the product's rate; of other cases, how many times as fast."""
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
        for future in [pool.submit(run_module, "check", module, device, report, deadline) for module in modules]:
            future.result()
    num_failed = sum("error" in result for result in report.results)
    print(f"{len(report.results) - num_failed} cases agree with the reference, {num_failed} do not")
    return 1 if num_failed or not report.results else 0


def run_benchmarks(modules: Sequence[str], device: str, report: Report, path: Path, deadline: float) -> int:
    for module in ("device", *modules):
        run_module("bench", module, device, report, deadline)
    goals = judge(report.results)
    print_goals(goals)
    write(path, {**json.loads(path.read_text()), "goals": goals})
    return 1 if any("error" in result for result in report.results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=__doc__.split("\n")[0])
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
    report = Report(path, describe(device))
    deadline = time.monotonic() + options.seconds
    if options.command == "check":
        return run_checks(options.modules, options.device, report, deadline, options.jobs)
    return run_benchmarks(options.modules, options.device, report, path, deadline)


if __name__ == "__main__":
    sys.exit(main())
