"""Attention backends: everything that knows how the paged KV cache is read and written."""

import importlib
import logging

import torch

from pagewire.kernels.arguments import LayerCache
from pagewire.kernels.cpu import CpuKernels
from worker_service.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    DeviceRows,
    UnavailableError,
)
from worker_service.attention.backends.cpu import CpuAttend, CpuAttention
from worker_service.config import ATTENTION_BACKENDS

__all__ = [
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


def create_backend(
    name: str, device: torch.device, shape: AttentionShape, kernels: CpuKernels | None = None
) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one there is for `device`, and says so if it is torch.

    Args:
        kernels: the CPU's, where there are any.

    Raises:
        UnavailableError: there is no backend of that name, or it cannot compute this here.
    """
    if name == "auto":
        preferred = "cpu" if device.type == "cpu" else "triton"
        try:
            return create_backend(preferred, device, shape, kernels)
        except UnavailableError as error:
            # Of CPU kernels that could not be built, the loader has warned.
            level = logging.INFO if device.type == "cpu" else logging.WARNING
            logger.log(level, "attention is computed in plain torch, which is slower: %s", error)
            return create_backend("torch", device, shape, kernels)
    if name not in ATTENTION_BACKENDS:
        names = ", ".join(ATTENTION_BACKENDS)
        raise UnavailableError(f"attention backend {name!r} is unknown: choose auto or one of {names}")
    try:
        module = importlib.import_module(f"{__name__}.backends.{name}")
    except ImportError as error:
        raise UnavailableError(
            f"attention backend {name!r} needs {ATTENTION_BACKENDS[name]} to be installed ({error}): install it, or "
            "choose another --attention-backend"
        ) from error
    backend: AttentionBackend = module.create(device, shape, kernels)
    return backend
