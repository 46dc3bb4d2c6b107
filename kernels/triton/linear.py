"""Matrix multiplication with quantised weights that stay quantised: 4-bit or 8-bit codes, or 8-bit floats.

For each group of inputs, `dot(x, codes - zero)` is computed with exact operands and accumulated in float32. The scale
of the group multiplies this sum, not the weights. A program computes its result transposed, so that the decoded weights
are rows of the first operand, which processors read from registers (as Marlin does: Frantar et al., 2024,
https://arxiv.org/abs/2408.11743).

Specification: `dequantized()` of `pagewire.kernels.weight.StoredWeight`.
"""

import math
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.experts import Assignment
from pagewire.kernels.triton.launching import FLOATS, INTERPRETED, Strided, check_tensor, operand
from pagewire.kernels.weight import FLOAT8, GROUP_UNIT, StoredFormat, StoredWeight

_MAX_DEPTH = 64  # largest number of inputs of one dot product
_NUM_PROGRAMS = 2 * 132  # enough to keep the processors of an H200 busy

# The compile-time constants of the kernel: the tile of a program; the inputs of a dot product (depth), the dot products
# of a step that are computed side by side (lanes), and the codes per byte (halves); the depths per group, 0: one group;
# the offset of 4-bit codes, or whether they are E2M1 numbers; the type of operands; the PTX that decodes 4-bit codes,
# or None; and the number of steps that are loaded ahead.
KernelShape = namedtuple(
    "KernelShape", "block_m block_n depth num_lanes num_halves group_depths offset is_e2m1 operand decoders num_stages"
)
# A `PackedWeight` as kernel arguments: pointers, or None for a missing part.
Pointers = namedtuple("Pointers", "codes scale zero minimum")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantised weight [..., out, in] in the memory layout of this module's kernel. It belongs to one linear layer,
    or contains the weights of all experts. Its value is `scale * (codes - zero) - minimum`.

    4-bit codes are stored in units of `2 * depth` inputs: the first half of a unit in the lower halves of its bytes,
    the second half in the upper halves. Other codes are stored in units of `depth` inputs. The last unit is padded.
    Scales, zeros and minima are stored in 32-bit words. A word contains consecutive groups of one output, and the words
    of neighbouring outputs are adjacent. The reason is that only loads of at least 32 bits can be prefetched.

    Attributes:
        codes: [..., out, units * depth], dense: uint8, two 4-bit codes per byte; int8; or float8_e4m3fn.
        scale: [..., words, out, groups per word]: float16 if float16 represents every scale exactly, else float32.
        zero: int8 in the same layout; None means 0.
        minimum: float16 or float32 in the same layout; None means 0.
        group_size: number of inputs that share a scale. The last group may be shorter.
        in_size: number of inputs, without the padding of the last unit.
        offset: value that is added to a 4-bit code: 0 or -8.
        is_e2m1: 4-bit codes are E2M1 numbers instead, and represent twice these numbers.
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
        """The number of inputs in one dot product of the kernel. All of these inputs belong to one group, so they share
        a scale."""
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
    def is_float(self) -> bool:
        return self.codes.dtype == FLOAT8


class LinearTile(NamedTuple):
    """The tile of a matrix multiplication, which is the part of the result that one program of the kernel computes, and
    the launch options of the kernel. The tile has `block_m` rows of activations and `block_n` outputs.

    In each step of its loop, the program computes `num_lanes` dot products side by side.
    """

    block_m: int
    block_n: int
    num_lanes: int
    num_warps: int
    num_stages: int


