"""Paged attention by the C kernels: rows of every kind in one call a layer, straight from the pages."""

from collections.abc import Sequence

from torch import Tensor

from kernels.cpu import CpuKernels, PagedRows, PagedScoring
from worker_service.attention.backend import Attend, AttentionBatch, LayerCache


class CpuAttention:
    """The backend for CPUs where the kernels can be built."""

    name = "cpu"
    is_head_major = True  # a head's keys are read in runs as long as a block

    def __init__(self, kernels: CpuKernels, windows: Sequence[int] = ()) -> None:
        """`windows`: see `create_backend`."""
        self._kernels = kernels
        self._windows = windows

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """See `AttentionBackend.prepare`."""
        rows = PagedRows.of(batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.slot_mapping)
        scale = kv_cache[0][0].shape[3] ** -0.5
        windows = self._windows or (0,) * len(kv_cache)
        scorings = [PagedScoring(scale, window) for window in windows]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._kernels.attend(rows, scorings[layer], query, key, value, *kv_cache[layer])

        return attend
