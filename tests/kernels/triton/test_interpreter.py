"""The fixes to Triton's interpreter compute the same as torch and as Triton's own loop over elements."""

import numpy as np
import pytest
import torch

from testing.kernels.device import choose_device

DEVICE = choose_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from testing.kernels.interpreter import convert  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="nothing is interpreted")


def test_every_bfloat16_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    expected = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float()
    actual = torch.from_numpy(convert(halves, tl.bfloat16, tl.float32, None).view(np.float32))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_floats_become_the_nearest_bfloat16():
    """Halfway between every two neighbours, one bit to either side, and the neighbours. Any NaN stays NaN."""
    above = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = above + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    expected = torch.from_numpy(bits.view(np.float32)).bfloat16()
    actual = torch.from_numpy(convert(bits.view(np.float32), tl.float32, tl.bfloat16, None).view(np.int16))
    torch.testing.assert_close(actual.view(torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _after(first_factor, first_term, factor, term):
    """Return the composition of two linear functions, which is not commutative."""
    return first_factor * factor, first_term * factor + term


@triton.jit
def _lines_kernel(factors, terms, output, SIZE: tl.constexpr, AXIS: tl.constexpr):
    places = tl.arange(0, 4)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    factor, term = tl.reduce((tl.load(factors + places), tl.load(terms + places)), AXIS, _after)
    rows = tl.arange(0, 4 if AXIS == 1 else SIZE)
    tl.store(output + rows, factor)
    tl.store(output + rows + (4 if AXIS == 1 else SIZE), term)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_reduction_keeps_the_order_of_what_it_combines(size, axis):
    generator = torch.Generator().manual_seed(size)
    factors, terms = torch.randint(1, 3, (2, 4, size), generator=generator)
    found = torch.empty(2, 4 if axis == 1 else size, dtype=torch.int64)
    _lines_kernel[(1,)](factors, terms, found, SIZE=size, AXIS=axis)
    factor, term = torch.ones_like(found[0]), torch.zeros_like(found[0])
    for one, other in zip(factors.unbind(axis), terms.unbind(axis), strict=True):
        factor, term = factor * one, term * one + other
    assert torch.equal(found, torch.stack([factor, term]))
