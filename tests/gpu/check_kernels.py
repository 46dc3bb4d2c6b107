"""Check every Triton kernel on a GPU against the reference, at real sizes: `make gpu-check-kernels`.

    python -m tests.gpu.check_kernels

Needs only torch with CUDA, and Triton. Modules of cases run side by side, each in a process of its own; a case that
kills its process costs only itself. Results are written to bench/results/gpu_kernels_check.CARD.json as they arrive.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from testing.kernel_checks import MODULES
from testing.kernel_checks.case import DeviceCase
from testing.ledger import path_of
from testing.part import Case, Report, describe, run_on_device, run_part
from testing.record import RESULTS

SECONDS = 450.0


def check(case: DeviceCase, device: torch.device) -> dict:
    case.run(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {}


def run_checks(
    modules: Sequence[str], device: str, report: Report, seconds: float, pause_at: float = math.inf,
    num_jobs: int = len(MODULES),
) -> int:  # fmt: skip
    command = [sys.executable, "-m", "tests.gpu.check_kernels", "--device", device]
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(num_jobs) as pool:
        for future in [
            pool.submit(run_part, module, [*command, "--part", module, "--done"], report, deadline, pause_at)
            for module in modules
        ]:
            future.result()
    report.end(modules)
    print(f"{len(report.results) - report.num_failed} cases agree with the reference, {report.num_failed} do not")
    return 1 if report.num_failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check_kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--modules", nargs="+", default=MODULES, help="of cases")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing more is run")
    parser.add_argument("--jobs", type=int, default=len(MODULES), help="processes at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS}/gpu_kernels_check.CARD.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.part is not None:
        cases = importlib.import_module(options.part).device_cases()
        run_on_device((Case(case.name, partial(check, case, device)) for case in cases), device, options.done)
        return 0
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine that has one, with torch built for it")
    heading = describe(device)
    report = Report(options.output or path_of("kernels_check", heading["card"]), heading, options.modules)
    return run_checks(options.modules, options.device, report, options.seconds, num_jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
