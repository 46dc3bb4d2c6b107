"""Products with quantised weights, which stay quantised: codes of 4 or 8 bits, or floats of 8.

Of each group of inputs `dot(x, codes - zero)` is computed with exact operands and accumulated in float32; the group's
scale multiplies the sum, not the weights. A program holds its product transposed, so that what it decodes are the rows
of the first operand, which processors take from registers (as Marlin does: Frantar et al., 2024,
https://arxiv.org/abs/2408.11743).

Specification: `dequantized()` of `pagewire.kernels.quantized.QuantizedWeight` and of
`pagewire.kernels.float8.Float8Weight`.
"""

import math
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.float8 import Float8Format, Float8Weight
from pagewire.kernels.quantized import GROUP, QuantizedFormat, QuantizedWeight
from pagewire.kernels.triton.attention_arguments import FLOATS, operand
from pagewire.kernels.triton.experts import Assignment, ProductTile
from pagewire.kernels.triton.strided import Strided

E4M3 = torch.float8_e4m3fn
_MAX_DEPTH = 128  # inputs of a product at most

# A `PackedWeight` as the kernel takes it: pointers, None where something is not there.
Pointers = namedtuple("Pointers", "codes scale zero minimum")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [..., out, in] of a layer, or of each expert, as the kernel reads it: `scale * (codes - zero) - minimum`.

    Codes of 4 bits lie in units of `2 * depth` inputs, the first half of them in the lower halves of bytes; other codes
    in units of `depth`. The last unit is filled up. What groups have lies in words of 32 bits, each of consecutive groups
    of one output, and the words of outputs side by side: no smaller loads run ahead of what is computed.

    Attributes:
        codes: [..., out, units * depth], dense: uint8, each byte of two codes of 4 bits; int8; or float8_e4m3fn.
        scale: [..., words, out, groups of a word]: float16 where every scale is such a number, else float32.
        zero: the same in int8; None: 0.
        minimum: the same in float16 or float32; None: 0.
        group_size: inputs that have a scale in common. The last group may be shorter.
        in_size: inputs, without what fills up the last unit.
        offset: what is to be added to a code of 4 bits.
        is_e2m1: codes of 4 bits are E2M1 numbers instead, and mean twice these.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    minimum: Tensor | None
    group_size: int
    in_size: int
    offset: int = 0
    is_e2m1: bool = False

    @property
    def depth(self) -> int:
        """Inputs of a product: all of one group."""
        return _depth(self.group_size, self.in_size)

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_groups(self) -> int:
        return -(-self.in_size // self.group_size)

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def num_bytes(self) -> int:
        there = (self.codes, self.scale, self.zero, self.minimum)
        return sum(tensor.numel() * tensor.itemsize for tensor in there if tensor is not None)


# By bytes of an element of x: for few rows, where weights are read at the speed of memory, and for many. `block_k` is
# what a step of the loop takes.
_FEW = {2: ProductTile(16, 64, 256, 4, 4), 4: ProductTile(16, 64, 128, 4, 3)}
_MANY = {2: ProductTile(64, 128, 128, 8, 3), 4: ProductTile(32, 64, 64, 4, 3)}


def can_pack(format: QuantizedFormat | Float8Format, in_size: int) -> bool:
    """Whether `pack` takes weights of this format: groups are of 16 inputs or multiples of that, or whole rows."""
    size = format.block_size if isinstance(format, Float8Format) else format.group_size
    return size >= in_size or not size % GROUP


def pack(weight: QuantizedWeight | Float8Weight, device: torch.device) -> PackedWeight:
    """Lays out a weight for the kernel, on the device.

    Codes take 4 bits where all differ by less than 16, or all are twice E2M1 numbers and nothing stands for 0 but 0.

    Raises:
        ValueError: groups are neither of multiples of 16 inputs nor of whole rows.
    """
    if isinstance(weight, Float8Weight):
        in_size = weight.values.shape[1]
        if not can_pack(Float8Format(weight.block_size), in_size):
            raise ValueError(
                f"blocks of {weight.block_size} of {in_size} inputs are not served; make them a multiple of {GROUP}, or "
                "whole rows"
            )
        values = _fill_up(weight.values.view(torch.uint8).to(device), _depth(weight.block_size, in_size)).view(E4M3)
        return PackedWeight(values, _pack_scales(weight.scale, device), None, None, weight.block_size, in_size)
    weight = weight.without_factors()
    minimum = None if weight.minimum is None else _pack_scales(weight.minimum, device)
    zero = None if weight.zero is None else _to_words(weight.zero.to(device))
    codes, scale = weight.codes.to(device), _pack_scales(weight.scale, device)
    packed = PackedWeight(codes, scale, zero, minimum, weight.group_size, codes.shape[1])
    return _encode(packed, codes)


def multiply(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, output_dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + b; a row's result depends on no other row's numbers.

    Args:
        x: [T, in_size] float16, bfloat16 or float32; rows at any distance.
        bias: [out_size], dense, of the dtype of x or float32.
        output_dtype: that of x, or float32; None: that of x.

    Returns:
        [T, out_size]; accumulated, and the bias added, in float32.

    Raises:
        ValueError: a shape, stride or dtype is not one of these.
    """
    if packed.codes.dim() != 2:
        raise ValueError(f"the weight is of {len(packed.codes)} experts; multiply the slots of each, `multiply_chosen`")
    _check_rows(x, packed)
    out_size = packed.out_size
    _check_bias(bias, (out_size,), x.dtype)
    output_dtype = output_dtype or x.dtype
    if output_dtype not in (x.dtype, torch.float32):
        raise ValueError(f"the output is to be {output_dtype}; make it {x.dtype} or torch.float32")
    output = x.new_empty((len(x), out_size), dtype=output_dtype)
    tile = choose_tile(len(x), x.dtype)
    if output.numel():
        _launch(triton.cdiv(len(x), tile.block_m), x, packed, bias, output, None, 1, tile)
    return output


def choose_tile(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """The tile of a product of rows that are not assigned to experts."""
    return (_FEW if num_rows <= _FEW[2].block_m else _MANY)[dtype.itemsize]


def _launch(
    num_tiles: int,
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    output: Tensor,
    table: object,
    slots_of_row: int,
    tile: ProductTile,
) -> None:
    num_slots, out_size = output.shape
    sizes = launch_sizes(packed)
    pointers = Pointers(packed.codes, packed.scale, packed.zero, packed.minimum)
    _multiply_kernel[(num_tiles, triton.cdiv(out_size, tile.block_n))](
        *(Strided.of(x), pointers, bias, output, table, num_slots, slots_of_row, packed.in_size, out_size, *sizes),
        packed.offset,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **kernel_options(packed, tile, x.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def launch_sizes(packed: PackedWeight) -> tuple[int, int, int]:
    """Units and groups of a row, and how many products deep a group is."""
    depth = packed.depth
    return packed.codes.shape[-1] // depth, packed.num_groups, max(1, packed.group_size // depth)


def kernel_options(packed: PackedWeight, tile: ProductTile, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is compiled for besides the tile's sides."""
    num_halves = 8 // packed.bits
    return {
        "DEPTH": packed.depth,
        "NUM_HALVES": num_halves,
        "NUM_UNITS": max(1, tile.block_k // (packed.depth * num_halves)),
        "IS_E2M1": packed.is_e2m1,
        "OPERAND": operand(dtype, dtype),
        "NUM_STAGES": tile.num_stages,
    }


def _depth(group_size: int, in_size: int) -> int:
    return _MAX_DEPTH if group_size >= in_size else math.gcd(group_size, _MAX_DEPTH)


def _fill_up(codes: Tensor, unit: int) -> Tensor:
    missing = -codes.shape[-1] % unit
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes.contiguous()


def _to_words(scales: Tensor) -> Tensor:
    """Of [..., out, groups], in words of 32 bits."""
    per_word = 4 // scales.itemsize
    return _fill_up(scales, per_word).unflatten(-1, (-1, per_word)).transpose(-2, -3).contiguous()


def _pack_scales(scales: Tensor, device: torch.device) -> Tensor:
    scales = scales.to(device)
    halves = scales.half()
    is_exact = bool((halves.float() == scales).all())
    return _to_words(halves if is_exact else scales)


def _encode(packed: PackedWeight, codes: Tensor) -> PackedWeight:
    """The packed weight with these codes, int8 [..., out, in], in as few bits as they take."""
    lowest, highest = (int(bound) for bound in codes.aminmax()) if codes.numel() else (0, 0)
    depth = packed.depth
    if highest - lowest < 16:
        offset = next((start for start in (-8, 0) if start <= lowest and highest < start + 16), lowest)
        nibbles = _fill_up(codes, 2 * depth) - offset
        return replace(packed, codes=_fold(nibbles.view(torch.uint8), depth), offset=offset)
    sizes = codes.abs()
    is_e2m1 = (sizes <= 4) | (sizes == 6) | (sizes == 8) | (sizes == 12)
    if packed.zero is None and lowest > -16 and bool(is_e2m1.all()):
        nibbles = sizes.clamp(max=4) + (sizes > 4) + (sizes > 6) + (sizes > 8) + (codes < 0).to(torch.int8) * 8
        return replace(packed, codes=_fold(_fill_up(nibbles.view(torch.uint8), 2 * depth), depth), is_e2m1=True)
    return replace(packed, codes=_fill_up(codes, depth))


def _fold(nibbles: Tensor, depth: int) -> Tensor:
    """Bytes of the two halves of each unit of `2 * depth`; of what fills up, the lower 4 bits count."""
    halves = nibbles.unflatten(-1, (-1, 2, depth))
    return (halves[..., 0, :] & 15 | halves[..., 1, :] << 4).flatten(-2)


def _check_rows(x: Tensor, packed: PackedWeight) -> None:
    if x.dim() != 2 or x.shape[1] != packed.in_size or x.dtype not in FLOATS or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype} with strides {x.stride()}; make it [rows, {packed.in_size}] float16, "
            "bfloat16 or float32, rows dense"
        )


def _check_bias(bias: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if bias is not None and (
        bias.shape != shape or bias.dtype not in (dtype, torch.float32) or not bias.is_contiguous()
    ):
        raise ValueError(
            f"the bias is {list(bias.shape)} {bias.dtype}; make it {list(shape)} {dtype} or torch.float32, dense"
        )


@triton.jit(do_not_specialize=["num_slots", "slots_of_row", "offset"])
def _multiply_kernel(
    x, weight, biases, output, table, num_slots, slots_of_row, in_size, out_size,
    num_units, num_groups, group_depths, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, NUM_HALVES: tl.constexpr,
    NUM_UNITS: tl.constexpr, IS_E2M1: tl.constexpr, OPERAND: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N outputs of a tile of rows, or of slots of one expert where there is a table."""
    tile = tl.program_id(0)
    members = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.zeros([], tl.int64)
    if table is None:
        slots = members
        is_member = members < num_slots
    else:
        expert = tl.load(table.tile_experts + tile).to(tl.int64)
        if expert < 0:
            return
        members = tl.load(table.tile_starts + tile) + tl.arange(0, BLOCK_M)
        is_member = members < tl.load(table.ends + expert)
        slots = tl.load(table.order + members, mask=is_member, other=0)
    columns, inputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, DEPTH)
    is_column = columns < out_size
    x_at = x.data + (slots // slots_of_row).to(tl.int64)[:, None] * x.strides[0] + inputs[None, :]
    row_bytes = num_units * DEPTH
    codes_at = weight.codes + expert * out_size * row_bytes
    codes_at += columns.to(tl.int64)[:, None] * row_bytes + inputs[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(0, num_units, NUM_UNITS, num_stages=NUM_STAGES):
        for index in tl.static_range(NUM_UNITS):
            # What lies behind the last unit or group repeats it, by inputs of 0.
            unit = first + index
            codes = tl.load(codes_at + tl.minimum(unit, num_units - 1) * DEPTH, mask=is_column[:, None], other=0.0)
            for half in tl.static_range(NUM_HALVES):
                piece = unit * NUM_HALVES + half
                is_input = piece * DEPTH + inputs < in_size
                x_tile = tl.load(x_at + piece * DEPTH, mask=is_member[:, None] & is_input[None, :], other=0.0)
                group = tl.minimum(piece // group_depths, num_groups - 1)
                values = _decode(codes, half, offset, NUM_HALVES, IS_E2M1, x.data.dtype.element_ty, OPERAND)
                if weight.zero is not None:
                    zero = _load_of_group(weight.zero, expert, group, num_groups, columns, out_size)
                    values -= zero.to(OPERAND)[:, None]
                scale = _load_of_group(weight.scale, expert, group, num_groups, columns, out_size).to(tl.float32)
                product = tl.dot(values, tl.trans(x_tile.to(OPERAND)), input_precision="ieee")
                sums += product * scale[:, None]
                if weight.minimum is not None:
                    minimum = _load_of_group(weight.minimum, expert, group, num_groups, columns, out_size)
                    sums -= minimum.to(tl.float32)[:, None] * tl.sum(x_tile.to(tl.float32), axis=1)[None, :]
    if biases is not None:
        sums += tl.load(biases + expert * out_size + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    output_at = output + slots.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(output_at, tl.trans(sums).to(output.dtype.element_ty), mask=is_member[:, None] & is_column[None, :])


@triton.jit
def _load_of_group(scales, expert, group, num_groups, columns, out_size):
    """What columns have in a group: all of a word is loaded."""
    PER_WORD: tl.constexpr = 32 // scales.dtype.element_ty.primitive_bitwidth
    words = scales.to(tl.pointer_type(tl.int32)) + expert * out_size * tl.cdiv(num_groups, PER_WORD)
    found = tl.load(words + group // PER_WORD * out_size + columns, mask=columns < out_size, other=0)
    if PER_WORD == 1:
        values = found.to(scales.dtype.element_ty, bitcast=True)
    elif PER_WORD == 2:
        values = (found >> group % PER_WORD * 16).to(tl.int16).to(scales.dtype.element_ty, bitcast=True)
    else:
        values = (found >> group % PER_WORD * 8).to(tl.int8)
    return values


@triton.jit
def _decode(
    codes, half: tl.constexpr, offset,
    NUM_HALVES: tl.constexpr, IS_E2M1: tl.constexpr, ELEMENT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Codes as operands. Those of 4 bits become bits of floats, which is cheaper than a conversion: the last bits of a
    number whose last bit is worth 1, or exponent and first bit of the fraction of a very small one."""
    TOP: tl.constexpr = ELEMENT.fp_mantissa_width  # where the exponent begins
    if NUM_HALVES == 1:
        values = codes.to(OPERAND)
    else:
        bits = codes.to(tl.int32 if ELEMENT == tl.float32 else tl.int16) >> 4 * half & 15
        if IS_E2M1:
            bits = (bits & 7) << (TOP - 1) | (bits & 8) << (ELEMENT.primitive_bitwidth - 4)
            values = bits.to(ELEMENT, bitcast=True).to(OPERAND) * (2.0**ELEMENT.exponent_bias)
        else:
            bits |= (ELEMENT.exponent_bias + TOP) << TOP
            values = bits.to(ELEMENT, bitcast=True).to(OPERAND) - tl.full([1, 1], 2**TOP - offset, OPERAND)
    return values
