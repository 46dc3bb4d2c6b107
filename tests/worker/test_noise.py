"""The noise never changes: stored values, and its statistical properties."""

import math

import pytest
import torch

from pagewire.kernels.noise import fmix32, gumbel_noise, noise_keys

pytestmark = pytest.mark.thorough

STORED_KEYS = [504418101, 449783931, 2526403563, 3526180431, 4030845349]
STORED_NOISE = [-0.84076, -0.3367, 0.15137, 0.04273, -0.27057]


def fmix32_by_hand(value: int) -> int:
    value ^= value >> 16
    value = value * 0x85EBCA6B % 2**32
    value ^= value >> 13
    value = value * 0xC2B2AE35 % 2**32
    return value ^ value >> 16


def key_by_hand(seed: int, sample_index: int, position: int) -> int:
    inner = fmix32_by_hand(sample_index ^ fmix32_by_hand(position ^ 0x9E3779B9))
    return fmix32_by_hand(seed % 2**32 ^ fmix32_by_hand(seed >> 32 ^ inner))


def gumbel_by_hand(key: int, token_id: int) -> float:
    uniform = ((fmix32_by_hand(key ^ token_id * 0x9E3779B1 % 2**32) >> 9) + 0.5) * 2**-23
    return -math.log(-math.log(uniform))


def key(seed: int, sample_index: int, position: int) -> torch.Tensor:
    signed = seed - (1 << 64) if seed >> 63 else seed
    return noise_keys(*(torch.tensor([value]) for value in (signed, sample_index, position)))


def test_fmix32_is_that_of_murmur3() -> None:
    # From the reference implementation.
    assert fmix32(torch.tensor([0, 1, 0xDEADBEEF, 0xFFFFFFFF])).tolist() == [0, 0x514E28B7, 0x0DE5C6A9, 0x81F16F39]


def test_stored_keys() -> None:
    assert [
        key(seed, sample_index, position).item()
        for seed, sample_index, position in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (2**64 - 1, 3, 131_072))
    ] == STORED_KEYS


def test_stored_noise() -> None:
    noise = gumbel_noise(key(1234567890123, 2, 77), 151_936)[0]
    assert [round(noise[token_id].item(), 5) for token_id in (0, 1, 2, 1000, 151_935)] == STORED_NOISE


def test_noise_equals_integer_arithmetic_by_hand() -> None:
    for seed, sample_index, position in ((0, 0, 1), (2**40 + 7, 5, 900), (2**64 - 1, 2**32 - 1, 2**24)):
        by_hand = key_by_hand(seed, sample_index, position)
        assert key(seed, sample_index, position).item() == by_hand
        expected = torch.tensor([gumbel_by_hand(by_hand, token_id) for token_id in range(300)])
        torch.testing.assert_close(gumbel_noise(torch.tensor([by_hand]), 300)[0], expected, rtol=1e-4, atol=1e-5)


def test_noise_is_always_finite() -> None:
    uniform = (torch.tensor([0, 2**23 - 1]).to(torch.float32) + 0.5) * 2.0**-23
    assert (-torch.log(-torch.log(uniform))).isfinite().all()
    assert 0 < uniform[0] < uniform[1] < 1


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise(torch.cat([key(seed, 0, 9) for seed in range(50)]), 4000).double()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02


def test_rows_are_independent() -> None:
    """Neighbouring seeds, samples and positions have no correlation beyond chance: five sigma of 1 / sqrt(4000)."""
    keys = [key(seed, sample, position) for seed in (0, 1, 2**32) for sample in (0, 1) for position in (1, 2, 3)]
    correlations = torch.corrcoef(gumbel_noise(torch.cat(keys), 4000).double()) - torch.eye(len(keys))
    assert correlations.abs().max().item() < 5 / math.sqrt(4000)
