"""Blocks of quantised weights compared bit for bit with PyPI `gguf`'s own dequantisation."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from pagewire.common.gguf import SUPPORTED_TYPES
from worker_service.models.layouts.gguf import BLOCKS, decode_rows, is_finite

QUANTIZED = {served.name: served for served in SUPPORTED_TYPES.values() if served.is_quantized}
# The offsets of the float16 numbers in a block.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),  # the bits of its scale are in four places
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),  # its scales are powers of two, in the first byte of a block
}
MXFP4_SCALES = np.array([1, 2, 3, 127, 251, 252], np.uint8)
# The smallest and largest numbers, denormal and normal, and both zeros.
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00], np.uint16)


def random_blocks(type_name: str, seed: int, *, extreme: bool) -> np.ndarray:
    """Return random blocks, [7 rows, 5 blocks, bytes], whose scales are finite."""
    print(f"{type_name}, seed {seed}")
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (7, 5, QUANTIZED[type_name].block_bytes), dtype=np.uint8)
    for start in HALVES[type_name]:
        drawn = rng.integers(0, 0x7C00, (7, 5), dtype=np.uint16) | (rng.integers(0, 2, (7, 5), dtype=np.uint16) << 15)
        halves = rng.choice(EXTREMES, (7, 5)) if extreme else drawn.astype(np.uint16)
        blocks[..., start : start + 2] = halves.view(np.uint8).reshape(7, 5, 2)
    if type_name == "IQ1_M":
        halves = blocks[..., 48:56].view(np.uint16) & 0x0FFF
        drawn = rng.integers(0, 0x7C00, (7, 5), dtype=np.uint16)
        drawn = rng.choice(EXTREMES, (7, 5)) if extreme else drawn
        halves |= (drawn[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
        blocks[..., 48:56] = halves.view(np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.choice(MXFP4_SCALES, (7, 5)) if extreme else rng.integers(64, 192, (7, 5))
    return blocks.reshape(7, -1)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_weights_are_those_of_the_format_bit_for_bit(type_name: str, seed: int, extreme: bool) -> None:
    rows = random_blocks(type_name, seed, extreme=extreme)
    decoded = decode_rows(QUANTIZED[type_name], torch.from_numpy(rows))
    expected = gguf.quants.dequantize(rows, GGMLQuantizationType[type_name])
    assert is_finite(decoded)
    assert np.array_equal(decoded.dequantized().numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_codes_are_integers_with_a_scale_a_group(type_name: str) -> None:
    rows = random_blocks(type_name, 99, extreme=False)
    decoded = decode_rows(QUANTIZED[type_name], torch.from_numpy(rows))
    columns = 5 * QUANTIZED[type_name].block_size
    assert (decoded.values.dtype, decoded.scale.dtype) == (torch.int8, torch.float32)
    assert decoded.values.shape == (7, columns)
    assert decoded.scale.shape == (7, columns // decoded.group_size)
    assert decoded.group_size % 16 == 0
    if decoded.minimum is not None:
        assert decoded.minimum.shape == decoded.scale.shape
    whole = decoded.without_factors()
    groups = decoded.values.unflatten(1, (-1, decoded.group_size)).float() * whole.scale[..., None]
    values = groups if whole.minimum is None else groups - whole.minimum[..., None]
    assert torch.equal(decoded.dequantized(), values.flatten(1))
    assert (decoded.scale_factor is not None) == BLOCKS[type_name].format.has_factors
    # Kernels of CPUs store up to 16 different codes in 4 bits.
    assert len(decoded.values.unique()) <= 1 << BLOCKS[type_name].format.bits


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize(("type_name", "start"), [(name, start) for name, starts in HALVES.items() for start in starts])
def test_a_scale_that_is_no_number_is_seen(type_name: str, start: int, half: int) -> None:
    rows = random_blocks(type_name, 3, extreme=False)
    at = 2 * QUANTIZED[type_name].block_bytes + start  # in the third block
    rows[6, at : at + 2] = np.array([half], np.uint16).view(np.uint8)
    assert not is_finite(decode_rows(QUANTIZED[type_name], torch.from_numpy(rows)))


def test_a_scale_in_four_parts_that_is_no_number_is_seen() -> None:
    rows = random_blocks("IQ1_M", 3, extreme=False)
    rows[6, 2 * 56 + 49 : 2 * 56 + 56 : 2] = (0x0F, 0x0F, 0xEF, 0x7F)  # 0x7E00, from the lowest four bits on
    assert not is_finite(decode_rows(QUANTIZED["IQ1_M"], torch.from_numpy(rows)))
