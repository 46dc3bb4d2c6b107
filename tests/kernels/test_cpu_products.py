"""The C kernels' matrix products against float64, for weights of every dtype and any number of rows."""

import random

import pytest
import torch

from pagewire.kernels.cpu.library import VARIANTS
from tests.kernels.variants import load_variant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 40)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    """For every processor that has no more than this one."""
    return load_variant(request.param)


def random_product(seed, dtype):
    """A weight of a size that is seldom a whole number of panels, its bias or None, and activations."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    in_size = rng.choice([1, 7, 64, 255, 256, 257, 700])
    out_size = rng.choice([1, 15, 16, 17, 32, 63, 64, 65, 150])
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator) if rng.random() < 0.5 else None
    return weight, bias, torch.randn(max(NUM_ROWS), in_size, generator=generator)


def error_bound(x, weight):
    """Of sums of 256 float32 terms at a time (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1)."""
    num_roundings = min(x.shape[1], 256) + x.shape[1] // 256 + 2
    return num_roundings * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + 1)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_linear(variant, seed, dtype, num_threads):
    weight, bias, x = random_product(seed, dtype)
    packed = variant.pack_linear(weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in NUM_ROWS:
            actual = variant.linear(x[:num_rows], packed)
            assert actual.dtype == torch.float32
            assert ((actual.double() - expected[:num_rows]).abs() <= error_bound(x[:num_rows], weight)).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_no_other_row(variant, dtype):
    """Bit for bit: what a request gets does not change with who shares its step."""
    weight, bias, x = random_product(3, dtype)
    packed = variant.pack_linear(weight, bias)
    alone = torch.cat([variant.linear(row[None], packed) for row in x])
    for num_rows in NUM_ROWS:
        assert torch.equal(variant.linear(x[:num_rows], packed), alone[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_come_through(variant, dtype):
    x = torch.randn(3, 20)
    weight = torch.randn(20, 20).to(dtype)
    x[1, 7] = torch.nan
    weight[4, 3] = torch.inf
    actual = variant.linear(x, variant.pack_linear(weight))
    assert actual[1].isnan().all()
    assert actual[0].isfinite().sum() == 19
    assert actual[0, 4].isinf()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_packed_weights(variant, seed, dtype):
    weight, bias, _ = random_product(seed, dtype)
    indexes = torch.randint(0, len(weight), (30,), generator=torch.Generator().manual_seed(seed))
    actual = variant.take_rows(variant.pack_linear(weight, bias), indexes)
    assert torch.equal(actual, weight[indexes].float())


def test_bad_arguments_are_refused(cpu_kernels):
    packed = cpu_kernels.pack_linear(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"x is torch.float32 \(2, 7\)"):
        cpu_kernels.linear(torch.ones(2, 7), packed)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16"):
        cpu_kernels.linear(torch.ones(2, 8).bfloat16(), packed)
    with pytest.raises(ValueError, match=r"bias is .*must be torch.float32 \(4,\)"):
        cpu_kernels.pack_linear(torch.ones(4, 8), torch.ones(3))
    with pytest.raises(ValueError, match="float64 has no kernels"):
        cpu_kernels.pack_linear(torch.ones(4, 8).double())
    with pytest.raises(ValueError, match=r"indexes is torch.int32"):
        cpu_kernels.take_rows(packed, torch.zeros(2, dtype=torch.int32))
