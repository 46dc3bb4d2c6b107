"""Quantised blocks of GGUF files, decoded to integer codes with their scales.

Each type means w = scale * code - minimum in float32, bit for bit the values that PyPI `gguf` computes. Scales and
minimums of K-quants are integers, with float factors for each 256 inputs. The layouts follow llama.cpp's ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.common.gguf import ElementType
from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import StoredFormat, StoredWeight

_CODE_BITS = torch.arange(8, dtype=torch.uint8)
_PAIRS = _CODE_BITS[::2, None]  # the places of the 2-bit numbers in a byte
# The values of the 4-bit codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.int8)


def decode_rows(element_type: ElementType, rows: Tensor) -> StoredWeight:
    """Decode rows of a quantised GGUF tensor, given as bytes [rows, bytes per row], to integer codes with scales."""
    layout = BLOCKS[element_type.name]
    blocks = rows.unflatten(1, (-1, element_type.block_bytes))  # [rows, blocks, block_bytes]
    parts = {name: values.flatten(1) for name, values in layout.decode(blocks).items()}
    return StoredWeight(
        parts["codes"].view(torch.int8),
        parts["scale"].float(),
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
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1).flatten(-2)
    high = (blocks[..., 2:4, None] >> _CODE_BITS[::2]) & 3  # [rows, blocks, 2, 4]
    scale = (low | (high.flatten(-2) << 4)).view(torch.int8) - 32
    return {"codes": codes, "scale": scale, "scale_factor": _half(blocks, 0)}


def _decode_q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [rows, blocks, 2, 4, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _CODE_BITS[:8:2, None]
    codes = (low | ((high & 3) << 4)).flatten(-3) - 32
    return {"codes": codes, "scale": blocks[..., 192:208].view(torch.int8), "scale_factor": _half(blocks, 208)}


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
    "IQ4_NL": BlockLayout(StoredFormat(torch.int8, 32, 4, has_half_scales=True, has_table=True), _decode_iq4_nl),
    "IQ4_XS": BlockLayout(StoredFormat(torch.int8, 32, 4, has_factors=True, has_table=True), _decode_iq4_xs),
    "Q6_K": BlockLayout(StoredFormat(torch.int8, 16, 6, has_factors=True), _decode_q6_k),
    "MXFP4": BlockLayout(MXFP4, _decode_mxfp4),
}
