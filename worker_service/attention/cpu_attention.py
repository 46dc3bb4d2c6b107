"""Paged attention by the C kernels: rows of every kind in one call a layer, straight from the pages."""

from collections.abc import Sequence

from torch import Tensor

from pagewire.kernels.cpu import CpuKernels, PagedRows, PagedScoring
from worker_service.attention.backend import AttentionBatch, LayerCache
from worker_service.models.model import Attend


class CpuAttend:
    """Attention of one prepared step, a layer at a time; or what a whole stack of layers needs for it."""

    def __init__(
        self,
        kernels: CpuKernels,
        rows: PagedRows,
        scorings: Sequence[PagedScoring],
        kv_cache: Sequence[LayerCache],
    ) -> None:
        self._kernels = kernels
        self.rows = rows
        self.scorings = scorings
        self.kv_cache = kv_cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        return self._kernels.attend(self.rows, self.scorings[layer], query, key, value, *self.kv_cache[layer])


class CpuAttention:
    """The backend for CPUs where the kernels can be built."""

    name = "cpu"
    is_head_major = True  # a head's keys are read in runs as long as a block
    is_capturable = False

    def __init__(self, kernels: CpuKernels, windows: Sequence[int] = ()) -> None:
        """`windows`: see `AttentionShape`; left out, no layer has one."""
        self._kernels = kernels
        self._windows = windows
        self._scorings: list[PagedScoring] = []  # of the layers of any cache: they are all of one shape

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """See `AttentionBackend.prepare`."""
        rows = PagedRows.of(batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.slot_mapping)
        if not self._scorings:
            scale = kv_cache[0][0].shape[3] ** -0.5
            self._scorings = [PagedScoring(scale, window) for window in self._windows or (0,) * len(kv_cache)]
        return CpuAttend(self._kernels, rows, self._scorings, kv_cache)
