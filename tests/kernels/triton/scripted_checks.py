"""Cases that behave as the kernels must not, for the tests of the command that runs cases."""

import os
from collections.abc import Iterator

import torch

from testing.kernel_checks.case import DeviceCase


def agrees(device: torch.device) -> None:
    print("something on standard output")


def differs(device: torch.device) -> None:
    raise AssertionError("row 3 differs, seed 1")


def dies(device: torch.device) -> None:
    os._exit(7)


def device_cases() -> Iterator[DeviceCase]:
    yield DeviceCase("first", agrees)
    yield DeviceCase("wrong", differs)
    yield DeviceCase("deadly", dies)
    yield DeviceCase("deadly again", dies)
    yield DeviceCase("last", agrees)