# By bytes per element of x and rows per tile, widest first. For few rows, memory bandwidth limits the reading of
# weights. These tiles use lanes and more warps, because fewer warps could not hide the latency of a step.
_TILES = {
    2: {
        16: [LinearTile(16, 64, 4, 8, 4), LinearTile(16, 32, 4, 4, 4), LinearTile(16, 16, 8, 8, 3)],
        32: [LinearTile(32, 64, 4, 8, 4), LinearTile(32, 32, 4, 8, 3), LinearTile(32, 16, 8, 8, 3)],
        64: [LinearTile(64, 128, 1, 8, 4), LinearTile(64, 64, 1, 4, 4)],
    },
    4: {16: [LinearTile(16, 16, 4, 4, 3)], 32: [LinearTile(32, 64, 1, 4, 3)]},
}


def can_pack(group_size: int, in_size: int) -> bool:
    """Return whether `pack` supports quantised weights with this group size (the number of inputs that share a scale).
    Multiples of 16 inputs, and groups that cover a whole row, are supported."""
    return group_size >= in_size or not group_size % GROUP_UNIT


def num_bytes(format: StoredFormat, out_size: int, in_size: int) -> int:
    """Return an upper bound on the GPU memory, in bytes, of a quantised weight of this format after `pack`. The bound
    is known before the weight is read.

    Scales are assumed to need 4 bytes, because only their values show whether float16 represents them. Codes of at most
    4 bits are assumed to stay at 4 bits. `join` may store them in 8 bits if other experts need 8 bits; the bound does
    not include this.
    """
    bits, group_size = 4 if format.bits <= 4 and not format.table else 8, format.group_size
    num_groups, depth = -(-in_size // group_size), _depth(group_size, in_size)
    of_codes = -(-in_size // (depth * 8 // bits)) * depth
    has_zeros = format.has_zeros or bits == 4  # shifting codes into 4 bits may add zeros
    of_zeros = -(-num_groups // 4) * 4 if has_zeros else 0
    return out_size * (of_codes + 4 * num_groups * (1 + format.has_minima) + of_zeros)


def pack(weight: StoredWeight, device: torch.device) -> PackedWeight:
    """Convert a quantised weight to the memory layout of this module's kernel, on `device`. The values do not change.

    Codes are stored in 4 bits in two cases: all codes differ by less than 16, or all codes are twice E2M1 numbers and
    the weight has no zeros.

    Raises:
        ValueError: the group size is neither a multiple of 16 inputs nor a whole row.
    """
    in_size = weight.values.shape[1]
    if not can_pack(weight.group_size, in_size):
        raise ValueError(
            f"groups of {weight.group_size} of {in_size} inputs are not supported; make them a multiple of "
            f"{GROUP_UNIT}, or whole rows"
        )
    parts = {name: part.to(device) for name, part in weight.without_factors().parts().items()}
    zero, minimum = parts.get("zero"), parts.get("minimum")
    packed = PackedWeight(
        parts["values"],
        _pack_scales(parts["scale"]),
        None if zero is None else _to_words(zero),
        None if minimum is None else _pack_scales(minimum),
        weight.group_size,
        in_size,
    )
    return _ENCODERS[weight.element](packed, parts["values"])


def multiply(x: Tensor, packed: PackedWeight, bias: Tensor | None = None, output: Tensor | None = None) -> Tensor:
    """Return x W^T + b, the output of a linear layer with a quantised weight. The result of a row of x does not depend
    on the other rows.

    Args:
        x: [T, in_size] float16, bfloat16 or float32; any row stride.
        packed: the weight.
        bias: [out_size], dense, of the dtype of x or float32; or None.
        output: memory for the result, [T, out_size], dense, of the dtype of x or float32; None means new memory of the
            dtype of x.

    Returns:
        [T, out_size]. The sum, including the bias, is computed in float32.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    if packed.codes.dim() != 2:
        raise ValueError(f"the weight has {len(packed.codes)} experts; use `multiply_routed`")
    out_size = packed.out_size
    check_tensor("x", x, ("rows", packed.in_size), *FLOATS, is_strided=True)
    check_tensor("bias", bias, (out_size,), x.dtype, torch.float32)
    check_tensor("output", output, (len(x), out_size), x.dtype, torch.float32)
    if output is None:
        output = x.new_empty(len(x), out_size)
    if output.numel():
        block_m = choose_block_m(len(x), x.dtype)
        _launch(triton.cdiv(len(x), block_m), block_m, x, packed, bias, output, None, 1)
    return output


def multiply_routed(x: Tensor, packed: PackedWeight, assignment: Assignment, biases: Tensor | None = None) -> Tensor:
    """Return the expert outputs of a mixture-of-experts layer with quantised weights. Each pair of a token and one of
    its chosen experts is called a slot. The output of a slot is x W^T + b, with the weight W and the bias b of the
    slot's expert.

    Args:
        x: [T, in_size], one row per token, or [T * num_chosen, in_size], one row per slot; float16, bfloat16 or
            float32, any row stride.
        packed: the weights of all experts.
        assignment: the assignment of these slots, for the dtype of x.
        biases: [num_experts, out_size], dense, of the dtype of x or float32; or None.

    Returns:
        The outputs of all slots, [T * num_chosen, out_size], in the dtype of x. The sum, including the bias, is
        computed in float32.

    Raises:
        ValueError: a shape, stride or dtype is not supported.
    """
    table, num_chosen, tile = assignment
    num_slots, num_experts = len(table.order), len(table.ends)
    if packed.codes.dim() != 3 or len(packed.codes) != num_experts:
        raise ValueError(f"the weight is {list(packed.codes.shape)}; build one for {num_experts} experts with `join`")
    check_tensor("x", x, ("rows", packed.in_size), *FLOATS, is_strided=True)
    num_tokens = num_slots // num_chosen
    if len(x) not in (num_tokens, num_slots):
        raise ValueError(f"x has {len(x)} rows; pass {num_tokens} rows, one per token, or {num_slots}, one per slot")
    check_tensor("biases", biases, (num_experts, packed.out_size), x.dtype, torch.float32)
    output = x.new_empty(num_slots, packed.out_size)
    if output.numel():
        _launch(len(table.tile_experts), tile.block_m, x, packed, biases, output, table, num_slots // len(x))
    return output


def join(packed: Sequence[PackedWeight]) -> PackedWeight:
    """Combine the packed weights of single experts into one weight for the whole expert layer. The codes of all experts
    get the same number of bits: 4 if that is possible for all of them, else 8.

    Raises:
        ValueError: sizes differ, only some weights are 8-bit floats, or there is no weight.
    """
    kinds = {(each.codes.dim(), each.out_size, each.in_size, each.group_size, each.is_float) for each in packed}
    if len(kinds) != 1 or packed[0].codes.dim() != 2:
        raise ValueError(
            f"weights have (dimensions, outputs, inputs, group size, is float) {sorted(kinds)}; make them equal, with "
            "2 dimensions"
        )
    first, num_groups = packed[0], packed[0].num_groups
    parts = {
        name: _stack([getattr(each, name) for each in packed], num_groups) for name in ("scale", "zero", "minimum")
    }
    joined = replace(first, **parts)  # type: ignore[arg-type]
    if len({(each.codes.dtype, each.offset, each.is_e2m1) for each in packed}) == 1:
        codes = torch.stack([each.codes.view(torch.uint8) for each in packed])
        return replace(joined, codes=codes.view(first.codes.dtype))
    codes = torch.stack([_unpack_codes(each.codes, each) for each in packed])
    return _encode(replace(joined, offset=0, is_e2m1=False), codes)


def lookup_rows(packed: PackedWeight, indexes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a quantised weight as floats, as an embedding looks them up. The rows are computed in float32 and
    rounded once. The host does not wait for the device.

    Args:
        packed: a weight of 2 dimensions.
        indexes: [T] int64, each from 0 to out_size - 1.
        dtype: dtype of the result.

    Returns:
        [T, in_size].

    Raises:
        ValueError: the indexes are not of this shape or dtype, or the weight is for experts.
    """
    if indexes.dim() != 1 or indexes.dtype != torch.int64 or packed.codes.dim() != 2:
        raise ValueError(
            f"indexes are {list(indexes.shape)} {indexes.dtype} and the weight is {list(packed.codes.shape)}; pass "
            "indexes [T] torch.int64 and a weight with 2 dimensions"
        )
    rows = _unpack_codes(packed.codes.view(torch.uint8)[indexes].view(packed.codes.dtype), packed).float()

    def of_inputs(words: Tensor) -> Tensor:
        found = _from_words(words[:, indexes])[:, : packed.num_groups].float()
        return found.repeat_interleave(min(packed.group_size, packed.in_size), 1)[:, : packed.in_size]

    if packed.zero is not None:
        rows = rows - of_inputs(packed.zero)
    rows = rows * of_inputs(packed.scale)
    if packed.minimum is not None:
        rows = rows - of_inputs(packed.minimum)
    return rows.to(dtype)


def choose_block_m(num_rows: int, dtype: torch.dtype) -> int:
    """Return the number of rows of activations that one program of the matrix multiplication processes. `num_rows` is
    the total number of rows, and `dtype` is the dtype of the activations. Layers with experts do not use this
    function."""
    sizes = _TILES[dtype.itemsize]
    return next((size for size in sizes if num_rows <= size), max(sizes))


def choose_tile(block_m: int, num_tiles: int, out_size: int, dtype: torch.dtype) -> LinearTile:
    """Return the tile that each program of the matrix multiplication computes: the widest tile that still gives enough
    programs to fill the GPU, or else the narrowest tile. `num_tiles` is the number of tiles along the rows."""
    tiles = _TILES[dtype.itemsize][block_m]
    wide = (tile for tile in tiles if num_tiles * triton.cdiv(out_size, tile.block_n) >= _NUM_PROGRAMS)
    return next(wide, tiles[-1])


def kernel_shape(packed: PackedWeight, tile: LinearTile, dtype: torch.dtype) -> KernelShape:
    """Return the compile-time constants with which the matrix multiplication kernel is compiled for a packed weight, a
    tile, and activations of `dtype`."""
    num_halves = 8 // packed.bits
    has_decoders = num_halves == 2 and dtype.itemsize == 2 and not INTERPRETED
    return KernelShape(
        tile.block_m,
        tile.block_n,
        packed.depth,
        tile.num_lanes,
        num_halves,
        0 if packed.num_groups == 1 else packed.group_size // packed.depth,
        packed.offset,
        packed.is_e2m1,
        operand(dtype, dtype),
        tuple(decoder(dtype, packed.is_e2m1, half) for half in range(2)) if has_decoders else None,
        tile.num_stages,
    )


def decoder(dtype: torch.dtype, is_e2m1: bool, half: int) -> str:
    """Return a piece of PTX assembly with which the kernel converts four 4-bit codes to 16-bit floats.

    The four codes are in the 4 bytes of register $2: in the upper 4 bits of each byte if `half` is 1, else in the lower
    4 bits. The code writes the bits of two floats to $0 and of two floats to $1. The results equal the results of the
    kernel's generic code in `_decode`.
    """
    if not is_e2m1:
        top = "0x64646464" if dtype == torch.float16 else "0x43434343"  # the upper bytes of the floats 1024 or 128
        lines = ["shr.b32 t, $2, 4", "and.b32 t, t, 0x0F0F0F0F"] if half else ["and.b32 t, $2, 0x0F0F0F0F"]
        lines += [f"prmt.b32 $0, t, {top}, 0x4140", f"prmt.b32 $1, t, {top}, 0x4342"]
    elif dtype == torch.float16:  # the result is in the upper bytes
        lines = ["shr.b32 t, $2, 3", "and.b32 u, $2, 0x80808080"]
        if not half:
            lines = ["shl.b32 t, $2, 1", "shl.b32 u, $2, 4", "and.b32 u, u, 0x80808080"]
        lines += ["and.b32 t, t, 0x0E0E0E0E", "or.b32 t, t, u"]
        lines += ["prmt.b32 $0, t, 0, 0x1404", "prmt.b32 $1, t, 0, 0x3424"]
    else:
        lines = []
        for index, bytes_of_two in enumerate(("0x4140", "0x4342")):
            lines += [f"prmt.b32 t, $2, 0, {bytes_of_two}", f"shl.b32 u, t, {8 if half else 12}"]
            lines += [f"shl.b32 t, t, {2 if half else 6}", "and.b32 t, t, 0x01C001C0", "and.b32 u, u, 0x80008000"]
            # An output register must not replace an input register that is still to be read.
            lines += [f"or.b32 {'v' if index == 0 else '$1'}, t, u"]
        lines += ["mov.b32 $0, v"]
    return "{.reg .b32 t, u, v; " + "; ".join(lines) + ";}"


def _launch(
    num_tiles: int,
    block_m: int,
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    output: Tensor,
    table: object,
    slots_of_row: int,
) -> None:
    num_slots, out_size = output.shape
    tile = choose_tile(block_m, num_tiles, out_size, x.dtype)
    pointers = Pointers(packed.codes, packed.scale, packed.zero, packed.minimum)
    _multiply_kernel[(num_tiles, triton.cdiv(out_size, tile.block_n))](
        Strided.of(x),
        pointers,
        bias,
        output,
        table,
        num_slots,
        slots_of_row,
        packed.in_size,
        out_size,
        *launch_sizes(packed),
        SHAPE=kernel_shape(packed, tile, x.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def launch_sizes(packed: PackedWeight) -> tuple[int, int]:
    """Return two sizes that each launch of the kernel needs: the number of units in which the codes of an output are
    stored, and the number of quantization groups of an output."""
    return packed.codes.shape[-1] // packed.depth, packed.num_groups


def _depth(group_size: int, in_size: int) -> int:
    return _MAX_DEPTH if group_size >= in_size else math.gcd(group_size, _MAX_DEPTH)


def _pad_to_unit(codes: Tensor, unit: int) -> Tensor:
    missing = -codes.shape[-1] % unit
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes.contiguous()


def _to_words(scales: Tensor) -> Tensor:
    """Rearrange scales or zeros [..., out, groups] into 32-bit words, as the kernel reads them: [..., words, out,
    groups per word]."""
    per_word = 4 // scales.itemsize
    return _pad_to_unit(scales, per_word).unflatten(-1, (-1, per_word)).transpose(-2, -3).contiguous()


def _from_words(words: Tensor) -> Tensor:
    """Convert scales or zeros from the 32-bit words of `_to_words` back to [..., out, groups]. The padding of the last
    word is included."""
    return words.transpose(-2, -3).flatten(-2)


def _pack_scales(scales: Tensor) -> Tensor:
    halves = scales.half()
    is_exact = bool((halves.float() == scales).all())
    return _to_words(halves if is_exact else scales)


def _encode(packed: PackedWeight, codes: Tensor) -> PackedWeight:
    """Return the packed weight with its codes replaced by these int8 codes, [..., out, in]. The codes are stored in 4
    bits if possible and in 8 bits otherwise."""
    lowest, highest = (int(bound) for bound in codes.aminmax()) if codes.numel() else (0, 0)
    depth = packed.depth
    start = next((start for start in (-8, 0) if start <= lowest and highest < start + 16), None)
    if start is None and highest - lowest < 16:  # shifting zeros and codes makes them fit
        shifted = _shift_zero(packed, -8 - lowest)
        if shifted is not None:
            packed, codes, start = replace(packed, zero=shifted), codes - 8 - lowest, -8
    if start is not None:
        nibbles = _pad_to_unit(codes, 2 * depth) - start
        return replace(packed, codes=_pack_nibbles(nibbles.view(torch.uint8), depth), offset=start)
    sizes = codes.abs()
    is_e2m1 = (sizes <= 4) | (sizes == 6) | (sizes == 8) | (sizes == 12)
    if packed.zero is None and lowest > -16 and bool(is_e2m1.all()):
        nibbles = sizes.clamp(max=4) + (sizes > 4) + (sizes > 6) + (sizes > 8) + (codes < 0).to(torch.int8) * 8
        return replace(
            packed, codes=_pack_nibbles(_pad_to_unit(nibbles.view(torch.uint8), 2 * depth), depth), is_e2m1=True
        )
    return replace(packed, codes=_pad_to_unit(codes, depth))


def _encode_floats(packed: PackedWeight, values: Tensor) -> PackedWeight:
    return replace(packed, codes=_pad_to_unit(values.view(torch.uint8), packed.depth).view(FLOAT8))


_ENCODERS = {torch.int8: _encode, FLOAT8: _encode_floats}  # by a weight's element


def _shift_zero(packed: PackedWeight, distance: int) -> Tensor | None:
    """Return the new zero points of a packed weight after `distance` was added to all its codes. The represented values
    do not change. Return None if a zero point no longer fits in 8 bits."""
    if packed.zero is None:
        return torch.full_like(_to_words(_from_words(packed.scale).to(torch.int8)), distance)
    moved = packed.zero.short() + distance
    return moved.char() if bool((moved.char() == moved).all()) else None


def _unpack_codes(codes: Tensor, packed: PackedWeight) -> Tensor:
    """Return the codes [..., in] of a packed weight as one number each: int8 codes without padding, or float8_e4m3fn
    values."""
    if packed.bits == 8:
        return codes[..., : packed.in_size]
    halves = codes.unflatten(-1, (-1, 1, packed.depth))
    nibbles = torch.cat((halves & 15, halves >> 4), -2).flatten(-3)[..., : packed.in_size].view(torch.int8)
    if not packed.is_e2m1:
        return nibbles + packed.offset
    sizes = nibbles & 7
    sizes = sizes + (sizes > 4) + (sizes > 5) + 3 * (sizes > 6).char()
    return torch.where(nibbles > 7, -sizes, sizes)


def _stack(parts: Sequence[Tensor | None], num_groups: int) -> Tensor | None:
    """Stack the scales (or zeros, or minima) of several experts' weights, converted to the widest of their dtypes. An
    entry of `parts` is None if the weight has no such tensor; zeros are used instead.

    Return None if all entries are None.
    """
    there = [part for part in parts if part is not None]
    if not there:
        return None
    dtype = max((part.dtype for part in there), key=lambda each: each.itemsize)
    nothing = _to_words(torch.zeros_like(_from_words(there[0])[..., :num_groups], dtype=dtype))

    def widened(part: Tensor | None) -> Tensor:
        if part is None or part.dtype == dtype:
            return nothing if part is None else part
        return _to_words(_from_words(part)[..., :num_groups].to(dtype))

    return torch.stack([widened(part) for part in parts])


def _pack_nibbles(nibbles: Tensor, depth: int) -> Tensor:
    """Store two 4-bit codes in each byte. Each unit of `2 * depth` codes is packed on its own: code i of its first half
    is in the lower bits of a byte, and code i of its second half in the upper bits. Only the lower 4 bits of a code are
    used."""
    halves = nibbles.unflatten(-1, (-1, 2, depth))
    return (halves[..., 0, :] & 15 | halves[..., 1, :] << 4).flatten(-2)


@triton.jit(do_not_specialize=["num_slots", "slots_of_row", "num_units", "num_groups"])
def _multiply_kernel(
    x, weight, biases, output, table, num_slots, slots_of_row, in_size, out_size,
    num_units, num_groups, SHAPE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that multiplies activations by a quantised weight. Each program computes BLOCK_N outputs for a tile
    of rows. If a table of slots (pairs of token and chosen expert) is given, a tile contains slots of the same expert
    instead of rows.

    Tiles have the dimensions (outputs, rows). With several lanes they are (lanes, outputs, rows).
    """
    tile = tl.program_id(0)
    members = tile * SHAPE.block_m + tl.arange(0, SHAPE.block_m)
    expert = tl.zeros([], tl.int64)
    if table is None:
        slots = members
        is_member = members < num_slots
    else:
        expert = tl.load(table.tile_experts + tile).to(tl.int64)
        if expert < 0:
            return
        members = tl.load(table.tile_starts + tile) + tl.arange(0, SHAPE.block_m)
        is_member = members < tl.load(table.ends + expert)
        slots = tl.load(table.order + members, mask=is_member, other=0)
    columns = tl.program_id(1) * SHAPE.block_n + tl.arange(0, SHAPE.block_n)
    is_column = columns < out_size
    x_at = x.data + (slots // slots_of_row).to(tl.int64) * x.strides[0]
    sums = _sum_groups(x_at, is_member, weight, expert, columns, in_size, out_size, num_units, num_groups, SHAPE)
    if biases is not None:
        sums += tl.load(biases + expert * out_size + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    output_at = output + slots.to(tl.int64)[:, None] * out_size + columns[None, :]
    tl.store(output_at, tl.trans(sums).to(output.dtype.element_ty), mask=is_member[:, None] & is_column[None, :])


@triton.jit
def _sum_groups(
    x_at, is_member, weight, expert, columns, in_size, out_size, num_units, num_groups,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one tile of the matrix multiplication: multiply each quantization group of inputs, apply
    its scales, and sum over all groups. Return [BLOCK_N, BLOCK_M] float32."""
    DEPTH: tl.constexpr = SHAPE.depth
    NUM_HALVES: tl.constexpr = SHAPE.num_halves
    ELEMENT: tl.constexpr = x_at.dtype.element_ty
    inputs, lanes = _expand_along(tl.arange(0, DEPTH), 1, SHAPE), 0
    columns, x_at, is_member = (
        _expand_along(columns, 0, SHAPE),
        _expand_along(x_at, 0, SHAPE),
        _expand_along(is_member, 0, SHAPE),
    )
    sums = tl.full([SHAPE.block_n, SHAPE.block_m], 0.0, tl.float32)
    if SHAPE.num_lanes > 1:
        lanes = tl.arange(0, SHAPE.num_lanes)[:, None, None]
        sums = tl.full([SHAPE.num_lanes, SHAPE.block_n, SHAPE.block_m], 0.0, tl.float32)
    is_column = columns < out_size
    row_bytes = num_units * DEPTH
    codes_at = weight.codes + expert * out_size * row_bytes + columns.to(tl.int64) * row_bytes + inputs
    for first in tl.range(0, num_units, SHAPE.num_lanes, num_stages=SHAPE.num_stages):
        # Indexes after the last unit or group repeat it, with inputs of 0.
        units = first + lanes
        codes = tl.load(codes_at + tl.minimum(units, num_units - 1) * DEPTH, mask=is_column, other=0.0)
        for half in tl.static_range(NUM_HALVES):
            pieces = units * NUM_HALVES + half
            x_tile = tl.load(
                x_at + (pieces * DEPTH + inputs), mask=is_member & (pieces * DEPTH + inputs < in_size), other=0.0
            )
            groups = pieces * 0
            if SHAPE.group_depths > 0:
                groups = tl.minimum(pieces // SHAPE.group_depths, num_groups - 1)
            values = _decode(codes, half, ELEMENT, SHAPE)
            if weight.zero is not None:
                values -= _load_of_groups(weight.zero, expert, groups, num_groups, columns, out_size).to(SHAPE.operand)
            scale = _load_of_groups(weight.scale, expert, groups, num_groups, columns, out_size).to(tl.float32)
            x_operand = _transpose(x_tile.to(SHAPE.operand), SHAPE)
            product = tl.dot(values, x_operand, input_precision="ieee")
            sums += product * scale
            if weight.minimum is not None:
                minimum = _load_of_groups(weight.minimum, expert, groups, num_groups, columns, out_size)
                # The sum of inputs of each row. A dot product needs fewer instructions than a sum across threads.
                ones = tl.full(codes.shape, 1.0, SHAPE.operand)
                x_sums = tl.dot(ones, x_operand, input_precision="ieee")
                sums -= minimum.to(tl.float32) * x_sums
    if SHAPE.num_lanes > 1:
        sums = tl.sum(sums, axis=0)
    return sums


@triton.jit
def _expand_along(line, dim: tl.constexpr, SHAPE: tl.constexpr):
    """Reshape a vector so that it broadcasts along dimension `dim` of a tile, 0 (outputs) or 1 (rows or inputs). If
    there are several lanes, they are an additional leading dimension."""
    line = line[:, None] if dim == 0 else line[None, :]
    if SHAPE.num_lanes > 1:
        line = line[None, :, :]
    return line


@triton.jit
def _transpose(tile, SHAPE: tl.constexpr):
    return tl.trans(tile, 0, 2, 1) if SHAPE.num_lanes > 1 else tl.trans(tile)


@triton.jit
def _load_of_groups(scales, expert, groups, num_groups, columns, out_size):
    """Load the scales (or zeros, or minima) of some quantization groups for the outputs of a tile. They are stored in
    32-bit words, and the whole word that contains the value is loaded."""
    PER_WORD: tl.constexpr = 32 // scales.dtype.element_ty.primitive_bitwidth
    words = scales.to(tl.pointer_type(tl.int32)) + expert * out_size * tl.cdiv(num_groups, PER_WORD)
    found = tl.load(words + groups // PER_WORD * out_size + columns, mask=columns < out_size, other=0)
    if PER_WORD == 1:
        values = found.to(scales.dtype.element_ty, bitcast=True)
    elif PER_WORD == 2:
        values = (found >> groups % PER_WORD * 16).to(tl.int16).to(scales.dtype.element_ty, bitcast=True)
    else:
        values = (found >> groups % PER_WORD * 8).to(tl.int8)
    return values


@triton.jit
def _decode(codes, half: tl.constexpr, ELEMENT: tl.constexpr, SHAPE: tl.constexpr):
    """Convert a tile of codes to floats, as operands of the dot product.

    For 4-bit codes, the bits of a float are put together directly, which is cheaper than a conversion. An integer code
    becomes the last bits of a float whose last bit has the value 1, such as 1024 in float16. An E2M1 number becomes the
    exponent and the first fraction bit of a very small float. Then a subtraction or multiplication gives the value of
    the code.
    """
    if SHAPE.num_halves == 1:
        values = codes.to(SHAPE.operand)
    else:
        TOP: tl.constexpr = ELEMENT.fp_mantissa_width  # where the exponent begins
        if SHAPE.decoders is None:
            bits = codes.to(tl.int32 if ELEMENT.primitive_bitwidth == 32 else tl.int16) >> 4 * half & 15
            if SHAPE.is_e2m1:
                bits = (bits & 7) << (TOP - 1) | (bits & 8) << (ELEMENT.primitive_bitwidth - 4)
            else:
                bits |= (ELEMENT.exponent_bias + TOP) << TOP
        else:
            bits = tl.inline_asm_elementwise(SHAPE.decoders[half], "=r,=r,r", [codes], tl.int16, True, 4)
        floats = bits.to(ELEMENT, bitcast=True).to(SHAPE.operand)
        values = floats * (2.0**ELEMENT.exponent_bias) if SHAPE.is_e2m1 else floats - (2.0**TOP - SHAPE.offset)
    return values
