"""Attention as GPU kernels see a step: computed by the reference from tensors on the device only."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.reference import paged_attention, reshape_and_cache
from tests.worker.fake_device import as_kernel
from worker_service.attention import AttentionBatch, LayerCache
from worker_service.models.torch_operations import Attend


class DeviceAttention:
    """A backend that checks the host's description of a step against the tensors on the device."""

    name = "reference"
    is_head_major = False
    is_capturable = True
    is_mixed_capturable = True

    def __init__(self, scorings: Sequence[Scoring] = (), group_of_layer: Sequence[int] = ()) -> None:
        self._scorings = scorings
        self._group_of_layer = group_of_layer

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        rows = batch.device_rows
        assert rows is not None
        scorings = self._scorings or [Scoring(keys.shape[3] ** -0.5) for keys, _ in kv_cache]
        groups = self._group_of_layer or (0,) * len(kv_cache)

        @as_kernel
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            query_start_loc, seq_lens = rows.query_start_loc.tolist(), rows.seq_lens.tolist()
            _check(batch, rows.num_decodes, query_start_loc, seq_lens, len(query), kv_cache[layer][0].shape[1])
            reshape_and_cache(key, value, *kv_cache[layer], batch.slot_mapping[groups[layer]])
            scoring = replace(scorings[layer], sinks=sinks)
            tables = batch.block_tables[groups[layer]]
            return paged_attention(query, *kv_cache[layer], tables, seq_lens, query_start_loc, scoring)

        return attend


def _check(
    batch: AttentionBatch,
    num_decodes: int | None,
    query_start_loc: list[int],
    seq_lens: list[int],
    num_tokens: int,
    block_size: int,
) -> None:
    lengths = [end - start for start, end in pairwise(query_start_loc)]
    if num_decodes is None:
        num_decodes = sum(length == 1 and seq_len > 0 for length, seq_len in zip(lengths, seq_lens, strict=True))
        assert (query_start_loc[0], query_start_loc[-1], batch.query_start_loc) == (0, num_tokens, [])
    else:
        assert query_start_loc == batch.query_start_loc
        assert num_decodes == lengths.count(1)
    assert lengths[:num_decodes] == [1] * num_decodes, "rows that decode come first"
    for seq_len, bound in zip(seq_lens, batch.seq_lens, strict=True):
        assert seq_len <= bound
        assert seq_len <= batch.block_tables.shape[2] * block_size
