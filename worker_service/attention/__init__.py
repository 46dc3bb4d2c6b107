"""The attention backends: the only code that knows the layout of the paged KV cache."""

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
    """Return the implementation of attention called `name`, for example "triton", for one device.

    "auto" selects the fastest backend that supports `device` and `shape`. It logs a line if that backend is plain
    torch.

    Args:
        kernels: the CPU kernels, or None if they could not be built.

    Raises:
        UnavailableError: the name is unknown, a package is missing, or the backend does not support `shape` on
            `device`.
    """
    if name == "auto":
        preferred = "cpu" if device.type == "cpu" else "triton"
        try:
            return create_backend(preferred, device, shape, kernels)
        except UnavailableError as error:
            # The loader has already logged a warning if the CPU kernels could not be built.
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
