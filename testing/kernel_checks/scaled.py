"""Checks of `kernels/triton/scaled.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import scaled as specification
from pagewire.kernels.triton import scaled
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided

FP8 = torch.float8_e4m3fn
TRITON_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", FP8: "fp8e4nv"}


@dataclass(frozen=True)
class Product:
    """A matrix multiplication to compare.

    Attributes:
        kind: kind of the weight: "int8", FP8 with scales of "channels", or FP8 with scales of "blocks".
        dtype: dtype of activations and outputs.
    """

    kind: str
    num_rows: int
    in_size: int
    out_size: int
    dtype: torch.dtype = torch.bfloat16
    has_bias: bool = False

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.int8 if self.kind == "int8" else FP8

    @property
    def group_size(self) -> int:
        return scaled.BLOCK if self.kind == "blocks" else self.in_size


def make_weight(product: Product, generator: torch.Generator) -> scaled.ScaledWeight:
    """Return a weight. The memory after its last output must not be read; for FP8 it contains NaN."""
    device = generator.device
    out_size, in_size = product.out_size, product.in_size
    of_blocks = (-(-out_size // scaled.BLOCK), -(-in_size // scaled.BLOCK))
    shape = of_blocks if product.kind == "blocks" else (out_size,)
    scale = torch.rand(shape, generator=generator, device=device) * 0.1 + 0.01
    if product.kind == "int8":
        codes = torch.randint(-128, 128, (out_size + 1, in_size), generator=generator, device=device).to(torch.int8)
        return scaled.ScaledWeight(codes[:-1], scale, in_size)
    values = (torch.randn(out_size + 1, in_size, generator=generator, device=device) * 60).clamp(-448, 448)
    values[-1] = float("nan")
    return scaled.ScaledWeight(values.to(FP8)[:-1], scale, product.group_size)


def make_rows(product: Product, generator: torch.Generator) -> Tensor:
    """Return rows of different magnitudes as a view of wider rows. If there are more than two rows, one is all
    zeros."""
    normal = partial(torch.randn, generator=generator, device=generator.device)
    x = normal(product.num_rows, product.in_size + 16) * normal(product.num_rows, 1).exp()
    x[:, product.in_size :] = float("nan")
    if product.num_rows > 2:
        x[1] = 0
    return x.to(product.dtype)[:, : product.in_size]


def make_bias(product: Product, generator: torch.Generator) -> Tensor | None:
    bias = torch.randn(product.out_size, generator=generator, device=generator.device)
    return bias.to(product.dtype) if product.has_bias else None


def check_rounding(device: torch.device, x: Tensor, dtype: torch.dtype, group_size: int, case: str) -> None:
    """Check that rounded values and scales equal the specification bit for bit."""
    x = x.to(device)
    rounded, expected = scaled.round_rows(x, dtype, group_size), specification.round_rows(x, dtype, group_size)
    assert rounded.scale.shape == expected.scale.shape, case
    same = rounded.scale.eq(expected.scale) | (rounded.scale.isnan() & expected.scale.isnan())
    assert same.all(), f"{case}: {int((~same).sum())} scales differ"
    bits, expected_bits = (each.values.view(torch.uint8) for each in (rounded, expected))
    assert torch.equal(bits, expected_bits), f"{case}: {int((bits != expected_bits).sum())} values differ"


def check_product(device: torch.device, product: Product, seed: int) -> None:
    """Check rounding and multiplication: int8 has exactly the specified bits, and FP8 is within the error of its
    sums."""
    case = f"{product}, seed {seed}"
    generator = torch.Generator(device).manual_seed(seed)
    x, weight, bias = make_rows(product, generator), make_weight(product, generator), make_bias(product, generator)
    check_rounding(device, x, product.weight_dtype, product.group_size, case)
    actual = scaled.multiply(x, weight, bias)
    rounded = specification.round_rows(x, product.weight_dtype, weight.block_size)
    expected = specification.multiply(rounded, weight.values, weight.scale, bias, product.dtype)
    assert actual.dtype == product.dtype, f"{case}: {actual.dtype}"
    assert actual.shape == expected.shape, f"{case}: {actual.shape}"
    if product.kind == "int8":
        assert torch.equal(actual, expected), f"{case}: {int((actual != expected).sum())} outputs differ"
        return
    limit = torch.finfo(product.dtype).eps * expected.double().abs() + sum_error(rounded, weight)
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= limit).all()), f"{case}: off by {float(error.max())}"


def sum_error(rounded: specification.RoundedRows, weight: scaled.ScaledWeight) -> Tensor:
    """Return an upper bound on the difference of two sums of the same FP8 products, float64 [T, out_size].

    A float32 sum in any order has an error of 2^-24 of the sum of magnitudes per addition. Tensor cores of a Hopper GPU
    align the products of a step to the largest product and keep 13 bits below it (DeepSeek-V3, 3.3.2). So each of 128
    products, and each of the sums of four steps, has an error of at most 2^-13 of the largest possible product.
    """
    in_size = weight.values.shape[1]
    rows, outputs = dequantized_rows(rounded).abs(), dequantized(weight).abs()
    num_blocks = -(-in_size // scaled.BLOCK)
    error = 2 * (scaled.BLOCK + num_blocks + 4) * 2.0**-24 * (rows @ outputs.T)
    if rows.device.type == "cuda":
        for start in range(0, in_size, scaled.BLOCK):
            inputs = slice(start, start + scaled.BLOCK)
            error += 132 * 2.0**-13 * rows[:, inputs].amax(1)[:, None] * outputs[:, inputs].amax(1)
    return error


def dequantized_rows(rounded: specification.RoundedRows) -> Tensor:
    """Return the values of rounded rows, float64 [T, in_size]."""
    in_size = rounded.values.shape[1]
    group_size = in_size if rounded.scale.shape[1] == 1 else scaled.BLOCK
    return rounded.values.double() * rounded.scale.double().repeat_interleave(group_size, 1)[:, :in_size]


def dequantized(weight: scaled.ScaledWeight) -> Tensor:
    """Return the values of a weight, float64 [out_size, in_size]."""
    scale = weight.scale.double()
    if scale.dim() == 1:
        return weight.values.double() * scale[:, None]
    out_size, in_size = weight.values.shape
    expanded = scale.repeat_interleave(scaled.BLOCK, 0)[:out_size].repeat_interleave(scaled.BLOCK, 1)
    return weight.values.double() * expanded[:, :in_size]


def check_exact_sums(device: torch.device, product: Product, seed: int) -> None:
    """Check small integers, whose sums are exact in any order: FP8 has exactly the specified bits."""
    case = f"{product}, exact sums, seed {seed}"
    generator = torch.Generator(device).manual_seed(seed)
    integers = partial(torch.randint, -4, 5, generator=generator, device=device)
    x = integers((product.num_rows, product.in_size)).to(product.dtype)
    x[:, :: scaled.BLOCK] = 448  # makes the scales of rows 1
    weight = make_weight(product, generator)
    powers = 2.0 ** torch.randint(-3, 4, weight.scale.shape, generator=generator, device=device)
    values = integers(weight.values.shape).float().to(FP8)
    weight = replace(weight, values=values, scale=powers)
    bias = make_bias(product, generator)
    actual = scaled.multiply(x, weight, bias, torch.float32)
    expected = x.double() @ dequantized(weight).T
    expected = (expected if bias is None else expected + bias.double()).float()
    rounded = specification.round_rows(x, FP8, weight.block_size)
    specified = specification.multiply(rounded, weight.values, weight.scale, bias)
    assert torch.equal(specified, expected), f"{case}: the specification is off"
    assert torch.equal(actual, expected), f"{case}: {int((actual != expected).sum())} outputs differ"


def check_neighbours(device: torch.device, product: Product, seed: int) -> None:
    """Check that a row has the same bits whatever the other rows contain, including infinities and NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    x, weight, bias = make_rows(product, generator), make_weight(product, generator), make_bias(product, generator)
    before = scaled.multiply(x, weight, bias)
    for kept in {0, product.num_rows // 2, product.num_rows - 1}:
        others = torch.randn(x.shape, generator=generator, device=device).to(x.dtype)
        others[(kept + 1) % len(x), 3], others[(kept + 2) % len(x), 5] = float("nan"), float("inf")
        others[kept] = x[kept]
        after = scaled.multiply(others, weight, bias)
        case = f"{product}, seed {seed}, row {kept}"
        assert torch.equal(after[kept], before[kept]), f"{case} differs beside others"
        if product.num_rows > 2:
            lost = [(kept + 1) % len(x), (kept + 2) % len(x)]
            assert after[lost].isnan().all(), f"{case}: what is not finite gives numbers"
            assert after.isnan().all(1).sum() == 2, f"{case}: other rows are NaN, too"
    if product.num_rows <= 16:
        for row in range(product.num_rows):
            alone = scaled.multiply(x[row : row + 1], weight, bias)
            assert torch.equal(alone[0], before[row]), f"{product}, seed {seed}: row {row} differs alone"


QWEN3_8B = Product("int8", 16, 4096, 12288)
KINDS = ("int8", "channels", "blocks")


def device_cases() -> Iterator[DeviceCase]:
    def case(name: str, check: Callable[..., None], *arguments: object) -> DeviceCase:
        return DeviceCase(f"scaled: {name}", lambda device: check(device, *arguments))

    for kind in KINDS:
        product = replace(QWEN3_8B, kind=kind)
        for num_rows in (1, 7, 16, 17, 64, 65, 512, 2000):
            of_rows = replace(product, num_rows=num_rows, has_bias=num_rows % 2 == 0)
            yield case(f"{kind}, {num_rows} rows", check_product, of_rows, 1)
            narrow = replace(of_rows, in_size=3072, out_size=1024, dtype=torch.float16)
            yield case(f"{kind}, {num_rows} rows, few outputs", check_product, narrow, 2)
            odd = replace(of_rows, in_size=1500, out_size=1001, dtype=torch.float32)
            yield case(f"{kind}, {num_rows} rows, odd sizes", check_product, odd, 3)
            if kind != "int8":
                yield case(f"{kind}, {num_rows} rows, exact sums", check_exact_sums, of_rows, 4)
        for num_rows in (1, 16, 50, 200):
            of_rows = replace(product, num_rows=num_rows)
            yield case(f"{kind}, {num_rows} rows beside others", check_neighbours, of_rows, 5)


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks of rounding and multiplication together, for sizes of Qwen3-0.6B and Qwen3-8B.

    Few rows are bound by reading the weight. `bench.gpu.products` measures the same sizes with cuBLAS.
    """
    for kind in KINDS:
        for out_size, in_size in ((4096, 1024), (1024, 3072), (6144, 4096), (24576, 4096), (4096, 12288)):
            for num_rows in (1, 16, 512):
                yield BenchCase(
                    f"{kind}: product of {num_rows} rows that are rounded, [{out_size}, {in_size}]",
                    partial(make_bench, Product(kind, num_rows, in_size, out_size)),
                    bytes_moved=out_size * in_size + 2 * num_rows * (in_size + out_size),
                    flops=2 * num_rows * out_size * in_size,
                )


def make_bench(product: Product, device: torch.device) -> list[Callable[[], object]]:
    """Return functions over several weights, which together exceed 100 MB and so do not fit a cache.

    Torch's matrix multiplication is used where `has_library` found that it agrees.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight = make_weight(product, generator)
    is_library = product.kind != "int8" and scaled.has_library(device, product.kind == "blocks")
    weight = replace(weight, has_library=is_library)
    num_sets = max(2, -(-100_000_000 // weight.values.numel()))
    x = make_rows(product, generator)
    sets = [replace(weight, values=weight.values.clone()) for _ in range(num_sets)]
    return [partial(scaled.multiply, x, each) for each in sets]


def compile_cases() -> Iterator[CompileCase]:
    for source in ("bf16", "fp16", "fp32"):
        for dtype, in_size, group_size in ((torch.int8, 4096, 4096), (FP8, 4096, 4096), (FP8, 4096, scaled.BLOCK)):
            yield _rounding_variant(source, dtype, in_size, group_size)
    for kind in KINDS:
        for num_rows, out_size, dtype, bias in (
            *((1, 1024, torch.bfloat16, None), (16, 4096, torch.float16, "*fp16"), (16, 12288, torch.bfloat16, None)),
            *((64, 1024, torch.bfloat16, "*bf16"), (64, 4096, torch.float16, None), (512, 1024, torch.float16, None)),
            *((64, 24576, torch.bfloat16, None), (2048, 4096, torch.bfloat16, "*bf16")),
            *((2048, 12288, torch.float16, None), (2048, 4096, torch.float32, "*fp32")),
        ):
            yield _product_variant(Product(kind, num_rows, 4096, out_size, dtype), bias)


def _rounding_variant(source: str, dtype: torch.dtype, in_size: int, group_size: int) -> CompileCase:
    groups, tile = scaled.rounding_tile(in_size, group_size)
    return CompileCase(
        f"rows of {source} rounded to {dtype} in groups of {group_size}",
        scaled._round_kernel,
        {
            **{"x": strided(source, 2), "values": f"*{TRITON_TYPES[dtype]}", "scale": "*fp32"},
            **dict.fromkeys(("num_rows", "in_size", "group_size", "num_groups"), "i32"),
        },
        {"LARGEST": specification.LARGEST[dtype], "GROUPS": groups, "TILE": tile},
        divisible_by_16=("strides", "in_size", "group_size"),
    )


def _product_variant(product: Product, bias: str | None) -> CompileCase:
    tile = scaled.choose_tile(product.num_rows, product.out_size, product.weight_dtype)
    element = TRITON_TYPES[product.weight_dtype]
    return CompileCase(
        f"product of {product}, {tile}, bias {bias}",
        scaled._multiply_kernel,
        {
            **{"x": f"*{element}", "x_scale": "*fp32", "weight": scaled.ScaledPointers(f"*{element}", "*fp32")},
            **{"bias": bias, "output": f"*{TRITON_TYPES[product.dtype]}"},
            **dict.fromkeys(("num_rows", "in_size", "out_size"), "i32"),
        },
        {
            **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
            "IS_BLOCKED": product.kind == "blocks",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("in_size", "out_size"),
        overlaps=True,
        min_programs=2 if tile.block_m < 128 else 1,
    )
