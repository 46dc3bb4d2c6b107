"""Mixtures of experts in C, compared with plain torch, and bit for bit with separate matrix multiplications."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cpu import CpuKernels, DecoderKernel, PackedExperts, PackedLinear, PagedRows
from pagewire.kernels.cpu.library import VARIANTS
from pagewire.kernels.experts import ExpertRouting, multiply_routed, route_tokens, sum_slots
from pagewire.kernels.weight import StoredWeight
from pagewire.network.operations import (
    Activate,
    CombineExperts,
    Embed,
    Gate,
    LmHead,
    Multiply,
    MultiplyRouted,
    RouteTopK,
)
from testing.kernels.variants import load_variant
from tests.kernels.random_products import compact, threads

pytestmark = pytest.mark.one_of_each

NUM_TOKENS = (1, 2, 7, 8, 9, 40)
ROUTINGS = (
    ExpertRouting(1),
    ExpertRouting(4, renormalizes=False),
    ExpertRouting(8),
    ExpertRouting(3, scoring="sigmoid", factor=2.5),
    ExpertRouting(4, scoring="sigmoid", num_groups=8, num_chosen_groups=2),
    ExpertRouting(2, num_groups=4, num_chosen_groups=3),
    ExpertRouting(2, num_groups=24, num_chosen_groups=2),  # of one expert each
    ExpertRouting(3, "sparse_mixer", renormalizes=False, jitter=0.1),
)
NUM_EXPERTS = 24


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request) -> CpuKernels:
    """The kernels of one variant, for processors with at most this processor's features."""
    return load_variant(request.param)


def run(kernels: CpuKernels, operations: list[Any], table: Tensor, token_ids: Tensor, read: str, width: int) -> Tensor:
    """Return the final content of a buffer, [T, width]. The buffer x begins with rows of the table."""
    head = kernels.pack_linear(StoredWeight(torch.zeros(1, width)))
    kernel = DecoderKernel(kernels, [Embed("x", table), *operations, LmHead(read, head)])
    num_tokens = len(token_ids)
    cache = (torch.zeros(num_tokens, 1, 1, 1),) * 2
    rows = PagedRows.of([0, num_tokens], [num_tokens], torch.zeros(1, 1, num_tokens), torch.arange(num_tokens)[None])
    none = torch.zeros(0, dtype=torch.int64)
    return kernel.forward(token_ids, torch.zeros_like(token_ids), none, rows, [Scoring(1.0)], [cache])[0]


# The routing


def check_routing(kernels, logits, routing, correction=None):
    rows = torch.arange(len(logits))
    route = RouteTopK("x", "routes", routing, correction)
    found = run(kernels, [route], logits, rows, "routes", 2 * routing.num_chosen)
    ids, weights = route_tokens(logits, routing, correction)
    assert torch.equal(found[:, : routing.num_chosen].contiguous().view(torch.int32), ids.int())
    torch.testing.assert_close(found[:, routing.num_chosen :], weights, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("has_correction", [False, True])
def test_tokens_are_routed(variant, routing, has_correction):
    """Logits are multiples of 1/16, so that many are equal, and the others differ by more than rounding."""
    generator = torch.Generator().manual_seed(1)
    for num_experts in (NUM_EXPERTS, 5 * NUM_EXPERTS):
        logits = torch.randint(-64, 64, (40, num_experts), generator=generator) / 16
        correction = torch.randint(0, 3, (num_experts,), generator=generator) / 4 if has_correction else None
        check_routing(variant, logits, routing, correction)


def test_of_equal_scores_the_lower_id_is_chosen(variant):
    logits = torch.zeros(9, 100)
    logits[1:, 99] = 1.0
    logits[:, 3] = -0.0
    check_routing(variant, logits, ExpertRouting(4))
    check_routing(variant, logits, ExpertRouting(4, scoring="sigmoid"))


def test_logits_that_scoring_makes_equal_are_told_apart(variant):
    logits = torch.full((1, 20), -200.0)
    logits[0, 0], logits[0, 11] = 0.0, -199.0
    check_routing(variant, logits, ExpertRouting(2))
    check_routing(variant, torch.tensor([[40.0, 60.0, -50.0, 50.0]]), ExpertRouting(2, "sigmoid"))


def test_all_experts_may_be_chosen(variant):
    logits = torch.randn(9, 7, generator=torch.Generator().manual_seed(2))
    check_routing(variant, logits, ExpertRouting(7))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_nan_logits_are_detected(variant, routing):
    """If a logit of a token is NaN, a weight of this token is NaN; other tokens are unchanged."""
    logits = torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))

    def routes(of):
        return run(variant, [RouteTopK("x", "routes", routing)], of, torch.arange(9), "routes", 2 * routing.num_chosen)

    spoilt = logits.clone()
    spoilt[4, NUM_EXPERTS - 1] = torch.nan
    found, others = routes(spoilt), [row for row in range(9) if row != 4]
    assert torch.equal(found[others], routes(logits)[others])
    ids = found[4, : routing.num_chosen].clone().view(torch.int32).tolist()
    assert sorted(set(ids)) == ids
    assert 0 <= ids[0] <= ids[-1] < NUM_EXPERTS
    assert found[4, routing.num_chosen :].isnan().any()


