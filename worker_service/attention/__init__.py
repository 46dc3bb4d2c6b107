"""Attention backends: everything that knows how the paged KV cache is read and written."""

from collections.abc import Sequence

import torch

from worker_service.attention.backend import Attend, AttentionBackend, AttentionBatch, LayerCache
from worker_service.attention.torch_attention import TorchAttention

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "AttentionBatch", "LayerCache", "create_backend"]

BACKENDS = ("auto", "torch")


def create_backend(name: str, device: torch.device, windows: Sequence[int] = ()) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one there is for `device`.

    `windows`: of each layer, the positions that a query attends to, its own included, or 0 for all up to its own. Left
    out, no layer has a window.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown on {device}: choose one of {', '.join(BACKENDS)}")
    return TorchAttention(windows)
