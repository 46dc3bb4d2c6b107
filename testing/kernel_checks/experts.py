"""Checks of `kernels/triton/experts.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import experts as specification
from pagewire.kernels.triton import experts
from pagewire.kernels.triton.launching import operand
from pagewire.network.expert_routing import ExpertRouting
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided

TRITON_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Layer:
    """A layer of experts to compare: the number of tokens and the sizes of both matrix multiplications.

    Attributes:
        is_skewed: all tokens prefer the same few experts, so most experts have no token.
    """

    num_tokens: int
    num_experts: int
    routing: ExpertRouting
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype = torch.float32
    has_bias: bool = False
    is_skewed: bool = False


def make_logits(layer: Layer, generator: torch.Generator) -> Tensor:
    """Return router logits as a view of wider rows."""
    device = generator.device
    logits = torch.randn(layer.num_tokens, layer.num_experts + 3, generator=generator, device=device)
    if layer.is_skewed:
        logits += 20 * torch.arange(layer.num_experts + 3, device=device).eq(layer.num_experts - 1)
    return logits[:, : layer.num_experts]


def check_routing(device: torch.device, layer: Layer, has_correction: bool, is_tied: bool, seed: int) -> None:
    """Compare the routing with the specification. `is_tied`: many logits are equal."""
    case = f"{layer}, {has_correction=}, {is_tied=}, seed {seed}"
    generator = torch.Generator(device).manual_seed(seed)
    logits = make_logits(layer, generator)
    if is_tied:
        logits = logits.round()
    correction = torch.randn(layer.num_experts, generator=generator, device=device) if has_correction else None
    ids, weights = experts.route_tokens(logits, layer.routing, correction)
    expected_ids, expected_weights = specification.route_tokens(logits, layer.routing, correction)
    assert torch.equal(ids, expected_ids), f"{case}: {(ids != expected_ids).sum()} ids differ"
    assert weights.dtype == torch.float32, case
    error = (weights - expected_weights).abs() / expected_weights.abs().clamp_min(1e-30)
    assert not error.numel() or float(error.max()) <= 4e-6, f"{case}: weights are off by {float(error.max())}"


def check_layer(device: torch.device, layer: Layer, seed: int) -> None:
    """Check both matrix multiplications, with rows by token and by slot, and the sum of slots."""
    case = f"{layer}, seed {seed}"
    generator = torch.Generator(device).manual_seed(seed)
    ids, weights = specification.route_tokens(make_logits(layer, generator), layer.routing)
    up, up_biases = make_weights(layer, 2 * layer.intermediate_size, layer.hidden_size, generator)
    down, down_biases = make_weights(layer, layer.hidden_size, layer.intermediate_size, generator)
    x = torch.randn(layer.num_tokens, layer.hidden_size + 16, generator=generator, device=device).to(layer.dtype)
    tokens = x[:, : layer.hidden_size]
    assignment = experts.assign(ids, layer.num_experts, layer.dtype)
    check_assignment(assignment, ids, case)
    slots = experts.multiply_routed(tokens, up, assignment, up_biases)
    check_product(slots, tokens, up, ids, up_biases, f"{case}, of tokens")
    halves = slots[:, : layer.intermediate_size]
    outputs = experts.multiply_routed(halves, down, assignment, down_biases)
    check_product(outputs, halves, down, ids, down_biases, f"{case}, of slots")
    summed = experts.sum_slots(outputs, weights)
    assert torch.equal(summed, specification.sum_slots(outputs, weights)), f"{case}: the sum differs"


def make_weights(layer: Layer, out_size: int, in_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Return the weights of all experts, and their biases if the layer has biases.

    The memory after the last expert contains NaN and must not be read.
    """
    normal = partial(torch.randn, generator=generator, device=generator.device)
    weights = normal(layer.num_experts + 1, out_size, in_size).to(layer.dtype)
    weights[-1] = float("nan")
    biases = normal(layer.num_experts, out_size).to(layer.dtype) if layer.has_bias else None
    return weights[:-1], biases


