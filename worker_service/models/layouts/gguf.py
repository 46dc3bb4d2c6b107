"""Quantised blocks of GGUF files, decoded to integer codes with their scales.

Each type means w = scale * code - minimum in float32, bit for bit the values that PyPI `gguf` computes. Scales and
minimums of K-quants are integers, with float factors for each 256 inputs. Codes of the IQ types are values of a grid
with their signs. The layouts follow llama.cpp's ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.common.gguf import ElementType
from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import StoredFormat, StoredWeight
from worker_service.models.layouts.gguf_grids import grid

_CODE_BITS = torch.arange(8, dtype=torch.uint8)
_PAIRS = _CODE_BITS[::2, None]  # the places of the 2-bit numbers in a byte
_SEVENS = torch.arange(0, 28, 7)  # the places of four 7-bit numbers in a word
_OCTALS = torch.arange(0, 12, 3)  # the places of four 3-bit numbers in a word
_POWERS = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8)[:, None]
_GRIDS = {name: grid(name) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")}
# Seven signs are stored; the eighth makes the number of negative signs even.
_EVEN_SIGNS = torch.tensor([index | index.bit_count() % 2 << 7 for index in range(128)], dtype=torch.uint8)
# The values of the 4-bit codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.int8)


def decode_rows(element_type: ElementType, rows: Tensor) -> StoredWeight:
    """Decode rows of a quantised GGUF tensor, given as bytes [rows, bytes per row], to integer codes with scales."""
    layout = BLOCKS[element_type.name]
    blocks = rows.unflatten(1, (-1, element_type.block_bytes))  # [rows, blocks, block_bytes]
    parts = {name: values.flatten(1) for name, values in layout.decode(blocks).items()}
    codes = parts["codes"].view(torch.int8)
    # Types without scales of groups have only the factor of a block.
    scale = parts["scale"].float() if "scale" in parts else torch.ones(len(codes), codes.shape[1] // 32)
    return StoredWeight(
        codes,
        scale,
        layout.format.group_size,
        parts["minimum"].float() if "minimum" in parts else None,
        scale_factor=parts.get("scale_factor"),
        minimum_factor=parts.get("minimum_factor"),
    )


def is_finite(weight: StoredWeight) -> bool:
    """Return whether all scales and minimums of a decoded GGUF weight are finite."""
    return all(bool(part.isfinite().all()) for part in weight.parts().values() if part.is_floating_point())


# The parts of a `StoredWeight`, each [rows, blocks, values per block]. Codes may be bytes, and scales integers.
_Parts = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The memory format of a quantised GGUF type, such as Q4_K, with the function that decodes its blocks. A block is a
    number of values that are stored together; `ElementType` gives its size."""

    format: StoredFormat
    decode: Callable[[Tensor], _Parts]


def _half(blocks: Tensor, start: int) -> Tensor:
    """Read the float16 number at byte `start` of each quantised block, and return it as float32, [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit codes from bytes: return the lower halves of all bytes, followed by the upper halves, [..., n] ->
    [..., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpack the highest bit of each 5-bit code. These bits are stored apart from the lower four. The results are 0 or
    16: [..., 4] -> [..., 32]."""
    return ((packed[..., None] >> _CODE_BITS) & 1).flatten(-2) << 4


def _decode_q8_0(blocks: Tensor) -> _Parts:
    return {"codes": blocks[..., 2:], "scale": _half(blocks, 0)}


def _decode_q4_0(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 2:]) - 8, "scale": _half(blocks, 0)}


def _decode_q4_1(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 4:]), "scale": _half(blocks, 0), "minimum": -_half(blocks, 2)}


def _decode_q5_0(blocks: Tensor) -> _Parts:
    return {"codes": (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])) - 16, "scale": _half(blocks, 0)}


def _decode_q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return {"codes": codes, "scale": _half(blocks, 0), "minimum": -_half(blocks, 2)}


