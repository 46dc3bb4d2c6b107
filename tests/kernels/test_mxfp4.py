"""MXFP4 compared with transformers and PyPI `gguf`: every byte with every exponent."""

import gguf
import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import StoredWeight

NUM_EXPONENTS = 255  # without the exponent that is not a number
BLOCKS = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(NUM_EXPONENTS, 1, 1)
EXPONENTS = torch.arange(NUM_EXPONENTS, dtype=torch.uint8)[:, None].repeat(1, 16)


def every_weight():
    """Return a weight in which each row has one exponent, and all bytes."""
    codes = mxfp4_codes(BLOCKS).view(NUM_EXPONENTS, 512)
    scale = mxfp4_scales(EXPONENTS, codes.unflatten(1, (-1, MXFP4.group_size)))
    return StoredWeight(codes, scale, MXFP4.group_size)


def test_every_number_is_that_of_transformers():
    expected = convert_moe_packed_tensors(BLOCKS[None], EXPONENTS[None], dtype=torch.float32)[0].t()
    assert torch.equal(every_weight().dequantized(), expected)


def test_every_number_is_that_of_gguf():
    """Every MXFP4 number is dequantised as in gguf, which stores the two halves of the bytes one after the other."""
    stored = torch.cat([EXPONENTS[..., None], BLOCKS], dim=-1).flatten(1)
    with np.errstate(over="ignore"):  # 6 times the largest power is infinite
        meant = torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType.MXFP4))
    in_turns = meant.view(NUM_EXPONENTS, 16, 2, 16).transpose(2, 3).flatten(1)
    assert torch.equal(every_weight().dequantized(), in_turns)


def test_panels_hold_every_number(cpu_kernels):
    """Groups whose powers are below all normal numbers need wider scales."""
    weight = every_weight()
    for rows, scale_dtype in ((slice(2, None), torch.float8_e8m0fnu), (slice(None), torch.bfloat16)):
        part = weight[torch.arange(NUM_EXPONENTS)[rows]]
        packed = cpu_kernels.pack_linear(part)
        assert (packed.format.bits, packed.format.scale_dtype) == (4, scale_dtype)
        assert torch.equal(cpu_kernels.lookup_rows(packed, torch.arange(len(part.values))), part.dequantized())


def test_groups_of_zeros_need_no_wide_scales(cpu_kernels):
    blocks, exponents = BLOCKS[127:129].clone(), EXPONENTS[127:129].clone()
    blocks[:, 3], exponents[:, 3] = 0x80, 0  # -0 is also 0
    codes = mxfp4_codes(blocks).view(2, 512)
    scale = mxfp4_scales(exponents, codes.unflatten(1, (-1, MXFP4.group_size)))
    assert (scale[:, 3] == 0).all()
    packed = cpu_kernels.pack_linear(StoredWeight(codes, scale, MXFP4.group_size))
    assert packed.format.scale_dtype == torch.float8_e8m0fnu


def test_an_exponent_stands_for_no_number():
    codes = torch.zeros(1, 1, MXFP4.group_size, dtype=torch.int8)
    assert mxfp4_scales(torch.tensor([[255]], dtype=torch.uint8), codes).isnan().all()