def check_assignment(assignment: experts.Assignment, ids: Tensor, case: str) -> None:
    """Check that slots are sorted by expert in stable order, and that the tiles contain each slot once."""
    order, ends, tile_experts, tile_starts = (tensor.cpu() for tensor in assignment.table)
    flat = ids.flatten().cpu()
    assert torch.equal(order.long(), flat.argsort(stable=True)), f"{case}: slots are in another order"
    assert torch.equal(ends.long(), flat.bincount(minlength=len(ends)).cumsum(0)), f"{case}: experts end elsewhere"
    begin = 0
    expected = []
    for expert, end in enumerate(ends.tolist()):
        expected += [(expert, start) for start in range(begin, end, assignment.tile.block_m)]
        begin = end
    num_tiles = len(expected)
    tiles = [*zip(tile_experts.tolist(), tile_starts.tolist(), strict=True)]
    assert tiles[:num_tiles] == expected, f"{case}: tiles are cut elsewhere"
    assert tile_experts[num_tiles:].eq(-1).all(), f"{case}: there are tiles of nothing"


def check_product(actual: Tensor, x: Tensor, weights: Tensor, ids: Tensor, biases: Tensor | None, case: str) -> None:
    """Check a matrix multiplication against float64.

    Products of narrow floats are exact, so the allowed error covers float32 sums and one rounding of the result.
    """
    wide_biases = None if biases is None else biases.double()
    expected = specification.multiply_routed(x.double(), weights.double(), ids, wide_biases)
    spread = specification.multiply_routed(x.double().abs(), weights.double().abs(), ids)
    limit = torch.finfo(actual.dtype).eps * expected.abs() + 64 * 2.0**-24 * spread
    error = (actual.double() - expected).abs()
    assert actual.dtype == x.dtype, f"{case}: {actual.dtype}"
    assert bool((error <= limit).all()), f"{case}: off by {float(error.max())}"


def check_alone(device: torch.device, layer: Layer, seed: int) -> None:
    """Check that a token has the same bits alone as beside others, if the tile is the same."""
    generator = torch.Generator(device).manual_seed(seed)
    ids, _ = experts.route_tokens(make_logits(layer, generator), layer.routing)
    weights, biases = make_weights(layer, layer.intermediate_size, layer.hidden_size, generator)
    x = torch.randn(layer.num_tokens, layer.hidden_size, generator=generator, device=device).to(layer.dtype)
    assignment = experts.assign(ids, layer.num_experts, layer.dtype)
    slots = experts.multiply_routed(x, weights, assignment, biases).unflatten(0, ids.shape)
    for token in range(layer.num_tokens):
        own = slice(token, token + 1)
        assignment_alone = experts.assign(ids[own], layer.num_experts, layer.dtype)
        assert assignment_alone.tile == assignment.tile
        alone = experts.multiply_routed(x[own], weights, assignment_alone, biases)
        assert torch.equal(alone, slots[token]), f"{layer}, seed {seed}: token {token} alone differs"


def check_replay(device: torch.device, layer: Layer, seed: int) -> None:
    """Check that a graph captured for one routing gives correct results for other routings."""
    generator = torch.Generator(device).manual_seed(seed)
    weights, biases = make_weights(layer, layer.intermediate_size, layer.hidden_size, generator)
    x = torch.randn(layer.num_tokens, layer.hidden_size, generator=generator, device=device).to(layer.dtype)
    logits = make_logits(replace(layer, is_skewed=True), generator).contiguous()

    def compute() -> tuple[Tensor, Tensor]:
        ids, _ = experts.route_tokens(logits, layer.routing)
        assignment = experts.assign(ids, layer.num_experts, layer.dtype)
        return ids, experts.multiply_routed(x, weights, assignment, biases)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, slots = compute()
    for _ in range(3):
        logits.copy_(make_logits(layer, generator))
        graph.replay()
        check_product(slots, x, weights, ids, biases, f"{layer}, replayed, seed {seed}")


