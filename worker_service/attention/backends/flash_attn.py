"""Paged attention by the package flash-attn (Dao, 2023, https://arxiv.org/abs/2307.08691), whose pages are our blocks.

Rows that decode go to `flash_attn_with_kvcache`, the others to `flash_attn_varlen_func`: the interface of flash-attn
2.6 to 2.8.3. Its sources from July 2026 on (pull request 2711) ask the device for the longest row in the first of them,
which no graph can hold: with these, leave graphs off by --max-graph-batch-size 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.triton.cache import HEAD_DIMS
from pagewire.kernels.triton.fused import HeadCaching
from worker_service.attention.backend import AttentionBatch, AttentionShape, DeviceRows
from worker_service.attention.cached_attend import CachedAttend
from worker_service.attention.capability import Capability
from worker_service.models.model import Attend

_CAPABILITY = Capability(
    backend="flash_attn",
    device_types=("cuda",),
    compute_capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=HEAD_DIMS,
    block_sizes=range(256, 257),  # flash-attn takes multiples of it, and the kernel that writes them no larger ones
    takes_sinks=False,
)


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "FlashAttention":
    """Raises UnavailableError where it cannot compute this."""
    _CAPABILITY.check(shape, device)
    return FlashAttention(shape, device)


class FlashAttention:
    """The backend for whoever has flash-attn. Keys and values are written by the Triton kernel."""

    name = "flash_attn"
    is_head_major = False
    is_capturable = True
    is_mixed_capturable = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._scoring = shape.scoring(0, device)
        # How far a query sees to its left and right, itself not counted; -1: to the end.
        self._window_sizes = [(window - 1, 0) if window else (-1, -1) for window in shape.windows]

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Tells rows that decode from the others. See `AttentionBackend.prepare`."""
        rows = batch.rows_on(kv_cache[0][0].device)
        assert rows.num_decodes is not None, "only behind a graph, which cannot hold this backend"
        block_tables = batch.block_tables.to(torch.int32)
        parts: list[_Decodes | _PromptRows] = []
        if rows.num_decodes:
            parts.append(_Decodes.of(rows, block_tables, self._scoring))
        if rows.num_decodes < len(batch.seq_lens):
            parts.append(_PromptRows.of(batch, rows, block_tables, self._scoring))

        def attend(layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
            assert sinks is None
            window_size = self._window_sizes[layer]
            outputs = [part.attend(query[part.tokens], *kv_cache[layer], window_size) for part in parts]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return CachedAttend(kv_cache, HeadCaching(batch.slot_mapping), attend)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The rows that decode: they come first, with one token each."""

    tokens: slice
    block_tables: Tensor
    seq_lens: Tensor
    scoring: Scoring

    @staticmethod
    def of(rows: DeviceRows, block_tables: Tensor, scoring: Scoring) -> "_Decodes":
        first = slice(0, rows.num_decodes)
        return _Decodes(first, block_tables[first], rows.seq_lens[first], scoring)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, window_size: tuple[int, int]) -> Tensor:
        output: Tensor = flash_attn_with_kvcache(
            query[:, None],  # [rows, 1, num_heads, head_dim]
            key_cache,
            value_cache,
            cache_seqlens=self.seq_lens,
            block_table=self.block_tables,
            softmax_scale=self.scoring.scale,
            softcap=self.scoring.softcap,
            alibi_slopes=self.scoring.alibi_slopes,
            causal=True,
            window_size=window_size,
        )
        return output[:, 0]


@dataclass(frozen=True, slots=True)
class _PromptRows:
    """The rows behind those that decode, with any number of tokens."""

    tokens: slice
    block_tables: Tensor
    query_start_loc: Tensor  # [rows + 1] int32, from 0
    key_start_loc: Tensor  # [rows + 1] int32: of the rows' positions, as if they stood one row behind the other
    max_queries: int
    max_seq_len: int
    scoring: Scoring

    @staticmethod
    def of(batch: AttentionBatch, rows: DeviceRows, block_tables: Tensor, scoring: Scoring) -> "_PromptRows":
        first = rows.num_decodes
        starts = rows.query_start_loc[first:]
        return _PromptRows(
            tokens=slice(first, None),
            block_tables=block_tables[first:],
            query_start_loc=starts - starts[0],
            key_start_loc=F.pad(rows.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0)),
            max_queries=max(end - start for start, end in pairwise(batch.query_start_loc[first:])),
            max_seq_len=max(batch.seq_lens[first:]),
            scoring=scoring,
        )

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, window_size: tuple[int, int]) -> Tensor:
        output: Tensor = flash_attn_varlen_func(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=self.query_start_loc,
            cu_seqlens_k=self.key_start_loc,
            max_seqlen_q=self.max_queries,
            max_seqlen_k=self.max_seq_len,
            softmax_scale=self.scoring.scale,
            softcap=self.scoring.softcap,
            alibi_slopes=self.scoring.alibi_slopes,
            causal=True,
            window_size=window_size,
            block_table=self.block_tables,
        )
        return output
