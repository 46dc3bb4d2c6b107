"""Attention of rows with many new tokens over a paged cache: whole prompts, chunks of them, with or without a prefix.

A program owns a tile of queries of one row, packed with all heads that share a KV head, so that keys and values are
read once for them all. Tiles of keys that every query of it sees take a loop without masks. The tile's row is found on
the device: the grid depends only on how many tokens and rows there are.

Rows with one new token are better off in `decode_attention`: `paged_attention` launches both, each for its part.

Specification: `pagewire.kernels.reference.paged_attention`.
"""

from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.attention_arguments import (
    Rows,
    Scoring,
    check_integers,
    check_tensors,
    operand,
    prepare_queries,
)

# Below every score and finite: where a tile has nothing to read, the difference of two infinities would be NaN.
_LOWEST = tl.constexpr(-3.0e38)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    selected_blocks: Tensor | None = None,
    num_selected: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Causal attention of S rows over one layer's paged cache, which already holds the rows' own keys and values.

    After FlashAttention 2 (Dao, 2023, https://arxiv.org/abs/2307.08691), over pages. Positions that the specification
    never reads may hold anything, NaN included; a query that attends to nothing gives zeros.

    Args:
        query: [T, num_heads, head_dim], float16, bfloat16 or float32; the last dimension dense. At most 16 heads share
            a KV head.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the query's dtype or of
            float8_e4m3fn; the last dimension dense, any other strides. Block sizes are multiples of 16 up to 256, head
            dimensions multiples of 8 from 32 to 256.
        block_tables: [S, max_blocks] int32, the last dimension dense.
        seq_lens: [S] int32, on the device.
        query_start_loc: [S + 1] int32, on the device: where each row's queries begin, counted from its first entry. So
            the last rows of a mixed batch can be passed as slices of everything.
        scale: > 0.
        window, alibi_slopes, softcap, key_scale, value_scale: as specified; slopes are float32.
        selected_blocks, num_selected: as specified, int32, dense.
        output: where to write, of the query's shape and dtype, the last dimension dense; None: new memory.

    Returns:
        [T, num_heads, head_dim], of the query's dtype; accumulated in float32. What belongs to no row is not written.

    Raises:
        ValueError: a shape, dtype, stride or number is not one of these.
    """
    if output is None:
        output = query.new_empty(query.shape)
    check_tensors(query, key_cache, value_cache, output)
    rows = Rows(block_tables, seq_lens, selected_blocks, num_selected)
    rows.check(seq_lens.numel(), key_cache.shape[2])
    check_integers("query_start_loc", query_start_loc, (seq_lens.numel() + 1,))
    scoring = Scoring(scale, window, alibi_slopes, softcap, key_scale, value_scale)
    scoring.check(query.shape[1], key_cache.dtype)
    if seq_lens.numel():
        _launch(output, query, key_cache, value_cache, rows, query_start_loc, scoring)
    return output


def _launch(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: Rows,
    query_start_loc: Tensor,
    scoring: Scoring,
) -> None:
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    num_groups, num_rows = query.shape[1] // num_kv_heads, rows.seq_lens.shape[0]
    tile = tiles.lookup("paged_prefill", head_dim=head_dim, num_groups=num_groups, dtype=key_cache.dtype)
    max_tiles = query.shape[0] // (tile.block_m // num_groups) + num_rows  # see `_find_tile`
    _paged_prefill_kernel[(max_tiles, num_kv_heads)](
        *(output, query, key_cache, value_cache, rows.block_tables, rows.seq_lens, query_start_loc),
        *(scoring.alibi_slopes, rows.selected_blocks, rows.num_selected, num_rows),
        *(scoring.score_factor, scoring.cap, scoring.value_scale, scoring.window),
        *(*output.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
        *(rows.block_tables.stride(0), rows.max_selected),
        NUM_GROUPS=num_groups,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_WINDOW=scoring.window > 0,
        HAS_SOFTCAP=scoring.softcap > 0,
        OPERAND=operand(query.dtype, key_cache.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# Device code. Scores are in units of log 2, so that weights are powers of two.


# Where the rows that do not decode begin in the step's tensors is no reason to compile again.
@triton.jit(
    do_not_specialize=["num_rows", "window", "table_stride_row", "max_selected"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_start_loc"],
)
def _paged_prefill_kernel(
    output, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc,
    alibi_slopes, selected_blocks, num_selected,
    num_rows, score_factor, cap, value_scale, window,
    output_stride_token, output_stride_head, query_stride_token, query_stride_head,
    key_stride_block, key_stride_position, key_stride_head,
    value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """A row of the tile is one head of one query: BLOCK_M // NUM_GROUPS queries by NUM_GROUPS heads."""
    TILE_QUERIES: tl.constexpr = BLOCK_M // NUM_GROUPS
    head = tl.program_id(1)
    # The last queries of a row have most to read: they begin first.
    row, first_query = _find_tile(query_start_loc, num_rows, tl.num_programs(0) - 1 - tl.program_id(0), TILE_QUERIES)
    start = tl.load(query_start_loc + row) - tl.load(query_start_loc)
    num_queries = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc) - start
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + row)
    first_position = seq_len - num_queries + first_query
    last_position = tl.minimum(first_position + TILE_QUERIES, seq_len) - 1

    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    queries_of, heads = first_query + members // NUM_GROUPS, head * NUM_GROUPS + members % NUM_GROUPS
    is_member = (members < TILE_QUERIES * NUM_GROUPS) & (queries_of < num_queries)
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + queries_of).to(tl.int64)
    query += (tokens * query_stride_token + heads * query_stride_head)[:, None] + dims[None, :]
    queries, factors = prepare_queries(tl.load(query, mask=mask, other=0.0), score_factor, OPERAND)
    slopes = factors
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_member, other=0.0) * 1.4426950408889634  # log2(e)

    first, begin, full_begin, full_end, end = _bound(first_position, last_position, window, BLOCK_N, HAS_WINDOW)
    selected = selected_blocks
    if selected_blocks is not None:  # in any order: no tile is known to be seen by all
        row_head = row.to(tl.int64) * tl.num_programs(1) + head
        selected = selected_blocks + row_head * max_selected
        begin, end = 0, tl.load(num_selected + row_head) * BLOCK_SIZE
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    totals = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], _LOWEST, tl.float32)
    for part in tl.static_range(3):  # before what all queries of the tile see, that, and past it
        until = end
        if part == 0:
            until = tl.minimum(full_begin, end)
        elif part == 1:
            until = full_end
        if part == 2 or ((part == 1 or HAS_WINDOW) and selected_blocks is None):
            sums, totals, highest = _attend(
                sums, totals, highest, queries, factors, slopes, cap, seq_len - num_queries + queries_of, window,
                begin, until, first, last_position, block_tables + row.to(tl.int64) * table_stride_row, selected,
                key_cache + head * key_stride_head, value_cache + head * value_stride_head,
                key_stride_block, key_stride_position, value_stride_block, value_stride_position,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, part != 1, HAS_WINDOW, HAS_SOFTCAP,
                alibi_slopes is not None, OPERAND,
            )  # fmt: skip
            begin = tl.maximum(begin, until)
    result = sums * (value_scale / tl.where(totals == 0.0, 1.0, totals))[:, None]
    output += (tokens * output_stride_token + heads * output_stride_head)[:, None] + dims[None, :]
    tl.store(output, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _find_tile(query_start_loc, num_rows, index, TILE_QUERIES: tl.constexpr):
    """The row of a tile, and the tile's first query in it, which may lie past the row's last.

    Row i's tiles begin at tile query_start_loc[i] // TILE_QUERIES + i: room for one partial tile in each row.
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
def _bound(first_position, last_position, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first position that any query of a tile sees; tiles of keys from begin to end hold all that any of them sees.

    Of those, all queries see all from full_begin to full_end.
    """
    first = tl.zeros_like(first_position)
    full_begin = first
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    return first, first // BLOCK_N * BLOCK_N, full_begin, full_end, tl.maximum(last_position + 1, 0)


@triton.jit
def _attend(
    sums, totals, highest, queries, factors, slopes, cap, positions, window,
    begin, end, first, last, block_table, selected, key_cache, value_cache,
    key_stride_block, key_stride_position, value_stride_block, value_stride_position,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Adds what lies at indexes begin to end of what may be read: positions, or those of the selected blocks in turn.

    Nothing before position `first` or after `last` is read. Without a mask all of it is read, and every query sees it.
    """
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    for start in tl.range(begin, end, BLOCK_N):
        index = start + columns
        logical = index // BLOCK_SIZE
        if selected is not None:
            logical = tl.load(selected + logical, mask=index < end, other=0)
        offset = index % BLOCK_SIZE
        position = logical * BLOCK_SIZE + offset
        is_read = tl.full([BLOCK_N], True, tl.int1)
        if IS_MASKED:
            is_read = (index < end) & (position >= first) & (position <= last)
        block = tl.load(block_table + logical, mask=is_read, other=0).to(tl.int64)
        mask = is_read[:, None] & (dims < HEAD_DIM)[None, :]
        key = key_cache + (block * key_stride_block + offset * key_stride_position)[:, None] + dims[None, :]
        keys = tl.load(key, mask=mask, other=0.0).to(OPERAND)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")

        if HAS_SOFTCAP or HAS_ALIBI:
            scores *= factors[:, None]
        if HAS_SOFTCAP:  # tanh(y) as 1 - 2 / (exp(2 * y) + 1), which overflows at neither end; scores are 2 * y
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if HAS_ALIBI:
            scores -= slopes[:, None] * (positions[:, None] - position[None, :])
        if IS_MASKED:
            is_seen = is_read[None, :] & (position[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (position[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        if HAS_SOFTCAP or HAS_ALIBI:
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_highest[:, None])
        else:  # the factors are positive, so that the maximum may come before them
            new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factors)
            weights = tl.exp2(scores * factors[:, None] - new_highest[:, None])

        decay = tl.exp2(highest - new_highest)
        highest = new_highest
        totals = totals * decay + tl.sum(weights, axis=1)
        value = value_cache + (block * value_stride_block + offset * value_stride_position)[:, None] + dims[None, :]
        values = tl.load(value, mask=mask, other=0.0).to(OPERAND)
        sums = tl.dot(weights.to(OPERAND), values, sums * decay[:, None], input_precision="ieee")
    return sums, totals, highest
