"""Matrix multiplications with rounded activations compared with their specification, and that with float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from pagewire.kernels import scaled as specification
from pagewire.kernels.triton import scaled
from pagewire.kernels.weight import StoredWeight
from testing.kernel_checks.scaled import (
    FP8,
    KINDS,
    Product,
    check_exact_sums,
    check_neighbours,
    check_product,
    check_rounding,
    dequantized,
    dequantized_rows,
    make_rows,
    make_weight,
)

PRODUCT = Product("int8", 5, 160, 72)


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_rows_are_rounded_bit_for_bit(device, dtype):
    generator = torch.Generator().manual_seed(1)
    check = partial(check_rounding, device)
    for size in (1, 15, 128, 129, 1000, 5000):  # up to several tiles of a row
        for source in (torch.float32, torch.float16, torch.bfloat16):
            x = make_rows(Product("int8", 4, size, 1, source), generator)
            for group_size in (size, scaled.BLOCK):
                check(x, dtype, group_size, f"{size} {source} in groups of {group_size}, seed 1")
    for scale in (1e-45, 1e-41, 1e-38, 1e-36, 1e30, 2e37):
        x = torch.randn(3, 300, generator=generator) * scale
        check(x, dtype, 300, f"magnitude {scale}, seed 1")
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]])  # halfway: to the even one
    check(halves, dtype, 8, "halves")


def test_the_rule_of_rounding():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5]])
    assert specification.round_rows(x, torch.int8, 8).values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -126]]
    x = torch.tensor([[448.0, -448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 0.0]])
    expected = [[448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8, 2.0**-9, 0.0]]
    assert specification.round_rows(x, FP8, 8).values.float().tolist() == expected
    for dtype, largest in scaled.LARGEST.items():
        rounded = specification.round_rows(torch.tensor([[0.0, 0.0], [-3.0, 1.0]]), dtype, 2)
        assert rounded.scale.tolist() == [[2.0**-126], [float(torch.tensor(3.0) / largest)]]
        assert rounded.values[0].float().tolist() == [0.0, 0.0]
        assert rounded.values[1, 0].float() == -largest


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_a_group_nan(device, dtype, bad):
    x = torch.ones(3, 300)
    x[1, 140] = bad
    for group_size in (300, scaled.BLOCK):
        check_rounding(device, x, dtype, group_size, f"{bad} in groups of {group_size}")
        rounded = scaled.round_rows(x.to(device), dtype, group_size)
        groups = torch.arange(rounded.scale.shape[1], device=device) == 140 // group_size
        assert rounded.scale[1].isnan().tolist() == groups.tolist()
        assert not rounded.scale[[0, 2]].isnan().any()
        assert rounded.values[1, 140].float() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 70])
def test_products(device, kind, num_rows, has_bias):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        check_product(device, replace(PRODUCT, kind=kind, num_rows=num_rows, dtype=dtype, has_bias=has_bias), seed)


def test_products_of_random_shapes(device):
    generator = torch.Generator().manual_seed(7)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: E731
    for seed in range(24):
        product = Product(KINDS[seed % 3], draw(1, 40), draw(1, 420), draw(1, 300), has_bias=bool(draw(0, 1)))
        check_product(device, product, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(device, kind):
    """Numbers of outputs for which the host chooses each of the tiles."""
    dtype = replace(PRODUCT, kind=kind).weight_dtype
    chosen = set()
    for num_rows, out_size in (
        (16, 8200),
        (3, 4100),
        (5, 100),
        (129, 8200),
        (17, 16390),
        (33, 8200),
        (20, 4100),
        (64, 9),
    ):
        check_product(device, Product(kind, num_rows, 40, out_size), seed=out_size)
        chosen.add(scaled.choose_tile(num_rows, out_size, dtype))
    assert chosen == {*scaled._FEW[dtype], *scaled._MANY}


@pytest.mark.parametrize("kind", ["channels", "blocks"])
@pytest.mark.parametrize("num_rows", [1, 16, 70])
def test_exact_sums_of_fp8_have_the_specified_bits(device, kind, num_rows):
    for seed, (in_size, out_size) in enumerate(((128, 16), (300, 140), (1000, 33))):
        check_exact_sums(device, Product(kind, num_rows, in_size, out_size, has_bias=seed == 1), seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_a_row_does_not_depend_on_others(device, kind, num_rows):
    check_neighbours(device, replace(PRODUCT, kind=kind, num_rows=num_rows, has_bias=True), seed=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [2.0**-14, 1.0, 2.0**15])
def test_the_specification_is_as_near_as_rounding_allows(kind, magnitude):
    """The specification is within the rounding bound of the float64 result.

    Each int8 input is off by at most half a step. Each FP8 input is off by at most a sixteenth, or by half of 2^-9 of
    the scale below the least normal number.
    """
    seed = 11
    generator = torch.Generator().manual_seed(seed)
    product = replace(PRODUCT, kind=kind, num_rows=9, in_size=300, has_bias=True)
    x, weight = make_rows(product, generator).float() * magnitude, make_weight(product, generator)
    rounded = specification.round_rows(x, product.weight_dtype, product.group_size)
    actual = specification.multiply(rounded, weight.values, weight.scale).double()
    expected, whole = x.double() @ dequantized(weight).T, dequantized_rows(rounded)
    scale = rounded.scale.double().repeat_interleave(product.group_size, 1)[:, :300]
    steps = scale / 2 if kind == "int8" else (x.double().abs() * 2.0**-4).maximum(scale * 2.0**-10)
    assert bool(((whole - x.double()).abs() <= steps * (1 + 2.0**-20)).all()), f"seed {seed}"
    weights = dequantized(weight).abs()
    limit = steps @ weights.T + (300 + 8) * 2.0**-24 * (x.double().abs() @ weights.T) * 1.1
    error = (actual - expected).abs()
    assert bool((error <= limit).all()), f"seed {seed}: off by {float((error / limit).max())} of the bound"
    # The bound is not too loose: the error comes near it, and a wrong scale would exceed it.
    assert float((error / limit)[2:].max()) > 0.02


def test_sums_of_int8_are_exact_at_the_largest(device):
    """The largest number of products of -128 and -127 that an int32 can hold."""
    size = scaled.MAX_INPUTS
    codes = torch.full((2, size), -128, dtype=torch.int8, device=device)
    weight = scaled.ScaledWeight(codes, torch.ones(2, device=device), size)
    x = torch.full((1, size), -127.0, device=device)
    assert scaled.multiply(x, weight).tolist() == [[127.0 * 128 * size] * 2]


def test_weights_of_int8_are_packed(device):
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (6, 512), generator=generator).to(torch.int8)
    scale, ones = torch.rand(6, 1, generator=generator), torch.ones(6, 1)
    whole = StoredWeight(codes, scale, 512)
    for weight in (whole, whole.in_groups_of(64)):
        packed = scaled.pack(weight, device)
        assert packed is not None
        assert (packed.block_size, packed.values.device.type) == (512, device.type)
        assert torch.equal(packed.scale.cpu()[:, None] * packed.values.cpu(), weight.dequantized())
    factors = StoredWeight(codes, scale, 512)
    several = torch.rand(6, 8, generator=generator)
    for weight in (
        replace(factors, minimum=ones),
        replace(factors, zero=torch.ones(6, 1, dtype=torch.int8)),
        StoredWeight(codes, several, 64),
        StoredWeight(codes, several[:, :4] * 0 + 1, 128, scale_factor=torch.tensor([[1.0, 2.0]] * 6)),
    ):
        assert scaled.pack(weight, device) is None
    equal = StoredWeight(codes, scale.expand(6, 4).contiguous(), 128, scale_factor=torch.full((6, 2), 0.3))
    packed = scaled.pack(equal, device)
    assert packed is not None
    assert torch.equal(packed.scale.cpu()[:, None] * packed.values.cpu(), equal.dequantized())
    wide = torch.zeros(1, scaled.MAX_INPUTS + 16, dtype=torch.int8)
    assert scaled.pack(StoredWeight(wide, torch.ones(1, 1), wide.shape[1]), device) is None


def test_weights_of_fp8_are_packed(device):
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(300, 400, generator=generator).to(FP8)
    channels = torch.rand(300, 1, generator=generator)
    blocks = torch.rand(3, 4, generator=generator)
    of_outputs = blocks.repeat_interleave(128, 0)[:300]
    of_units = of_outputs.repeat_interleave(4, 1)[:, :13]  # units of 32 inputs; the last of 16
    for scale, block_size, shape in (
        *((channels, 400, (300,)), (channels.expand(300, 25).contiguous(), 16, (300,))),
        *((torch.ones(300, 1), 400, (300,)), (of_outputs, 128, (3, 4)), (of_units, 32, (3, 4))),
        (of_outputs[:, [0, 2]], 256, (3, 4)),
    ):
        weight = StoredWeight(values, scale, block_size)
        packed = scaled.pack(weight, device)
        assert packed is not None
        assert tuple(packed.scale.shape) == shape
        assert packed.block_size == (400 if len(shape) == 1 else 128)
        assert torch.equal(dequantized(packed).float().cpu(), weight.dequantized())
    other_rows, other_inputs = of_outputs.clone(), of_units.clone()
    other_rows[5, 2] += 1
    other_inputs[:, 5] += 1
    for scale, block_size in ((other_rows, 128), (other_inputs, 32), (torch.rand(300, 2, generator=generator), 200)):
        assert scaled.pack(StoredWeight(values, scale, block_size), device) is None


def test_no_rows_are_no_error(device):
    weight = make_weight(PRODUCT, torch.Generator(device).manual_seed(1))
    assert scaled.multiply(torch.empty(0, 160, device=device), weight).shape == (0, 72)
    assert scaled.round_rows(torch.empty(0, 160, device=device), torch.int8, 160).scale.shape == (0, 1)


def test_what_is_supported(device):
    assert scaled.is_supported(device, torch.int8)
    assert not scaled.is_supported(device, torch.bfloat16)
    assert not scaled.is_supported(torch.device("meta"), torch.int8)


@pytest.mark.parametrize(
    ("capability", "has_int8", "has_fp8"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 6), True, False), ((8, 9), True, True), ((9, 0), True, True)],
)
def test_fp8_needs_compute_capability_8_9(monkeypatch, capability, has_int8, has_fp8):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert (scaled.is_supported(cuda, torch.int8), scaled.is_supported(cuda, FP8)) == (has_int8, has_fp8)


@pytest.fixture
def _library_anew():
    """Forget whether torch's multiplication is supported, so that it is checked again."""
    scaled.has_library.cache_clear()
    yield
    scaled.has_library.cache_clear()


