"""Runs the cases of one module of checks on a device: a process of `bench/gpu/kernels.py`, which starts it."""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import torch

from bench.gpu.device_timer import measure
from testing.kernel_checks.case import COPY, MATMUL, BenchCase, DeviceCase
from testing.part import Case, UnavailableError, run_cases

_MATMUL_SIZE = 8192
_COPY_BYTES = 1 << 30

KernelCase = TypeVar("KernelCase", DeviceCase, BenchCase)


def check(case: DeviceCase, device: torch.device) -> dict:
    case.run(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {}


def bench(case: BenchCase, device: torch.device) -> dict:
    try:
        calls = case.make(device)
    except NotImplementedError as error:
        raise UnavailableError(str(error)) from error
    figures = asdict(measure(calls))
    goals = [asdict(goal) for goal in case.goals]
    return {**figures, "bytes_moved": case.bytes_moved, "flops": case.flops, "goals": goals}


def reference_cases() -> Iterator[BenchCase]:
    """Yields cases that show how fast the device is: a copy far larger than its cache, and a large bfloat16 product."""

    def copy(device: torch.device) -> list[Callable[[], object]]:
        source, target = torch.randint(0, 99, (2, _COPY_BYTES // 4), dtype=torch.int32, device=device)
        return [lambda: target.copy_(source)]

    def matmul(device: torch.device) -> list[Callable[[], object]]:
        left, right = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, device=device).bfloat16()
        return [lambda: left @ right]

    yield BenchCase(COPY, copy, bytes_moved=2 * _COPY_BYTES)
    yield BenchCase(MATMUL, matmul, flops=2 * _MATMUL_SIZE**3)


def run_all(
    cases: Iterator[KernelCase], run: Callable[[KernelCase, torch.device], dict], device: torch.device, done: int
) -> None:
    def release() -> None:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises where the device was lost with this case: the next has a new process
            torch.cuda.empty_cache()

    run_cases((Case(case.name, partial(run, case, device)) for case in cases), done, release)


def main(command: str, module_name: str, device_name: str, done: int) -> None:
    device = torch.device(device_name)
    if command == "check":
        run_all(importlib.import_module(module_name).device_cases(), check, device, done)
    elif module_name == "device":
        run_all(reference_cases(), bench, device, done)
    else:
        run_all(importlib.import_module(module_name).bench_cases(), bench, device, done)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
