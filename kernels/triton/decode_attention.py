"""Attention of rows with one new token each over a paged cache: `paged_attention_v1` and `paged_attention_v2`.

Both read the keys and values of a row once per KV head: one tile contains all query heads that share the KV head.
Version 1 has one program per row and KV head. Version 2 cuts long rows into splits and adds them up in a second launch
(flash decoding: Dao et al., 2023, https://pytorch.org/blog/flash-decoding/). The device decides once per step, for all
layers, where rows are cut, so that the programs have equal work: see `SplitPlan`. No grid depends on the lengths of
rows, so a CUDA graph can contain the launches.

Specification: `pagewire.kernels.reference.paged_attention`, with one query per row.
"""

from collections import namedtuple
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
    LayerTensors,
    adjust_scores,
    count_sinks,
    load_slopes,
    one_layer,
    prepare_queries,
    sees_blocks,
)
from pagewire.kernels.triton.launching import RepeatedLaunch, check_tensor

REDUCTION_TILE = 16  # splits
MIN_CHUNK = 64  # positions: one tile of most shapes, which cannot be divided further
# Splits are shorter than this multiple of the shortest split only if processors would otherwise be idle: each split
# costs memory traffic for its partial sums.
CHUNKS_OF_FULL = 4
MAX_UNSPLIT_LEN = 256  # positions; the estimated number that one program reads in the time of a second launch
PROGRAMS_PER_PROCESSOR = 4
ANY_LEN = 2**31 - 1
_ALIGNMENT = 64  # positions
_TILE = 128