QWEN3_30B = Layer(64, 128, ExpertRouting(8), 2048, 768, torch.bfloat16)
MIXTRAL = Layer(64, 8, ExpertRouting(2), 4096, 3584, torch.bfloat16)  # a quarter of the columns
GPT_OSS = Layer(64, 32, ExpertRouting(4), 2880, 2880, torch.bfloat16, has_bias=True)
DEEPSEEK_V3 = ExpertRouting(8, "sigmoid", True, 2.5, 8, 4)
PHI_MOE = ExpertRouting(2, "sparse_mixer", False, jitter=0.2)
_TOKENS = (1, 7, 64, 1000, 4096)


def device_cases() -> Iterator[DeviceCase]:
    def case(name: str, check: Callable[..., None], *arguments: object) -> DeviceCase:
        return DeviceCase(f"experts: {name}", lambda device: check(device, *arguments))

    for routing, num_experts in (
        (ExpertRouting(8), 128),
        (ExpertRouting(2), 8),
        (ExpertRouting(8, "softmax", False), 60),
        (PHI_MOE, 16),
    ):
        for is_tied in (False, True):
            arguments = (
                replace(QWEN3_30B, num_tokens=300, routing=routing, num_experts=num_experts),
                False,
                is_tied,
                1,
            )
            yield case(f"{routing} of {num_experts}, {is_tied=}", check_routing, *arguments)
    for routing, num_experts in ((DEEPSEEK_V3, 256), (ExpertRouting(8, "sigmoid"), 160), (ExpertRouting(10), 512)):
        layer = replace(QWEN3_30B, num_tokens=300, routing=routing, num_experts=num_experts)
        yield case(f"{routing} of {num_experts} corrected", check_routing, layer, True, False, 2)
    for name, layer in (("Qwen3-30B-A3B", QWEN3_30B), ("Mixtral", MIXTRAL), ("gpt-oss", GPT_OSS)):
        for num_tokens in _TOKENS:
            yield case(f"{name}, {num_tokens} tokens", check_layer, replace(layer, num_tokens=num_tokens), 3)
        yield case(f"{name}, replayed", check_replay, layer, 4)
        yield case(f"{name}, each token alone", check_alone, layer, 7)
    for dtype in (torch.float16, torch.float32):
        yield case(f"{dtype}", check_layer, replace(QWEN3_30B, dtype=dtype), 5)
        yield case(f"{dtype} many", check_layer, replace(QWEN3_30B, dtype=dtype, num_tokens=2000), 5)
    yield case("skewed", check_layer, replace(QWEN3_30B, num_tokens=1000, is_skewed=True), 6)


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks of the first matrix multiplication of a layer of Qwen3-30B-A3B.

    Few tokens are bound by the memory of the weights, many tokens by arithmetic.
    """
    routing, hidden_size, out_size = QWEN3_30B.routing, QWEN3_30B.hidden_size, 2 * QWEN3_30B.intermediate_size
    for num_tokens in (8, 64, 8192):
        layer = replace(QWEN3_30B, num_tokens=num_tokens)
        num_slots = num_tokens * routing.num_chosen
        num_read = layer.num_experts * (1 - (1 - routing.num_chosen / layer.num_experts) ** num_tokens)  # expected
        num_bytes = round(2 * num_read * hidden_size * out_size) + 2 * num_slots * (hidden_size + out_size)
        flops = 2 * num_slots * hidden_size * out_size
        make = partial(_make_bench, layer)
        yield BenchCase(f"product of experts, {num_tokens} tokens", make, bytes_moved=num_bytes, flops=flops)
        # The same number of tokens for each expert that is read.
        shape = (round(num_read), -(-num_slots // round(num_read)), hidden_size, out_size)
        make = partial(_make_batched_bench, shape)
        yield BenchCase(f"torch's batched product, {num_tokens} tokens", make, bytes_moved=num_bytes, flops=flops)
    name, num_bytes = "routing and assignment of tokens, 64 tokens", 64 * (4 * 128 + 3 * 8 * 8)
    yield BenchCase(name, _make_routing_bench, bytes_moved=num_bytes)


def _make_bench(layer: Layer, device: torch.device) -> list[Callable[[], object]]:
    generator = torch.Generator(device).manual_seed(0)
    ids, _ = experts.route_tokens(make_logits(layer, generator), layer.routing)
    assignment = experts.assign(ids, layer.num_experts, layer.dtype)
    x = torch.randn(layer.num_tokens, layer.hidden_size, generator=generator, device=device).to(layer.dtype)
    sets = [make_weights(layer, 2 * layer.intermediate_size, layer.hidden_size, generator)[0] for _ in range(2)]
    return [partial(experts.multiply_routed, x, weights, assignment) for weights in sets]


def _make_batched_bench(shape: tuple[int, int, int, int], device: torch.device) -> list[Callable[[], object]]:
    num_experts, num_tokens, in_size, out_size = shape
    bfloat16 = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(num_experts, num_tokens, in_size, **bfloat16)
    return [partial(torch.bmm, x, torch.randn(num_experts, in_size, out_size, **bfloat16)) for _ in range(2)]


def _make_routing_bench(device: torch.device) -> list[Callable[[], object]]:
    logits = make_logits(QWEN3_30B, torch.Generator(device).manual_seed(0))

    def choose() -> experts.Assignment:
        ids, _ = experts.route_tokens(logits, QWEN3_30B.routing)
        return experts.assign(ids, QWEN3_30B.num_experts, QWEN3_30B.dtype)

    return [choose]


def compile_cases() -> Iterator[CompileCase]:
    for routing, num_experts, correction in (
        *((ExpertRouting(8), 128, None), (ExpertRouting(10, "softmax", False), 512, None)),
        *((ExpertRouting(4, "sigmoid"), 60, "*fp32"), (DEEPSEEK_V3, 256, "*fp32")),
        (PHI_MOE, 16, None),
    ):
        yield CompileCase(
            f"routing of tokens, {routing} of {num_experts}",
            experts._choose_kernel,
            {
                **{"logits": strided("fp32", 2), "correction": correction, "ids": "*i64", "weights": "*fp32"},
                **{"num_tokens": "i32", "factor": "fp32", "max_distance": "fp32"},
            },
            {"SHAPE": experts.routing_shape(routing, num_experts)},
        )
    table = experts.SlotTable("*i32", "*i32", "*i32", "*i32")
    assigned = {"ids": "*i64", "table": table, **dict.fromkeys(("num_slots", "num_experts", "max_tiles"), "i32")}
    for padded_experts in (2, 8, 512):
        constants = {"PADDED_EXPERTS": padded_experts, "BLOCK_M": 16, "TILE": 1024}
        yield CompileCase(f"slots of {padded_experts} experts", experts._assign_kernel, assigned, constants)
    for dtype, num_slots, biases in (
        *((torch.bfloat16, 1, None), (torch.bfloat16, 10**6, "*bf16"), (torch.bfloat16, 10**6, None)),
        *((torch.float32, 1, "*fp32"), (torch.float32, 10**6, None)),
    ):
        yield _product_variant(dtype, num_slots, biases)
    for dtype in ("*bf16", "*fp32"):
        signature = {"slots": dtype, "weights": "*fp32", "output": dtype, "width": "i32"}
        constants = {"NUM_CHOSEN": 8, "TILE": 1024}
        yield CompileCase(
            f"sum of slots {dtype}", experts._sum_kernel, signature, constants, divisible_by_16=("width",)
        )


def _product_variant(dtype: torch.dtype, num_slots: int, biases: str | None) -> CompileCase:
    tile = experts.choose_tile(num_slots, 128, dtype)
    element = TRITON_TYPES[dtype]
    return CompileCase(
        f"product of experts, {dtype}, {tile}, biases {biases}",
        experts._multiply_kernel,
        {
            **{"x": strided(element, 2), "weights": strided(element, 3), "biases": biases, "output": f"*{element}"},
            "table": experts.SlotTable("*i32", "*i32", "*i32", "*i32"),
            **dict.fromkeys(("slots_of_row", "in_size", "out_size"), "i32"),
        },
        {
            **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
            "OPERAND": operand(dtype, dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("strides", "in_size", "out_size"),
    )
