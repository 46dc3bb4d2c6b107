"""The C kernels' matrix products against float64, for weights of every dtype and any number of rows."""

import contextlib
import random

import pytest
import torch

from pagewire.kernels.cpu.library import VARIANTS
from tests.kernels.variants import load_variant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of weights, and of the activations that they are multiplied with.
KINDS = (*((dtype, torch.float32) for dtype in DTYPES), (torch.bfloat16, torch.bfloat16))
NUM_ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 40)
RUN = 256  # inputs that are summed up one after the other


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    """For every processor that has no more than this one."""
    return load_variant(request.param)


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_product(seed, dtype):
    """A weight of a size that is seldom a whole number of panels, its bias or None, and activations."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    in_size = rng.choice([1, 7, 64, 255, 256, 257, 700])
    out_size = rng.choice([1, 15, 16, 17, 32, 63, 64, 65, 150])
    print(f"seed {seed}: {in_size} inputs, {out_size} outputs")
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator) if rng.random() < 0.5 else None
    return weight, bias, torch.randn(max(NUM_ROWS), in_size, generator=generator)


def error_bound(x, weight):
    """Of sums of 256 float32 terms at a time (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1)."""
    num_roundings = min(x.shape[1], RUN) + x.shape[1] // RUN + 2
    return num_roundings * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + 1)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_linear(variant, seed, dtype, activation, num_threads):
    weight, bias, x = random_product(seed, dtype)
    packed = variant.pack_linear(weight, bias, activation)
    rounded = x.to(activation)
    expected = torch.nn.functional.linear(rounded.double(), weight.double(), None if bias is None else bias.double())
    with threads(num_threads):
        for num_rows in NUM_ROWS:
            actual = variant.linear(x[:num_rows], packed)
            assert actual.dtype == torch.float32
            error = (actual.double() - expected[:num_rows]).abs()
            assert (error <= error_bound(rounded[:num_rows], weight)).all()


def sums_of_pairs(x, weight):
    """The order of sums over bfloat16, whose products float32 holds exactly: of each two inputs the second one first."""
    x, weight = (torch.nn.functional.pad(values.float(), (0, values.shape[1] % 2)) for values in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], RUN):
        run = torch.zeros_like(total)
        for i in range(start, min(start + RUN, x.shape[1]), 2):
            run = run + x[:, i + 1, None] * weight[:, i + 1]
            run = run + x[:, i, None] * weight[:, i]
        total = total + run
    return total


@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_is_the_same_on_every_processor(variant, seed):
    weight, bias, x = random_product(seed, torch.bfloat16)
    expected = sums_of_pairs(x.bfloat16(), weight)
    actual = variant.linear(x, variant.pack_linear(weight, bias, torch.bfloat16))
    assert torch.equal(actual, expected if bias is None else expected + bias)


def check_rows(variant, x, packed):
    """Bit for bit: what a row gives alone it gives among any others, in any place, by any number of threads."""
    alone = torch.cat([variant.linear(row[None], packed) for row in x])
    generator = torch.Generator().manual_seed(0)
    for num_threads in (1, 2):
        with threads(num_threads):
            for num_rows in range(1, len(x) + 1):
                places = torch.randperm(len(x), generator=generator)[:num_rows]
                assert torch.equal(variant.linear(x[places], packed), alone[places])


@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
@pytest.mark.parametrize("seed", [3, 7])
def test_a_row_depends_on_no_other_row(variant, seed, dtype, activation):
    """What a request gets does not change with who shares its step."""
    weight, bias, x = random_product(seed, dtype)
    check_rows(variant, x, variant.pack_linear(weight, bias, activation))


def test_very_many_rows(variant):
    """More than share a run of a panel while it is near."""
    weight = torch.randn(70, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(230, 300, generator=torch.Generator().manual_seed(2))
    for activation in (torch.float32, torch.bfloat16):
        packed = variant.pack_linear(weight, None, activation)
        alone = torch.cat([variant.linear(row[None], packed) for row in x])
        assert torch.equal(variant.linear(x, packed), alone)


@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
def test_nan_and_infinity_come_through(variant, dtype, activation):
    x = torch.randn(14, 20)
    weight = torch.randn(20, 20).to(dtype)
    x[1, 7] = torch.nan
    weight[4, 3] = torch.inf
    actual = variant.linear(x, variant.pack_linear(weight, None, activation))
    assert actual[1].isnan().all()
    others = torch.cat([actual[:1], actual[2:]])
    assert others[:, 4].isinf().all()
    assert others.isfinite().sum() == 13 * 19


def test_activations_of_bfloat16_need_weights_of_it(cpu_kernels):
    with pytest.raises(ValueError, match="activations of torch.bfloat16 do not fit a weight of torch.float16"):
        cpu_kernels.pack_linear(torch.ones(4, 8).half(), None, torch.bfloat16)
    with pytest.raises(ValueError, match="activations of torch.float16 do not fit"):
        cpu_kernels.pack_linear(torch.ones(4, 8).half(), None, torch.float16)


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
