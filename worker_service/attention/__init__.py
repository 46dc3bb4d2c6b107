"""Attention backends: everything that knows how the paged KV cache is read and written."""

from collections.abc import Sequence

import torch

from kernels.cpu import load_kernels
from kernels.cpu.paged import MAX_HEAD_DIM
from worker_service.attention.backend import Attend, AttentionBackend, AttentionBatch, LayerCache
from worker_service.attention.cpu_attention import CpuAttention
from worker_service.attention.torch_attention import TorchAttention

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "AttentionBatch", "LayerCache", "create_backend"]

BACKENDS = ("auto", "cpu", "torch")


def create_backend(name: str, device: torch.device, windows: Sequence[int] = (), head_dim: int = 0) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one there is for `device`.

    `windows`: of each layer, the positions that a query attends to, its own included, or 0 for all up to its own. Left
    out, no layer has a window. `head_dim` is what the backend must be able to compute.

    Raises:
        ValueError: there is no backend of that name, or not here.
        BuildError: as `kernels.cpu.load_kernels` raises it.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown on {device}: choose one of {', '.join(BACKENDS)}")
    if name == "torch" or (name == "auto" and (device.type != "cpu" or head_dim > MAX_HEAD_DIM)):
        return TorchAttention(windows)
    if device.type != "cpu" or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"attention backend 'cpu' computes heads of at most {MAX_HEAD_DIM} on a CPU, not heads of {head_dim} on "
            f"{device}: choose torch"
        )
    kernels = load_kernels()
    if kernels is not None:
        return CpuAttention(kernels, windows)
    if name == "cpu":
        raise ValueError(
            "attention backend 'cpu' needs the CPU kernels, which are off or could not be built: set "
            "PAGEWIRE_CPU_KERNELS=require to see why, or choose torch"
        )
    return TorchAttention(windows)