def _scales_and_minimums(blocks: Tensor) -> _Parts:
    """Unpack the eight 6-bit scales and the eight 6-bit minima of each Q4_K or Q5_K block, and read the two float16
    factors by which they are multiplied. Return a dictionary with these tensors, keyed by the attribute names of
    `StoredWeight`."""
    low, middle, high = blocks[..., 4:16].split(4, dim=-1)
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minimum = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    factors = {"scale_factor": _half(blocks, 0), "minimum_factor": _half(blocks, 2)}
    return {"scale": scale, "minimum": minimum, **factors}


def _decode_q4_k(blocks: Tensor) -> _Parts:
    return {"codes": _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), **_scales_and_minimums(blocks)}


def _decode_q5_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    fifth = (blocks[..., None, 16:48] >> _CODE_BITS[:, None]) & 1  # [rows, blocks, 8 groups, 32]
    return {"codes": codes | (fifth.flatten(-2) << 4), **_scales_and_minimums(blocks)}


def _decode_q2_k(blocks: Tensor) -> _Parts:
    scales = blocks[..., :16]
    codes = (blocks[..., 16:80].unflatten(-1, (2, 1, 32)) >> _PAIRS) & 3  # [rows, blocks, 2, 4, 32]
    factors = {"scale_factor": _half(blocks, 80), "minimum_factor": _half(blocks, 82)}
    return {"codes": codes.flatten(-3), "scale": scales & 15, "minimum": scales >> 4, **factors}


def _decode_q3_k(blocks: Tensor) -> _Parts:
    low = (blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> _PAIRS) & 3  # [rows, blocks, 2, 4, 32]
    high = (blocks[..., None, :32] >> _CODE_BITS[:, None]) & 1  # [rows, blocks, 8, 32]; 0: subtract 4
    codes = (low.flatten(-3) | (high.flatten(-2) << 2)) - 4
    sixths = (blocks[..., None, 104:108] >> _PAIRS) & 3  # [rows, blocks, 4, 4]
    scale = (_nibbles(blocks[..., 96:104]) | (sixths.flatten(-2) << 4)).view(torch.int8) - 32
    return {"codes": codes, "scale": scale, "scale_factor": _half(blocks, 108)}


def _decode_iq4_nl(blocks: Tensor) -> _Parts:
    return {"codes": _IQ4_VALUES[_nibbles(blocks[..., 2:]).int()].view(torch.uint8), "scale": _half(blocks, 0)}


def _decode_iq4_xs(blocks: Tensor) -> _Parts:
    codes = _IQ4_VALUES[_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2).int()].view(torch.uint8)
    low = _alternating(blocks[..., 4:8])
    high = (blocks[..., 2:4, None] >> _CODE_BITS[::2]) & 3  # [rows, blocks, 2, 4]
    scale = (low | (high.flatten(-2) << 4)).view(torch.int8) - 32
    return {"codes": codes, "scale": scale, "scale_factor": _half(blocks, 0)}