def prefers_splits(num_rows: int, num_kv_heads: int, num_positions: int, max_seq_len: int, num_processors: int) -> bool:
    """Return whether `paged_attention_v2` is faster than `paged_attention_v1` for a decode step. Version 2 splits the
    KV cache of a long sequence (row) among several programs.

    Version 1 is slow if one row is much longer than the others, because a single program reads the whole row. The
    function returns true if this takes longer than all rows would take, spread evenly over two programs per processor.
    The result is always false if the longest row is short. When a CUDA graph is captured, pass upper bounds for all
    steps that will run the graph.

    Args:
        num_rows: number of rows (running sequences).
        num_kv_heads: number of KV heads.
        num_positions: number of positions in the KV cache of all rows together.
        max_seq_len: number of positions of the longest row.
        num_processors: processors of the device (`multi_processor_count`).
    """
    if num_rows == 0 or max_seq_len <= MAX_UNSPLIT_LEN:
        return False
    return max_seq_len * 2 * num_processors > num_positions * num_kv_heads


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The division of a decode step's rows (one running sequence each) into splits, pieces of a row's KV cache that
    separate programs read. The plan applies to all layers and includes scratch memory for the partial sums.

    The length of a split is about the number of positions of all rows divided by the number of wanted programs, for any
    mixture of lengths. If the result is small, the number of processors is used instead of the number of programs. In
    this way, a fixed number of programs is enough for every step, and few programs are idle. A row with only one split
    needs neither scratch memory nor the second launch.

    Attributes:
        split_starts: [S + 1] int32; row i has splits split_starts[i] to split_starts[i + 1], and a row of seq_len 0 has
            no split.
        split_rows: [max_splits] int32, the row of each split; -1 after the last split.
        sums: [max_splits, num_heads, head_dim] float32, the weighted sums of values.
        highest: [max_splits, num_heads] float32, the highest score, in units of log 2.
        totals: [max_splits, num_heads] float32, the sum of the weights, relative to the highest score.
        num_full_splits: number of splits that all rows together would have if every split had the full length.
        min_chunk: positions of the shortest split, except the last split of a row. If splits are shorter than four
            times this, there are about as many programs as processors.
    """

    split_starts: Tensor
    split_rows: Tensor
    sums: Tensor
    highest: Tensor
    totals: Tensor
    num_full_splits: int
    min_chunk: int

    @staticmethod
    def allocate(
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int = 0,
        min_chunk: int = MIN_CHUNK,
    ) -> "SplitPlan":
        """Allocate GPU memory for a plan that splits the KV cache reads of decode steps with `num_rows` rows.

        Args:
            num_rows: number of rows, S.
            num_heads, num_kv_heads, head_dim: sizes of the queries and the cache.
            device: device of the memory.
            num_programs: number of programs that share the work, usually four per processor. 0 means four per processor
                of `device`.
            min_chunk: the smallest number of positions in a split, a multiple of 16.

        Raises:
            ValueError: a number is out of range, or num_programs is 0 and the device is not a GPU.
        """
        if not num_programs and device.type == "cuda":
            num_programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        if num_programs < 1:
            raise ValueError(f"num_programs is {num_programs} on the device {device}; make it at least 1")
        if min_chunk < 16 or min_chunk % 16:
            raise ValueError(f"min_chunk is {min_chunk}; make it a multiple of 16, at least 16")
        num_full_splits = max(1, num_programs // num_kv_heads)
        max_splits = num_rows + num_full_splits  # the last split of each row may be a short one
        return SplitPlan(
            torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            torch.full((max_splits,), -1, dtype=torch.int32, device=device),
            torch.empty((max_splits, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((max_splits, num_heads), dtype=torch.float32, device=device),
            torch.empty((max_splits, num_heads), dtype=torch.float32, device=device),
            num_full_splits,
            min_chunk,
        )

    @property
    def num_rows(self) -> int:
        return self.split_starts.shape[0] - 1

    def of_first(self, num_rows: int) -> "SplitPlan":
        """Return a plan for steps with only `num_rows` rows, which uses the memory of this plan. Raises ValueError if
        this plan has memory for fewer rows."""
        if not 0 <= num_rows <= self.num_rows:
            raise ValueError(f"num_rows is {num_rows}, but the plan has memory for 0 to {self.num_rows}; allocate more")
        past_split = self.split_rows.shape[0] - self.num_rows + num_rows
        return SplitPlan(
            self.split_starts[: num_rows + 1],
            self.split_rows[:past_split],
            self.sums[:past_split],
            self.highest[:past_split],
            self.totals[:past_split],
            self.num_full_splits,
            self.min_chunk,
        )

    def decide(self, seq_lens: Tensor, max_positions: int = ANY_LEN) -> None:
        """Compute how the KV cache of each row (running sequence) is divided into splits, given the lengths of the
        rows. The plan is computed on the device, and the host does not wait for it.

        Args:
            seq_lens: [S] int32.
            max_positions: upper bound on the positions that a row reads, such as the window.

        Raises:
            ValueError: the plan is for another number of rows, or max_positions is below 1.
        """
        check_tensor("seq_lens", seq_lens, (self.num_rows,), torch.int32)
        if max_positions < 1:
            raise ValueError(f"max_positions is {max_positions}; make it at least 1")
        max_splits = self.split_rows.shape[0]
        _plan_kernel[(triton.cdiv(max_splits, _TILE),)](
            seq_lens,
            self.split_starts,
            self.split_rows,
            self.num_rows,
            max_splits,
            self.num_full_splits,
            max_positions,
            MIN_CHUNK=self.min_chunk,
            FULL_CHUNK=CHUNKS_OF_FULL * self.min_chunk,
            SHARES_PER_PROCESSOR=PROGRAMS_PER_PROCESSOR,
            ALIGNMENT=min(_ALIGNMENT, self.min_chunk),
            TILE=_TILE,
            num_warps=4,
        )

    def check(self, query_shape: tuple[int, int, int]) -> None:
        """Raise ValueError unless the plan was allocated for queries of this shape, [S, num_heads, head_dim]."""
        expected = [self.num_rows, *self.sums.shape[1:]]
        if list(query_shape) != expected:
            raise ValueError(f"queries are {list(query_shape)}, but the plan is for {expected}; allocate another plan")


def paged_attention_v1(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scoring: Scoring,
    output: Tensor | None = None,
) -> Tensor:
    """Compute attention for a decode step: one query per row over one layer's paged KV cache. One program of the kernel
    processes one row and KV head.

    The kernel follows vLLM's kernel of the same name (Kwon et al., 2023, https://arxiv.org/abs/2309.06180). Positions
    that the specification never reads may contain anything, including NaN. A row of seq_len 0 returns zeros.

    Args:
        query: [S, num_heads, head_dim], float16, bfloat16 or float32; the last dimension dense. At most 128 query heads
            share a KV head, or 32 if head_dim is above 256.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the query's dtype or of
            float8_e4m3fn; the last dimension dense, any other strides. The block size is a multiple of 8 up to 256,
            head_dim a multiple of 8 from 16 to 512.
        block_tables: [S, max_blocks] int32, the last dimension dense.
        seq_lens: [S] int32, on the device.
        scoring: as specified.
        output: memory for the result, with the query's shape and dtype, the last dimension dense; None means new
            memory.

    Returns:
        [S, num_heads, head_dim] in the dtype of the query; accumulated in float32.

    Raises:
        ValueError: a shape, dtype, stride or number is not supported.
    """
    return paged_attention_v2(query, key_cache, value_cache, block_tables, seq_lens, None, scoring, output)


def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    plan: SplitPlan | None,
    scoring: Scoring,
    output: Tensor | None = None,
) -> Tensor:
    """Compute the same result as `paged_attention_v1`, with the KV cache of long rows split among several programs.
    This is faster for few rows, or for long rows among short rows.

    Args:
        query, key_cache, value_cache, block_tables, seq_lens, scoring, output: as in `paged_attention_v1`.
        plan: a plan allocated for this number of rows and these heads, and decided for these `seq_lens`. Its scratch
            memory is overwritten. None means that rows are not split.

    Returns:
        [S, num_heads, head_dim] in the dtype of the query; accumulated in float32.

    Raises:
        ValueError: a shape, dtype, stride or number is not supported.
    """
    layers, layer = one_layer(query, key_cache, value_cache, scoring, output)
    DecodeAttention.of(layers, block_tables, seq_lens, query.shape[0], plan).launch(layer)
    return layer.output.data


# The tensors of a `SplitPlan`.
_Splits = namedtuple("_Splits", "rows starts sums highest totals")


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """The attention of a decode step, in which each row (running sequence) has one new token. It is prepared once per
    step for layers that are alike. Then `launch` computes each layer, for which only the `LayerTensors` differ.

    Attributes:
        rows: see `AlikeLayers.rows`.
        attend: launches the attention kernel; None if there are no rows.
        splits: the splits of the rows; None means that rows are not split.
        reduce: launches the kernel that adds up the results of the splits; None means that rows are not split.
    """

    rows: tuple[Any, ...]
    attend: RepeatedLaunch | None
    splits: _Splits | None
    reduce: RepeatedLaunch | None

    @staticmethod
    def of(
        layers: AlikeLayers,
        block_tables: Tensor,
        seq_lens: Tensor,
        num_rows: int,
        plan: SplitPlan | None,
    ) -> "DecodeAttention":
        """Prepare attention for the first `num_rows` queries of a decode step, as `paged_attention_v2` computes it, or
        as `paged_attention_v1` if `plan` is None.

        Raises ValueError if there are fewer queries than rows, or if an argument does not match the layers.
        """
        num_tokens, num_heads, head_dim = layers.query_shape
        if num_rows > num_tokens:
            raise ValueError(f"there are {num_rows} rows but only {num_tokens} queries; pass a query for each row")
        rows = layers.rows(block_tables, seq_lens, num_rows, layers.scoring.window or ANY_LEN)
        num_kv_heads = layers.cache_shape[2]
        if plan is not None:
            plan.check((num_rows, num_heads, head_dim))
        if not num_rows:
            return DecodeAttention(rows, None, None, None)
        if plan is None:
            grid = (num_kv_heads, num_rows)
            attend = layers.launch(_paged_attention_v1_kernel, "paged_attention_v1", lambda shape: grid)
            return DecodeAttention(rows, attend, None, None)
        splits = _Splits(plan.split_rows, plan.split_starts, plan.sums, plan.highest, plan.totals)
        grid = (num_kv_heads, plan.split_rows.shape[0])
        attend = layers.launch(_paged_attention_v2_kernel, "paged_attention_v2", lambda shape: grid)
        padded_dim = triton.next_power_of_2(head_dim)
        constants = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim, "TILE": REDUCTION_TILE}
        reduce = RepeatedLaunch(_reduction_kernel, (num_heads, num_rows, 1), constants, {"num_warps": 4})
        return DecodeAttention(rows, attend, splits, reduce)

    def launch(self, layer: LayerTensors) -> None:
        """Compute decode attention for one layer, and write the results of all rows to the layer's output tensor."""
        if self.attend is None:
            return
        arguments = (layer.output, layer.query, layer.caches, *self.rows, layer.weighing)
        if self.reduce is None:
            self.attend(layer.kind, *arguments)
            return
        self.attend(layer.kind, self.splits, *arguments)
        self.reduce(layer.kind, self.splits, layer.output)