@pytest.mark.usefixtures("_library_anew")
def test_torch_matmul_is_used_for_many_rows_if_results_agree(device, monkeypatch):
    """Our kernel computes all rows where torch has no multiplication on a CPU, such as with scales per block."""
    calls = []
    multiply = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: calls.append(args) or multiply(*args, **kwargs))
    generator = torch.Generator().manual_seed(8)
    values, scale = torch.randn(256, 384, generator=generator).to(FP8), torch.rand(256, 1, generator=generator)
    weight = scaled.pack(StoredWeight(values, scale, 384), device)
    assert weight.has_library
    assert scaled.has_library(device, True) or device.type == "cpu"
    x = torch.randn(80, 384, generator=generator).bfloat16().to(device)
    for num_rows, asks_library in ((64, False), (65, True), (80, True)):
        calls.clear()
        actual = scaled.multiply(x[:num_rows], weight)
        assert bool(calls) == asks_library
        rounded = specification.round_rows(x[:num_rows], FP8, 384)
        expected = specification.multiply(rounded, weight.values, weight.scale)
        torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-3)
    calls.clear()
    scaled.multiply(x, weight, torch.zeros(256, device=device))
    scaled.multiply(x, weight, None, torch.float32)
    odd = scaled.pack(StoredWeight(values[:, :383], scale, 383), device)
    assert not odd.has_library
    assert not calls


