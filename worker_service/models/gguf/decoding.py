"""Blocks of quantized weights as GGUF files store them, to integers with their scales.

Each type is w = scale * code - minimum in float32, bit for bit as PyPI `gguf` dequantizes it. The layouts are those of
llama.cpp's ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.quantized import QuantizedFormat, QuantizedWeight

_CODE_BITS = torch.arange(8, dtype=torch.uint8)


def decode_rows(type_name: str, rows: Tensor) -> QuantizedWeight:
    """Decode rows of bytes, [rows, bytes of a row]. `type_name` is that of a quantized type that is served."""
    layout = _LAYOUTS[type_name]
    blocks = rows.unflatten(1, (-1, layout.block_bytes))  # [rows, blocks, block_bytes]
    codes, scale, minimum = layout.decode(blocks)
    return QuantizedWeight(
        codes.flatten(1), scale.flatten(1), None if minimum is None else minimum.flatten(1), layout.format.group_size
    )


def quantized_format(type_name: str) -> QuantizedFormat | None:
    """Return what is known of weights of a type; None: it is not quantised."""
    return _LAYOUTS[type_name].format if type_name in _LAYOUTS else None


def is_finite(weight: QuantizedWeight) -> bool:
    """Return whether scales and minimums are numbers."""
    parts = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    return all(bool(part.isfinite().all()) for part in parts)


# Codes [rows, blocks, columns of a block], scales and minimums [rows, blocks, groups of a block].
_Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Layout:
    block_bytes: int
    format: QuantizedFormat
    decode: Callable[[Tensor], _Parts]


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a place of each block, in float32: [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """All the low halves of the bytes, then the high ones: [..., n] -> [..., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[..., 4] -> [..., 32], each 0 or 16."""
    return ((packed[..., None] >> _CODE_BITS) & 1).flatten(-2) << 4


def _decode_q8_0(blocks: Tensor) -> _Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _decode_q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 2:]).view(torch.int8) - 8, _half(blocks, 0), None


def _decode_q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:]).view(torch.int8), _half(blocks, 0), -_half(blocks, 2)


def _decode_q5_0(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes.view(torch.int8) - 16, _half(blocks, 0), None


def _decode_q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes.view(torch.int8), _half(blocks, 0), -_half(blocks, 2)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minimums of a K-block, which are its two float16 factors times 6 bits each: exact."""
    low, middle, high = blocks[..., 4:16].split(4, dim=-1)
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    minimum = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    return _half(blocks, 0) * scale.float(), _half(blocks, 2) * minimum.float()


def _decode_q4_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return codes.view(torch.int8), *_scales_and_minimums(blocks)


def _decode_q5_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    fifth = (blocks[..., None, 16:48] >> _CODE_BITS[:, None]) & 1  # [rows, blocks, 8 groups, 32]
    return (codes | (fifth.flatten(-2) << 4)).view(torch.int8), *_scales_and_minimums(blocks)


def _decode_q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [rows, blocks, 2, 4, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _CODE_BITS[:8:2, None]
    codes = (low | ((high & 3) << 4)).flatten(-3)
    scale = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return codes.view(torch.int8) - 32, scale, None


_LAYOUTS = {
    "Q8_0": _Layout(34, QuantizedFormat(8, 32, has_half_scales=True, has_minima=False), _decode_q8_0),
    "Q4_0": _Layout(18, QuantizedFormat(4, 32, has_half_scales=True, has_minima=False), _decode_q4_0),
    "Q4_1": _Layout(20, QuantizedFormat(4, 32, has_half_scales=True, has_minima=True), _decode_q4_1),
    "Q5_0": _Layout(22, QuantizedFormat(5, 32, has_half_scales=True, has_minima=False), _decode_q5_0),
    "Q5_1": _Layout(24, QuantizedFormat(5, 32, has_half_scales=True, has_minima=True), _decode_q5_1),
    "Q4_K": _Layout(144, QuantizedFormat(4, 32, has_half_scales=False, has_minima=True), _decode_q4_k),
    "Q5_K": _Layout(176, QuantizedFormat(5, 32, has_half_scales=False, has_minima=True), _decode_q5_k),
    "Q6_K": _Layout(210, QuantizedFormat(6, 16, has_half_scales=False, has_minima=False), _decode_q6_k),
}
