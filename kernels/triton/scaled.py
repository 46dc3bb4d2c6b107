"""Kernels for W8A8 matrix multiplication: activations rounded to 8 bits times 8-bit weights, both int8 or both FP8
(e4m3).

One launch rounds the rows and another multiplies them. Scales of blocks are applied to the sum of each 128 inputs, as
in DeepSeek-V3 (2024, https://arxiv.org/abs/2412.19437, 3.3.2).

Specification: `pagewire.kernels.scaled`.
"""

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.scaled import BLOCK, LARGEST, MAX_INPUTS, MIN_SCALE, RoundedRows
from pagewire.kernels.triton.experts import ProductTile
from pagewire.kernels.triton.launching import FLOATS, INTERPRETED, Strided, check_tensor
from pagewire.kernels.weight import FLOAT8, StoredWeight

_BLOCK = tl.constexpr(BLOCK)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
# Adding this to a float32 of at most 2^22 rounds it to nearest even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_ROUND_TILE = 4096  # elements that a program rounds at a time
_MIN_CAPABILITY = {torch.int8: (8, 0), FLOAT8: (8, 9)}
_LIBRARY_UNIT = 16
_MIN_LIBRARY_ROWS = 65  # for fewer rows, memory bandwidth limits the kernel too, so it is as fast
_ENOUGH_PROGRAMS = 128  # for the 132 processors of an H200


# A weight as kernel arguments.
ScaledPointers = namedtuple("ScaledPointers", "codes scale")

