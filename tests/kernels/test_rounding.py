"""Quantisation of weights as in PyPI `gguf`: codes and scales bit for bit, in plain torch and in C."""

import random

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from pagewire.kernels import quantized
from pagewire.kernels.cpu.library import VARIANTS
from testing.kernels.variants import load_variant

NAMES = {8: "Q8_0", 4: "Q4_0"}


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def quantize(request):
    return quantized.quantize if request.param == "torch" else load_variant(request.param).quantize


def draw(seed):
    """Return rows of very different magnitudes; some groups contain zeros, halves of steps, or equal numbers."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_groups = rng.randrange(1, 40), rng.randrange(1, 12)
    values = torch.randn(num_rows, 32 * num_groups, generator=generator)
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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", range(12))
def test_codes_and_scales_are_those_of_gguf(quantize, seed, bits):
    values = draw(seed)
    weight = quantize(values.clone(), bits)
    blocks = gguf.quants.quantize(values.numpy(), GGMLQuantizationType[NAMES[bits]])
    blocks = blocks.reshape(len(values), -1, 34 if bits == 8 else 18)
    scale = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    packed = blocks[..., 2:]
    if bits == 8:
        codes = packed.view(np.int8)
    else:
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8) - 8
    assert np.array_equal(weight.scale.numpy().view(np.uint32), scale.view(np.uint32))
    assert np.array_equal(weight.values.numpy(), codes.reshape(values.shape))
    assert (weight.minimum, weight.group_size) == (None, 32)


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_too_small_for_a_scale_are_0(quantize, bits):
    values = torch.full((2, 64), 1e-44)
    values[1] = 1e-20
    assert torch.equal(quantize(values, bits).dequantized(), torch.zeros(2, 64))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 9e6])
def test_what_is_no_number_or_too_large_is_refused(quantize, bits, wrong):
    values = torch.ones(3, 96)
    values[1, 50] = wrong
    with pytest.raises(ValueError, match="numbers that are not finite, or too large"):
        quantize(values, bits)


def test_the_kernels_take_whole_groups_of_float32_alone():
    kernels = load_variant("portable")
    with pytest.raises(ValueError, match="cannot quantise 48 columns to 8 bits in groups of 32"):
        kernels.quantize(torch.ones(2, 48), 8)
    with pytest.raises(ValueError, match="cannot quantise 64 columns to 5 bits"):
        kernels.quantize(torch.ones(2, 64), 5)
    with pytest.raises(ValueError, match=r"values is torch\.float16|values"):
        kernels.quantize(torch.ones(2, 64).half(), 8)
