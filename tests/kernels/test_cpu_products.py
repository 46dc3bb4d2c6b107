"""The C kernels' matrix multiplications compared with float64, and bit for bit with their order of summation."""

import platform
import random
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.cpu.library import VARIANTS
from pagewire.kernels.weight import FLOAT8, StoredFormat, StoredWeight, unit_size
from testing.kernels.variants import load_variant
from tests.kernels.random_products import (
    DTYPES,
    KINDS,
    NUM_ROWS,
    compact,
    random_activations,
    random_product,
    random_quantized,
    threads,
)

pytestmark = pytest.mark.one_of_each

RUN = 256  # inputs that are added one after another
INTEGER_RUN = 1024  # the same for quantised weights


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    """The kernels of one variant, for processors with at most this processor's features."""
    return load_variant(request.param)


def error_bound(x, weight):
    """Return the error bound for sums in runs of 256 float32 terms.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 3.1.
    """
    num_roundings = min(x.shape[1], RUN) + x.shape[1] // RUN + 2
    return num_roundings * 2.0**-24 * (x.abs().double() @ weight.abs().double().T + 1)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_linear(variant, seed, dtype, activation, num_threads):
    weight, bias, x = random_product(seed, dtype)
    packed = variant.pack_linear(StoredWeight(weight), bias, activation)
    rounded = x.to(activation)
    expected = torch.nn.functional.linear(rounded.double(), weight.double(), None if bias is None else bias.double())
    with threads(num_threads):
        for num_rows in NUM_ROWS:
            actual = variant.linear(x[:num_rows], packed)
            assert actual.dtype == torch.float32
            error = (actual.double() - expected[:num_rows]).abs()
            assert (error <= error_bound(rounded[:num_rows], weight)).all()


def sums_of_pairs(x, weight):
    """Return the sums in the order of the bfloat16 kernels, whose products are exact in float32.

    Of each two inputs the second is added first.
    """
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
    actual = variant.linear(x, variant.pack_linear(StoredWeight(weight), bias, torch.bfloat16))
    assert torch.equal(actual, expected if bias is None else expected + bias)


def check_rows(variant, x, packed):
    """Check that a row's output is bit-identical among any rows, at any position, with any number of threads."""
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
    """The output of a request does not depend on the other requests in its step."""
    weight, bias, x = random_product(seed, dtype)
    check_rows(variant, x, variant.pack_linear(StoredWeight(weight), bias, activation))


def test_very_many_rows(variant):
    """More rows than can share a run of a packed panel while it is in the cache."""
    weight = torch.randn(70, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(230, 300, generator=torch.Generator().manual_seed(2))
    for activation in (torch.float32, torch.bfloat16):
        packed = variant.pack_linear(StoredWeight(weight), None, activation)
        alone = torch.cat([variant.linear(row[None], packed) for row in x])
        assert torch.equal(variant.linear(x, packed), alone)


@pytest.mark.parametrize(("dtype", "activation"), KINDS, ids=str)
def test_nan_and_infinity_come_through(variant, dtype, activation):
    x = torch.randn(14, 20)
    weight = torch.randn(20, 20).to(dtype)
    x[1, 7] = torch.nan
    weight[4, 3] = torch.inf
    actual = variant.linear(x, variant.pack_linear(StoredWeight(weight), None, activation))
    assert actual[1].isnan().all()
    others = torch.cat([actual[:1], actual[2:]])
    assert others[:, 4].isinf().all()
    assert others.isfinite().sum() == 13 * 19


def test_activations_of_bfloat16_need_weights_of_it(cpu_kernels):
    with pytest.raises(
        ValueError, match=r"activations of torch.bfloat16 are not supported with a weight of torch.float16"
    ):
        cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8).half()), None, torch.bfloat16)
    with pytest.raises(ValueError, match=r"activations of torch.float16 are not supported"):
        cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8).half()), None, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_packed_weights(variant, seed, dtype):
    weight, bias, _ = random_product(seed, dtype)
    indexes = torch.randint(0, len(weight), (30,), generator=torch.Generator().manual_seed(seed))
    actual = variant.lookup_rows(variant.pack_linear(StoredWeight(weight), bias), indexes)
    assert torch.equal(actual, weight[indexes].float())