# From the widest tile, which reads least, to the narrowest, which gives the most programs. FP8 tiles process 128 inputs
# at a time, because 128 inputs share a scale. All tiles fit the shared memory of an H200 and spill no register when
# compiled for it.
_FEW = {
    torch.int8: (ProductTile(16, 64, 256, 4, 4), ProductTile(16, 32, 256, 4, 5), ProductTile(16, 16, 512, 4, 5)),
    FLOAT8: (*(ProductTile(16, 64, BLOCK, 4, 6), ProductTile(16, 32, BLOCK, 4, 8), ProductTile(16, 16, BLOCK, 4, 8)),),
}
_MANY = (
    *(ProductTile(128, 128, BLOCK, 8, 4), ProductTile(64, 128, BLOCK, 4, 4), ProductTile(64, 64, BLOCK, 4, 4)),
    *(ProductTile(64, 32, BLOCK, 4, 5), ProductTile(64, 16, BLOCK, 4, 6)),
)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """An 8-bit weight of a linear layer, for multiplication with activations rounded to 8 bits (W8A8). Its value is
    `values * scale`.

    Attributes:
        values: int8 or float8_e4m3fn [out_size, in_size], dense.
        scale: float32 [out_size], one scale per channel; or, for FP8 in blocks, [ceil(out_size / 128), ceil(in_size /
            128)].
        block_size: number of inputs that share a scale: in_size, or 128.
        has_library: whether `torch._scaled_mm` can multiply by this weight on this device; see the function
            `has_library`.
    """

    values: Tensor
    scale: Tensor
    block_size: int
    has_library: bool = False


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device can multiply matrices in int8 (compute capability 8.0) or float8_e4m3fn (8.9).

    Triton's interpreter supports both dtypes.
    """
    if dtype not in _MIN_CAPABILITY:
        return False
    if device.type != "cuda":
        return INTERPRETED and device.type == "cpu"
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY[dtype]


def pack(weight: StoredWeight, device: torch.device) -> ScaledWeight | None:
    """Convert a quantised weight to a `ScaledWeight` on the device, for matrix multiplication in 8 bits. Return None if
    this module cannot represent the weight exactly.

    Not supported are weights with zeros or minima, int8 weights with several scales in a row, int8 weights with more
    than MAX_INPUTS inputs, and FP8 weights whose scales are neither one per row nor one per block of 128 by 128.
    """
    parts, in_size, is_float = weight.without_factors().parts(), weight.values.shape[1], weight.element == FLOAT8
    values, scales = parts["values"], parts["scale"]
    if not parts.keys().isdisjoint(("minimum", "zero")) or (in_size > MAX_INPUTS and not is_float):
        return None
    if torch.equal(scales, scales[:, :1].expand_as(scales)):
        scale, block_size = scales[:, 0].contiguous(), in_size
    elif is_float and (blocks := _scales_of_blocks(scales, weight.group_size, *values.shape)) is not None:
        scale, block_size = blocks, BLOCK
    else:
        return None
    packed = ScaledWeight(values.to(device).contiguous(), scale.to(device), block_size)
    return replace(packed, has_library=_fits_library(packed) and has_library(device, block_size == BLOCK))


def _fits_library(weight: ScaledWeight) -> bool:
    """Return whether `torch._scaled_mm` supports the dtype and sizes of a weight. It supports FP8 weights whose sizes
    are multiples of 128 if the scales are per block, else multiples of 16."""
    unit = BLOCK if weight.scale.dim() == 2 else _LIBRARY_UNIT
    return weight.values.dtype == FLOAT8 and not any(size % unit for size in weight.values.shape)


@lru_cache
def has_library(device: torch.device, is_blocked: bool) -> bool:
    """Return whether `torch._scaled_mm`, which uses cuBLAS, gives the same result as this module's FP8 kernel on a
    device, up to rounding.

    `is_blocked` selects scales per block; otherwise there is one scale per channel. The function does not check GPU
    models or CUDA versions: it computes a small matrix multiplication both ways and compares the results.
    """
    rows, outputs, inputs = 80, 2 * BLOCK, 2 * BLOCK
    numbers = torch.arange(outputs * inputs, dtype=torch.float32, device=device)
    values = (numbers * 0.7).sin().view(outputs, inputs).mul(200).to(FLOAT8)
    scale = (2 + torch.arange(4 if is_blocked else outputs, dtype=torch.float32, device=device)) / 1000
    block_size = BLOCK if is_blocked else inputs
    weight = ScaledWeight(values, scale.view(2, 2) if is_blocked else scale, block_size)
    rounded = round_rows((numbers[: rows * inputs] * 0.3).cos().view(rows, inputs), values.dtype, block_size)
    expected = _multiply(rounded, weight, None, torch.float32)
    try:
        actual = _multiply_by_library(rounded, weight).float()
    except (RuntimeError, ValueError):
        return False
    return bool(((actual - expected).abs() <= expected.abs() / 128 + expected.abs().max() / 10_000).all())


def _scales_of_blocks(scales: Tensor, group_size: int, out_size: int, in_size: int) -> Tensor | None:
    """Return one scale for each block of 128 by 128 of a weight: [ceil(out_size / 128), ceil(in_size / 128)], dense.
    Return None if the scales differ within a block."""
    unit = gcd(group_size, BLOCK)
    of_units = scales.repeat_interleave(group_size // unit, 1)[:, : -(-in_size // unit)]
    blocks = of_units[::BLOCK, :: BLOCK // unit].contiguous()
    expanded = blocks.repeat_interleave(BLOCK, 0)[:out_size].repeat_interleave(BLOCK // unit, 1)
    return blocks if torch.equal(expanded[:, : of_units.shape[1]], of_units) else None


def round_rows(x: Tensor, dtype: torch.dtype, group_size: int) -> RoundedRows:
    """Round rows of activations to 8 bits, each row or each 128 inputs with a scale of its own, as
    `pagewire.kernels.scaled.round_rows` specifies.

    Args:
        x: [T, in_size], float16, bfloat16 or float32; any row stride.
        dtype: int8 or float8_e4m3fn.
        group_size: number of inputs of a row that share a scale: in_size, or 128.

    Returns:
        Dense values. The scales are stored column by column: the scales of neighbouring rows are adjacent in memory.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    check_tensor("x", x, ("T", "in_size"), *FLOATS, is_strided=True)
    num_rows, in_size = x.shape
    if dtype not in LARGEST:
        raise ValueError(f"rows cannot be rounded to {dtype}; choose int8 or float8_e4m3fn")
    if not in_size or group_size not in (in_size, BLOCK):
        raise ValueError(f"groups of {group_size} of {in_size} inputs are not supported; use {in_size} or {BLOCK}")
    num_groups = triton.cdiv(in_size, group_size)
    values = torch.empty((num_rows, in_size), dtype=dtype, device=x.device)
    scale = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    tile_groups, tile = rounding_tile(in_size, group_size)
    if num_rows:
        _round_kernel[(num_rows, triton.cdiv(num_groups, tile_groups))](
            Strided.of(x),
            values,
            scale,
            num_rows,
            in_size,
            group_size,
            num_groups,
            LARGEST=LARGEST[dtype],
            GROUPS=tile_groups,
            TILE=tile,
            enable_fp_fusion=False,
        )
    return RoundedRows(values, scale.T)