# Matrix multiplications


def packed_weight(kernels: CpuKernels, kind: str, out_size: int, in_size: int, seed: int) -> PackedLinear:
    """Return a random weight in packed panels of some kind; in_size is a multiple of 256."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(out_size, in_size, generator=generator) / in_size**0.5
    bias = torch.randn(out_size, generator=generator) if seed % 2 else None
    match kind:
        case "float32":
            return kernels.pack_linear(StoredWeight(values), bias)
        case "bfloat16 held" | "bfloat16":
            activation = torch.bfloat16 if kind == "bfloat16" else torch.float32
            return kernels.pack_linear(StoredWeight(values.bfloat16()), bias, activation)
        case "int8" | "int4":
            return kernels.pack_linear(kernels.quantize(values, 8 if kind == "int8" else 4), bias)
        case "K-quant":
            weight = compact(seed, 4, 32, has_minima=True, has_factors=True)
            return kernels.pack_linear(weight[:out_size], bias)
        case _:
            return kernels.pack_linear(StoredWeight(values.to(torch.float8_e4m3fn), torch.rand(out_size, 1), in_size))


KINDS = ("float32", "bfloat16 held", "bfloat16", "int8", "int4", "K-quant", "float8")


def random_ids(num_tokens, num_experts, num_chosen, generator):
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    return route_tokens(logits, ExpertRouting(num_chosen))[0]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_expert_slot_equals_single_matmul(variant, kind, num_threads):
    """The output is bit-identical whatever else is in the step, for rows of tokens and for rows of slots."""
    rng, generator = random.Random(kind), torch.Generator().manual_seed(4)
    in_size = 9 * 256 if kind == "K-quant" else 512
    for seed in range(3):
        num_experts, num_chosen = rng.randint(1, 12), rng.randint(1, 5)
        num_chosen = min(num_chosen, num_experts)
        out_size = rng.choice([7, 32, 64, 70])
        print(f"{num_chosen} of {num_experts} experts, {out_size} outputs")
        linears = [packed_weight(variant, kind, out_size, in_size, 10 * seed + n) for n in range(num_experts)]
        experts = PackedExperts(linears)
        for num_tokens in NUM_TOKENS:
            ids = random_ids(num_tokens, num_experts, num_chosen, generator)
            slots = torch.randn(num_tokens * num_chosen, in_size, generator=generator)
            of_tokens = slots[:num_tokens].repeat_interleave(num_chosen, 0)
            with threads(num_threads):
                found = variant.multiply_routed(slots, experts, ids)
                found_of_tokens = variant.multiply_routed(slots[:num_tokens].contiguous(), experts, ids)
            for slot, expert in enumerate(ids.flatten().tolist()):
                assert torch.equal(found[slot], variant.linear(slots[slot][None], linears[expert])[0])
                alone = variant.linear(of_tokens[slot][None], linears[expert])[0]
                assert torch.equal(found_of_tokens[slot], alone)


def test_slots_are_those_of_the_specification(variant):
    generator = torch.Generator().manual_seed(5)
    weights, biases = torch.randn(6, 40, 64, generator=generator), torch.randn(6, 40, generator=generator)
    experts = PackedExperts(
        [variant.pack_linear(StoredWeight(weight), bias) for weight, bias in zip(weights, biases, strict=True)]
    )
    ids = random_ids(20, 6, 3, generator)
    for num_rows in (20, 60):
        x = torch.randn(num_rows, 64, generator=generator)
        expected = multiply_routed(x, weights, ids, biases)
        torch.testing.assert_close(variant.multiply_routed(x, experts, ids), expected, rtol=1e-5, atol=1e-4)


def test_no_token_has_no_slot(cpu_kernels):
    experts = PackedExperts([cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8)))])
    assert cpu_kernels.multiply_routed(torch.ones(0, 8), experts, torch.zeros(0, 1, dtype=torch.int64)).shape == (0, 4)


def test_arguments_that_do_not_fit_are_refused(cpu_kernels):
    linears = [
        cpu_kernels.pack_linear(StoredWeight(torch.ones(4, 8))),
        cpu_kernels.pack_linear(StoredWeight(torch.ones(5, 8))),
    ]
    with pytest.raises(ValueError, match=r"weights \[4, 8\] over torch.float32 and \[5, 8\] over torch.float32"):
        PackedExperts(linears)
    with pytest.raises(ValueError, match="of no kind"):
        PackedExperts([])
    experts = PackedExperts(linears[:1])
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x is .*\(6, 8\)"):
        cpu_kernels.multiply_routed(torch.ones(4, 8), experts, ids)
    with pytest.raises(ValueError, match=r"ids is torch.int32"):
        cpu_kernels.multiply_routed(torch.ones(3, 8), experts, ids.int())


# Within a step


HIDDEN, INNER = 256, 256


class Layer:
    """Gated experts and their router, in packed panels of a kind."""

    def __init__(self, kernels: CpuKernels, kind: str, routing: ExpertRouting, *, is_fused: bool = True) -> None:
        self.kernels, self.routing = kernels, routing
        generator = torch.Generator().manual_seed(6)
        self.router = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)
        self.table = torch.randn(50, HIDDEN, generator=generator)
        numbers = range(NUM_EXPERTS)
        self.ups = [packed_weight(kernels, kind, 2 * INNER, HIDDEN, number) for number in numbers]
        self.downs = [packed_weight(kernels, kind, HIDDEN, INNER, 100 + number) for number in numbers]
        self.operations: list[Any] = [
            Multiply("x", "logits", kernels.pack_linear(StoredWeight(self.router))),
            RouteTopK("logits", "routes", routing),
        ]
        if is_fused:
            self.operations += [MultiplyRouted("x", "activated", "routes", self.ups, is_gated=True)]
        else:
            activate = Activate("ups", "activated", "silu", is_gated=True, num_parts=routing.num_chosen)
            self.operations += [MultiplyRouted("x", "ups", "routes", self.ups), activate]
        self.operations += [
            MultiplyRouted("activated", "slots", "routes", self.downs),
            CombineExperts("slots", "y", "routes"),
        ]

    def compute(self, token_ids: Tensor) -> Tensor:
        return run(self.kernels, self.operations, self.table, token_ids, "y", HIDDEN)

    def expected(self, token_ids: Tensor) -> Tensor:
        """Return the outputs by the specification of routing and by separate matrix multiplications in C."""
        x = self.table[token_ids]
        ids, weights = route_tokens(x @ self.router.T, self.routing)
        slots = []
        for token, experts in enumerate(ids.tolist()):
            for expert in experts:
                gate, up = self.kernels.linear(x[token][None], self.ups[expert]).chunk(2, 1)
                slots.append(self.kernels.linear(F.silu(gate) * up, self.downs[expert]))
        return sum_slots(torch.cat(slots), weights)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_experts_of_a_step(variant, kind, is_fused):
    layer = Layer(variant, kind, ExpertRouting(3), is_fused=is_fused)
    generator = torch.Generator().manual_seed(7)
    # A value computed in another order may be rounded to the next 8-bit code.
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}.get(kind, 3e-2)
    for num_tokens in NUM_TOKENS:
        token_ids = torch.randint(0, 50, (num_tokens,), generator=generator)
        found, expected = layer.compute(token_ids), layer.expected(token_ids)
        assert (found - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS[:5])
def test_a_token_depends_on_no_other_and_on_no_thread(variant, kind):
    """In random steps with few and many tokens, the output of each token is bit-identical to its output alone."""
    layer = Layer(variant, kind, ExpertRouting(4))
    generator = torch.Generator().manual_seed(8)
    with threads(1):
        alone = torch.cat([layer.compute(torch.tensor([token])) for token in range(50)])
    for num_tokens in (2, 5, 8, 9, 16, 50):
        token_ids = torch.randint(0, 50, (num_tokens,), generator=generator)
        for num_threads in (1, 2):
            with threads(num_threads):
                assert torch.equal(layer.compute(token_ids), alone[token_ids])


def test_a_shared_expert_is_gated(variant):
    generator = torch.Generator().manual_seed(9)
    table, weight = torch.randn(20, 40, generator=generator), torch.randn(1, 40, generator=generator)
    operations = [Multiply("x", "gate", variant.pack_linear(StoredWeight(weight))), Gate("x", "gate", "gated")]
    for num_tokens in (3, 20):
        token_ids = torch.randperm(20, generator=generator)[:num_tokens]
        x = table[token_ids]
        found = run(variant, operations, table, token_ids, "gated", 40)
        torch.testing.assert_close(found, x * (x @ weight.T).sigmoid(), rtol=1e-5, atol=1e-6)


def refused_operations(kernels: CpuKernels) -> dict[str, list[Any]]:
    """Return refused operations, by a part of the error message."""

    def linears(number: int, out_size: int = 4, in_size: int = 8) -> list[PackedLinear]:
        return [kernels.pack_linear(StoredWeight(torch.ones(out_size, in_size)))] * number

    route = RouteTopK("x", "routes", ExpertRouting(2))
    return {
        "9 of 8 experts cannot be chosen": [RouteTopK("x", "routes", ExpertRouting(9))],
        "0 of 8 experts cannot be chosen": [RouteTopK("x", "routes", ExpertRouting(0))],
        "1 of 3 groups of 8 experts cannot be chosen": [RouteTopK("x", "routes", ExpertRouting(1, num_groups=3))],
        r"correction is .*\(8,\)": [RouteTopK("x", "routes", ExpertRouting(1), torch.ones(7))],
        "buffer x is read as routes": [MultiplyRouted("x", "slots", "x", linears(8))],
        "there are 7 weights of 8 experts": [route, MultiplyRouted("x", "slots", "routes", linears(7))],
        "buffer x is 8 wide; 3 inputs are read": [route, MultiplyRouted("x", "y", "routes", linears(8, 4, 3))],
        "experts have weights": [route, MultiplyRouted("x", "y", "routes", [*linears(7), *linears(1, 5)])],
        "not 3 slots of one width": [RouteTopK("x", "routes", ExpertRouting(3)), CombineExperts("x", "y", "routes")],
        "does not have 3 parts": [Activate("x", "y", "silu", num_parts=3)],
        "buffer gate is 4; 8 is read": [Multiply("x", "gate", linears(1)[0]), Gate("x", "gate", "y")],
    }


def test_operations_that_do_not_fit_are_refused(cpu_kernels):
    for message, operations in refused_operations(cpu_kernels).items():
        with pytest.raises(ValueError, match=message):
            run(cpu_kernels, operations, torch.ones(3, 8), torch.zeros(2, dtype=torch.int64), "x", 8)
