"""Checks of the whole system on a GPU: scheduler and worker as processes, against transformers and against themselves.

    python -m tests.gpu.check [--parts parity kills]

Needs torch with CUDA, Triton, transformers and grpcio, and nothing that this repository would install. Parts run side
by side, and parts with many cases in slices. Each slice has a process of its own, which ends after --seconds at the
latest. Results are written to bench/results/gpu_check.CARD.json as they arrive; parts that are not run keep their last
results. The kernels have a separate check: make gpu-check-kernels. With --device cpu and an --output, the same code
runs as a rehearsal, without the cases that need a GPU.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
import transformers

from testing.part import Report, run_cases, run_part
from testing.part_command import open_report, part_parser
from tests.gpu.service_checks import PARTS, Setting

COMMAND = "tests.gpu.check"
NUM_JOBS = max(1, min(4, (os.cpu_count() or 1) // 2))
NUM_THREADS = 2  # of transformers in a slice's process
CASES_PER_SLICE = 8


def run_checks(
    parts: Sequence[str], device: str, report: Report, seconds: float, pause_at: float = math.inf,
    num_jobs: int = NUM_JOBS,
) -> int:  # fmt: skip
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # exact float32, in the services too
    command = [sys.executable, "-m", *COMMAND.split(), "--device", device]

    def run(part: str, number: int, count: int) -> None:
        one = [*command, "--part", part, "--slice", str(number), str(count), "--done"]
        run_part(part, one, report, time.monotonic() + seconds, pause_at)

    with ThreadPoolExecutor(num_jobs) as pool:
        for future in [pool.submit(run, *one) for part in parts for one in slices_of(part)]:
            future.result()
    report.end(parts)
    num_unavailable = sum("unavailable" in result for result in report.results)
    print(
        f"{len(report.results) - report.num_failed - num_unavailable} checks passed, {report.num_failed} failed, "
        f"{num_unavailable} were not possible here"
    )
    return 1 if report.num_failed else 0


def slices_of(part: str) -> list[tuple[str, int, int]]:
    """Return the slices of a part: its name, the slice's number, and the number of slices."""
    num_cases = sum(1 for _ in PARTS[part](Setting("cpu", Path())))
    count = -(-num_cases // CASES_PER_SLICE)
    return [(part, number, count) for number in range(count)]


def run_one(part: str, number: int, count: int, device: str, done: Sequence[str]) -> None:
    """Run a slice of a part in this process: every case whose index modulo `count` is `number`."""
    torch.set_num_threads(NUM_THREADS)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        run_cases(islice(PARTS[part](Setting(device, Path(directory))), number, None, count), done)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = part_parser(COMMAND, __doc__, PARTS)
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="slices at a time (default: %(default)s)")
    parser.add_argument("--slice", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        run_one(options.part, *options.slice, options.device, options.done)
        return 0
    report = open_report(COMMAND, parser, options)
    return run_checks(options.parts, options.device, report, options.seconds, num_jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
