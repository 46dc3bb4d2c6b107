"""Expert matrix multiplications in plain torch, and the memory of experts' weights during loading."""

import pytest
import torch

from pagewire.kernels.experts import multiply_routed, route_tokens
from pagewire.network.expert_routing import ExpertRouting
from testing.checkpoints.families import make_checkpoint
from worker_service.models.linear import ExpertLinear, stack
from worker_service.models.loading import prepare_model
from worker_service.models.torch_operations import Operations, multiply_all

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("of_slots", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
def test_products_are_those_of_the_specification(num_tokens, of_slots, has_biases):
    torch.manual_seed(num_tokens)
    ids, _ = route_tokens(torch.randn(num_tokens, 6), ExpertRouting(2))
    weights, biases = torch.randn(6, 5, 9), torch.randn(6, 5) if has_biases else None
    x = torch.randn(num_tokens * (2 if of_slots else 1), 9)
    expected = multiply_routed(x, weights, ids, biases)
    torch.testing.assert_close(multiply_all(x, weights, ids, biases), expected)


def test_weights_that_are_neighbours_are_stacked_up_without_a_copy():
    whole = torch.randn(3, 4, 5)
    assert stack(list(whole)).data_ptr() == whole.data_ptr()
    assert torch.equal(stack(list(whole)), whole)
    for others in ([whole[0], whole[2]], list(whole)[::-1], [whole[1], whole[0]], list(whole[:, :, ::2])):
        copied = stack(others)
        assert torch.equal(copied, torch.stack(others))
        assert copied.data_ptr() != others[0].data_ptr()


def test_experts_of_a_layer_are_loaded_into_one_memory(tmp_path, monkeypatch):
    """The experts of a layer are loaded into one tensor, so that a GPU does not store them twice while stacking."""
    kept = []

    def keep(self, weights, biases, computed):
        kept.append((weights, biases))

    monkeypatch.setattr(Operations, "prepare_experts", keep)
    path = make_checkpoint(tmp_path, "mixtral", seed=3)
    model = prepare_model(path, dtype=torch.float32, device=CPU)
    memory = []
    allocate = ExpertLinear.allocate

    def remember(self, device):
        found = allocate(self, device)
        memory.append(next(iter(found.values())).untyped_storage().data_ptr())
        return found

    monkeypatch.setattr(ExpertLinear, "allocate", remember)
    model.load()
    assert [weights.untyped_storage().data_ptr() for weights, _ in kept] == memory
    assert [tuple(weights.shape) for weights, _ in kept] == [(4, 192, 64), (4, 64, 96)] * 2
