"""Paged attention in plain torch for any device: correct for every mix of rows, and fast enough on a CPU.

A step's rows fall into three kinds. Each kind uses the cheapest method that torch has for it:

- The first chunk of a prompt attends to its own new keys and values and reads no cache. So does a whole prompt of a
  bidirectional model.
- A later chunk gathers its context once per layer. It attends under a mask on a CPU, and without a mask on a GPU.
- Decoding rows of similar length are padded to one group, then gathered and attended together.

In a layer with a window, a row's positions start at the window of the row's first query. Earlier positions are neither
gathered nor scored. Layers of the same layer group and window share all indices and masks.

A gather reads exactly the positions that a row owns. Other content of the cache, NaN included, is never read.

Grouped query heads are packed or expanded by strides, because `enable_gqa` is many times slower on a CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS, TokenRows
from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.reference import sees_blocks
from worker_service.attention.backend import AttentionBatch, AttentionShape, Capability
from worker_service.models.torch_operations import Attend

# Queries of a chunk that attend together. The limit bounds the mask's memory and skips most future scores.
MAX_CHUNK_QUERIES = 256
# Scores (256 MiB) that a chunk without a mask holds at a time. The memory profile does not measure these scores.
MAX_SCORES = 2**26
# A decoding row joins a group if its length is at least this share of the group's longest row...
MIN_GROUP_FILL = 0.75
# ...or if it is shorter by at most this number of positions, whose padding costs about as much as another group.
MAX_FREE_PADDING = 64


_CAPABILITY = Capability("torch", ("cpu", "cuda"), supports_bidirectional=True)
_ON_A_CPU = replace(_CAPABILITY, cache_dtypes=EIGHT_BITS)


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "TorchAttention":
    """Return the attention backend in plain torch.

    Raises UnavailableError if it does not support `shape` on `device`.
    """
    (_ON_A_CPU if device.type == "cpu" else _CAPABILITY).check(shape, device)
    return TorchAttention(shape, device)


class TorchAttention:
    """The attention backend in plain torch, for CPUs and GPUs. It needs no other package."""

    name = "torch"
    is_head_major = False
    is_capturable = False  # the host sorts the rows
    is_mixed_capturable = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._scorings = shape.scorings(device)  # one per layer

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Prepare the attention of one step. See `AttentionBackend.prepare`.

        Divide the sequences into first chunks of prompts, later chunks, and groups that decode. Compute the KV cache
        indices and the attention masks that later chunks and decoding groups need.
        """
        caches = [(TokenRows(keys), TokenRows(values)) for keys, values in kv_cache]
        # The layers with the same key share block tables and positions.
        keys = [
            (group, scoring.window, rows.block_stride, rows.position_stride)
            for group, scoring, (rows, _) in zip(self._shape.group_of_layer, self._scorings, caches, strict=True)
        ]
        steps = {key: _Step.of(batch, *key, self._shape) for key in dict.fromkeys(keys)}
        divide = _whole_prompts if self._shape.is_bidirectional else _causal_parts
        parts = {key: divide(step) for key, step in steps.items()}
        all_written = {key: step.cache_rows(batch.slot_mapping[key[0]]) for key, step in steps.items()}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
            key_rows, value_rows = caches[layer]
            written, scoring = all_written[keys[layer]], replace(self._scorings[layer], sinks=sinks)
            key, value = key_rows.write(written, key), value_rows.write(written, value)
            output = query.new_empty(query.shape)
            for part in parts[keys[layer]]:
                output[part.tokens] = part.attend(query, key, value, key_rows, value_rows, scoring)
            return output

        return attend


def _supports_masks(device: torch.device) -> bool:
    """Return whether `F.scaled_dot_product_attention` can be used with masks on `device`.

    On a GPU (an H200 with torch 2.11), a mask at an unaligned address crashed the process, and the mask of a sliding
    window gave wrong results. On GPUs, `_attend_scored` therefore computes all attention that needs a mask.
    """
    return device.type == "cpu"


def _is_plain(scoring: Scoring) -> bool:
    """Return whether `F.scaled_dot_product_attention` can compute attention with these parameters.

    It does not support soft caps, ALiBi slopes or attention sinks. It supports a sliding window, in the form of a mask.
    A block pattern would need a mask for each head.
    """
    others = (scoring.alibi_slopes, scoring.sinks, scoring.pattern)
    return not scoring.softcap and all(other is None for other in others)


