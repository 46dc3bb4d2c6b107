"""Attention of rows with many new tokens over a paged cache: whole prompts or chunks, with or without a cached prefix.

A program processes a tile of queries of one row. The tile contains all query heads that share a KV head, so keys and
values are read once for all of them. A loop without masks processes the tiles of keys that are visible to every query
of the tile. The device finds the row of a tile: the grid depends only on the number of tokens and rows.

Rows with one new token are faster in `decode_attention`; `paged_attention` launches both kernels, each for its rows.

Specification: `pagewire.kernels.reference.paged_attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton.attention_arguments import (
    LOWEST,
    AlikeLayers,
    AttentionConstants,
    LayerTensors,
    adjust_scores,
    count_sinks,
    load_slopes,
    one_layer,
    prepare_queries,
    sees_blocks,
)
from pagewire.kernels.triton.launching import RepeatedLaunch, check_tensor


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scoring: Scoring,
    output: Tensor | None = None,
) -> Tensor:
    """Compute causal attention for prefill: S rows with several new tokens each, over one layer's paged KV cache. The
    cache already contains the keys and values of the new tokens.

    The algorithm is FlashAttention 2 (Dao, 2023, https://arxiv.org/abs/2307.08691) over pages. Positions that the
    specification never reads may contain anything, including NaN. A query that attends to no position returns zeros.

    Args:
        query: [T, num_heads, head_dim], float16, bfloat16 or float32; the last dimension dense. At most 128 query heads
            share a KV head, or 32 if head_dim is above 256.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the query's dtype or of
            float8_e4m3fn; the last dimension dense, any other strides. The block size is a multiple of 8 up to 256,
            head_dim a multiple of 8 from 16 to 512.
        block_tables: [S, max_blocks] int32, the last dimension dense.
        seq_lens: [S] int32, on the device. A row of length -1 is neither read nor written.
        query_start_loc: [S + 1] int32, on the device: the first query of each row in `query`. Queries that belong to no
            row are neither read nor written. So the last rows of a mixed batch can be passed with the queries of the
            whole batch.
        scoring: as specified.
        output: memory for the result, with the query's shape and dtype, the last dimension dense; None means new
            memory.

    Returns:
        [T, num_heads, head_dim] in the dtype of the query; accumulated in float32. Queries that belong to no row are
            not written.

    Raises:
        ValueError: a shape, dtype, stride or number is not supported.
    """
    layers, layer = one_layer(query, key_cache, value_cache, scoring, output)
    PrefillAttention.of(layers, block_tables, seq_lens, query_start_loc, 0).launch(layer)
    return layer.output.data


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """The attention of `paged_prefill` for one step. It is prepared once per step for layers that are alike. Then
    `launch` computes each layer, for which only the `LayerTensors` differ.

    Attributes:
        rows: see `AlikeLayers.rows`.
        query_start_loc: [S + 1] int32, on the device.
        num_rows: S.
        attend: launches the attention kernel.
    """

    rows: tuple[Any, ...]
    query_start_loc: Tensor
    num_rows: int
    attend: RepeatedLaunch

    @staticmethod
    def of(
        layers: AlikeLayers,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_skipped: int,
    ) -> "PrefillAttention":
        """Prepare the prefill attention of a step for the given rows (running sequences). Raises ValueError if a shape
        or dtype is not supported.

        `num_skipped` is the number of queries in the step that precede the queries of these rows. Pass 0 if the host
        does not know this number.
        """
        num_rows = seq_lens.numel()
        rows = layers.rows(block_tables, seq_lens, num_rows, layers.scoring.window or None)
        check_tensor("query_start_loc", query_start_loc, (num_rows + 1,), torch.int32)
        num_queries = layers.query_shape[0] - num_skipped

        def grid(shape: AttentionConstants) -> tuple[int, int]:
            max_tiles = num_queries // (shape.block_m // shape.num_groups) + num_rows  # see `_find_tile`
            return max_tiles, layers.cache_shape[2]

        attend = layers.launch(_paged_prefill_kernel, "paged_prefill", grid)
        return PrefillAttention(rows, query_start_loc, num_rows, attend)

    def launch(self, layer: LayerTensors) -> None:
        """Compute prefill attention for one layer, and write the results of all rows to the layer's output tensor."""
        if self.num_rows:
            arguments = (layer.output, layer.query, layer.caches, *self.rows, layer.weighing)
            self.attend(layer.kind, *arguments, self.query_start_loc, self.num_rows)


# Device code. Scores are in units of log 2, so that weights are powers of two. `AlikeLayers` builds the arguments;
# SHAPE is an `AttentionConstants`.

# The position of the first prefill row in the step's tensors must not trigger a recompilation.
_NUMBERS = ["table_stride", "window", "num_rows"]
_ROWS = ["block_tables", "seq_lens", "query_start_loc"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _paged_prefill_kernel(
    output, query, caches, block_tables, table_stride, seq_lens, window, weighing, query_start_loc, num_rows,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that computes prefill attention for one tile of queries per program. The tile has one row for each
    pair of a query and a head: block_m // num_groups queries times num_groups heads."""
    NUM_GROUPS: tl.constexpr = SHAPE.num_groups
    TILE_QUERIES: tl.constexpr = SHAPE.block_m // SHAPE.num_groups
    HAS_WINDOW: tl.constexpr = window is not None
    head = tl.program_id(1)
    # The last queries of a row read the most keys, so their programs start first.
    row, first_query = _find_tile(query_start_loc, num_rows, tl.num_programs(0) - 1 - tl.program_id(0), TILE_QUERIES)
    start = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    if (first_query >= num_queries) | (seq_len < 0):
        return
    first_position = seq_len - num_queries + first_query
    last_position = tl.minimum(first_position + TILE_QUERIES, seq_len) - 1

    members, dims = tl.arange(0, SHAPE.block_m), tl.arange(0, SHAPE.padded_dim)
    queries_of, heads = first_query + members // NUM_GROUPS, head * NUM_GROUPS + members % NUM_GROUPS
    is_member = (members < TILE_QUERIES * NUM_GROUPS) & (queries_of < num_queries)
    mask = is_member[:, None] & (dims < SHAPE.head_dim)[None, :]
    tokens = (start + queries_of).to(tl.int64)
    query_at = query.data + (tokens * query.strides[0] + heads * query.strides[1])[:, None] + dims[None, :]
    queries, factors = prepare_queries(tl.load(query_at, mask=mask, other=0.0), weighing.factor, SHAPE.operand)
    slopes = load_slopes(weighing, factors, heads, is_member)

    first, begin, full_begin, full_end, end = _visible_keys(first_position, last_position, window, SHAPE.block_n)
    sums = tl.full([SHAPE.block_m, SHAPE.padded_dim], 0.0, tl.float32)
    totals = tl.full([SHAPE.block_m], 0.0, tl.float32)
    highest = tl.full([SHAPE.block_m], LOWEST, tl.float32)
    block_table = block_tables + row.to(tl.int64) * table_stride
    of_tile = (queries, factors, slopes, seq_len - num_queries + queries_of, heads)
    for part in tl.static_range(3):  # keys before, within and after the range that all queries of the tile see
        until = end
        if part == 0:
            until = tl.minimum(full_begin, end)
        elif part == 1:
            until = full_end
        # With a block pattern, no tile is known to be visible to all queries.
        if part == 2 or ((part == 1 or HAS_WINDOW) and weighing.pattern is None):
            state, span = (sums, totals, highest), (begin, until, first, last_position)
            sums, totals, highest = _attend(
                state, of_tile, span, block_table, caches, head, window, weighing, SHAPE, part != 1
            )
            begin = tl.maximum(begin, until)
    sums, highest, totals = count_sinks(sums, highest, totals, weighing, heads, is_member)
    result = sums * (1.0 / tl.where(totals == 0.0, 1.0, totals))[:, None]
    output_at = output.data + (tokens * output.strides[0] + heads * output.strides[1])[:, None] + dims[None, :]
    tl.store(output_at, result.to(output.data.dtype.element_ty), mask=mask)


@triton.jit
def _find_tile(query_start_loc, num_rows, index, TILE_QUERIES: tl.constexpr):
    """Find the queries that a program computes. Return the row (one sequence of the step) to which the tile `index`
    belongs, and the number of queries of this row that precede the tile. The result may be past the last query of the
    row; such a tile is empty.

    The tiles of row i begin at tile start // TILE_QUERIES + i, where `start` is the number of queries of all rows
    before row i. This leaves room for one partial tile in each row.
    """
    origin = tl.load(query_start_loc)
    row, end = tl.zeros_like(num_rows), num_rows
    while end - row > 1:
        middle = (row + end) // 2
        is_before = (tl.load(query_start_loc + middle) - origin) // TILE_QUERIES + middle <= index
        row = tl.where(is_before, middle, row)
        end = tl.where(is_before, end, middle)
    first_tile = (tl.load(query_start_loc + row) - origin) // TILE_QUERIES + row
    return row, (index - first_tile) * TILE_QUERIES


@triton.jit
def _visible_keys(first_position, last_position, window, BLOCK_N: tl.constexpr):
    """Return the range of key positions that the queries of a tile attend to, as (first, begin, full_begin, full_end,
    end).

    `first` is the first position that any of the queries attends to. The range from `begin` to `end` contains all
    positions that any query attends to, and begins at a multiple of BLOCK_N. All queries attend to all positions from
    `full_begin` to `full_end`, so no mask is needed there.
    """
    first = tl.zeros_like(first_position)
    full_begin = first
    if window is not None:
        first = tl.maximum(first_position - window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    return first, first // BLOCK_N * BLOCK_N, full_begin, full_end, tl.maximum(last_position + 1, 0)


@triton.jit
def _attend(
    state, of_tile, span, block_table, caches, head, window, weighing, SHAPE: tl.constexpr, IS_MASKED: tl.constexpr
):
    """Compute attention over a range of the KV cache. Add its keys and values to the softmax state (sums, total
    weights, highest scores) and return the new state.

    `span` is (begin, end, first, last). The positions from `begin` to `end` are read, except for positions before
    `first` or after `last`. If IS_MASKED is false, every query attends to the whole range.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    IS_ADJUSTED: tl.constexpr = (weighing.cap is not None) or (weighing.slopes is not None)
    sums, totals, highest = state
    queries, factors, slopes, positions, heads = of_tile
    begin, end, _, _ = span
    columns, dims = tl.arange(0, SHAPE.block_n), tl.arange(0, SHAPE.padded_dim)
    keys, values = caches
    key_cache, value_cache = keys.data + head * keys.strides[2], values.data + head * values.strides[2]
    block, is_read = _locate(begin + columns, span, block_table, BLOCK_SIZE, IS_MASKED)
    for start in tl.range(begin, end, SHAPE.block_n):
        position = start + columns
        offset = position % BLOCK_SIZE
        mask = (dims < SHAPE.head_dim)[None, :]
        if IS_MASKED:
            mask = is_read[:, None] & mask
        key_at = key_cache + (block * keys.strides[0] + offset * keys.strides[1])[:, None] + dims[None, :]
        key_tile = tl.load(key_at, mask=mask, other=0.0).to(SHAPE.operand)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee")

        if IS_ADJUSTED:
            scores = adjust_scores(scores * factors[:, None], positions[:, None] - position[None, :], slopes, weighing)
        if IS_MASKED:
            is_seen = is_read[None, :] & (position[None, :] <= positions[:, None])
            if window is not None:
                is_seen = is_seen & (position[None, :] > positions[:, None] - window)
            if weighing.pattern is not None:
                is_seen = is_seen & sees_blocks(weighing.pattern, positions[:, None], position[None, :], heads[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        if IS_ADJUSTED:
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_highest[:, None])
        else:  # the factors are positive, so the maximum may be computed before the multiplication
            new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factors)
            weights = tl.exp2(scores * factors[:, None] - new_highest[:, None])

        decay = tl.exp2(highest - new_highest)
        highest = new_highest
        totals = totals * decay + tl.sum(weights, axis=1)
        value_at = value_cache + (block * values.strides[0] + offset * values.strides[1])[:, None] + dims[None, :]
        value_tile = tl.load(value_at, mask=mask, other=0.0).to(SHAPE.operand)
        sums = tl.dot(weights.to(SHAPE.operand), value_tile, sums * decay[:, None], input_precision="ieee")
        # The block ids of the next tile are loaded here. If they were loaded at their use, the keys and values of the
        # next tile could not be loaded while this tile is computed.
        block, is_read = _locate(position + SHAPE.block_n, span, block_table, BLOCK_SIZE, IS_MASKED)
    return sums, totals, highest


@triton.jit
def _locate(position, span, block_table, BLOCK_SIZE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Find where to read keys and values in the KV cache. For each position in a span (see `_attend`), return the block
    id in the KV cache, and whether to read the position. Without a mask, every position below the end of the span is
    read."""
    _, end, first, last = span
    is_read = position < end
    if IS_MASKED:
        is_read = is_read & (position >= first) & (position <= last)
    block = tl.load(block_table + position // BLOCK_SIZE, mask=is_read, other=0)
    return block.to(tl.int64), is_read
