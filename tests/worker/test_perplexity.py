"""The arithmetic of the table of what formats cost."""

import math

import pytest
import torch

from bench.core.perplexity import ARMS, perplexity
from testing.logits import mean_divergence


def test_perplexity_is_that_of_the_tokens_that_come_next():
    token_ids = [[0, 1, 2], [2, 2, 0]]
    probabilities = torch.full((6, 4), 0.1)
    following = {0: 1, 1: 2, 3: 2, 4: 0}
    for position, token in following.items():
        probabilities[position, token] = 0.7
    # What the last position of a sequence predicts does not count.
    probabilities[2], probabilities[5] = torch.tensor([0.97, 0.01, 0.01, 0.01]), torch.tensor([0.25] * 4)
    assert perplexity(probabilities.log() + 3, token_ids) == pytest.approx(1 / 0.7)
    assert perplexity(torch.zeros(6, 4), token_ids) == pytest.approx(4)


def test_divergence_is_the_mean_over_positions_in_nats():
    expected, actual = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.75, 0.25], [0.9, 0.1]])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert mean_divergence(expected.log(), actual.log() - 2) == pytest.approx(first / 2)


def test_every_format_is_there_once():
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    assert len({(arm.dtype, arm.cache_dtype, arm.gguf_type, str(arm.options)) for arm in ARMS}) == len(ARMS)