def _decode_q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [rows, blocks, 2, 4, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _CODE_BITS[:8:2, None]
    codes = (low | ((high & 3) << 4)).flatten(-3) - 32
    return {"codes": codes, "scale": blocks[..., 192:208].view(torch.int8), "scale_factor": _half(blocks, 208)}


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Read the unsigned numbers in the bytes from `start` to `stop` of each block, as int64. `dtype` is int16 or
    int32."""
    return blocks[..., start:stop].contiguous().view(dtype).long() & ((1 << 8 * dtype.itemsize) - 1)


def _alternating(packed: Tensor) -> Tensor:
    """Unpack 4-bit numbers from bytes: the lower half of each byte, followed by its upper half, [..., n] ->
    [..., 2n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _from_grid(type_name: str, indexes: Tensor, signs: Tensor) -> Tensor:
    """Look up vectors of a grid, and apply signs: a bit for each value, of which 1 means a negative value. `signs` has
    a byte for each 8 values. Return int8 codes, [rows, blocks, 256]."""
    values = _GRIDS[type_name][indexes].flatten(2)
    is_negative = ((signs[..., None] >> _CODE_BITS) & 1).flatten(2).bool()
    return values.where(~is_negative, -values)


def _decode_iq2_xxs(blocks: Tensor) -> _Parts:
    words = _words(blocks, 2, 66, torch.int32)[..., 1::2]  # [rows, blocks, 8 groups]
    indexes = blocks[..., 2:].unflatten(-1, (8, 8))[..., :4].flatten(2).long()
    signs = _EVEN_SIGNS[((words[..., None] >> _SEVENS) & 127).flatten(2)]
    return {"codes": _from_grid("IQ2_XXS", indexes, signs), "scale": (2 * (words >> 28) + 1) * (_half(blocks, 0) / 8)}


def _decode_iq2_xs(blocks: Tensor) -> _Parts:
    words = _words(blocks, 2, 66, torch.int16)
    codes = _from_grid("IQ2_XS", words & 511, _EVEN_SIGNS[words >> 9])
    return {"codes": codes, "scale": (2 * _alternating(blocks[..., 66:]) + 1) * (_half(blocks, 0) / 8)}


def _decode_iq2_s(blocks: Tensor) -> _Parts:
    high = ((blocks[..., 66:74, None] >> _CODE_BITS[::2]) & 3).flatten(2).long()
    codes = _from_grid("IQ2_S", blocks[..., 2:34] | high << 8, blocks[..., 34:66])
    return {"codes": codes, "scale": (2 * _alternating(blocks[..., 74:]) + 1) * (_half(blocks, 0) / 8)}


def _decode_iq3_xxs(blocks: Tensor) -> _Parts:
    words = _words(blocks, 66, 98, torch.int32)
    signs = _EVEN_SIGNS[((words[..., None] >> _SEVENS) & 127).flatten(2)]
    codes = _from_grid("IQ3_XXS", blocks[..., 2:66].long(), signs)
    return {"codes": codes, "scale": (2 * (words >> 28) + 1) * (_half(blocks, 0) / 4)}


def _decode_iq3_s(blocks: Tensor) -> _Parts:
    high = ((blocks[..., 66:74, None] >> _CODE_BITS) & 1).flatten(2).long()
    codes = _from_grid("IQ3_S", blocks[..., 2:66] | high << 8, blocks[..., 74:106])
    return {"codes": codes, "scale": 2 * _alternating(blocks[..., 106:]) + 1, "scale_factor": _half(blocks, 0)}


def _shifted(indexes: Tensor, is_below: Tensor) -> Tensor:
    """Look up vectors of the grid of 1-bit types, and shift each by 1/8, down where `is_below` is true. Return int8
    codes, which are 8 times the values: [rows, blocks, 256]."""
    return (_GRIDS["IQ1_S"][indexes] * 8 + 1 - 2 * is_below.to(torch.int8)[..., None]).flatten(2)


def _decode_iq1_s(blocks: Tensor) -> _Parts:
    words = _words(blocks, 34, 50, torch.int16)  # [rows, blocks, 8 groups]
    indexes = blocks[..., 2:34] | ((words[..., None] >> _OCTALS) & 7).flatten(2) << 8
    codes = _shifted(indexes, (words >> 15).bool().repeat_interleave(4, -1))
    return {"codes": codes, "scale": (2 * ((words >> 12) & 7) + 1) * (_half(blocks, 0) / 8)}


def _decode_iq1_m(blocks: Tensor) -> _Parts:
    words = _words(blocks, 48, 56, torch.int16)  # four 3-bit scales, and 4 bits of a float16 number
    half = (words >> 12 << torch.arange(0, 16, 4)).sum(-1, keepdim=True)
    factor = half.to(torch.uint16).view(torch.float16).float()
    scale = 2 * ((words[..., None] >> _OCTALS) & 7).flatten(2) + 1
    high = _alternating(blocks[..., 32:48])
    codes = _shifted(blocks[..., :32] | (high & 7).long() << 8, (high & 8).bool())
    return {"codes": codes, "scale": scale * (factor / 8)}


def _decode_tq1_0(blocks: Tensor) -> _Parts:
    parts = (
        blocks[..., None, start:stop] * _POWERS[:count] for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    )
    digits = torch.cat([part.flatten(2) for part in parts], dim=-1)  # times 3 / 256
    return {"codes": (digits.int() * 3 >> 8).to(torch.int8) - 1, "scale_factor": _half(blocks, 52)}


def _decode_tq2_0(blocks: Tensor) -> _Parts:
    codes = (blocks[..., :64].unflatten(-1, (2, 1, 32)) >> _PAIRS) & 3
    return {"codes": codes.flatten(2) - 1, "scale_factor": _half(blocks, 64)}


def _decode_mxfp4(blocks: Tensor) -> _Parts:
    codes = mxfp4_codes(blocks[..., 1:]).view(*blocks.shape[:-1], 16, 2).transpose(-1, -2).flatten(-2)
    return {"codes": codes, "scale": mxfp4_scales(blocks[..., 0], codes)[..., None]}


BLOCKS = {
    "Q8_0": BlockLayout(StoredFormat(torch.int8, 32, 8, has_half_scales=True), _decode_q8_0),
    "Q4_0": BlockLayout(StoredFormat(torch.int8, 32, 4, has_half_scales=True), _decode_q4_0),
    "Q4_1": BlockLayout(StoredFormat(torch.int8, 32, 4, has_half_scales=True, has_minima=True), _decode_q4_1),
    "Q5_0": BlockLayout(StoredFormat(torch.int8, 32, 5, has_half_scales=True), _decode_q5_0),
    "Q5_1": BlockLayout(StoredFormat(torch.int8, 32, 5, has_half_scales=True, has_minima=True), _decode_q5_1),
    "Q4_K": BlockLayout(StoredFormat(torch.int8, 32, 4, has_minima=True, has_factors=True), _decode_q4_k),
    "Q5_K": BlockLayout(StoredFormat(torch.int8, 32, 5, has_minima=True, has_factors=True), _decode_q5_k),
    # Codes of 2 and 3 bits are widened to 4 bits.
    "Q2_K": BlockLayout(StoredFormat(torch.int8, 16, 4, has_minima=True, has_factors=True), _decode_q2_k),
    "Q3_K": BlockLayout(StoredFormat(torch.int8, 16, 4, has_factors=True), _decode_q3_k),
    "TQ1_0": BlockLayout(StoredFormat(torch.int8, 32, 4, has_factors=True), _decode_tq1_0),
    "TQ2_0": BlockLayout(StoredFormat(torch.int8, 32, 4, has_factors=True), _decode_tq2_0),
    "IQ4_NL": BlockLayout(StoredFormat(torch.int8, 32, 4, has_half_scales=True, table="IQ4"), _decode_iq4_nl),
    "IQ4_XS": BlockLayout(StoredFormat(torch.int8, 32, 4, has_factors=True, table="IQ4"), _decode_iq4_xs),
    # The scales of these types, except IQ3_S, have more bits than float16.
    "IQ3_S": BlockLayout(StoredFormat(torch.int8, 32, 4, has_factors=True, table="IQ3_S"), _decode_iq3_s),
    "IQ3_XXS": BlockLayout(StoredFormat(torch.int8, 32, 4, table="IQ3_XXS"), _decode_iq3_xxs),
    "IQ2_S": BlockLayout(StoredFormat(torch.int8, 16, 4, table="IQ2"), _decode_iq2_s),
    "IQ2_XS": BlockLayout(StoredFormat(torch.int8, 16, 4, table="IQ2"), _decode_iq2_xs),
    "IQ2_XXS": BlockLayout(StoredFormat(torch.int8, 32, 4, table="IQ2"), _decode_iq2_xxs),
    "IQ1_M": BlockLayout(StoredFormat(torch.int8, 16, 4, table="IQ1"), _decode_iq1_m),
    "IQ1_S": BlockLayout(StoredFormat(torch.int8, 32, 4, table="IQ1"), _decode_iq1_s),
    "Q6_K": BlockLayout(StoredFormat(torch.int8, 16, 6, has_factors=True), _decode_q6_k),
    "MXFP4": BlockLayout(MXFP4, _decode_mxfp4),
}
