"""Paged attention in plain torch, for any device: correct for every mix of rows, and quick on a CPU.

A step's rows fall into three kinds, and each kind is attended in the cheapest way torch has for it:

- a prompt's first chunk attends to its own fresh keys and values and reads no cache;
- a later chunk gathers its context once a layer and attends under a mask, or without one on a GPU;
- decoding rows of similar length are padded to one group, gathered and attended at once.

Where a layer has a window, a row's positions begin with that of its first query: to such a layer the row is no longer,
and what is left in front is neither gathered nor scored. Layers of one window share everything.

Gathers pick exactly the positions a row owns, so whatever lies elsewhere in the cache, NaN included, is never read.
Grouped query heads are packed or expanded by strides: `enable_gqa` is many times slower on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS, TokenRows
from pagewire.kernels.cpu import CpuKernels
from worker_service.attention.backend import AttentionBatch, AttentionShape, Capability
from worker_service.models.torch_operations import Attend

# Queries of a chunk that attend together: bounds the mask's memory, and skips most scores of the future.
MAX_CHUNK_QUERIES = 256
# Scores that a chunk without a mask holds at a time, 256 MiB: the memory profile sees none of them.
MAX_SCORES = 2**26
# A decoding row joins a group if it is at least this part as long as the longest row of the group...
MIN_GROUP_FILL = 0.75
# ...or shorter by no more positions than cost as much as a group of its own.
MAX_FREE_PADDING = 64


_CAPABILITY = Capability("torch", ("cpu", "cuda"))
_ON_A_CPU = replace(_CAPABILITY, cache_dtypes=EIGHT_BITS)


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "TorchAttention":
    """Raises UnavailableError where it cannot compute this."""
    (_ON_A_CPU if device.type == "cpu" else _CAPABILITY).check(shape, device)
    return TorchAttention(shape, device)


class TorchAttention:
    """The backend that needs nothing but torch."""

    name = "torch"
    is_head_major = False
    is_capturable = False  # rows are sorted on the host
    is_mixed_capturable = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._scoring = shape.scoring(0, device)  # of all layers, but for windows and sinks

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Sorts the rows into kinds and computes their cache indices and masks. See `AttentionBackend.prepare`."""
        caches = [(TokenRows(keys), TokenRows(values)) for keys, values in kv_cache]
        windows = self._shape.windows
        steps = [_Step.of(batch, kv_cache[0][0], window, self._shape.dtype) for window in sorted(set(windows))]
        parts = {step.window: [*_first_chunks(step), *_later_chunks(step), *_decode_groups(step)] for step in steps}
        block_size = steps[0].block_size
        written = steps[0].cache_rows(batch.slot_mapping // block_size, batch.slot_mapping % block_size)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
            key_rows, value_rows = caches[layer]
            scoring = replace(self._scoring, window=windows[layer], sinks=sinks)
            key, value = key_rows.write(written, key), value_rows.write(written, value)
            output = query.new_empty(query.shape)
            for part in parts[windows[layer]]:
                output[part.tokens] = part.attend(query, key, value, key_rows, value_rows, scoring)
            return output

        return attend


def _takes_masks(device: torch.device) -> bool:
    """Whether `F.scaled_dot_product_attention` is given masks, or what needs one is computed without it.

    On a GPU (an H200, torch 2.11) it read a mask at an unaligned address, which ended the process, and under that of a
    window its results were wrong.
    """
    return device.type == "cpu"


def _is_plain(scoring: Scoring) -> bool:
    """Whether `F.scaled_dot_product_attention` knows all of it, given a mask."""
    return not scoring.softcap and scoring.alibi_slopes is None and scoring.sinks is None


def _attend_scored(
    queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, distances: Tensor, head_shape: tuple[int, ...]
) -> Tensor:
    """What `F.scaled_dot_product_attention` does not know.

    Args:
        queries, keys, values: as it takes them.
        distances: positions from each key to each query, to be broadcast to the scores; keys after a query are hidden.
        head_shape: which of a score's last dimensions count heads, with 1 for the others.
    """
    if queries.is_cuda:  # whose products are of the operands' type, where those of its fused attention are float32
        queries, keys = queries.float(), keys.float()
    scores = (queries @ keys.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if scoring.alibi_slopes is not None:
        scores -= scoring.alibi_slopes.view(head_shape) * distances
    is_hidden = distances < 0
    if scoring.window:
        is_hidden |= distances >= scoring.window
    scores.masked_fill_(is_hidden, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(head_shape).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


@dataclass(frozen=True, slots=True)
class _FirstChunk:
    """A row's tokens from its position 0 on, no more than the window."""

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
    """A row's tokens behind some context, or more of them than the window."""

    tokens: slice
    positions: Tensor  # [N] cache rows of the row's positions
    mask: Tensor | None  # additive, shared by the step's chunks, see `_mask`; None: see `_takes_masks`

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
    """R rows of one token each, padded to N positions."""

    tokens: Tensor  # [R]
    positions: Tensor  # [R * N] cache rows; padding repeats a row's last position
    last_positions: Tensor  # [R] of the N, those of the queries
    mask: Tensor | None  # [R, 1, 1, N] additive; None where all rows are equally long, or see `_takes_masks`
    is_even: bool  # all rows are equally long

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
        # The G query heads of a KV head stand as G rows over the same keys: [R, num_kv_heads, G, head_dim].
        queries = query[self.tokens].unflatten(1, (key.shape[1], -1))
        if _is_plain(scoring) and (self.is_even or self.mask is not None):
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask, scale=scoring.scale)
        else:
            distances = self.last_positions[:, None] - torch.arange(keys.shape[2], device=keys.device)
            head_shape = (*queries.shape[1:3], 1)
            attended = _attend_scored(queries, keys, values, scoring, distances[:, None, None], head_shape)
        return attended.flatten(1, 2)


# Some rows of a step that are attended together. `tokens` says where theirs lie in the flat batch, and `attend` makes
# [number of tokens, num_heads, head_dim] of a layer's fresh tensors and its cache.
_Part = _FirstChunk | _LaterChunk | _DecodeGroup


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch as layers of one window see it, and how its cache is laid out."""

    num_queries: list[int]  # [S]
    query_start_loc: list[int]  # [S + 1]
    starts: list[int]  # [S] the first position that the row's queries attend to
    lengths: list[int]  # [S] positions from there to the row's end
    window: int
    block_tables: Tensor  # [S, max_blocks] int64
    block_size: int
    block_stride: int  # from block to block, in cache rows
    dtype: torch.dtype  # of queries

    @staticmethod
    def of(batch: AttentionBatch, cache: Tensor, window: int, dtype: torch.dtype) -> "_Step":
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
            block_tables=batch.block_tables.long(),
            block_size=cache.shape[1],
            block_stride=cache.stride(0) // cache.stride(1),
            dtype=dtype,
        )

    def tokens(self, row: int) -> slice:
        return slice(self.query_start_loc[row], self.query_start_loc[row + 1])

    def cache_rows(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        return blocks * self.block_stride + offsets

    def positions(self, rows: list[int], num_positions: int) -> Tensor:
        """Cache rows of `num_positions` of each row, flat; past a row's end, its last position again."""
        device = self.block_tables.device
        ends = [[self.starts[row], self.starts[row] + self.lengths[row] - 1] for row in rows]
        first, last = torch.tensor(ends, device=device).split(1, dim=1)  # [rows, 1] each
        positions = (first + torch.arange(num_positions, device=device)).minimum(last)
        blocks = self.block_tables[torch.tensor(rows, device=device)].gather(1, positions // self.block_size)
        return self.cache_rows(blocks, positions % self.block_size).flatten()


def _first_chunks(step: _Step) -> list[_Part]:
    return [_FirstChunk(step.tokens(row)) for row in range(len(step.lengths)) if _is_first_chunk(step, row)]


def _is_first_chunk(step: _Step, row: int) -> bool:
    """Whether plain causal attention over the fresh tokens is all."""
    num_queries = step.num_queries[row]
    return num_queries == step.lengths[row] and (not step.window or num_queries <= step.window)


def _later_chunks(step: _Step) -> list[_Part]:
    rows = [
        row for row, num_queries in enumerate(step.num_queries) if num_queries > 1 and not _is_first_chunk(step, row)
    ]
    if not rows:
        return []
    mask = None
    if _takes_masks(step.block_tables.device):
        mask = _mask(step, max(step.num_queries[row] for row in rows), max(step.lengths[row] for row in rows))
    return [_LaterChunk(step.tokens(row), step.positions([row], step.lengths[row]), mask) for row in rows]


def _mask(step: _Step, num_queries: int, num_positions: int) -> Tensor:
    """[queries, positions], causal and of the step's window from the bottom right: its last q rows and last n columns
    fit any q queries that are the last of n positions."""
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
    if not is_even and _takes_masks(device):
        is_padding = torch.arange(lengths[0], device=device) > last_positions[:, None]
        mask = torch.zeros(is_padding.shape, dtype=step.dtype, device=device).masked_fill_(is_padding, float("-inf"))
        mask = mask[:, None, None, :]
    tokens = torch.tensor([step.query_start_loc[row] for row in rows], device=device)
    return _DecodeGroup(tokens, step.positions(rows, lengths[0]), last_positions, mask, is_even)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention of one row's queries [Q, num_heads, head_dim], its last, over [N, num_kv_heads, head_dim]."""
    num_kv_heads = key.shape[1]
    num_groups = query.shape[1] // num_kv_heads
    queries = query.unflatten(1, (num_kv_heads, num_groups)).permute(1, 2, 0, 3)  # [num_kv_heads, G, Q, head_dim]
    keys = key.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1)  # [num_kv_heads, G, N, head_dim], not copied
    values = value.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1)
    is_causal = len(query) == len(key) and (not scoring.window or len(key) <= scoring.window)  # and nothing else
    if _is_plain(scoring) and (is_causal or mask is not None):
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scoring.scale
        )
    else:
        positions = torch.arange(len(key), device=key.device)
        distances = positions[len(key) - len(query) :, None] - positions
        attended = _attend_scored(queries, keys, values, scoring, distances, (num_kv_heads, num_groups, 1, 1))
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
