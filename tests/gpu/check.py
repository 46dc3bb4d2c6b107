"""Checks the whole system on a GPU: scheduler and worker as processes, against transformers and against itself.

    python -m tests.gpu.check [--parts parity kills]

Needs torch with CUDA, Triton, transformers, grpcio and nothing that this repository would install. Parts run side by
side, each in a process of its own that ends after --seconds at the latest. Results go to bench/results/gpu_check.json
as they come; parts that are not run keep their last ones. The kernels have a check of their own: make
gpu-check-kernels. With --device cpu and an --output it is a rehearsal of the same code, without what only a GPU can do.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from testing.part import Report, run_cases, run_part
from testing.part_command import open_report, part_parser
from tests.gpu.service_checks import PARTS, Setting

COMMAND = "tests.gpu.check"
NUM_THREADS = 2  # of transformers in a part's process


def run_checks(parts: Sequence[str], device: str, report: Report, seconds: float, num_jobs: int) -> int:
    def run(part: str) -> None:
        command = [sys.executable, "-m", *COMMAND.split(), "--device", device, "--part", part, "--done"]
        run_part(part, command, report, time.monotonic() + seconds)

    with ThreadPoolExecutor(num_jobs) as pool:
        for future in [pool.submit(run, part) for part in parts]:
            future.result()
    num_unavailable = sum("unavailable" in result for result in report.results)
    print(
        f"{len(report.results) - report.num_failed - num_unavailable} checks passed, {report.num_failed} failed, "
        f"{num_unavailable} were not possible here"
    )
    return 1 if report.num_failed else 0


def run_one(part: str, device: str, done: int) -> None:
    """Runs a part in this process."""
    torch.set_num_threads(NUM_THREADS)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        run_cases(PARTS[part](Setting(device, Path(directory))), done)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = part_parser(COMMAND, __doc__, PARTS)
    num_jobs = max(1, min(4, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=num_jobs, help="parts at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.part is not None:
        run_one(options.part, options.device, options.done)
        return 0
    report = open_report(COMMAND, parser, options)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # float32 is float32, in the services too
    return run_checks(options.parts, options.device, report, options.seconds, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