def test_bad_arguments_are_refused(cpu_kernels):
    packed = cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8)))
    with pytest.raises(ValueError, match=r"x is torch.float32 \(2, 7\)"):
        cpu_kernels.linear(torch.ones(2, 7), packed)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16"):
        cpu_kernels.linear(torch.ones(2, 8).bfloat16(), packed)
    with pytest.raises(ValueError, match=r"bias is .*must be torch.float32 \(4,\)"):
        cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8)), torch.ones(3))
    with pytest.raises(ValueError, match=r"no kernel supports weights of torch.float64"):
        cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8).double()))
    with pytest.raises(ValueError, match=r"indexes is torch.int32"):
        cpu_kernels.lookup_rows(packed, torch.zeros(2, dtype=torch.int32))


# Quantised weights


def round_to_int8(x):
    """Return codes and scales per row and 32 inputs: [num_rows, units, 32] and [num_rows, units, 1]."""
    units = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = units.abs().amax(2, keepdim=True)
    codes = (units * torch.where(largest > 1e-30, 127 / largest, 0)).round()
    return codes, torch.where(largest > 1e-30, largest / 127, 0)


def fused(a, b, c):
    """Return a * b + c, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def rounded_twice(a, b, c):
    return a * b + c


def sums_of_groups(x, weight, multiply_add):
    """Return the sums in the order of the kernels for quantised weights: run by run and group by group.

    The sums within a group are exact.
    """
    codes, scales = round_to_int8(x)
    width = 32 if weight.group_size % 32 == 0 else 16
    padding = (0, codes.shape[1] * 32 - weight.values.shape[1])
    weights = torch.nn.functional.pad(weight.values, padding).double().unflatten(1, (-1, width))
    codes = codes.double().flatten(1).unflatten(1, (-1, width))
    total = run = torch.zeros(len(x), len(weight.values))
    for group in range(weight.values.shape[1] // width):
        scale = scales[:, group * width // 32]
        source = group * width // weight.group_size
        run = multiply_add((codes[:, group] @ weights[:, group].T).float() * scale, weight.scale[:, source], run)
        if weight.minimum is not None:
            run = multiply_add(-scale * codes[:, group].sum(1, keepdim=True).float(), weight.minimum[:, source], run)
        if (group + 1) * width % INTEGER_RUN == 0:
            total, run = total + run, torch.zeros_like(run)
    return total + run


def of_variant(variant):
    has_fused = variant.variant != "portable" or platform.machine() == "aarch64"
    return fused if has_fused else rounded_twice


@pytest.mark.parametrize("seed", range(24))
def test_quantised_weights_bit_for_bit(variant, seed):
    weight = random_quantized(seed)
    x = random_activations(seed, 13, weight.values.shape[1])
    bias = torch.randn(len(weight.values), generator=torch.Generator().manual_seed(seed)) if seed % 2 else None
    expected = sums_of_groups(x, weight, of_variant(variant))
    actual = variant.linear(x, variant.pack_linear(weight, bias))
    assert torch.equal(actual, expected if bias is None else expected + bias)


@pytest.mark.parametrize("seed", range(4))
def test_quantised_weights_are_near_their_formula(variant, seed):
    """Rounding the activations to int8 is the only error beyond float32's."""
    weight = random_quantized(100 + seed)
    x = random_activations(seed, 5, weight.values.shape[1])
    codes, scales = round_to_int8(x)
    rounded = (codes.double() * scales.double()).flatten(1)[:, : x.shape[1]]
    assert ((rounded - x).abs() <= scales.repeat_interleave(32, 1).flatten(1)[:, : x.shape[1]] * 0.501).all()
    matrix = weight.values.double().unflatten(1, (-1, weight.group_size)) * weight.scale.double()[..., None]
    sizes = matrix.abs()
    if weight.minimum is not None:
        matrix, sizes = matrix - weight.minimum.double()[..., None], sizes + weight.minimum.double().abs()[..., None]
    expected = rounded @ matrix.flatten(1).T
    error = (variant.linear(x, variant.pack_linear(weight)).double() - expected).abs()
    assert (error <= 60 * 2.0**-24 * (rounded.abs() @ sizes.flatten(1).T)).all()


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_row_depends_on_no_other_row_over_quantised_weights(variant, seed):
    weight = random_quantized(seed)
    check_rows(variant, random_activations(seed, 40, weight.values.shape[1]), variant.pack_linear(weight))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_spoils_no_other(variant, value):
    """The row's output is NaN, because no integer represents its input."""
    weight = random_quantized(5)
    x = random_activations(5, 9, weight.values.shape[1])
    packed = variant.pack_linear(weight)
    expected = variant.linear(x, packed)
    x[4, 7] = value
    actual = variant.linear(x, packed)
    assert actual[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("seed", range(300, 312))
def test_packed_codes_are_the_weight(variant, seed):
    weight = random_quantized(seed)
    indexes = torch.randint(0, len(weight.values), (30,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(variant.lookup_rows(variant.pack_linear(weight), indexes), weight.dequantized()[indexes])


COMPACT = [
    pytest.param(*case, id="-".join(map(str, case)))
    for case in (
        (4, 32, True, True),
        (6, 16, False, True),
        (8, 16, False, True),
        (6, 32, True, True),
        (8, 32, True, True),
        (6, 32, False, False),
        (4, 32, False, False),
        (8, 16, False, False),
    )
]


@pytest.mark.parametrize(("bits", "group_size", "has_minima", "has_factors"), COMPACT)
def test_compact_weights_bit_for_bit(variant, bits, group_size, has_minima, has_factors):
    """Rows equal the formula, and the outputs equal the same integers with plain scales, in every order of rows."""
    weight = compact(7, bits, group_size, has_minima, has_factors)
    packed = variant.pack_linear(weight)
    assert torch.equal(variant.lookup_rows(packed, torch.arange(70)), weight.dequantized())
    x = random_activations(7, 13, weight.values.shape[1])
    zero = 0 if weight.zero is None else weight.zero.int().repeat_interleave(group_size, 1)
    plain = weight.without_factors()
    differences = replace(plain, zero=None)
    object.__setattr__(differences, "values", weight.values.int() - zero)
    assert torch.equal(variant.linear(x, packed), sums_of_groups(x, differences, of_variant(variant)))
    alone = torch.cat([variant.linear(row[None], packed) for row in x])
    assert torch.equal(variant.linear(x, packed), alone)


def test_compact_weights_take_few_bits(cpu_kernels):
    sizes = {}
    for name, case in {
        "Q4_K": (4, 32, True, True),
        "Q6_K": (6, 16, False, True),
        "8 bits": (8, 16, False, True),
        "zeros": (4, 32, False, False),
    }.items():
        weight = compact(1, *case)
        panels = cpu_kernels.pack_linear(weight).panels
        sizes[name] = panels.numel() * 8 / (96 * weight.values.shape[1])  # 70 outputs fill three panels of 32
    if "avx512f" in VARIANTS[cpu_kernels.variant]:
        assert sizes == {"Q4_K": 4.625, "Q6_K": 6.5625, "8 bits": 8.5625, "zeros": 4.75}


def test_packed_panels_use_the_smallest_sufficient_format(cpu_kernels):
    codes = torch.randint(-8, 8, (64, 256), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = StoredWeight(codes, torch.full((64, 8), 0.75), 32)
    sizes = {}
    for name, changed in {
        "4 bits": weight,
        "powers of two": replace(weight, scale=torch.full((64, 8), 0.5)),
        "powers of two and 0": replace(weight, scale=torch.tensor([2.0**127, 2.0**-126, 0, 1]).repeat(64, 2)),
        "below all normal powers": replace(weight, scale=torch.full((64, 8), 2.0**-127)),
        "minima": replace(weight, minimum=torch.ones(64, 8)),
        "float32": replace(weight, scale=torch.full((64, 8), 0.1)),
        "groups of 16": StoredWeight(codes, torch.full((64, 16), 0.75), 16),
        "groups of 128": StoredWeight(codes, torch.full((64, 2), 0.75), 128),
        "6 bits": replace(weight, values=codes + torch.arange(64, dtype=torch.int8)[:, None] % 24),
        "6 bits, not negative": replace(weight, values=codes + 8 + torch.arange(64, dtype=torch.int8)[:, None] % 49),
        "8 bits": replace(weight, values=codes + torch.arange(64, dtype=torch.int8)[:, None]),
    }.items():
        packed = cpu_kernels.pack_linear(changed)
        assert torch.equal(cpu_kernels.lookup_rows(packed, torch.arange(64)), changed.dequantized())
        sizes[name] = packed.panels.numel() * 8 / codes.numel()
    assert sizes == {
        "4 bits": 4.5,
        "powers of two": 4.25,
        "powers of two and 0": 4.25,
        "below all normal powers": 4.5,
        "minima": 5,
        "float32": 5,
        "groups of 16": 5,
        "groups of 128": 4.5,
        "6 bits": 6.5,
        "6 bits, not negative": 6.5,
        "8 bits": 8.5,
    }


def test_quantised_weights_that_do_not_fit_are_refused(cpu_kernels):
    codes, scale = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2)
    for match, arguments in {
        r"values are torch.int32 \(4, 64\)": (codes.int(), scale, 32),
        "the group size 8 is not supported for 64 inputs": (codes, scale.repeat(1, 4), 8),
        "the group size 48 is not supported for 64 inputs": (codes, scale, 48),
        r"scale is torch.float16 \(4, 2\)": (codes, scale.half(), 32),
        r"minimum is torch.float32 \(4, 4\); it must be torch.float32 \(4, 2\)": (codes, scale, 32, torch.ones(4, 4)),
    }.items():
        with pytest.raises(ValueError, match=match):
            cpu_kernels.pack_linear(StoredWeight(*arguments))
    weight = StoredWeight(codes, scale, 32)
    with pytest.raises(ValueError, match="bias is"):
        cpu_kernels.pack_linear(weight, torch.ones(3))
    with pytest.raises(ValueError, match=r"values is .* contiguous"):
        cpu_kernels.pack_linear(StoredWeight(codes.repeat(1, 2)[:, ::2], scale, 32))


# 8-bit floats


def random_float8(seed):
    """Return a weight of all bytes that are numbers, including zeros and subnormals, in blocks of a random size.

    The last block may be shorter.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    in_size = 16 * rng.choice([1, 2, 5, 8, 20, 36, 64])
    group_size = rng.choice([16, 32, 48, 128, in_size, in_size])
    out_size = rng.choice([1, 15, 16, 17, 32, 63, 64, 65, 150])
    print(f"seed {seed}: {in_size} inputs in blocks of {group_size}, {out_size} outputs")
    codes = torch.randint(0, 254, (out_size, in_size), generator=generator, dtype=torch.uint8)
    codes += (codes >= 127).byte()  # skips 127 and 255, which are NaN
    scale = 0.01 + torch.rand(out_size, -(-in_size // group_size), generator=generator)
    return StoredWeight(codes.view(torch.float8_e4m3fn), scale, group_size)


def scale_of_inputs(weight):
    """Return the scale of each input, [out_size, in_size]."""
    return weight.scale.repeat_interleave(weight.group_size, 1)[:, : weight.values.shape[1]]


def sums_of_units(x, weight, multiply_add):
    """Return the sums in the order of the float8 kernels: within a unit as for bfloat16, and then unit by unit."""
    x, values, total = x.bfloat16().float(), weight.values.float(), torch.zeros(len(x), len(weight.values))
    unit = unit_size(FLOAT8, weight.group_size, x.shape[1])
    for start in range(0, x.shape[1], unit):
        sums = torch.zeros_like(total)
        for i in range(start, start + unit, 2):
            sums = sums + x[:, i + 1, None] * values[:, i + 1]
            sums = sums + x[:, i, None] * values[:, i]
        total = multiply_add(sums, scale_of_inputs(weight)[:, start], total)
    return total


@pytest.mark.parametrize("seed", range(400, 416))
def test_float8_bit_for_bit(variant, seed):
    weight = random_float8(seed)
    x = random_activations(seed, 13, weight.values.shape[1])
    bias = torch.randn(len(weight.values), generator=torch.Generator().manual_seed(seed)) if seed % 2 else None
    expected = sums_of_units(x, weight, of_variant(variant))
    actual = variant.linear(x, variant.pack_linear(weight, bias))
    assert torch.equal(actual, expected if bias is None else expected + bias)


@pytest.mark.parametrize("seed", range(420, 424))
def test_float8_is_near_float64(variant, seed):
    weight = random_float8(seed)
    x = random_activations(seed, 5, weight.values.shape[1]).bfloat16()
    matrix = weight.values.double() * scale_of_inputs(weight).double()
    error = (variant.linear(x.float(), variant.pack_linear(weight)).double() - x.double() @ matrix.T).abs()
    num_roundings = 128 + 2 * weight.values.shape[1] // 16
    assert (error <= num_roundings * 2.0**-24 * (x.double().abs() @ matrix.abs().T)).all()


@pytest.mark.parametrize("seed", range(430, 436))
def test_a_row_depends_on_no_other_row_over_float8(variant, seed):
    weight = random_float8(seed)
    check_rows(variant, random_activations(seed, 40, weight.values.shape[1]), variant.pack_linear(weight))


@pytest.mark.parametrize("seed", range(440, 448))
def test_packed_float8_is_the_weight(variant, seed):
    weight = random_float8(seed)
    actual = variant.lookup_rows(variant.pack_linear(weight), torch.arange(len(weight.values)))
    assert torch.equal(actual, weight.values.float() * scale_of_inputs(weight))
    assert torch.equal(actual, weight.dequantized())


def test_every_float8_is_widened_exactly(variant):
    """Each byte is multiplied with 1, alone in its output."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127]
    values = torch.zeros(len(codes), 32, dtype=torch.uint8)
    values[torch.arange(len(codes)), torch.arange(len(codes)) % 32] = codes
    weight = StoredWeight(values.view(torch.float8_e4m3fn), torch.ones(len(codes), 1), 32)
    actual = variant.linear(torch.ones(1, 32), variant.pack_linear(weight))
    assert torch.equal(actual[0], codes.view(torch.float8_e4m3fn).float())


def test_nan_and_infinity_come_through_float8(variant):
    weight = random_float8(5)
    x = random_activations(5, 9, weight.values.shape[1])
    packed = variant.pack_linear(weight)
    expected = variant.linear(x, packed)
    x[4, 7] = torch.nan
    actual = variant.linear(x, packed)
    assert actual[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize(("group_size", "expected"), [(128, 8.25), (1024, 8.25), (64, 8.5), (256, 8.25)])
def test_float8_takes_a_byte_and_its_scales(cpu_kernels, group_size, expected):
    weight = StoredWeight(torch.zeros(64, 1024).to(torch.float8_e4m3fn), torch.ones(64, 1024 // group_size), group_size)
    packed = cpu_kernels.pack_linear(weight)
    assert packed.panels.numel() * 8 / weight.values.numel() == expected
    assert StoredFormat(FLOAT8, group_size).num_bytes(64, 1024) == packed.panels.numel()


def test_float8_weights_of_several_blocks_are_joined():
    weights = [random_float8(seed) for seed in range(40)]
    weights = [weight for weight in weights if weight.values.shape[1] == 320]
    assert len({weight.group_size for weight in weights}) > 1
    assert torch.equal(StoredWeight.join(weights).dequantized(), torch.cat([each.dequantized() for each in weights]))


def test_float8_that_does_not_fit_is_refused(cpu_kernels):
    values = torch.zeros(4, 64).to(torch.float8_e4m3fn)
    for match, arguments in {
        r"values are torch.float32 \(4, 64\)": (values.float(), torch.ones(4, 1), 64),
        r"scale is .*must be torch.float32 \(4, 2\)": (values, torch.ones(4, 1), 32),
        "the group size 40 is not supported for 64 inputs": (values, torch.ones(4, 2), 40),
    }.items():
        with pytest.raises(ValueError, match=match):
            cpu_kernels.pack_linear(StoredWeight(*arguments))
    with pytest.raises(ValueError, match="bias is"):
        cpu_kernels.pack_linear(StoredWeight(values, torch.ones(4, 1), 64), torch.ones(3))
