"""Kernels for the operations between the matrix multiplications of a decoder, one launch each.

The functions of the same names in `kernels/reference.py` specify them. The kernels keep the intermediate roundings of
the specification: multiplications and additions are not fused.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.triton.cache import HEAD_DIMS, cached, check_caches
from pagewire.kernels.triton.launching import ALIGNMENT, FLOATS, INTEGERS, RepeatedLaunch, Strided, check_tensor

MAX_NORM_SIZE = 65536

_TILE_ELEMENTS = 1024  # per program that processes several rows or heads, or a piece of a row
_NUM_WARPS = 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square normalization of each row of activations (Zhang and Sennrich, 2019,
    https://arxiv.org/abs/1910.07467).

    Args:
        x: [T, size], float16, bfloat16 or float32; any row stride, size at most 65,536.
        weight: [size], of the same dtype or float32.
        eps: added to the mean square.

    Returns:
        [T, size], dense: x divided by its root mean square in float32, rounded to the weight's dtype, times weight.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    return add_rms_norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to the residual stream `x` in place, unless `update` is None, and return `rms_norm` of the sum.

    `x` and `update` are [T, size] with any row stride. The errors are the same as for `rms_norm`.
    """
    check_tensor("x", x, ("T", "size"), *FLOATS, is_strided=True)
    num_rows, size = x.shape
    if not 1 <= size <= MAX_NORM_SIZE:
        raise ValueError(f"x has rows of {size}; 1 to {MAX_NORM_SIZE} are supported")
    check_tensor("weight", weight, (size,), x.dtype, torch.float32)
    check_tensor("update", update, (num_rows, size), x.dtype, is_strided=True)
    output = x.new_empty(num_rows, size)
    if num_rows == 0:
        return output
    padded_size = triton.next_power_of_2(size)
    tile_rows = max(1, _TILE_ELEMENTS // padded_size)
    added = None if update is None else Strided.of(update)
    _rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        Strided.of(x),
        added,
        weight,
        output,
        num_rows,
        eps,
        SIZE=size,
        PADDED_SIZE=padded_size,
        TILE_ROWS=tile_rows,
        num_warps=min(16, max(_NUM_WARPS, padded_size // 1024)),
        enable_fp_fusion=False,
    )
    return output


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, the activation of a gated MLP (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    Args:
        gate_up: [T, 2 * size], gates first, float16, bfloat16 or float32; any row stride.

    Returns:
        [T, size], dense; silu is computed in float32 and rounded before the multiplication.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    check_tensor("gate_up", gate_up, ("T", "2 * size"), *FLOATS, is_strided=True)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]}; make the size even, half of it gates")
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    if output.numel():
        _silu_mul_kernel[(num_tokens, triton.cdiv(size, _TILE_ELEMENTS))](
            gate_up, output, gate_up.stride(0), size, TILE=_TILE_ELEMENTS, num_warps=_NUM_WARPS, enable_fp_fusion=False
        )
    return output


def norm_rope(heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare query and key heads for attention, in place: normalize the heads that have a norm weight, then apply
    rotary position embedding. With `rotates_first`, normalize after the rotation.

    The rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) rotates pairs (i, i + head_dim /
    2).

    Args:
        heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values, float16, bfloat16 or float32. The
            values are not changed. head_dim is a multiple of 8 from 16 to 512; the last dimension is dense.
        preparation: tables of the heads' dtype, and norm weights of the heads' dtype or float32.

    Returns:
        Views of `heads`: queries, keys and values.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    _check_heads(heads, preparation)
    num_heads, query_weight, key_weight, eps, cos, sin, rotates_first = preparation
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    if heads.shape[0]:
        angles = (Strided.of(cos), Strided.of(sin))
        launch = _norm_rope_launch(heads, num_heads, None, rotates_first=rotates_first)
        launch(None, Strided.of(heads), query_weight, key_weight, eps, angles, None)
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return queries, keys, values


@dataclass(frozen=True, slots=True)
class HeadCaching:
    """A kernel that prepares the query, key and value heads of a step for attention, in one pass over the heads. It
    normalizes and rotates them as `norm_rope` does, and then writes keys and values to the KV cache as
    `reshape_and_cache` does. The layers of a layer group share one object in a step.

    If a layer's arguments have the same memory layout as those of an earlier layer, they are not checked again.

    Attributes:
        slot_mapping: [T], int32 or int64, `block_id * block_size + offset` of each token, without duplicates. For a
            token with slot -1, queries are rotated but nothing is written to the KV cache.
        launches: the launches so far, by memory layout. The objects of a step may share them.
    """

    slot_mapping: Tensor
    launches: dict[Hashable, RepeatedLaunch] = field(default_factory=dict)

    def turn(self, heads: Tensor, preparation: NormRopeParams, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Rotate the queries in place, and write the rotated keys and the values to the KV cache of one layer. The keys
        and values in `heads` are not changed.

        Args:
            heads, preparation: as in `norm_rope`.
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the heads' dtype or of
                float8_e4m3fn, which saturates; the last dimension dense, any other strides.

        Returns:
            A view of `heads`: the queries.

        Raises:
            ValueError: a shape, stride or dtype is not supported.
        """
        num_heads, query_weight, key_weight, eps, cos, sin, rotates_first = preparation
        layout: list[Hashable] = [num_heads, rotates_first]
        addresses = self.slot_mapping.data_ptr()
        for tensor in (heads, query_weight, key_weight, cos, sin, key_cache, value_cache):
            if tensor is None:
                layout.append(None)
            else:
                layout += (tensor.shape, tensor.stride(), tensor.dtype)
                addresses |= tensor.data_ptr()
        kind = tuple(layout)
        launch = self.launches.get(kind)
        if launch is None:
            _check_heads(heads, preparation)
            _check_cached(heads, num_heads, key_cache, value_cache, self.slot_mapping)
            launch = _norm_rope_launch(heads, num_heads, key_cache, rotates_first=rotates_first)
            self.launches[kind] = launch
        if heads.shape[0]:
            launch(
                None if addresses % ALIGNMENT else kind,
                Strided.of(heads),
                query_weight,
                key_weight,
                eps,
                (Strided.of(cos), Strided.of(sin)),
                (Strided.of(key_cache), Strided.of(value_cache), self.slot_mapping),
            )
        return heads[:, :num_heads]


def _norm_rope_launch(heads: Tensor, num_heads: int, cache: Tensor | None, *, rotates_first: bool) -> RepeatedLaunch:
    """Return an object that launches the kernel that normalizes and rotates heads, in this or the other order. If
    `cache` is given, the kernel writes keys and values to the KV cache. Otherwise it writes the keys to `heads`."""
    num_tokens, total_heads, head_dim = heads.shape
    num_kv_heads = (total_heads - num_heads) // 2
    padded_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = _TILE_ELEMENTS // (2 * padded_half)
    num_turned = num_heads + num_kv_heads if cache is None else total_heads
    constants = {
        "NUM_HEADS": (num_heads, num_kv_heads),
        "HEAD_DIM": head_dim,
        "PADDED_HALF": padded_half,
        "BLOCK_SIZE": 1 if cache is None else cache.shape[1],
        "TILE_HEADS": tile_heads,
        "ROTATES_FIRST": rotates_first,
    }
    grid = (num_tokens, triton.cdiv(num_turned, tile_heads), 1)
    return RepeatedLaunch(_norm_rope_kernel, grid, constants, {"num_warps": _NUM_WARPS, "enable_fp_fusion": False})


def _check_heads(heads: Tensor, preparation: NormRopeParams) -> None:
    num_heads, query_weight, key_weight, _, cos, sin, _ = preparation
    check_tensor("heads", heads, ("T", "heads", "head_dim"), *FLOATS, is_strided=True)
    num_tokens, total_heads, head_dim = heads.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"heads have a head_dim of {head_dim}; make it a multiple of 8 from 16 to 512")
    if num_heads < 1 or total_heads - num_heads < 2 or (total_heads - num_heads) % 2:
        raise ValueError(f"{total_heads} heads with {num_heads} queries do not leave equal numbers of keys and values")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        check_tensor(name, weight, (head_dim,), heads.dtype, torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (num_tokens, head_dim), heads.dtype, is_strided=True)


def _check_cached(heads: Tensor, num_heads: int, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    check_caches(key_cache, value_cache)
    num_kv_heads, head_dim = (heads.shape[1] - num_heads) // 2, heads.shape[2]
    if key_cache.shape[2:] != (num_kv_heads, head_dim) or key_cache.dtype not in (heads.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"the caches are {key_cache.dtype} {list(key_cache.shape)}; for these heads they must be {heads.dtype} "
            f"or torch.float8_e4m3fn, with {num_kv_heads} heads of {head_dim}"
        )
    check_tensor("slot_mapping", slot_mapping, (len(heads),), *INTEGERS)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, update, weight, output, num_rows, eps,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Triton kernel for root mean square normalization. Each program normalizes TILE_ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, PADDED_SIZE)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    dtype = x.data.dtype.element_ty
    sources = x.data + rows[:, None] * x.strides[0] + columns[None, :]
    values = tl.load(sources, mask=mask, other=0.0)
    if update is not None:
        updates = tl.load(update.data + rows[:, None] * update.strides[0] + columns[None, :], mask=mask, other=0.0)
        values = (values.to(tl.float32) + updates.to(tl.float32)).to(dtype)
        tl.store(sources, values, mask=mask)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    wide = values.to(tl.float32)
    rms = tl.sqrt_rn(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normalized = _scale(tl.div_rn(wide, rms[:, None]).to(weights.dtype), weights[None, :]).to(dtype)
    tl.store(output + rows[:, None] * SIZE + columns[None, :], normalized, mask=mask)


@triton.jit
def _silu_mul_kernel(gate_up, output, stride, size, TILE: tl.constexpr):
    """Triton kernel for the activation of a gated MLP. Each program computes TILE elements of silu(gate) * up in one
    row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=mask, other=0.0)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(gate_up.dtype.element_ty)
    tl.store(output + row * size + columns, _scale(silu, up), mask=mask)


@triton.jit
def _norm_rope_kernel(
    heads, query_weight, key_weight, eps, angles, target,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, ROTATES_FIRST: tl.constexpr,
):  # fmt: skip
    """Triton kernel that normalizes and rotates TILE_HEADS heads of one token per program. A head is processed as two
    halves: pair i consists of element i of both halves. NUM_HEADS has the numbers of query heads and of key heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_QUERIES: tl.constexpr = NUM_HEADS[0]
    NUM_KEYS: tl.constexpr = NUM_HEADS[1]
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    pair = tl.arange(0, PADDED_HALF)[None, :]
    is_query = (head < NUM_QUERIES) & (pair < HALF)
    is_key = (head >= NUM_QUERIES) & (head < NUM_QUERIES + NUM_KEYS) & (pair < HALF)
    is_value = (head >= NUM_QUERIES + NUM_KEYS) & (head < NUM_QUERIES + 2 * NUM_KEYS) & (pair < HALF)
    sources = heads.data + token * heads.strides[0] + head * heads.strides[1] + pair
    raw_first = tl.load(sources, mask=is_query | is_key | is_value, other=0.0)
    raw_second = tl.load(sources + HALF, mask=is_query | is_key | is_value, other=0.0)

    first, second = raw_first, raw_second
    if ROTATES_FIRST:
        first, second = _rotate_halves(first, second, angles, token, pair, HALF)
    if query_weight is not None:
        units = _normalize_halves(first, second, query_weight, eps, pair, HEAD_DIM)
        first, second = tl.where(is_query, units[0], first), tl.where(is_query, units[1], second)
    if key_weight is not None:
        units = _normalize_halves(first, second, key_weight, eps, pair, HEAD_DIM)
        first, second = tl.where(is_key, units[0], first), tl.where(is_key, units[1], second)
    if not ROTATES_FIRST:
        first, second = _rotate_halves(first, second, angles, token, pair, HALF)
    tl.store(sources, first, mask=is_query)
    tl.store(sources + HALF, second, mask=is_query)
    if target is not None:
        key_cache, value_cache, slots = target
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            block, position = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            kv_head = head - NUM_QUERIES
            _store_halves(key_cache, block, position, kv_head, pair, HALF, first, second, is_key)
            kv_head -= NUM_KEYS
            _store_halves(value_cache, block, position, kv_head, pair, HALF, raw_first, raw_second, is_value)
    else:
        tl.store(sources, first, mask=is_key)
        tl.store(sources + HALF, second, mask=is_key)


@triton.jit
def _normalize_halves(first, second, weight, eps, pair, HEAD_DIM: tl.constexpr):
    """Return `rms_norm` of query or key heads that are given as two halves, [heads, padded half] each."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    rms = tl.sqrt_rn(squares / HEAD_DIM + eps)[:, None]
    weight_first, weight_second = _load_halves(weight, pair, HEAD_DIM // 2)
    unit_first = _scale(tl.div_rn(wide_first, rms).to(weight_first.dtype), weight_first)
    unit_second = _scale(tl.div_rn(wide_second, rms).to(weight_second.dtype), weight_second)
    return unit_first.to(first.dtype), unit_second.to(second.dtype)


@triton.jit
def _rotate_halves(first, second, angles, token, pair, HALF: tl.constexpr):
    """Return the rotated halves of query or key heads of one token, [heads, padded half] each."""
    cos, sin = angles
    cos_first, cos_second = _load_halves(cos.data + token * cos.strides[0], pair, HALF)
    sin_first, sin_second = _load_halves(sin.data + token * sin.strides[0], pair, HALF)
    turned_first = _rotate_element(first, second, cos_first, sin_first)
    return turned_first, _rotate_element(second, first, cos_second, sin_second)


@triton.jit
def _load_halves(row, pair, HALF: tl.constexpr):
    """Load the first and the second half of a vector of 2 * HALF elements, such as a norm weight: [1, padded half]
    each."""
    first = tl.load(row + pair, mask=pair < HALF, other=0.0)
    second = tl.load(row + HALF + pair, mask=pair < HALF, other=0.0)
    return first, second


@triton.jit
def _scale(x, factor):
    """Return x * factor in the dtype of x. The product is computed in float32 and rounded once."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate_element(x, other, cos, sin):
    """Return the rotated values of one element of each pair that rotary position embedding rotates. `x` contains these
    elements and `other` the other elements of the pairs. x * cos is rounded before other * sin is added."""
    return (_scale(x, cos).to(tl.float32) + other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)


@triton.jit
def _store_halves(cache, block, position, head, pair, HALF: tl.constexpr, first, second, mask):
    """Write key or value heads, given as two halves, to one position of a KV cache block."""
    row = cache.data + block * cache.strides[0] + position * cache.strides[1]
    targets = row + head * cache.strides[2] + pair
    tl.store(targets, cached(first, cache), mask=mask)
    tl.store(targets + HALF, cached(second, cache), mask=mask)
