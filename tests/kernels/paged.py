"""The two parts of `CpuKernels.attend`, separately: attention over the cache, and storing keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cpu import CpuKernels, PagedRows


def paged_attention(
    kernels: CpuKernels,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    scoring: Scoring,
    num_threads: int | None = None,
) -> Tensor:
    """Return the attention output over the cache's content. `num_threads`: overrides torch's number of threads."""
    rows = PagedRows.of(query_start_loc, seq_lens, block_tables[None], torch.full((1, len(query)), -1))
    unread = query.new_full((len(query), key_cache.shape[2], query.shape[2]), float("nan"))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        return kernels.attend(rows, scoring, query, unread, unread, key_cache, value_cache)
    finally:
        torch.set_num_threads(before)


def store_kv(
    kernels: CpuKernels, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write keys and values to their slots, without any row that attends."""
    rows = PagedRows.of([0], [], torch.empty(1, 0, 0), slots[None])
    kernels.attend(rows, Scoring(1.0), key, key, value, key_cache, value_cache)
