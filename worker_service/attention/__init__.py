"""Attention backends: everything that knows how the paged KV cache is read and written."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from pagewire.kernels.cpu import load_kernels
from pagewire.kernels.cpu.paged import MAX_HEAD_DIM
from worker_service.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    DeviceRows,
    LayerCache,
)
from worker_service.attention.capability import Capability, UnavailableError
from worker_service.attention.cpu_attention import CpuAttend, CpuAttention
from worker_service.attention.torch_attention import TorchAttention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionShape",
    "CpuAttend",
    "CpuAttention",
    "DeviceRows",
    "LayerCache",
    "UnavailableError",
    "create_backend",
]

logger = logging.getLogger(__name__)

_CPU = Capability("cpu", ("cpu",), head_dims=range(1, MAX_HEAD_DIM + 1))
_CPU_FLOAT32 = replace(_CPU, cache_dtypes=(torch.bfloat16, torch.float16))
_TORCH = Capability("torch", ("cpu", "cuda"))


def create_backend(name: str, device: torch.device, shape: AttentionShape) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one there is for `device`, and says so if it is torch.

    Raises:
        UnavailableError: there is no backend of that name, or it cannot compute this here.
        BuildError: as `pagewire.kernels.cpu.load_kernels` raises it.
    """
    if name == "auto":
        preferred = "cpu" if device.type == "cpu" else "triton"
        try:
            return BACKENDS[preferred](device, shape)
        except UnavailableError as error:
            # Of CPU kernels that could not be built, `load_kernels` has warned.
            level = logging.INFO if device.type == "cpu" else logging.WARNING
            logger.log(level, "attention is computed in plain torch, which is slower: %s", error)
            return BACKENDS["torch"](device, shape)
    if name not in BACKENDS:
        raise UnavailableError(f"attention backend {name!r} is unknown: choose auto or one of {', '.join(BACKENDS)}")
    return BACKENDS[name](device, shape)


def _create_cpu(device: torch.device, shape: AttentionShape) -> AttentionBackend:
    (_CPU_FLOAT32 if shape.dtype == torch.float32 else _CPU).check(shape, device)
    kernels = load_kernels()
    if kernels is None:
        raise UnavailableError(
            "attention backend 'cpu' needs the CPU kernels, which are off or could not be built: set "
            "PAGEWIRE_CPU_KERNELS=require to see why, or choose torch"
        )
    return CpuAttention(kernels, shape.windows)


def _create_triton(device: torch.device, shape: AttentionShape) -> AttentionBackend:
    try:
        # Only where it computes: the first import takes long.
        from worker_service.attention import triton_attention
    except ImportError as error:
        raise _not_installed("triton", "triton", error) from error
    triton_attention.CAPABILITY.check(shape, device)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return triton_attention.TritonAttention(shape, num_processors)


def _create_flash_attn(device: torch.device, shape: AttentionShape) -> AttentionBackend:
    try:
        from worker_service.attention import flash_attention
    except ImportError as error:
        raise _not_installed("flash_attn", "flash-attn, and triton,", error) from error
    flash_attention.CAPABILITY.check(shape, device)
    return flash_attention.FlashAttention(shape)


def _not_installed(backend: str, packages: str, error: ImportError) -> UnavailableError:
    return UnavailableError(
        f"attention backend {backend!r} needs {packages} to be installed ({error}): install it, or choose another "
        "--attention-backend"
    )


def _create_torch(device: torch.device, shape: AttentionShape) -> AttentionBackend:
    _TORCH.check(shape, device)
    return TorchAttention(shape.windows)


BACKENDS: dict[str, Callable[[torch.device, AttentionShape], AttentionBackend]] = {
    "cpu": _create_cpu,
    "triton": _create_triton,
    "flash_attn": _create_flash_attn,
    "torch": _create_torch,
}
