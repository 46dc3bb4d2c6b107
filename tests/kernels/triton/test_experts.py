"""Experts compared with their specification: routes, the order of slots, matrix multiplications and sums."""

from dataclasses import replace

import pytest
import torch

from pagewire.kernels import experts as specification
from pagewire.kernels.triton import experts
from pagewire.network.expert_routing import ExpertRouting
from testing.kernel_checks.experts import PHI_MOE, Layer, check_layer, check_product, check_routing

GROUPED = ExpertRouting(4, "sigmoid", True, 2.5, num_groups=3, num_chosen_groups=2)
LAYER = Layer(5, 8, ExpertRouting(2), 40, 24)


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [
        (8, ExpertRouting(2)),
        (128, ExpertRouting(8)),
        (60, ExpertRouting(4, renormalizes=False)),
        (5, ExpertRouting(5, factor=0.5)),
        (9, ExpertRouting(1, "sigmoid")),
        (16, PHI_MOE),
        (24, GROUPED),
        (4, ExpertRouting(2, "sigmoid", num_groups=4, num_chosen_groups=2)),  # groups of one
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered in divide")  # of equal logits
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_correction", [False, True])
def test_routing(device, num_experts, routing, is_tied, has_correction):
    layer = replace(LAYER, num_tokens=4, num_experts=num_experts, routing=routing)
    check_routing(device, layer, has_correction, is_tied, seed=num_experts)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of infinities
@pytest.mark.parametrize("routing", [ExpertRouting(3), replace(GROUPED, num_chosen=3)], ids=str)
def test_requested_number_of_experts_is_chosen_for_any_logits(device, routing):
    logits = torch.tensor([[float("nan")] * 6, [float("-inf")] * 6, [0.0, -0.0] * 3, [float("inf"), *[1.0] * 5]])
    ids, _ = experts.route_tokens(logits.to(device), routing)
    assert ids[[0, 1, 2]].tolist() == [[0, 1, 2]] * 3
    assert ids[3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_with_equal_scores_are_ranked_by_their_logits(device, scoring):
    logits = torch.tensor([[40.0, 60.0, -50.0, 50.0]], device=device)
    for route in (experts.route_tokens, specification.route_tokens):
        ids, _ = route(logits, ExpertRouting(2, scoring))
        assert ids.tolist() == [[1, 3]]


@pytest.mark.parametrize("highest", [-200.0, 200.0])
def test_the_softmax_of_large_logits_is_finite(device, highest):
    logits = torch.tensor([[highest, highest - 1, highest - 2]], device=device)
    _, weights = experts.route_tokens(logits, ExpertRouting(2, renormalizes=False))
    torch.testing.assert_close(weights, logits.softmax(-1)[:, :2])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products(device, dtype, has_bias):
    check_layer(device, replace(LAYER, dtype=dtype, has_bias=has_bias), seed=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 1, "num_experts": 40, "routing": ExpertRouting(8)},
        {"num_tokens": 70, "num_experts": 3},  # several tiles of an expert
        {"num_tokens": 40, "is_skewed": True, "routing": ExpertRouting(1)},  # a full tile of one expert
        {"num_experts": 1, "routing": ExpertRouting(1)},
        {"hidden_size": 150, "intermediate_size": 90},  # several tiles of inputs and outputs, with partial tiles
        {
            "num_tokens": 131,
            "routing": ExpertRouting(8),
            "hidden_size": 8,
            "intermediate_size": 4,
        },  # more slots than one iteration processes
    ],
    ids=str,
)
def test_sizes_on_every_edge(device, changes):
    check_layer(device, replace(LAYER, **changes), seed=2)


def test_what_is_not_a_number_stays_with_its_token(device):
    generator = torch.Generator(device).manual_seed(4)
    x, weights = (torch.randn(*size, generator=generator, device=device) for size in ((4, 16), (2, 8, 16)))
    ids = torch.tensor([[0, 1]] * 4, device=device)
    x[2, 5] = float("nan")
    slots = experts.multiply_routed(x, weights, experts.assign(ids, 2, x.dtype))
    assert slots[4:6].isnan().all()
    others = [0, 1, 3]
    rest = slots.unflatten(0, (4, 2))[others].flatten(0, 1)
    check_product(rest, x[others], weights, ids[others], None, "the other tokens")


def test_no_tokens_are_no_error(device):
    ids, weights = experts.route_tokens(torch.empty(0, 8, device=device), LAYER.routing)
    assert ids.shape == weights.shape == (0, 2)
    assignment = experts.assign(ids, 8, torch.float32)
    slots = experts.multiply_routed(torch.empty(0, 16, device=device), torch.ones(8, 4, 16, device=device), assignment)
    assert slots.shape == (0, 4)
    assert experts.sum_slots(slots, weights).shape == (0, 4)


def test_choices_refuse():
    logits = torch.zeros(2, 6)
    for text, arguments in (
        (r"logits is \[2, 6\] torch.float64", (logits.double(), LAYER.routing)),
        (r"correction is \[5\] torch.float32 .* make it \[6\]", (logits, LAYER.routing, torch.zeros(5))),
        ("7 of 6 experts", (logits, ExpertRouting(7))),
        ("2 of 4 groups of 6 experts cannot be chosen", (logits, ExpertRouting(1, "sigmoid", True, 1.0, 4, 2))),
        ("3 of 6 experts in 1 of 3 groups", (logits, ExpertRouting(3, "sigmoid", True, 1.0, 3, 1))),
    ):
        with pytest.raises(ValueError, match=text):
            experts.route_tokens(*arguments)


def test_products_and_sums_refuse():
    ids = torch.tensor([[0, 1], [1, 2]])
    x, weights = torch.zeros(2, 16), torch.zeros(3, 4, 16)
    assignment = experts.assign(ids, 3, torch.float32)
    for text, arguments in (
        (r"x is \[2, 15\]", (x[:, :15], weights, assignment)),
        ("make it .* torch.float16, its last dimension dense", (x, weights.half(), assignment)),
        ("x has 3 rows; pass 2 rows, one per token, or 4, one per slot", (torch.zeros(3, 16), weights, assignment)),
        (r"weights is \[2, 4, 16\] .* make it \[3, out_size", (x, weights[:2], assignment)),
        ("weights is .* its last dimension dense", (x, weights.mT.contiguous().mT, assignment)),
        (r"biases is \[3, 5\]", (x, weights, assignment, torch.zeros(3, 5))),
    ):
        with pytest.raises(ValueError, match=text):
            experts.multiply_routed(*arguments)
    with pytest.raises(ValueError, match=r"make it .* torch.int32 or torch.int64"):
        experts.assign(ids.float(), 3, torch.float32)
    with pytest.raises(ValueError, match=r"slots is \[3, 4\] torch.float32 .* make it \[4, width\]"):
        experts.sum_slots(torch.zeros(3, 4), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"weights is \[2, 2\] torch.float64"):
        experts.sum_slots(torch.zeros(4, 4), torch.zeros(2, 2).double())
