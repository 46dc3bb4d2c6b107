"""Mixture-of-experts kernels: the routing of tokens, and the matrix multiplication of slots with their experts'
weights.

The device sorts slots by expert and cuts them into tiles of one expert each (after vLLM's `moe_align_block_size` and
`fused_moe`: Kwon et al., 2023, https://arxiv.org/abs/2309.06180). No grid depends on the routing and the host waits for
no result, so a CUDA graph can contain the launches.

Specification: `pagewire.kernels.experts`.
"""

from collections import namedtuple
from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.experts import MIN_SUM
from pagewire.kernels.triton.launching import FLOATS, INTEGERS, Strided, check_tensor, operand
from pagewire.network.expert_routing import ExpertRouting

_ROUTING_TILE = 512  # experts and padding of all tokens of one program
_SUM_TILE = 1024  # elements of a row per program
_ASSIGN_TILE = 1024  # slots that a program reads at a time
_MIN_SUM = tl.constexpr(MIN_SUM)


class ProductTile(NamedTuple):
    """The tile of a matrix multiplication, which is the part of the work that one program of the kernel processes at a
    time, and the launch options of the kernel. The tile has `block_m` rows or slots, `block_n` outputs and `block_k`
    inputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By bytes per element: for few slots per expert, where memory bandwidth limits the speed, and for many. The tiles fit
# the shared memory of an H200 and spill no register when compiled for it.
_FEW = {2: ProductTile(16, 64, 128, 4, 4), 4: ProductTile(16, 64, 64, 4, 3)}
_MANY = {2: ProductTile(64, 128, 64, 4, 4), 4: ProductTile(32, 64, 32, 4, 3)}


# The compile-time constants of the routing: tokens per program; groups, experts per group, and the next powers of two
# of both; the number of chosen experts and groups; and how logits become scores and weights.
RoutingShape = namedtuple(
    "RoutingShape",
    "tile_tokens num_groups group_size padded_groups padded_size num_chosen num_chosen_groups scoring renormalizes",
)


class SlotTable(NamedTuple):
    """The slots of a mixture-of-experts layer sorted by expert, for the matrix multiplication kernel. Each pair of a
    token and one of its chosen experts is called a slot.

    Attributes:
        order: [T * num_chosen] int32, slots sorted by expert; the slots of an expert are in ascending order.
        ends: [num_experts] int32, the end of each expert's slots in `order`.
        tile_experts: [maximum number of tiles] int32, the expert of each tile; -1 means that the tile is not used.
        tile_starts: int32 of the same size, the start of each tile's slots in `order`.
    """

    order: Tensor
    ends: Tensor
    tile_experts: Tensor
    tile_starts: Tensor


class Assignment(NamedTuple):
    """The pairs of a token and a chosen expert (slots) of one step, sorted by expert, so that the expert weights can be
    multiplied. It also contains the number of experts per token and the tile for which the table was built."""

    table: SlotTable
    num_chosen: int
    tile: ProductTile


def route_tokens(logits: Tensor, routing: ExpertRouting, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from the router's logits, and compute their weights, as
    `pagewire.kernels.experts.route_tokens` specifies.

    Args:
        logits: [T, num_experts] float32, any row stride. NaN is treated as the highest logit.
        routing: how many experts are chosen, and how their weights are computed from the logits.
        correction: [num_experts] float32, dense.

    Returns:
        The ids of the chosen experts, [T, num_chosen] int64 in ascending order, and their weights, [T, num_chosen]
        float32.

    Raises:
        ValueError: a shape, stride or dtype is not supported, or there are fewer experts than the routing chooses.
    """
    _check_routing(logits, routing, correction)
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, routing.num_chosen), dtype=torch.int64, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    shape = routing_shape(routing, num_experts)
    if num_tokens:
        _choose_kernel[(triton.cdiv(num_tokens, shape.tile_tokens),)](
            Strided.of(logits),
            correction,
            ids,
            weights,
            num_tokens,
            routing.factor,
            2 * routing.jitter,
            SHAPE=shape,
            enable_fp_fusion=False,
        )
    return ids, weights


