"""Quantisation of weights in plain torch and in C, bit for bit: to 8 bits as in PyPI `gguf`."""

import random

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from pagewire.kernels import quantized
from pagewire.kernels.cpu.library import VARIANTS
from testing.kernels.variants import load_variant


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def quantize(request):
    return quantized.quantize if request.param == "torch" else load_variant(request.param).quantize


def draw(seed, unit=32):
    """Return rows of very different magnitudes; some groups contain zeros, halves of steps, or equal numbers."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = rng.randrange(1, 40), unit * rng.randrange(1, 12)
    values = torch.randn(num_rows, num_columns, generator=generator)
    values *= 10.0 ** torch.randint(-7, 4, (num_rows, 1), generator=generator)
    groups = values.view(-1, 32)
    for kind in range(4):
        chosen = torch.rand(len(groups), generator=generator) < 0.2
        halves = torch.randint(-254, 255, (int(chosen.sum()), 32), generator=generator) / 2.0
        halves[:, rng.randrange(32)] = rng.choice([127.0, -127.0])
        signs = torch.randint(0, 2, halves.shape, generator=generator) * 2.0 - 1.0
        groups[chosen] = [halves, torch.zeros_like(halves), signs * 0.3, (halves / 16).round() / 2][kind]
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    print(f"seed {seed}: {tuple(values.shape)} of {dtype}")
    return values.clamp(-60_000, 60_000).to(dtype).float()


@pytest.mark.parametrize("seed", range(12))
def test_codes_of_8_bits_are_those_of_gguf(quantize, seed):
    values = draw(seed)
    weight = quantize(values.clone(), 8)
    blocks = gguf.quants.quantize(values.numpy(), GGMLQuantizationType.Q8_0).reshape(len(values), -1, 34)
    scale = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    assert np.array_equal(weight.scale.numpy().view(np.uint32), scale.view(np.uint32))
    assert np.array_equal(weight.values.numpy(), blocks[..., 2:].view(np.int8).reshape(values.shape))
    assert (weight.minimum, weight.group_size) == (None, 32)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("seed", range(12))
def test_the_kernels_give_the_bits_of_the_specification(quantize, seed, bits):
    values = draw(seed, 256 if bits == 4 else 32)
    expected = quantized.quantize(values.clone(), bits).parts()
    found = quantize(values.clone(), bits).parts()
    assert found.keys() == expected.keys()
    assert ("scale_factor" in found) == (bits == 4)
    for name, part in expected.items():
        assert part.dtype == found[name].dtype
        assert torch.equal(part.view(torch.int8), found[name].view(torch.int8)), name


@pytest.mark.parametrize("seed", range(12))
def test_the_kernels_weigh_inputs_as_the_specification_does(quantize, seed):
    values = draw(seed, 256)
    importance = torch.rand(values.shape[1], generator=torch.Generator().manual_seed(seed)) ** 6 + 1e-6
    expected = quantized.quantize(values.clone(), 4, importance).parts()
    found = quantize(values.clone(), 4, importance).parts()
    for name, part in expected.items():
        assert torch.equal(part.view(torch.int8), found[name].view(torch.int8)), name
    equal = quantize(values.clone(), 4, torch.full((values.shape[1],), 4.0)).parts()
    for name, part in quantize(values.clone(), 4).parts().items():
        assert torch.equal(part.view(torch.int8), equal[name].view(torch.int8)), name


@pytest.mark.parametrize("bits", [6, 4])
def test_errors_are_smaller_than_those_of_plain_rounding(quantize, bits):
    """Random weights with outliers, as in models."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 512, generator=generator) + 0.3 * torch.randn(64, 1, generator=generator)
    values[:, ::37] *= 3
    error = (quantize(values.clone(), bits).dequantized() - values).square().mean()
    blocks = gguf.quants.quantize(values.numpy(), GGMLQuantizationType.Q4_1)
    plain = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_1))
    assert error < (0.95 if bits == 4 else 0.2) * (plain - values).square().mean()


@pytest.mark.parametrize("deviation", [1e-2, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
def test_the_error_of_small_values_is_no_larger_than_of_zeros(quantize, deviation):
    """Scales and factors of float16 lose bits below 6e-5."""
    values = deviation * torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    error = (quantize(values.clone(), 4).dequantized() - values).square().mean().sqrt() / deviation
    assert error < (0.08 if deviation > 1e-5 else 0.2 if deviation > 1e-6 else 1.05)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_equal_values_and_zeros_keep_their_values(quantize, bits, sign):
    values = torch.zeros(3, 256)
    values[1] = sign * 0.75
    values[2, 32:64] = sign * 0.75
    assert torch.allclose(quantize(values.clone(), bits).dequantized(), values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_groups_too_small_for_a_scale_are_0(quantize, bits):
    values = torch.full((2, 256), 1e-44)
    values[1] = 1e-20
    assert torch.equal(quantize(values, bits).dequantized(), torch.zeros(2, 256))


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 9e9, 3e38, -3e38])
def test_what_is_no_number_or_too_large_is_refused(quantize, bits, wrong):
    values = torch.ones(3, 256)
    values[1, 50] = wrong
    with pytest.raises(ValueError, match="numbers that are not finite, or too large"):
        quantize(values, bits)


def test_the_kernels_take_whole_groups_of_float32_alone():
    kernels = load_variant("portable")
    with pytest.raises(ValueError, match="cannot quantise 48 columns to 8 bits in units of 32"):
        kernels.quantize(torch.ones(2, 48), 8)
    with pytest.raises(ValueError, match="cannot quantise 64 columns to 4 bits in units of 256"):
        kernels.quantize(torch.ones(2, 64), 4)
    with pytest.raises(ValueError, match="cannot quantise 64 columns to 5 bits"):
        kernels.quantize(torch.ones(2, 64), 5)
    with pytest.raises(ValueError, match=r"values is torch\.float16|values"):
        kernels.quantize(torch.ones(2, 64).half(), 8)