def _attend_scored(
    queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, distances: Tensor, head_shape: tuple[int, ...]
) -> Tensor:
    """Compute attention in plain torch operations, with soft caps, ALiBi slopes, windows, patterns and sinks.

    `F.scaled_dot_product_attention` does not support soft caps, slopes, patterns or sinks on any device.

    Args:
        queries, keys, values: as `F.scaled_dot_product_attention` expects them.
        distances: position of each query minus position of each key, broadcast to the scores. A key with a negative
            distance is hidden.
        head_shape: the shape that broadcasts one value per head to the scores.
    """
    # a GPU's matmul returns the operands' dtype, but its fused attention accumulates scores in float32
    if queries.is_cuda:
        queries, keys = queries.float(), keys.float()
    scores = (queries @ keys.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if scoring.alibi_slopes is not None:
        scores -= scoring.alibi_slopes.view(head_shape) * distances
    is_hidden = distances < 0
    if scoring.window:
        is_hidden |= distances >= scoring.window
    if scoring.pattern is not None:  # without a window, keys begin at position 0
        positions, heads = torch.arange(keys.shape[-2], device=keys.device), torch.arange(math.prod(head_shape))
        heads = heads.to(keys.device).view(head_shape)
        is_hidden = is_hidden | ~sees_blocks(scoring.pattern, positions + distances, positions, heads)
    scores.masked_fill_(is_hidden, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(head_shape).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


@dataclass(frozen=True, slots=True)
class _FirstChunk:
    """New tokens of one sequence that attend only to one another, such as the first chunk of a prompt.

    There are at most as many tokens as the layer's window. Their attention does not read the KV cache.
    """

    tokens: slice

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: TokenRows,
        value_rows: TokenRows,
        scoring: Scoring,
    ) -> Tensor:
        return _attend_chunk(query[self.tokens], key[self.tokens], value[self.tokens], None, scoring)


@dataclass(frozen=True, slots=True)
class _LaterChunk:
    """New tokens of one sequence whose attention reads the KV cache.

    Some of them attend to earlier tokens, or there are more of them than positions in the layer's window.
    """

    tokens: slice
    positions: Tensor  # [N] cache rows of the row's positions
    mask: Tensor | None  # additive, shared by the step's chunks, see `_mask`; None: see `_supports_masks`

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: TokenRows,
        value_rows: TokenRows,
        scoring: Scoring,
    ) -> Tensor:
        keys, values = (rows.read(self.positions, query.dtype) for rows in (key_rows, value_rows))
        queries = query[self.tokens]
        end = len(keys) - len(queries)
        num_together = MAX_CHUNK_QUERIES
        if self.mask is None:
            num_together = max(1, min(num_together, MAX_SCORES // (query.shape[1] * len(keys))))
        outputs = []
        for chunk in queries.split(num_together):
            first = max(0, end - scoring.window + 1) if scoring.window else 0
            end += len(chunk)
            mask = None if self.mask is None else self.mask[-len(chunk) :, first - end :]
            outputs.append(_attend_chunk(chunk, keys[first:end], values[first:end], mask, scoring))
        return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """R sequences that decode one token each, and whose attention is computed together.

    The keys of each sequence are padded to N positions.
    """

    tokens: Tensor  # [R]
    positions: Tensor  # [R * N] cache rows; padding repeats a row's last position
    last_positions: Tensor  # [R] index of each row's query among the N positions
    mask: Tensor | None  # [R, 1, 1, N] additive; None: all rows have the same length, or see `_supports_masks`
    is_even: bool  # whether all rows have the same length

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: TokenRows,
        value_rows: TokenRows,
        scoring: Scoring,
    ) -> Tensor:
        shape = (len(self.tokens), -1, *key.shape[1:])
        keys = key_rows.read(self.positions, query.dtype).view(shape).transpose(1, 2)  # [R, num_kv_heads, N, head_dim]
        values = value_rows.read(self.positions, query.dtype).view(shape).transpose(1, 2)
        # The G query heads of a KV head become G rows over the same keys: [R, num_kv_heads, G, head_dim].
        queries = query[self.tokens].unflatten(1, (key.shape[1], -1))
        if _is_plain(scoring) and (self.is_even or self.mask is not None):
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, scale=scoring.scale)
        else:
            distances = self.last_positions[:, None] - torch.arange(keys.shape[2], device=keys.device)
            head_shape = (*queries.shape[1:3], 1)
            attended = _attend_scored(queries, keys, values, scoring, distances[:, None, None], head_shape)
        return attended.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _WholePrompt:
    """All tokens of one sequence of a bidirectional model. They attend to one another and read no KV cache."""

    tokens: slice

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_rows: TokenRows,
        value_rows: TokenRows,
        scoring: Scoring,
    ) -> Tensor:
        queries, keys, values = query[self.tokens], key[self.tokens], value[self.tokens]
        reach, num_together = scoring.window - 1 if scoring.window else len(keys), len(keys)
        if not _is_plain(scoring) or reach < len(keys) - 1:
            num_together = max(1, min(MAX_CHUNK_QUERIES, MAX_SCORES // (query.shape[1] * len(keys))))
        outputs = []
        for start in range(0, len(keys), num_together):
            seen = slice(max(0, start - reach), start + num_together + reach)
            chunk = queries[start : start + num_together]
            outputs.append(_attend_chunk(chunk, keys[seen], values[seen], None, scoring, start - seen.start))
        return torch.cat(outputs)


# Some rows of a step that attend together. `tokens` selects their tokens in the flat batch. `attend` returns [number of
# tokens, num_heads, head_dim], computed from a layer's new tensors and the layer's cache.
_Part = _FirstChunk | _LaterChunk | _DecodeGroup | _WholePrompt


@dataclass(frozen=True, slots=True)
class _Step:
    """The lengths and block tables of a step's sequences, and the KV cache's layout.

    All layers of the same layer group and window share this object.
    """

    num_queries: list[int]  # [S]
    query_start_loc: list[int]  # [S + 1]
    starts: list[int]  # [S] the first position that the row's queries attend to
    lengths: list[int]  # [S] number of positions from there to the row's end
    window: int
    block_tables: Tensor  # [S, max_blocks] int64
    block_size: int
    block_stride: int  # see `TokenRows`
    position_stride: int
    dtype: torch.dtype  # of queries

    @staticmethod
    def of(
        batch: AttentionBatch, group: int, window: int, block_stride: int, position_stride: int, shape: AttentionShape
    ) -> "_Step":
        num_queries = [end - start for start, end in pairwise(batch.query_start_loc)]
        starts = [0] * len(num_queries)
        if window:
            starts = [max(0, end - num - window + 1) for end, num in zip(batch.seq_lens, num_queries, strict=True)]
        return _Step(
            num_queries=num_queries,
            query_start_loc=batch.query_start_loc,
            starts=starts,
            lengths=[end - start for end, start in zip(batch.seq_lens, starts, strict=True)],
            window=window,
            block_tables=batch.block_tables[group].long(),
            block_size=shape.block_size,
            block_stride=block_stride,
            position_stride=position_stride,
            dtype=shape.dtype,
        )

    def tokens(self, row: int) -> slice:
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    def cache_rows(self, slots: Tensor) -> Tensor:
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return blocks * self.block_stride + offsets * self.position_stride

    def positions(self, rows: list[int], num_positions: int) -> Tensor:
        """Return the indices of the KV cache entries for `num_positions` positions of each given sequence, flattened.

        `rows` are the sequences' indexes in the step. Positions start at the first one to which the sequence's new
        tokens attend. After the sequence's end, the index of its last position is repeated.
        """
        device = self.block_tables.device
        ends = [[self.starts[row], self.starts[row] + self.lengths[row] - 1] for row in rows]
        first, last = torch.tensor(ends, device=device).split(1, dim=1)  # [rows, 1] each
        positions = (first + torch.arange(num_positions, device=device)).minimum(last)
        blocks = self.block_tables[torch.tensor(rows, device=device)].gather(1, positions // self.block_size)
        return self.cache_rows(blocks * self.block_size + positions % self.block_size).flatten()


def _whole_prompts(step: _Step) -> list[_Part]:
    return [_WholePrompt(step.tokens(row)) for row in range(len(step.lengths))]


def _causal_parts(step: _Step) -> list[_Part]:
    return [*_first_chunks(step), *_later_chunks(step), *_decode_groups(step)]


def _first_chunks(step: _Step) -> list[_Part]:
    return [_FirstChunk(step.tokens(row)) for row in range(len(step.lengths)) if _is_first_chunk(step, row)]


def _is_first_chunk(step: _Step, row: int) -> bool:
    """Return whether the attention of a sequence's new tokens can be computed without the KV cache.

    It can if no new token attends to an earlier token, and if the new tokens are not more than the window.
    """
    num_queries = step.num_queries[row]
    return num_queries == step.lengths[row] and (not step.window or num_queries <= step.window)


def _later_chunks(step: _Step) -> list[_Part]:
    rows = [
        row for row, num_queries in enumerate(step.num_queries) if num_queries > 1 and not _is_first_chunk(step, row)
    ]
    if not rows:
        return []
    mask = None
    if _supports_masks(step.block_tables.device):
        mask = _mask(step, max(step.num_queries[row] for row in rows), max(step.lengths[row] for row in rows))
    return [_LaterChunk(step.tokens(row), step.positions([row], step.lengths[row]), mask) for row in rows]


def _mask(step: _Step, num_queries: int, num_positions: int) -> Tensor:
    """Return an additive attention mask [queries, positions], causal and limited to the sliding window.

    All chunks of a step share one mask. A chunk of q queries that are the last of n positions uses the last q rows and
    the last n columns of the mask.
    """
    num_queries = min(num_queries, MAX_CHUNK_QUERIES)
    if step.window:
        num_positions = min(num_positions, num_queries + step.window - 1)
    shape = (num_queries, num_positions)
    device = step.block_tables.device
    mask = torch.full(shape, float("-inf"), dtype=step.dtype, device=device).triu_(num_positions - num_queries + 1)
    if step.window:
        is_past = torch.ones(shape, dtype=torch.bool, device=device).tril_(num_positions - num_queries - step.window)
        mask.masked_fill_(is_past, float("-inf"))
    return mask


def _decode_groups(step: _Step) -> list[_Part]:
    rows = [row for row, num_queries in enumerate(step.num_queries) if num_queries == 1 < step.lengths[row]]
    groups: list[list[int]] = []
    min_length = 0
    for row in sorted(rows, key=lambda row: -step.lengths[row]):
        length = step.lengths[row]
        if groups and length >= min_length:
            groups[-1].append(row)
        else:
            groups.append([row])
            min_length = min(int(length * MIN_GROUP_FILL), length - MAX_FREE_PADDING)
    return [_decode_group(step, group) for group in groups]


def _decode_group(step: _Step, rows: list[int]) -> _DecodeGroup:
    device = step.block_tables.device
    lengths = [step.lengths[row] for row in rows]  # longest first
    last_positions, mask = torch.tensor(lengths, device=device) - 1, None
    is_even = lengths[-1] == lengths[0]
    if not is_even and _supports_masks(device):
        is_padding = torch.arange(lengths[0], device=device) > last_positions[:, None]
        mask = torch.zeros(is_padding.shape, dtype=step.dtype, device=device).masked_fill_(is_padding, float("-inf"))
        mask = mask[:, None, None, :]
    tokens = torch.tensor([step.query_start_loc[row] for row in rows], device=device)
    return _DecodeGroup(tokens, step.positions(rows, lengths[0]), last_positions, mask, is_even)


def _attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, first: int | None = None
) -> Tensor:
    """Compute the attention of Q tokens of one sequence over N positions. The queries begin at position `first`, or are
    the last ones if it is None.

    `query` is [Q, num_heads, head_dim], `key` and `value` are [N, num_kv_heads, head_dim]. Return the output in the
    shape of `query`.
    """
    num_kv_heads = key.shape[1]
    num_groups = query.shape[1] // num_kv_heads
    queries = query.unflatten(1, (num_kv_heads, num_groups)).permute(1, 2, 0, 3)  # [num_kv_heads, G, Q, head_dim]
    keys = key.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1)  # [num_kv_heads, G, N, head_dim], not copied
    values = value.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1)
    # whether causality, or none in a bidirectional model, is the only restriction
    is_unmasked = len(query) == len(key) and (not scoring.window or len(key) <= scoring.window)
    if _is_plain(scoring) and (is_unmasked or mask is not None):
        is_causal = mask is None and not scoring.is_bidirectional
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scoring.scale
        )
    else:
        positions = torch.arange(len(key), device=key.device)
        first = len(key) - len(query) if first is None else first
        distances = positions[first : first + len(query), None] - positions
        distances = distances.abs() if scoring.is_bidirectional else distances
        attended = _attend_scored(queries, keys, values, scoring, distances, (num_kv_heads, num_groups, 1, 1))
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
