"""Attention of rows with one new token each over a paged cache: `paged_attention_v1` and `paged_attention_v2`.

Both read a row's keys and values once per KV head: the query heads that share it are packed into one tile. Version 1
has one program per row and KV head. Version 2 cuts long rows into splits and adds them up in a second launch (flash
decoding: Dao et al., 2023, https://pytorch.org/blog/flash-decoding/). Where rows are cut is decided on the device, once
a step for all layers: see `split_plan`. No grid depends on the rows' lengths, so a CUDA graph can hold the launches.

Specification: `pagewire.kernels.reference.paged_attention`, with one query per row.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.attention_arguments import Rows, Scoring, check_tensors, operand, prepare_queries
from pagewire.kernels.triton.split_plan import ANY_LEN, SplitPlan

MIN_ROWS = 16  # of a tile: the least that a matrix product takes
REDUCTION_TILE = 16  # splits

# Below every score and finite: where a tile has nothing to read, the difference of two infinities would be NaN.
_LOWEST = tl.constexpr(-3.0e38)


def paged_attention_v1(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
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
    """Attention of one query per row over one layer's paged cache, one program per row and KV head.

    After vLLM's kernel of the same name (Kwon et al., 2023, https://arxiv.org/abs/2309.06180). Positions that the
    specification never reads may hold anything, NaN included; a row of seq_len 0 gives zeros.

    Args:
        query: [S, num_heads, head_dim], float16, bfloat16 or float32; the last dimension dense. At most 16 heads share
            a KV head.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the query's dtype or of
            float8_e4m3fn; the last dimension dense, any other strides. Block sizes are multiples of 16 up to 256, head
            dimensions multiples of 8 from 32 to 256.
        block_tables: [S, max_blocks] int32, the last dimension dense.
        seq_lens: [S] int32, on the device.
        scale: > 0.
        window, alibi_slopes, softcap, key_scale, value_scale: as specified; slopes are float32.
        selected_blocks, num_selected: as specified, int32, dense.
        output: where to write, of the query's shape and dtype, the last dimension dense; None: new memory.

    Returns:
        [S, num_heads, head_dim], of the query's dtype; accumulated in float32.

    Raises:
        ValueError: a shape, dtype, stride or number is not one of these.
    """
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    check_tensors(query, key_cache, value_cache, output)
    rows = Rows(block_tables, seq_lens, selected_blocks, num_selected)
    rows.check(query.shape[0], key_cache.shape[2])
    scoring = Scoring(scale, window, alibi_slopes, softcap, key_scale, value_scale)
    scoring.check(query.shape[1], key_cache.dtype)
    if query.shape[0]:
        _paged_attention_v1_kernel[(key_cache.shape[2], query.shape[0])](
            *_arguments(output, query, key_cache, value_cache, rows, scoring),
            **_constants("paged_attention_v1", query, key_cache, scoring),
        )
    return output


def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: SplitPlan,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    selected_blocks: Tensor | None = None,
    num_selected: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """`paged_attention_v1` with the rows cut into splits: for few rows, or long ones among short ones.

    Args:
        plan: allocated for this number of rows and these heads, and decided for these `seq_lens`; its scratch memory
            is overwritten.
    """
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    check_tensors(query, key_cache, value_cache, output)
    rows = Rows(block_tables, seq_lens, selected_blocks, num_selected)
    rows.check(query.shape[0], key_cache.shape[2])
    scoring = Scoring(scale, window, alibi_slopes, softcap, key_scale, value_scale)
    scoring.check(query.shape[1], key_cache.dtype)
    plan.check(query)
    num_rows, num_heads, head_dim = query.shape
    if num_rows == 0:
        return output
    scratch = (plan.split_starts, plan.sums, plan.highest, plan.totals)
    _paged_attention_v2_kernel[(key_cache.shape[2], plan.split_rows.shape[0])](
        *(plan.split_rows, *scratch, *_arguments(output, query, key_cache, value_cache, rows, scoring)),
        **_constants("paged_attention_v2", query, key_cache, scoring),
    )
    _reduction_kernel[(num_heads, num_rows)](
        *(output, *scratch, value_scale, *output.stride()[:2]),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        TILE=REDUCTION_TILE,
        num_warps=4,
    )
    return output


def _arguments(
    output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Rows, scoring: Scoring
) -> tuple[object, ...]:
    """What both versions' kernels take."""
    return (
        *(output, query, key_cache, value_cache, rows.block_tables, rows.seq_lens),
        *(scoring.alibi_slopes, rows.selected_blocks, rows.num_selected),
        *(scoring.score_factor, scoring.cap, scoring.value_scale, scoring.window or ANY_LEN),
        *(*output.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
        *(rows.block_tables.stride(0), rows.max_selected),
    )


def _constants(kernel: str, query: Tensor, key_cache: Tensor, scoring: Scoring) -> dict[str, object]:
    """What both versions' kernels are compiled and launched with."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    num_groups = query.shape[1] // num_kv_heads
    tile = tiles.lookup(kernel, head_dim=head_dim, num_groups=num_groups, dtype=key_cache.dtype)
    return {
        "NUM_GROUPS": num_groups,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": MIN_ROWS,
        "BLOCK_N": tile.block_n,
        "HAS_SOFTCAP": scoring.softcap > 0,
        "OPERAND": operand(query.dtype, key_cache.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# Device code. Scores are in units of log 2, so that weights are powers of two.

# How long rows are, and where in a step's tensors they lie, is no reason to compile again.
_COUNTS = ["window", "table_stride_row", "max_selected"]
_ROWS = ["block_tables", "seq_lens"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ROWS)
def _paged_attention_v1_kernel(
    output, query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, selected_blocks, num_selected,
    score_factor, cap, value_scale, window, output_stride_row, output_stride_head, query_stride_row, query_stride_head,
    key_stride_block, key_stride_position, key_stride_head,
    value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sums, _, totals = _attend_split(
        0, 1, row, head, query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes,
        selected_blocks, num_selected, score_factor, cap, window, query_stride_row, query_stride_head,
        key_stride_block, key_stride_position, key_stride_head,
        value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
        NUM_GROUPS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_SOFTCAP, OPERAND,
    )  # fmt: skip
    _store_means(
        output + row * output_stride_row + head * NUM_GROUPS * output_stride_head, output_stride_head,
        sums, totals, value_scale, NUM_GROUPS, HEAD_DIM, PADDED_DIM, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ROWS)
def _paged_attention_v2_kernel(
    split_rows, split_starts, split_sums, split_highest, split_totals,
    output, query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, selected_blocks, num_selected,
    score_factor, cap, value_scale, window, output_stride_row, output_stride_head, query_stride_row, query_stride_head,
    key_stride_block, key_stride_position, key_stride_head,
    value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A row in one split gets its result here; what the others add up to is for `_reduction_kernel`."""
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(split_rows + split).to(tl.int64)
    if row < 0:
        return
    first_split = tl.load(split_starts + row)
    num_splits = tl.load(split_starts + row + 1) - first_split
    sums, highest, totals = _attend_split(
        split - first_split, num_splits, row, head, query, key_cache, value_cache, block_tables, seq_lens,
        alibi_slopes, selected_blocks, num_selected, score_factor, cap, window, query_stride_row, query_stride_head,
        key_stride_block, key_stride_position, key_stride_head,
        value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
        NUM_GROUPS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_SOFTCAP, OPERAND,
    )  # fmt: skip
    if num_splits == 1:
        _store_means(
            output + row * output_stride_row + head * NUM_GROUPS * output_stride_head, output_stride_head,
            sums, totals, value_scale, NUM_GROUPS, HEAD_DIM, PADDED_DIM, BLOCK_M,
        )  # fmt: skip
    else:
        groups, dims = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
        is_group = groups < NUM_GROUPS
        heads = (split * tl.num_programs(0) + head).to(tl.int64) * NUM_GROUPS + groups
        tl.store(split_highest + heads, highest, mask=is_group)
        tl.store(split_totals + heads, totals, mask=is_group)
        pointers = split_sums + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, sums, mask=is_group[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _reduction_kernel(
    output, split_starts, split_sums, split_highest, split_totals, value_scale, output_stride_row, output_stride_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one head of one row; none gives zeros."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_split = tl.load(split_starts + row)
    past_split = tl.load(split_starts + row + 1)
    if past_split - first_split == 1:
        return
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    highest = tl.full([], _LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for start in tl.range(first_split, past_split, TILE):
        splits = start + tl.arange(0, TILE)
        is_split = splits < past_split
        heads = splits.to(tl.int64) * NUM_HEADS + head
        peaks = tl.load(split_highest + heads, mask=is_split, other=_LOWEST)
        parts = tl.load(split_totals + heads, mask=is_split, other=0.0)
        pointers = split_sums + heads[:, None] * HEAD_DIM + dims[None, :]
        part_sums = tl.load(pointers, mask=is_split[:, None] & is_dim[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        weights = tl.exp2(peaks - new_highest)
        rescale = tl.exp2(highest - new_highest)
        sums = sums * rescale + tl.sum(part_sums * weights[:, None], axis=0)
        total = total * rescale + tl.sum(parts * weights, axis=0)
        highest = new_highest
    means = sums * (value_scale / tl.where(total == 0.0, 1.0, total))
    pointers = output + row * output_stride_row + head * output_stride_head + dims
    tl.store(pointers, means.to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def _attend_split(
    split, num_splits, row, head, query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes,
    selected_blocks, num_selected, score_factor, cap, window, query_stride_row, query_stride_head,
    key_stride_block, key_stride_position, key_stride_head,
    value_stride_block, value_stride_position, value_stride_head, table_stride_row, max_selected,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One split's sums, [BLOCK_M, PADDED_DIM], highest scores and totals, [BLOCK_M]."""
    groups, columns, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, PADDED_DIM)
    is_dim = (dims < HEAD_DIM)[None, :]
    heads = head * NUM_GROUPS + groups
    query += row * query_stride_row + heads[:, None] * query_stride_head + dims[None, :]
    mask = (groups < NUM_GROUPS)[:, None] & is_dim
    queries, factors = prepare_queries(tl.load(query, mask=mask, other=0.0), score_factor, OPERAND)
    slopes = factors
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=groups < NUM_GROUPS, other=0.0) * 1.4426950408889634  # log2(e)
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0)
    begin, end = first // BLOCK_N * BLOCK_N, seq_len
    selected = selected_blocks
    if selected_blocks is not None:
        row_head = row * tl.num_programs(0) + head
        selected = selected_blocks + row_head * max_selected
        begin, end = 0, tl.load(num_selected + row_head) * BLOCK_SIZE
    chunk = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
    begin += split * chunk
    end = tl.minimum(begin + chunk, end)

    block_table = block_tables + row * table_stride_row
    key_cache += head * key_stride_head + dims[None, :]
    value_cache += head * value_stride_head + dims[None, :]
    highest = tl.full([BLOCK_M], _LOWEST, tl.float32)
    totals = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    position, block, is_read = _locate(begin + columns, end, first, seq_len, block_table, selected, BLOCK_SIZE)
    for start in tl.range(begin, end, BLOCK_N):
        offset = (start + columns) % BLOCK_SIZE
        keys_at = key_cache + (block * key_stride_block + offset * key_stride_position)[:, None]
        keys = tl.load(keys_at, mask=is_read[:, None] & is_dim, other=0.0).to(OPERAND)
        values_at = value_cache + (block * value_stride_block + offset * value_stride_position)[:, None]
        values = _load_values(values_at, is_read[:, None], is_dim, OPERAND)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factors[:, None]
        if HAS_SOFTCAP:  # see `Scoring.score_factor`
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if alibi_slopes is not None:
            scores -= slopes[:, None] * (seq_len - 1 - position).to(tl.float32)[None, :]
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        sums, highest, totals = _accumulate(scores, values, sums, highest, totals)
        # Block ids of the next tile: were they loaded where they are used, its keys and values could not be on their
        # way while this tile is computed.
        position, block, is_read = _locate(
            start + BLOCK_N + columns, end, first, seq_len, block_table, selected, BLOCK_SIZE
        )
    return sums, highest, totals


@triton.jit
def _locate(index, end, first, seq_len, block_table, selected, BLOCK_SIZE: tl.constexpr):
    """Positions, block ids, and whether to read them, at indexes into what a row and KV head may read: positions
    themselves, or those of the selected blocks in turn."""
    logical = index // BLOCK_SIZE
    if selected is not None:
        logical = tl.load(selected + logical, mask=index < end, other=0)
    position = logical * BLOCK_SIZE + index % BLOCK_SIZE
    is_read = (index < end) & (position >= first) & (position < seq_len)
    block = tl.load(block_table + logical, mask=is_read, other=0)
    return position, block.to(tl.int64), is_read


@triton.jit
def _load_values(pointers, is_read, is_dim, OPERAND: tl.constexpr):
    """Values, and zeros where they are not to be read: there may be NaN, and 0 * NaN is NaN."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        # Were this a mask of the load, the compiler would fetch values from shared memory byte by byte.
        values = tl.where(is_read, tl.load(pointers, mask=is_dim, other=0.0).to(OPERAND), 0.0)
    else:
        values = tl.load(pointers, mask=is_read & is_dim, other=0.0).to(OPERAND)
    return values


@triton.jit
def _accumulate(scores, values, sums, highest, totals):
    """Adds a tile of values, weighed by their scores, to what was read before (online softmax: Milakov and Gimelshein,
    2018, https://arxiv.org/abs/1805.02867)."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
    return sums, new_highest, totals * rescale + tl.sum(weights, axis=1)


@triton.jit
def _store_means(
    output, stride_head, sums, totals, value_scale,
    NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The results of a group's heads: zeros where nothing was read, NaN where NaN was."""
    groups, dims = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    means = sums * (value_scale / tl.where(totals == 0.0, 1.0, totals))[:, None]
    pointers = output + groups[:, None] * stride_head + dims[None, :]
    mask = (groups < NUM_GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(pointers, means.to(output.dtype.element_ty), mask=mask)