# Device code. Scores are in units of log 2, so that weights are powers of two. `AlikeLayers` builds the arguments;
# SHAPE is an `AttentionConstants`.

# The lengths of rows and their position in a step's tensors must not trigger a recompilation.
_NUMBERS = ["table_stride", "window"]
_ROWS = ["block_tables", "seq_lens"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _paged_attention_v1_kernel(
    output, query, caches, block_tables, table_stride, seq_lens, window, weighing, SHAPE: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block_table, seq_len = block_tables + row * table_stride, tl.load(seq_lens + row)
    sums, _, totals = _attend_split(0, 1, row, head, query, caches, block_table, seq_len, window, weighing, SHAPE)
    _store_means(output, row, head, sums, totals, SHAPE)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _paged_attention_v2_kernel(
    splits, output, query, caches, block_tables, table_stride, seq_lens, window, weighing,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that computes attention for one split of a row's KV cache per program. If a row has only one split,
    the kernel writes the row's final result. If it has several, `_reduction_kernel` then adds up their results."""
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(splits.rows + split).to(tl.int64)
    if row < 0:
        return
    first_split = tl.load(splits.starts + row)
    num_splits = tl.load(splits.starts + row + 1) - first_split
    block_table, seq_len = block_tables + row * table_stride, tl.load(seq_lens + row)
    split_of_row = split - first_split
    sums, highest, totals = _attend_split(
        split_of_row, num_splits, row, head, query, caches, block_table, seq_len, window, weighing, SHAPE
    )
    if num_splits == 1:
        _store_means(output, row, head, sums, totals, SHAPE)
    else:
        groups, dims = tl.arange(0, SHAPE.block_m), tl.arange(0, SHAPE.padded_dim)
        is_group = groups < SHAPE.num_groups
        heads = (split * tl.num_programs(0) + head).to(tl.int64) * SHAPE.num_groups + groups
        tl.store(splits.highest + heads, highest, mask=is_group)
        tl.store(splits.totals + heads, totals, mask=is_group)
        pointers = splits.sums + heads[:, None] * SHAPE.head_dim + dims[None, :]
        tl.store(pointers, sums, mask=is_group[:, None] & (dims < SHAPE.head_dim)[None, :])


@triton.jit
def _reduction_kernel(
    splits, output, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr
):
    """Triton kernel that adds up the partial attention results of a row's splits. Each program computes one query head
    of one row. The result of a row without splits is zeros."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_split = tl.load(splits.starts + row)
    past_split = tl.load(splits.starts + row + 1)
    if past_split - first_split == 1:
        return
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    highest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for start in tl.range(first_split, past_split, TILE):
        index = start + tl.arange(0, TILE)
        is_split = index < past_split
        heads = index.to(tl.int64) * NUM_HEADS + head
        peaks = tl.load(splits.highest + heads, mask=is_split, other=LOWEST)
        parts = tl.load(splits.totals + heads, mask=is_split, other=0.0)
        pointers = splits.sums + heads[:, None] * HEAD_DIM + dims[None, :]
        part_sums = tl.load(pointers, mask=is_split[:, None] & is_dim[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        weights = tl.exp2(peaks - new_highest)
        rescale = tl.exp2(highest - new_highest)
        sums = sums * rescale + tl.sum(part_sums * weights[:, None], axis=0)
        total = total * rescale + tl.sum(parts * weights, axis=0)
        highest = new_highest
    means = sums * (1.0 / tl.where(total == 0.0, 1.0, total))
    pointers = output.data + row * output.strides[0] + head * output.strides[1] + dims
    tl.store(pointers, means.to(output.data.dtype.element_ty), mask=is_dim)


@triton.jit
def _attend_split(
    split, num_splits, row, head, query, caches, block_table, seq_len, window, weighing, SHAPE: tl.constexpr,
):  # fmt: skip
    """Compute attention over one split of a row's KV cache, for the query heads that share a KV head. Return the
    softmax state: the weighted sums of values, [block_m, padded_dim], and the highest scores and total weights,
    [block_m] each."""
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    BLOCK_N: tl.constexpr = SHAPE.block_n
    groups, columns, dims = tl.arange(0, SHAPE.block_m), tl.arange(0, BLOCK_N), tl.arange(0, SHAPE.padded_dim)
    is_group, is_dim = groups < SHAPE.num_groups, (dims < SHAPE.head_dim)[None, :]
    heads = head * SHAPE.num_groups + groups
    query_at = query.data + row * query.strides[0] + heads[:, None] * query.strides[1] + dims[None, :]
    loaded = tl.load(query_at, mask=is_group[:, None] & is_dim, other=0.0)
    queries, factors = prepare_queries(loaded, weighing.factor, SHAPE.operand)
    slopes = load_slopes(weighing, factors, heads, is_group)
    first = tl.maximum(seq_len - window, 0)
    begin, end = first // BLOCK_N * BLOCK_N, seq_len
    chunk = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
    begin += split * chunk
    end = tl.minimum(begin + chunk, end)

    keys, values = caches
    key_cache = keys.data + head * keys.strides[2] + dims[None, :]
    value_cache = values.data + head * values.strides[2] + dims[None, :]
    highest = tl.full([SHAPE.block_m], LOWEST, tl.float32)
    totals = tl.full([SHAPE.block_m], 0.0, tl.float32)
    sums = tl.full([SHAPE.block_m, SHAPE.padded_dim], 0.0, tl.float32)
    block, is_read = _locate(begin + columns, end, first, block_table, BLOCK_SIZE)
    for start in tl.range(begin, end, BLOCK_N):
        position = start + columns
        offset = position % BLOCK_SIZE
        is_seen = is_read[None, :]
        if weighing.pattern is not None:
            is_seen = is_seen & sees_blocks(weighing.pattern, seq_len - 1, position[None, :], heads[:, None])
            is_read = tl.max((is_seen & is_group[:, None]).to(tl.int32), axis=0) > 0
        keys_at = key_cache + (block * keys.strides[0] + offset * keys.strides[1])[:, None]
        key_tile = tl.load(keys_at, mask=is_read[:, None] & is_dim, other=0.0).to(SHAPE.operand)
        values_at = value_cache + (block * values.strides[0] + offset * values.strides[1])[:, None]
        value_tile = _load_values(values_at, is_read[:, None], is_dim, SHAPE.operand)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * factors[:, None]
        scores = adjust_scores(scores, (seq_len - 1 - position)[None, :], slopes, weighing)
        scores = tl.where(is_seen, scores, float("-inf"))
        sums, highest, totals = _accumulate(scores, value_tile, sums, highest, totals)
        # The block ids of the next tile are loaded here. If they were loaded at their use, the keys and values of the
        # next tile could not be loaded while this tile is computed.
        block, is_read = _locate(position + BLOCK_N, end, first, block_table, BLOCK_SIZE)
    if split == 0:
        sums, highest, totals = count_sinks(sums, highest, totals, weighing, heads, is_group)
    return sums, highest, totals


@triton.jit
def _locate(position, end, first, block_table, BLOCK_SIZE: tl.constexpr):
    """Find where to read keys and values in the KV cache. For each position of a sequence, return the block id in the
    KV cache, and whether to read the position."""
    is_read = (position < end) & (position >= first)
    block = tl.load(block_table + position // BLOCK_SIZE, mask=is_read, other=0)
    return block.to(tl.int64), is_read


@triton.jit
def _load_values(pointers, is_read, is_dim, OPERAND: tl.constexpr):
    """Load value vectors from the KV cache, with zeros in place of those that must not be read. The zeros are necessary
    because unused memory may contain NaN, and a weight of 0 times NaN is NaN."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        # With a mask in the load instead, the compiler would read values from shared memory byte by byte.
        values = tl.where(is_read, tl.load(pointers, mask=is_dim, other=0.0).to(OPERAND), 0.0)
    else:
        values = tl.load(pointers, mask=is_read & is_dim, other=0.0).to(OPERAND)
    return values


@triton.jit
def _accumulate(scores, values, sums, highest, totals):
    """Add a tile of values, weighted by their attention scores, to the softmax state (sums, highest scores, total
    weights), and return the new state.

    This is online softmax (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
    return sums, new_highest, totals * rescale + tl.sum(weights, axis=1)


@triton.jit
def _store_means(output, row, head, sums, totals, SHAPE: tl.constexpr):
    """Write the attention results of the query heads that share a KV head. A result is zero if no position was read,
    and NaN if a NaN was read."""
    groups, dims = tl.arange(0, SHAPE.block_m), tl.arange(0, SHAPE.padded_dim)
    means = sums * (1.0 / tl.where(totals == 0.0, 1.0, totals))[:, None]
    heads = (head * SHAPE.num_groups + groups)[:, None] * output.strides[1]
    pointers = output.data + row * output.strides[0] + heads + dims[None, :]
    mask = (groups < SHAPE.num_groups)[:, None] & (dims < SHAPE.head_dim)[None, :]
    tl.store(pointers, means.to(output.data.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "max_splits", "num_full_splits", "max_positions"],
    do_not_specialize_on_alignment=["seq_lens"],
)
def _plan_kernel(
    seq_lens, split_starts, split_rows, num_rows, max_splits, num_full_splits, max_positions,
    MIN_CHUNK: tl.constexpr, FULL_CHUNK: tl.constexpr, SHARES_PER_PROCESSOR: tl.constexpr, ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that computes a `SplitPlan`. Each program writes TILE entries of split_rows.

    The first program also writes split_starts, except for the first entry, which is always 0.
    """
    columns = tl.arange(0, TILE)
    num_positions = tl.full([], 0, tl.int64)
    for start in tl.range(0, num_rows, TILE):
        lens = tl.load(seq_lens + start + columns, mask=start + columns < num_rows, other=0)
        num_positions += tl.sum(tl.minimum(lens, max_positions).to(tl.int64), axis=0)
    chunk = tl.maximum(tl.cdiv(num_positions, num_full_splits), MIN_CHUNK)
    chunk = tl.cdiv(chunk, ALIGNMENT) * ALIGNMENT
    # Rounded down: a few programs more than processors are better than half as many.
    of_processor = (
        tl.cdiv(num_positions, tl.maximum(num_full_splits // SHARES_PER_PROCESSOR, 1)) // ALIGNMENT * ALIGNMENT
    )
    chunk = tl.maximum(chunk, tl.minimum(of_processor, FULL_CHUNK)).to(tl.int32)

    splits = tl.program_id(0) * TILE + columns
    num_before = tl.zeros([TILE], tl.int32)  # rows that end before a split
    num_splits = tl.full([], 0, tl.int32)
    for start in tl.range(0, num_rows, TILE):
        rows = start + columns
        lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
        counts = tl.cdiv(tl.minimum(lens, max_positions), chunk)
        ends = num_splits + tl.cumsum(counts, axis=0)
        is_before = (ends[None, :] <= splits[:, None]) & (rows < num_rows)[None, :]
        num_before += tl.sum(is_before.to(tl.int32), axis=1)
        if tl.program_id(0) == 0:
            tl.store(split_starts + 1 + rows, ends, mask=rows < num_rows)
        num_splits += tl.sum(counts, axis=0)
    tl.store(split_rows + splits, tl.where(splits < num_splits, num_before, -1), mask=splits < max_splits)