def routing_shape(routing: ExpertRouting, num_experts: int) -> RoutingShape:
    """Return the compile-time constants of the kernel that chooses experts. One program of the kernel processes as many
    tokens as fit in `_ROUTING_TILE` elements, and at least one token."""
    num_groups, group_size = routing.num_groups, num_experts // routing.num_groups
    padded_groups, padded_size = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
    return RoutingShape(
        max(1, _ROUTING_TILE // (padded_groups * padded_size)),
        num_groups,
        group_size,
        padded_groups,
        padded_size,
        routing.num_chosen,
        routing.num_chosen_groups,
        routing.scoring,
        routing.renormalizes,
    )


def assign(ids: Tensor, num_experts: int, dtype: torch.dtype) -> Assignment:
    """Sort the slots of a step (pairs of token and chosen expert) by expert, so that each program of a matrix
    multiplication in `dtype` needs the weight of only one expert.

    Args:
        ids: [T, num_chosen] int64 or int32, dense, each from 0 to num_experts - 1.
        num_experts: number of experts.
        dtype: dtype of the activations.

    Raises:
        ValueError: the ids are not of this shape or dtype.
    """
    check_tensor("ids", ids, ("T", "num_chosen"), *INTEGERS)
    num_slots = ids.numel()
    tile = choose_tile(num_slots, num_experts, dtype)
    # Each expert with slots has at most one tile that is not full.
    max_tiles = min(num_slots, num_slots // tile.block_m + num_experts)
    sizes = (num_slots, num_experts, max_tiles, max_tiles)
    table = SlotTable(*(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes))
    if num_slots:
        _assign_kernel[(num_experts,)](
            ids,
            table,
            num_slots,
            num_experts,
            max_tiles,
            PADDED_EXPERTS=max(2, triton.next_power_of_2(num_experts)),
            BLOCK_M=tile.block_m,
            TILE=_ASSIGN_TILE,
        )
    return Assignment(table, ids.shape[1], tile)


def choose_tile(num_slots: int, num_experts: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile (the part of the outputs that one program computes) for an expert matrix multiplication. The
    choice uses the mean number of tokens per expert, because the host does not know which experts were chosen."""
    tiles = _FEW if num_slots <= _FEW[2].block_m * num_experts else _MANY
    return tiles[dtype.itemsize]


def multiply_routed(x: Tensor, weights: Tensor, assignment: Assignment, biases: Tensor | None = None) -> Tensor:
    """Return the expert outputs of a mixture-of-experts layer. Each pair of a token and one of its chosen experts is
    called a slot. The output of a slot is x W^T + b, with the weight W and the bias b of the slot's expert.

    Args:
        x: [T, in_size], one row per token, or [T * num_chosen, in_size], one row per slot; float16, bfloat16 or
            float32, any row stride.
        weights: [num_experts, out_size, in_size] of the same dtype, the last dimension dense.
        assignment: the slots sorted by expert, as `assign` returns them for the same number of experts.
        biases: [num_experts, out_size], dense, of the same dtype or float32; or None.

    Returns:
        The outputs of all slots, [T * num_chosen, out_size], in the dtype of x. Sums, with the bias, are in float32.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    _check_product(x, weights, assignment, biases)
    table, _, tile = assignment
    num_slots, out_size = len(table.order), weights.shape[1]
    output = x.new_empty(num_slots, out_size)
    if num_slots:
        _multiply_kernel[(len(table.tile_experts), triton.cdiv(out_size, tile.block_n))](
            Strided.of(x),
            Strided.of(weights),
            biases,
            output,
            table,
            num_slots // len(x),
            x.shape[1],
            out_size,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            OPERAND=operand(x.dtype, x.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return output


def sum_slots(slots: Tensor, weights: Tensor) -> Tensor:
    """Combine the outputs of each token's experts: return their weighted sum, added in float32 in ascending order of
    expert ids.

    Args:
        slots: [T * num_chosen, width], float16, bfloat16 or float32, dense.
        weights: [T, num_chosen] float32, dense.

    Returns:
        [T, width] in the dtype of the slots.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    check_tensor("weights", weights, ("T", "num_chosen"), torch.float32)
    num_tokens, num_chosen = weights.shape
    check_tensor("slots", slots, (num_tokens * num_chosen, "width"), *FLOATS)
    width = slots.shape[1]
    output = slots.new_empty(num_tokens, width)
    if output.numel():
        _sum_kernel[(num_tokens, triton.cdiv(width, _SUM_TILE))](
            slots, weights, output, width, NUM_CHOSEN=num_chosen, TILE=_SUM_TILE, enable_fp_fusion=False
        )
    return output


def _check_routing(logits: Tensor, routing: ExpertRouting, correction: Tensor | None) -> None:
    check_tensor("logits", logits, ("T", "num_experts"), torch.float32, is_strided=True)
    num_experts = logits.shape[1]
    check_tensor("correction", correction, (num_experts,), torch.float32)
    num_groups, num_chosen_groups = routing.num_groups, routing.num_chosen_groups
    if num_groups < 1 or num_experts % num_groups or not 1 <= num_chosen_groups <= num_groups:
        raise ValueError(f"{num_chosen_groups} of {num_groups} groups of {num_experts} experts cannot be chosen")
    if not 1 <= routing.num_chosen <= num_experts // num_groups * num_chosen_groups:
        raise ValueError(
            f"{routing.num_chosen} of {num_experts} experts in {num_chosen_groups} of {num_groups} groups cannot be "
            "chosen"
        )


def _check_product(x: Tensor, weights: Tensor, assignment: Assignment, biases: Tensor | None) -> None:
    num_slots, num_experts = len(assignment.table.order), len(assignment.table.ends)
    check_tensor("weights", weights, (num_experts, "out_size", "in_size"), *FLOATS, is_strided=True)
    check_tensor("x", x, ("rows", weights.shape[2]), weights.dtype, is_strided=True)
    num_tokens = num_slots // assignment.num_chosen
    if len(x) not in (num_tokens, num_slots):
        raise ValueError(f"x has {len(x)} rows; pass {num_tokens} rows, one per token, or {num_slots}, one per slot")
    check_tensor("biases", biases, tuple(weights.shape[:2]), x.dtype, torch.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(logits, correction, ids, weights, num_tokens, factor, max_distance, SHAPE: tl.constexpr):
    """Triton kernel that chooses the experts of SHAPE.tile_tokens tokens per program.

    A token's scores are in the order of the experts. To get sizes that are powers of two, padding follows the experts
    of each group, and the last group.
    """
    TILE_TOKENS: tl.constexpr = SHAPE.tile_tokens
    PADDED_SIZE: tl.constexpr = SHAPE.padded_size
    PADDED_EXPERTS: tl.constexpr = SHAPE.padded_groups * PADDED_SIZE
    tokens = (tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)).to(tl.int64)[:, None]
    lines = tl.arange(0, PADDED_EXPERTS)[None, :]
    experts = lines // PADDED_SIZE * SHAPE.group_size + lines % PADDED_SIZE
    is_expert = (lines // PADDED_SIZE < SHAPE.num_groups) & (lines % PADDED_SIZE < SHAPE.group_size)
    mask = is_expert & (tokens < num_tokens)
    logit = tl.load(logits.data + tokens * logits.strides[0] + experts, mask=mask, other=0.0)
    IS_SIGMOID: tl.constexpr = SHAPE.scoring == "sigmoid"
    if not IS_SIGMOID:
        logit = tl.where(is_expert, logit, float("-inf"))
        powers = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(powers, axis=1)[:, None])
    else:
        scores = tl.div_rn(tl.full(logit.shape, 1.0, tl.float32), 1.0 + tl.exp(-logit))
    ranked = scores
    if correction is None:
        if not IS_SIGMOID or SHAPE.num_groups == 1:  # rank by logits: rounding could make different scores equal
            ranked = logit
    else:
        ranked += tl.load(correction + experts, mask=is_expert, other=0.0)
    ranked = tl.where(ranked != ranked, float("inf"), ranked)
    if SHAPE.num_groups > 1:
        ranked = tl.where(is_expert, ranked, float("-inf"))
        of_groups = tl.reshape(ranked, [TILE_TOKENS, SHAPE.padded_groups, PADDED_SIZE])
        groups = tl.arange(0, SHAPE.padded_groups)[None, :]
        is_chosen = _choose(
            _sum_of_two_best(of_groups, SHAPE.group_size), groups, groups < SHAPE.num_groups, SHAPE.num_chosen_groups
        )
        ranked = tl.reshape(tl.where(is_chosen[:, :, None], of_groups, float("-inf")), [TILE_TOKENS, PADDED_EXPERTS])

    is_chosen = _choose(ranked, experts, is_expert, SHAPE.num_chosen)
    if SHAPE.scoring == "sparse_mixer":
        scores = _mix_sparsely(logit, ranked, experts, is_expert, max_distance, SHAPE.num_chosen)
    if SHAPE.renormalizes:
        totals = tl.sum(tl.where(is_chosen, scores, 0.0), axis=1) + _MIN_SUM
        scores = tl.div_rn(scores, tl.zeros_like(scores) + totals[:, None])
    places = tokens * SHAPE.num_chosen + tl.cumsum(is_chosen.to(tl.int32), axis=1) - 1
    mask = is_chosen & (tokens < num_tokens)
    tl.store(ids + places, (experts + tl.zeros_like(places)).to(tl.int64), mask=mask)
    tl.store(weights + places, scores * factor, mask=mask)


@triton.jit
def _mix_sparsely(left, ranked, experts, is_left, max_distance, NUM_CHOSEN: tl.constexpr):
    """Return the scores of SparseMixer, see `ExpertRouting.scoring`. `left` are the logits. Scores of experts that are
    not among the NUM_CHOSEN highest of `ranked` are 0."""
    scores, is_left = tl.zeros_like(left), tl.broadcast_to(is_left, left.shape)
    for _ in range(NUM_CHOSEN):
        is_best = _choose(ranked, experts, is_left, 1)
        top = tl.sum(tl.where(is_best, left, 0.0), axis=1)[:, None]
        is_far = tl.div_rn(top - left, tl.maximum(tl.abs(left), top)) > max_distance
        total = tl.sum(tl.where(is_far, 0.0, tl.exp(left - top)), axis=1)[:, None]
        scores = tl.where(is_best, tl.div_rn(tl.full(left.shape, 1.0, tl.float32), tl.zeros_like(left) + total), scores)
        left, is_left = tl.where(is_best, float("-inf"), left), is_left & ~is_best
    return scores


@triton.jit
def _sum_of_two_best(ranked, GROUP_SIZE: tl.constexpr):
    """Return the score of each group of experts, by which groups are ranked: the sum of the two highest scores of its
    experts. [tokens, groups, padded size] -> [tokens, groups]."""
    best, place = tl.max(ranked, axis=2, return_indices=True)
    if GROUP_SIZE > 1:
        is_best = tl.arange(0, ranked.shape[2])[None, None, :] == place[:, :, None]
        best += tl.max(tl.where(is_best, float("-inf"), ranked), axis=2)
    return best


@triton.jit
def _choose(ranked, indexes, is_there, NUM_CHOSEN: tl.constexpr):
    """Return a mask of the NUM_CHOSEN highest scores in each row of `ranked`. Among equal scores, the entry with the
    lower index is chosen.

    Invariant: exactly NUM_CHOSEN different entries of a row are chosen, even if scores are equal or not finite.
    Otherwise some of the token's ids would be undefined.
    """
    # All keys differ: they are ordered by number, then by descending index.
    LOWEST_KEY: tl.constexpr = -(2**63)
    ranked = tl.where(ranked != ranked, float("inf"), tl.where(ranked == 0.0, 0.0, ranked))
    bits = ranked.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - indexes).to(tl.int64)
    keys = tl.where(is_there, keys, LOWEST_KEY)
    is_chosen = keys != keys
    for _ in range(NUM_CHOSEN):
        is_highest = keys == tl.max(keys, axis=1)[:, None]
        is_chosen = is_chosen | is_highest
        keys = tl.where(is_highest, LOWEST_KEY, keys)
    return is_chosen


@triton.jit(do_not_specialize=["num_slots", "max_tiles"])
def _assign_kernel(
    ids, table, num_slots, num_experts, max_tiles,
    PADDED_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that sorts the slots of a step (pairs of token and chosen expert) by expert. Each program writes
    the list of slots and the list of tiles of one expert. The program of the last expert also writes the end of the
    list of tiles, which is unused."""
    expert, experts, lines = tl.program_id(0), tl.arange(0, PADDED_EXPERTS), tl.arange(0, TILE)
    counted = tl.zeros([PADDED_EXPERTS], tl.int32)
    for begin in tl.range(0, num_slots, TILE):
        mask = begin + lines < num_slots
        counted += tl.histogram(tl.load(ids + begin + lines, mask=mask, other=0).to(tl.int32), PADDED_EXPERTS, mask)
    start = tl.sum(tl.where(experts < expert, counted, 0), axis=0)
    end = start + tl.sum(tl.where(experts == expert, counted, 0), axis=0)
    tl.store(table.ends + expert, end)
    first_tile = tl.sum(tl.where(experts < expert, tl.cdiv(counted, BLOCK_M), 0), axis=0)
    past_tile = first_tile + tl.cdiv(end - start, BLOCK_M)
    past_filled = tl.where(expert == num_experts - 1, max_tiles, past_tile)
    for begin in tl.range(first_tile, past_filled, TILE):
        tiles = begin + lines
        tl.store(table.tile_experts + tiles, tl.where(tiles < past_tile, expert, -1), mask=tiles < past_filled)
        tl.store(table.tile_starts + tiles, start + (tiles - first_tile) * BLOCK_M, mask=tiles < past_tile)
    for begin in tl.range(0, num_slots, TILE):
        slots = begin + lines
        is_mine = tl.load(ids + slots, mask=slots < num_slots, other=-1) == expert
        places = start + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(table.order + places, slots, mask=is_mine)
        start += tl.sum(is_mine.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["slots_of_row"])
def _multiply_kernel(
    x, weights, biases, output, table, slots_of_row, in_size, out_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Triton kernel that multiplies slots (pairs of token and chosen expert) by their expert's weight. Each program
    computes BLOCK_N outputs for a tile of slots with the same expert."""
    tile = tl.program_id(0)
    expert = tl.load(table.tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    members = tl.load(table.tile_starts + tile) + tl.arange(0, BLOCK_M)
    is_member = members < tl.load(table.ends + expert)
    slots = tl.load(table.order + members, mask=is_member, other=0)
    columns, inputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_column = columns < out_size
    x_at = x.data + (slots // slots_of_row).to(tl.int64)[:, None] * x.strides[0] + inputs[None, :]
    weights_of_expert = weights.data + expert * weights.strides[0]
    weights_at = weights_of_expert + columns.to(tl.int64)[:, None] * weights.strides[1] + inputs[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, in_size, BLOCK_K):
        is_input = (start + inputs < in_size)[None, :]
        x_tile = tl.load(x_at + start, mask=is_member[:, None] & is_input, other=0.0).to(OPERAND)
        weight_tile = tl.load(weights_at + start, mask=is_column[:, None] & is_input, other=0.0).to(OPERAND)
        sums = tl.dot(x_tile, tl.trans(weight_tile), sums, input_precision="ieee")
    if biases is not None:
        sums += tl.load(biases + expert * out_size + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    output_at = output + slots.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(output_at, sums.to(output.dtype.element_ty), mask=is_member[:, None] & is_column[None, :])


@triton.jit
def _sum_kernel(slots, weights, output, width, NUM_CHOSEN: tl.constexpr, TILE: tl.constexpr):
    """Triton kernel that adds up the weighted outputs of a token's experts. Each program computes TILE elements of one
    token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    total = tl.zeros([TILE], tl.float32)
    for place in range(NUM_CHOSEN):
        slot = token * NUM_CHOSEN + place
        values = tl.load(slots + slot * width + columns, mask=mask, other=0.0).to(tl.float32)
        total += values * tl.load(weights + slot)
    tl.store(output + token * width + columns, total.to(output.dtype.element_ty), mask=mask)