@pytest.mark.usefixtures("_library_anew")
@pytest.mark.parametrize("fault", ["refuses", "is wrong"])
def test_torch_matmul_is_not_used_if_results_differ(device, monkeypatch, fault):
    def multiply(values, weight, *, scale_a, scale_b, out_dtype):
        if fault == "refuses":
            raise RuntimeError("not on this device")
        return ((values.float() @ weight.float()) * scale_a * 1.05 * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    assert not scaled.has_library(device, False)
    assert not scaled.pack(StoredWeight(torch.ones(128, 128).to(FP8), torch.ones(128, 1), 128), device).has_library


def test_products_refuse():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.zeros(2, 160), make_weight(PRODUCT, generator)
    blocks = make_weight(replace(PRODUCT, kind="blocks"), generator)
    wide = torch.zeros(1, scaled.MAX_INPUTS + 1, dtype=torch.int8)
    too_wide = scaled.ScaledWeight(wide, torch.ones(1), wide.shape[1])
    for text, arguments in (
        (r"x is \[2, 159\] .* make it \[T, 160\]", (x[:, :159], weight)),
        (r"x is \[2, 160\] torch.float64 .* make it .* torch.float16 or torch.bfloat16", (x.double(), weight)),
        ("with strides .* its last dimension dense", (torch.zeros(160, 2).T, weight)),
        (r"x is \[160\]", (x[0], weight)),
        (
            "weight is .* torch.uint8 .* torch.int8 or torch.float8_e4m3fn",
            (x, replace(weight, values=weight.values.byte())),
        ),
        ("weight is .* dense", (x, replace(weight, values=weight.values.T.contiguous().T))),
        (r"scale is \[71\] torch.float32 .* make it \[72\]", (x, replace(weight, scale=weight.scale[:71]))),
        (r"scale is \[72\] torch.float64", (x, replace(weight, scale=weight.scale.double()))),
        (r"scale is \[2, 2\] .* make it \[1, 2\]", (x, replace(blocks, scale=torch.ones(2, 2)))),
        (r"scale is \[1, 2\] .* make it \[72\]", (x, replace(weight, scale=torch.ones(1, 2)))),
        ("block_size is 128; .* must be 160", (x, replace(weight, block_size=128))),
        (
            f"int8 weights support at most {scaled.MAX_INPUTS}",
            (x, too_wide),
        ),
        (r"bias is \[71\] .* make it \[72\]", (x, weight, torch.zeros(71))),
        ("outputs cannot be torch.int8", (x, weight, None, torch.int8)),
    ):
        with pytest.raises(ValueError, match=text):
            scaled.multiply(*arguments)
    for text, arguments in (
        ("rows cannot be rounded to torch.uint8; choose int8 or float8_e4m3fn", (x, torch.uint8, 160)),
        ("groups of 64 of 160 inputs are not supported; use 160 or 128", (x, torch.int8, 64)),
        ("groups of 0 of 0 inputs", (x[:, :0], torch.int8, 0)),
    ):
        with pytest.raises(ValueError, match=text):
            scaled.round_rows(*arguments)
