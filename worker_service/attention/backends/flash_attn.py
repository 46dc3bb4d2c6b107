"""Paged attention by the package flash-attn (Dao, 2023, https://arxiv.org/abs/2307.08691).

Its pages are the blocks of the KV cache. Rows that decode use `flash_attn_with_kvcache`, and all other rows use
`flash_attn_varlen_func`. The calls follow the interface of flash-attn 2.6 to 2.8.3. From July 2026 on (pull request
2711), the source of `flash_attn_with_kvcache` reads the longest row's length back from the device, which a CUDA graph
cannot contain. With such a version, turn graphs off with --max-graph-batch-size 0.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.triton.cache import HEAD_DIMS
from worker_service.attention.backend import AttentionBatch, AttentionShape, Capability, DeviceRows
from worker_service.attention.backends.triton import CachedAttend
from worker_service.models.torch_operations import Attend

_CAPABILITY = Capability(
    backend="flash_attn",
    device_types=("cuda",),
    compute_capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=range(HEAD_DIMS.start, 256 + 1, HEAD_DIMS.step),
    # flash-attn needs multiples of 256, and the kernel that writes blocks supports no larger ones
    block_sizes=range(256, 257),
    supports_sinks=False,
    supports_patterns=False,
)


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "FlashAttention":
    """Return the attention backend that uses the package flash-attn.

    Raises UnavailableError if the backend does not support `shape` on `device`.
    """
    _CAPABILITY.check(shape, device)
    return FlashAttention(shape, device)


class FlashAttention:
    """The attention backend for GPUs on which the package flash-attn is installed.

    A Triton kernel writes keys and values to the KV cache, and flash-attn attends.
    """

    name = "flash_attn"
    is_head_major = False
    is_capturable = True
    is_mixed_capturable = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._options = [_options(scoring) for scoring in shape.scorings(device)]  # one per layer
        self._group_of_layer = shape.group_of_layer

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Prepare the attention of one step: separate the sequences that decode one token from those that prefill.

        See `AttentionBackend.prepare`.
        """
        rows = batch.rows_on(kv_cache[0][0].device)
        assert rows.num_decodes is not None, "only behind a graph, which cannot hold this backend"
        parts: list[_Attending] = []
        if rows.num_decodes:
            parts.append(_decodes(rows, rows.num_decodes))
        if rows.num_decodes < len(batch.seq_lens):
            parts.append(_prompts(batch, rows, rows.num_decodes))
        tables = [[of_group[which] for which, _ in parts] for of_group in batch.block_tables.to(torch.int32)]

        def attend(layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
            assert sinks is None
            outputs = [
                part(query[which], *kv_cache[layer], block_table=table, **self._options[layer])
                for (which, part), table in zip(parts, tables[self._group_of_layer[layer]], strict=True)
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return CachedAttend.of(kv_cache, self._group_of_layer, batch.slot_mapping, attend)


# A slice that selects sequences of the step and also their tokens, since sequences that decode come first. Then the
# function that attends with these tokens over a layer's caches. It also needs the layer's block tables and options.
_Attending = tuple[slice, Callable[..., Tensor]]


def _options(scoring: Scoring) -> dict[str, Any]:
    return {
        "softmax_scale": scoring.scale,
        "softcap": scoring.softcap,
        "alibi_slopes": scoring.alibi_slopes,
        "causal": True,
        # the number of positions that a query sees to its left and right, without its own; -1: no limit
        "window_size": (scoring.window - 1, 0) if scoring.window else (-1, -1),
    }


def _decodes(rows: DeviceRows, num: int) -> _Attending:
    """Prepare attention for the first `num` sequences of a step, which decode one token each.

    Return (which, attend). `which` is the slice of the batch with the sequences and their tokens. `attend` computes the
    attention of these tokens in one layer.
    """
    seq_lens = rows.seq_lens[:num]

    def attend(query: Tensor, *caches: Tensor, **of_layer: Any) -> Tensor:
        output: Tensor = flash_attn_with_kvcache(  # queries are [rows, 1, num_heads, head_dim]
            query[:, None], *caches, cache_seqlens=seq_lens, **of_layer
        )
        return output[:, 0]

    return slice(0, num), attend


def _prompts(batch: AttentionBatch, rows: DeviceRows, first: int) -> _Attending:
    """Prepare attention for the sequences of a step from index `first` on, which may have several new tokens each.

    Return (which, attend). `which` is the slice of the batch with the sequences and their tokens. `attend` computes the
    attention of these tokens in one layer.
    """
    starts = rows.query_start_loc[first:]
    of_rows = {
        "cu_seqlens_q": starts - starts[0],
        # Offsets of the rows' positions if all rows were concatenated.
        "cu_seqlens_k": F.pad(rows.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0)),
        "max_seqlen_q": max(end - start for start, end in pairwise(batch.query_start_loc[first:])),
        "max_seqlen_k": max(batch.seq_lens[first:]),
    }
    return slice(first, None), partial(flash_attn_varlen_func, **of_rows)
