"""Paged attention by the C kernels: one call per layer computes rows of every kind straight from the blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS
from pagewire.kernels.cpu import MAX_HEAD_DIM, CpuKernels, PagedRows
from worker_service.attention.backend import AttentionBatch, AttentionShape, Capability, UnavailableError

_BFLOAT16 = Capability(
    "cpu",
    ("cpu",),
    dtypes=(torch.float32, torch.bfloat16),
    cache_dtypes=EIGHT_BITS,
    head_dims=range(1, MAX_HEAD_DIM + 1),
    supports_bidirectional=True,
)
_FLOAT32 = replace(_BFLOAT16, cache_dtypes=(torch.bfloat16, torch.float16, *EIGHT_BITS))


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "CpuAttention":
    """Return the attention backend for CPUs, which uses the C kernels.

    Raises UnavailableError if the backend does not support `shape`, or if the C kernels are missing.
    """
    (_FLOAT32 if shape.dtype == torch.float32 else _BFLOAT16).check(shape, device)
    if kernels is None:
        raise UnavailableError(
            "attention backend 'cpu' needs the CPU kernels, which are off or could not be built: set "
            "PAGEWIRE_CPU_KERNELS=require to see why, or choose torch"
        )
    return CpuAttention(kernels, shape)


@dataclass(frozen=True, slots=True)
class CpuAttend:
    """The attention function of one prepared step on a CPU. A call computes one layer.

    `CpuDecoder` runs all layers in one call of the C kernels. It reads the fields instead of calling the function.
    """

    kernels: CpuKernels
    rows: PagedRows
    scorings: Sequence[Scoring]  # one per layer, without sinks
    kv_cache: Sequence[LayerCache]
    layer_groups: Sequence[int]  # one per layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Compute the attention of one layer and return the output [T, num_heads, head_dim]. See `Attend`."""
        scoring = replace(self.scorings[layer], sinks=sinks)
        return self.kernels.attend(
            self.rows, scoring, query, key, value, *self.kv_cache[layer], self.layer_groups[layer]
        )


class CpuAttention:
    """The attention backend for CPUs on which the C kernels can be built."""

    name = "cpu"
    is_head_major = True  # a head's keys are then read in contiguous runs of block length
    is_capturable = False
    is_mixed_capturable = False

    def __init__(self, kernels: CpuKernels, shape: AttentionShape) -> None:
        self._kernels = kernels
        self._scorings = shape.scorings(torch.device("cpu"))  # one per layer
        self._layer_groups = shape.group_of_layer

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> CpuAttend:
        """Return the attention function of one step for the C kernels, with the step's block tables and lengths.

        `kv_cache` has one entry per layer. See `AttentionBackend.prepare`.
        """
        rows = PagedRows.of(batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.slot_mapping)
        return self.prepare_rows(rows, kv_cache)

    def prepare_rows(self, rows: PagedRows, kv_cache: Sequence[LayerCache]) -> CpuAttend:
        """Prepare the attention of one step. `rows` describes its sequences in the layout of the C kernels."""
        return CpuAttend(self._kernels, rows, self._scorings, kv_cache, self._layer_groups)
