"""Chooses what a model computes with between its matrix products."""

import torch

from kernels.cpu import BuildError, load_kernels
from worker_service.models.operations import Operations, TorchOperations


def create_operations(device: torch.device) -> Operations:
    """The CPU kernels on a CPU where there are any, else plain torch.

    Raises ValueError if the kernels are required and cannot be built.
    """
    if device.type != "cpu":
        return TorchOperations()
    try:
        return load_kernels() or TorchOperations()
    except BuildError as error:
        raise ValueError(f"PAGEWIRE_CPU_KERNELS is require: {error}") from error
