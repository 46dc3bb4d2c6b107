"""Checks of `kernels/triton/linear.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import experts as specification
from pagewire.kernels.triton import experts, linear
from pagewire.kernels.weight import BLOCK, FLOAT8, StoredWeight
from pagewire.network.expert_routing import ExpertRouting
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided
from testing.kernel_checks.experts import TRITON_TYPES

CODES = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128)}
_E2M1 = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# The properties of packed codes that do not depend on the numbers: bits of a code, and whether codes are E2M1 numbers.
PACKED = {"int4": (4, False), "uint4": (4, False), "e2m1": (4, True), "int8": (8, False), "fp8": (8, False)}


@dataclass(frozen=True)
class Layer:
    """A matrix multiplication to compare.

    Attributes:
        codes: a key of `PACKED`.
        group_size: inputs that share a scale; 0: whole rows.
        is_exact: all numbers are small integers or powers of two, so that no sum is rounded.
    """

    num_rows: int
    out_size: int
    in_size: int
    codes: str = "int4"
    group_size: int = 32
    dtype: torch.dtype = torch.bfloat16
    has_half_scales: bool = True
    has_zeros: bool = False
    has_minima: bool = False
    has_factors: bool = False
    has_bias: bool = False
    is_exact: bool = False


def held_bytes(packed: linear.PackedWeight) -> int:
    """Return the bytes of a packed weight."""
    there = (packed.codes, packed.scale, packed.zero, packed.minimum)
    return sum(tensor.nbytes for tensor in there if tensor is not None)


def make_weight(layer: Layer, generator: torch.Generator) -> StoredWeight:
    device, size = generator.device, layer.group_size or layer.in_size
    shape, groups = (layer.out_size, layer.in_size), (layer.out_size, -(-layer.in_size // size))
    integers = partial(torch.randint, generator=generator, device=device)

    def numbers(shape: tuple[int, int]) -> Tensor:
        if layer.is_exact:
            return torch.ldexp(torch.ones(shape, device=device), integers(-3, 4, shape))
        found = 0.1 + torch.rand(shape, generator=generator, device=device)
        return found.half().float() if layer.has_half_scales else found

    scale = numbers(groups)
    if layer.codes == "fp8":
        values = (
            integers(-8, 9, shape).float() if layer.is_exact else torch.randn(shape, generator=generator, device=device)
        )
        return StoredWeight(values.to(FLOAT8), scale, size)
    if layer.codes == "e2m1":
        codes = _E2M1.to(device)[integers(0, 16, shape)]
    else:
        codes = integers(*CODES[layer.codes], shape).to(torch.int8)
        codes[0, :2] = torch.tensor(CODES[layer.codes], device=device) - torch.tensor((0, 1), device=device)
    zero = integers(-5, 20, groups).to(torch.int8) if layer.has_zeros else None
    minimum = numbers(groups) if layer.has_minima else None
    factors = [None, None]
    if layer.has_factors:
        blocks = (layer.out_size, layer.in_size // BLOCK)
        factors = [numbers(blocks), numbers(blocks) if layer.has_minima else None]
    return StoredWeight(codes, scale, size, minimum, zero, *factors)


def make_rows(layer: Layer, num_rows: int, generator: torch.Generator) -> Tensor:
    """Return rows as a view of wider rows, whose other columns must not be read."""
    shape = (num_rows, layer.in_size + 16)
    if layer.is_exact:
        x = torch.randint(-4, 5, shape, generator=generator, device=generator.device).to(layer.dtype)
    else:
        x = torch.randn(shape, generator=generator, device=generator.device).to(layer.dtype)
    x[:, layer.in_size :] = float("nan")
    return x[:, : layer.in_size]


def make_bias(layer: Layer, generator: torch.Generator) -> Tensor | None:
    bias = torch.randn(layer.out_size, generator=generator, device=generator.device).to(layer.dtype)
    return (bias.round() if layer.is_exact else bias) if layer.has_bias else None


def check_layer(device: torch.device, layer: Layer, seed: int) -> None:
    """Check `multiply` with an output of the dtype of x and with a float32 output."""
    generator = torch.Generator(device).manual_seed(seed)
    weight, bias = make_weight(layer, generator), make_bias(layer, generator)
    packed = linear.pack(weight, device)
    check_packed(packed, layer, f"{layer}, seed {seed}")
    x = make_rows(layer, layer.num_rows, generator)
    for dtype in {layer.dtype, torch.float32}:
        output = None if dtype == layer.dtype else x.new_empty(len(x), layer.out_size, dtype=dtype)
        actual = linear.multiply(x, packed, bias, output)
        assert actual.dtype == dtype
        assert output is None or actual is output
        check_product(actual, x, weight, bias, layer.is_exact, f"{layer}, {dtype}, seed {seed}")


def check_packed(packed: linear.PackedWeight, layer: Layer, case: str) -> None:
    """Check that codes have the number of bits of their kind, and that scales are float16 if float16 represents
    them."""
    assert (packed.bits, packed.is_e2m1) == PACKED[layer.codes], case
    assert (packed.out_size, packed.in_size) == (layer.out_size, layer.in_size), case
    if layer.has_half_scales and not layer.has_factors:
        assert packed.scale.dtype == torch.float16, case
    assert (packed.zero is not None, packed.minimum is not None) == (layer.has_zeros, layer.has_minima), case


def check_product(
    actual: Tensor, x: Tensor, weight: StoredWeight, bias: Tensor | None, is_exact: bool, case: str
) -> None:
    """Check a matrix multiplication against float64.

    Products of operands are exact, so the allowed error covers float32 sums and one rounding of the result. If
    `is_exact`, sums are exact too, and the result must equal the exact result rounded once.
    """
    expected = x.double() @ weight.dequantized().double().T
    if bias is not None:
        expected += bias.double()
    if is_exact:
        assert torch.equal(actual, expected.to(actual.dtype)), f"{case}: not exact"
        return
    spread = x.double().abs() @ magnitudes(weight).T
    limit = torch.finfo(actual.dtype).eps * expected.abs() + 64 * 2.0**-24 * spread
    error = (actual.double() - expected).abs()
    assert bool((error <= limit).all()), f"{case}: off by {float(error.max())}"


def magnitudes(weight: StoredWeight) -> Tensor:
    """Return the sum of the absolute values of the terms of each element of a weight, in float64."""
    whole = weight.without_factors()
    terms = replace(whole, minimum=None).dequantized().double().abs()
    if whole.minimum is not None:
        terms += whole.minimum.double().abs().repeat_interleave(whole.group_size, 1)
    return terms


def check_alone(device: torch.device, layer: Layer, seed: int) -> None:
    """Check that a row has the same bits alone as beside others with any content, if the tile is the same."""
    generator = torch.Generator(device).manual_seed(seed)
    packed, bias = linear.pack(make_weight(layer, generator), device), make_bias(layer, generator)
    x = make_rows(layer, layer.num_rows, generator)
    is_few = linear.choose_block_m(len(x), x.dtype) == linear.choose_block_m(1, x.dtype)
    alone = x[2:3] if is_few else x[2:].clone()  # or as the first of several rows
    expected = linear.multiply(alone, packed, bias)[0]
    x[0], x[1] = float("inf"), 1e4
    assert torch.equal(linear.multiply(x, packed, bias)[2], expected), f"{layer}, seed {seed}: a row depends on others"


def check_experts(
    device: torch.device, layer: Layer, changes: Sequence[Mapping[str, object]], routing: ExpertRouting, seed: int
) -> None:
    """Check `multiply_routed` with rows by token and by slot.

    Each expert differs from the layer by its entry of `changes`. Most tokens choose the last expert.
    """
    case = f"{layer}, {changes=}, {routing}, seed {seed}"
    generator = torch.Generator(device).manual_seed(seed)
    weights = [make_weight(replace(layer, **each), generator) for each in changes]
    packed = linear.join([linear.pack(weight, device) for weight in weights])
    logits = torch.randn(layer.num_rows, len(weights), generator=generator, device=device)
    logits[:, -1] += 3
    ids, _ = specification.route_tokens(logits, routing)
    bias = torch.randn(len(weights), layer.out_size, generator=generator, device=device).to(layer.dtype)
    biases = (bias.round() if layer.is_exact else bias) if layer.has_bias else None
    assignment = experts.assign(ids, len(weights), layer.dtype)
    for x in (make_rows(layer, layer.num_rows, generator), make_rows(layer, ids.numel(), generator)):
        slots = linear.multiply_routed(x, packed, assignment, biases)
        assert slots.shape == (ids.numel(), layer.out_size), case
        of_slots = x.repeat_interleave(ids.numel() // len(x), 0)
        for expert, weight in enumerate(weights):
            chosen = ids.flatten() == expert
            bias = None if biases is None else biases[expert]
            check_product(slots[chosen], of_slots[chosen], weight, bias, layer.is_exact, f"{case}, expert {expert}")


def check_replay(device: torch.device, layer: Layer, seed: int) -> None:
    """Check that a graph captured for some rows gives correct results for other rows."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = make_weight(layer, generator)
    packed, x = linear.pack(weight, device), make_rows(layer, layer.num_rows, generator)
    linear.multiply(x, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products, rows = linear.multiply(x, packed), linear.lookup_rows(packed, torch.arange(5, device=device), x.dtype)
    for _ in range(3):
        x.copy_(make_rows(layer, layer.num_rows, generator))
        graph.replay()
        check_product(products, x, weight, None, layer.is_exact, f"{layer}, replayed, seed {seed}")
        assert torch.equal(rows, weight.dequantized()[:5].to(x.dtype))


def compile_cases() -> Iterator[CompileCase]:
    plain = Layer(1, 256, 256)
    for codes in ("int4", "e2m1", "int8", "fp8"):
        for group_size in (32, 128):
            layer = replace(plain, codes=codes, group_size=group_size)
            for tile in _tiles(2):
                yield _variant(layer, tile)
            for tile in (linear._TILES[2][16][-1], linear._TILES[2][64][0]):
                yield _variant(replace(layer, dtype=torch.float16), tile)
                for dtype in (torch.float16, torch.bfloat16):
                    yield _variant(replace(layer, dtype=dtype), tile, has_experts=True)
    for changes in (
        {"has_zeros": True, "group_size": 128, "has_bias": True},
        {"has_minima": True, "has_half_scales": False, "codes": "uint4"},
        {"has_minima": True, "has_half_scales": False, "codes": "int8", "group_size": 16},
        {"has_half_scales": False, "codes": "fp8", "group_size": 0},
    ):
        for tile in _tiles(2):
            yield _variant(replace(plain, **changes), tile)
    for codes, group_size in (("int4", 32), ("e2m1", 32), ("fp8", 128)):
        for tile in _tiles(4):
            yield _variant(replace(plain, dtype=torch.float32, codes=codes, group_size=group_size), tile)


def _tiles(itemsize: int) -> Iterator[linear.LinearTile]:
    for tiles in linear._TILES[itemsize].values():
        yield from tiles


def _variant(layer: Layer, tile: linear.LinearTile, has_experts: bool = False) -> CompileCase:
    device = torch.device("cpu")
    packed = linear.pack(make_weight(layer, torch.Generator().manual_seed(0)), device)
    element = TRITON_TYPES[layer.dtype]
    types = {torch.uint8: "*u8", torch.int8: "*i8", FLOAT8: "*fp8e4nv", torch.float16: "*fp16", None: None}
    types[torch.float32] = "*fp32"
    parts = (packed.codes, packed.scale, packed.zero, packed.minimum)
    sizes = ["num_slots", "slots_of_row", "in_size", "out_size", "num_units", "num_groups"]
    numbers = [name for name in ("has_half_scales", "has_zeros", "has_minima", "has_bias") if getattr(layer, name)]
    return CompileCase(
        f"product{' of experts' * has_experts}, {layer.dtype}, {layer.codes} by {layer.group_size}, {tile}, {numbers}",
        linear._multiply_kernel,
        {
            "x": strided(element, 2),
            "weight": linear.Pointers(*(types[None if part is None else part.dtype] for part in parts)),
            "biases": f"*{element}" if layer.has_bias else None,
            "output": f"*{element}",
            "table": experts.SlotTable("*i32", "*i32", "*i32", "*i32") if has_experts else None,
            **dict.fromkeys(sizes, "i32"),
        },
        {
            "SHAPE": linear.kernel_shape(packed, tile, layer.dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("strides", "in_size", "out_size"),
        overlaps=True,
        min_programs=2 if tile.block_m == 16 else 1,
    )


def device_cases() -> Iterator[DeviceCase]:
    def case(name: str, check: Callable[..., None], *arguments: object) -> DeviceCase:
        return DeviceCase(f"linear: {name}", lambda device: check(device, *arguments))

    plain = Layer(16, 4096, 4096, group_size=128)
    for codes in PACKED:
        for num_rows in (1, 16, 17, 512, 2000):
            layer = replace(plain, codes=codes, num_rows=num_rows)
            yield case(f"{codes}, {num_rows} rows", check_layer, layer, 1)
            yield case(f"{codes}, {num_rows} rows, exact", check_layer, replace(layer, is_exact=True, in_size=512), 2)
        yield case(f"{codes}, a row alone", check_alone, replace(plain, codes=codes), 3)
        yield case(f"{codes}, a row alone of many", check_alone, replace(plain, codes=codes, num_rows=300), 3)
    for dtype in (torch.float16, torch.float32):
        for num_rows in (7, 300):
            for codes in PACKED:
                layer = replace(plain, dtype=dtype, codes=codes, num_rows=num_rows, group_size=32, out_size=1000)
                yield case(f"{dtype}, {codes}, {num_rows} rows", check_layer, layer, 4)
    for changes in (
        {"has_zeros": True, "has_bias": True},
        {"has_minima": True, "has_factors": True, "codes": "uint4", "group_size": 32, "has_half_scales": False},
        {"has_minima": True, "has_factors": True, "codes": "int8", "group_size": 16, "has_half_scales": False},
        {"codes": "fp8", "group_size": 0, "has_half_scales": False},
        {"codes": "e2m1", "group_size": 32, "in_size": 2880, "out_size": 2880, "has_bias": True},
    ):
        for num_rows in (5, 200):
            yield case(f"{changes}, {num_rows} rows", check_layer, replace(plain, num_rows=num_rows, **changes), 5)
    for codes in PACKED:
        for num_rows in (3, 500):
            layer = Layer(num_rows, 1536, 2048, codes, 128 if codes == "fp8" else 32, has_bias=True)
            yield case(f"{codes}, experts, {num_rows} rows", check_experts, layer, [{}] * 16, ExpertRouting(4), 6)
        yield case(f"{codes}, replayed", check_replay, replace(plain, codes=codes), 7)


# (outputs, inputs) of layers of Qwen3-0.6B and Qwen3-8B, with codes and group sizes: the projections of queries, keys
# and values, the gate and up projections, and the projections after each.
_BENCHED = (
    *((shape, "int4", 128) for shape in ((4096, 1024), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 12288))),
    *(((24576, 4096), codes, 32 if codes in ("uint4", "e2m1") else 128) for codes in PACKED),
)


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks. Few rows are bound by reading the codes, many rows by arithmetic."""
    for (out_size, in_size), codes, group_size in _BENCHED:
        for num_rows in (1, 16, 512):
            has_minima = codes == "uint4"
            shape = (num_rows, out_size, in_size)
            layer = Layer(*shape, codes, group_size, has_minima=has_minima, has_half_scales=not has_minima)
            num_scales = out_size * in_size // group_size
            num_bytes = out_size * in_size * PACKED[codes][0] // 8 + num_scales * (8 if has_minima else 2)
            yield BenchCase(
                f"product of {num_rows} rows, [{out_size}, {in_size}] {codes} by {group_size}",
                partial(make_bench, layer),
                bytes_moved=num_bytes + 2 * num_rows * (in_size + out_size),
                flops=2 * num_rows * out_size * in_size,
            )
    for num_rows in (1, 16, 512):
        out_size, in_size = 24576, 4096
        yield BenchCase(
            f"torch's product of {num_rows} rows, [{out_size}, {in_size}] bfloat16",
            partial(_make_plain_bench, num_rows, out_size, in_size),
            bytes_moved=2 * (out_size * in_size + num_rows * (in_size + out_size)),
            flops=2 * num_rows * out_size * in_size,
        )


def make_bench(layer: Layer, device: torch.device) -> list[Callable[[], object]]:
    """Return functions over several sets of weights, which together exceed 100 MB and so do not fit a cache."""
    generator = torch.Generator(device).manual_seed(0)
    packed = linear.pack(make_weight(layer, generator), device)
    num_sets = max(2, -(-100_000_000 // packed.num_bytes))
    x = make_rows(layer, layer.num_rows, generator)
    sets = [replace(packed, codes=packed.codes.clone()) for _ in range(num_sets)]
    return [partial(linear.multiply, x, each) for each in sets]


def _make_plain_bench(num_rows: int, out_size: int, in_size: int, device: torch.device) -> list[Callable[[], object]]:
    x = torch.randn(num_rows, in_size, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(out_size, in_size, device=device, dtype=torch.bfloat16) for _ in range(2)]
    return [partial(torch.nn.functional.linear, x, weight) for weight in weights]