def rounding_tile(in_size: int, group_size: int) -> tuple[int, int]:
    """Return how much one program of the rounding kernel processes: the number of groups of one row, and the number of
    inputs of each group that it reads at a time."""
    tile = min(_ROUND_TILE, triton.next_power_of_2(group_size))
    return min(_ROUND_TILE // tile, triton.next_power_of_2(triton.cdiv(in_size, group_size))), tile


def multiply(
    x: Tensor, weight: ScaledWeight, bias: Tensor | None = None, output_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W^T + b for an 8-bit weight. The activations x are first rounded to 8 bits: each row, or each 128 inputs
    of a row, by its largest absolute value.

    Args:
        x: [T, in_size], float16, bfloat16 or float32; any row stride.
        weight: the weight.
        bias: [out_size], dense, float16, bfloat16 or float32; or None.
        output_dtype: float16, bfloat16 or float32; None means the dtype of x.

    Returns:
        [T, out_size]; the bias is added in float32.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    output_dtype = output_dtype or x.dtype
    _check_product(x, weight, bias, output_dtype)
    return multiply_rounded(round_rows(x, weight.values.dtype, weight.block_size), weight, bias, output_dtype)


def multiply_rounded(
    rounded: RoundedRows, weight: ScaledWeight, bias: Tensor | None, output_dtype: torch.dtype
) -> Tensor:
    """Return x W^T + b for activations that `round_rows` has already rounded to 8 bits for this weight. See `multiply`
    for the other arguments.

    The multiplication runs in cuBLAS if cuBLAS supports the weight, there are many rows, `bias` is None, and the
    output is bfloat16. Otherwise it runs in a Triton kernel.
    """
    is_library = weight.has_library and bias is None and output_dtype == torch.bfloat16
    if is_library and len(rounded.values) >= _MIN_LIBRARY_ROWS:
        return _multiply_by_library(rounded, weight)
    return _multiply(rounded, weight, bias, output_dtype)


def _multiply_by_library(rounded: RoundedRows, weight: ScaledWeight) -> Tensor:
    """Multiply activations rounded to FP8 by a weight with `torch._scaled_mm`. Return [T, out_size] bfloat16."""
    row_scale, weight_scale = rounded.scale, weight.scale.t()
    if weight.scale.dim() == 1:
        row_scale, weight_scale = row_scale[:, 0, None], weight.scale[None]  # dense, as torch requires
    return torch._scaled_mm(
        rounded.values, weight.values.t(), scale_a=row_scale, scale_b=weight_scale, out_dtype=torch.bfloat16
    )


def _multiply(rounded: RoundedRows, weight: ScaledWeight, bias: Tensor | None, output_dtype: torch.dtype) -> Tensor:
    (num_rows, in_size), (out_size, _) = rounded.values.shape, weight.values.shape
    output = torch.empty((num_rows, out_size), dtype=output_dtype, device=rounded.values.device)
    tile = choose_tile(num_rows, out_size, weight.values.dtype)
    is_blocked = weight.scale.dim() == 2
    if output.numel():
        _multiply_kernel[(triton.cdiv(num_rows, tile.block_m), triton.cdiv(out_size, tile.block_n))](
            rounded.values,
            rounded.scale,
            ScaledPointers(weight.values, weight.scale),
            bias,
            output,
            num_rows,
            in_size,
            out_size,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            IS_BLOCKED=is_blocked,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=is_blocked,  # a fused operation would not round the product before adding the bias
        )
    return output


def choose_tile(num_rows: int, out_size: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile (the part of the result that one program computes) of the matrix multiplication. It is the widest
    tile with which every processor of the GPU still gets a program, or else the narrowest tile."""
    tiles: Iterable[ProductTile] = _FEW[dtype] if num_rows <= 16 else _MANY[num_rows <= 64 :]
    for tile in tiles:
        if triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_size, tile.block_n) >= _ENOUGH_PROGRAMS:
            break
    return tile


def _check_product(x: Tensor, weight: ScaledWeight, bias: Tensor | None, output_dtype: torch.dtype) -> None:
    values, scale = weight.values, weight.scale
    check_tensor("weight", values, ("out_size", "in_size"), *LARGEST)
    out_size, in_size = values.shape
    if values.dtype == torch.int8 and in_size > MAX_INPUTS:
        raise ValueError(f"the weight has {in_size} inputs; int8 weights support at most {MAX_INPUTS}")
    shape: tuple[int, ...] = (out_size,)
    block_size = in_size
    if scale.dim() == 2 and values.dtype == FLOAT8:
        shape, block_size = (triton.cdiv(out_size, BLOCK), triton.cdiv(in_size, BLOCK)), BLOCK
    check_tensor("scale", scale, shape, torch.float32)
    if weight.block_size != block_size:
        raise ValueError(f"block_size is {weight.block_size}; with a scale {list(shape)} it must be {block_size}")
    check_tensor("x", x, ("T", in_size), *FLOATS, is_strided=True)
    check_tensor("bias", bias, (out_size,), *FLOATS)
    if output_dtype not in FLOATS:
        raise ValueError(f"outputs cannot be {output_dtype}; choose float16, bfloat16 or float32")


@triton.jit(do_not_specialize=["num_rows"])
def _round_kernel(
    x, values, scale, num_rows, in_size, group_size, num_groups,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that rounds activations to 8 bits. Each program rounds GROUPS groups of one row, and reads TILE
    inputs of each group at a time."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = tl.arange(0, TILE)[None, :]
    starts = (groups * group_size)[:, None]
    x_row, values_row = x.data + row * x.strides[0], values + row * in_size
    highest = tl.zeros([GROUPS, TILE], tl.float32)
    for start in tl.range(0, group_size, TILE):
        lines = start + inputs
        mask = (lines < group_size) & (starts + lines < in_size)
        magnitudes = tl.abs(tl.load(x_row + starts + lines, mask=mask, other=0.0).to(tl.float32))
        magnitudes = tl.where(magnitudes < float("inf"), magnitudes, float("inf"))  # also replaces NaN
        highest = tl.maximum(highest, magnitudes)
    peaks = tl.max(highest, axis=1)
    scales = tl.maximum(tl.div_rn(peaks, tl.full([GROUPS], LARGEST, tl.float32)), _MIN_SCALE)
    is_finite = peaks < float("inf")
    tl.store(
        scale + groups.to(tl.int64) * num_rows + row, tl.where(is_finite, scales, float("nan")), groups < num_groups
    )
    for start in tl.range(0, group_size, TILE):
        lines = start + inputs
        mask = (lines < group_size) & (starts + lines < in_size)
        numbers = tl.load(x_row + starts + lines, mask=mask, other=0.0).to(tl.float32)
        quotients = tl.div_rn(numbers, tl.zeros_like(numbers) + scales[:, None])
        quotients = tl.where(is_finite[:, None], tl.clamp(quotients, -LARGEST, LARGEST), 0.0)
        if values.dtype.element_ty == tl.int8:
            quotients = (quotients + _ROUNDER) - _ROUNDER
        tl.store(values_row + starts + lines, quotients.to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    x, x_scale, weight, bias, output, num_rows, in_size, out_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_BLOCKED: tl.constexpr,
):  # fmt: skip
    """Triton kernel that multiplies 8-bit activations by an 8-bit weight. Each program computes BLOCK_N outputs of
    BLOCK_M rows.

    Programs that compute the same outputs of different rows are neighbours, so that the weight is read from memory only
    once.
    """
    ACCUMULATOR: tl.constexpr = tl.int32 if weight.codes.dtype.element_ty == tl.int8 else tl.float32
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns, inputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < out_size
    x_at = x + rows.to(tl.int64)[:, None] * in_size + inputs[None, :]
    weight_at = weight.codes + columns.to(tl.int64)[:, None] * in_size + inputs[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
    for start in tl.range(0, in_size, BLOCK_K):
        is_input = (start + inputs < in_size)[None, :]
        x_tile = tl.load(x_at + start, mask=is_row[:, None] & is_input, other=0.0)
        weight_tile = tl.trans(tl.load(weight_at + start, mask=is_column[:, None] & is_input, other=0.0))
        if tl.int32 == ACCUMULATOR:
            sums = tl.dot(x_tile, weight_tile, sums, out_dtype=tl.int32)
        else:
            # Tensor cores accumulate FP8 with fewer bits than float32, so they add up at most 128 products.
            partial = tl.dot(x_tile, weight_tile)
            if IS_BLOCKED:
                block = start // _BLOCK
                x_scales = tl.load(x_scale + block.to(tl.int64) * num_rows + rows, mask=is_row, other=0.0)
                scales_at = weight.scale + columns // _BLOCK * tl.cdiv(in_size, _BLOCK) + block
                partial *= x_scales[:, None] * tl.load(scales_at, mask=is_column, other=0.0)[None, :]
            sums += partial
    sums = sums.to(tl.float32)
    if not IS_BLOCKED:
        sums *= tl.load(x_scale + rows, mask=is_row, other=0.0)[:, None]
        sums *= tl.load(weight.scale + columns, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    output_at = output + rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(output_at, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
