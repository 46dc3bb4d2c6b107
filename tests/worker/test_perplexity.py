"""The arithmetic of the table of what formats cost."""

import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from bench.core.perplexity import ARMS, compared, files_of, perplexity
from testing.checkpoints.gguf_files import dequantized
from testing.logits import mean_divergence

QUANTIZED = Path(__file__).parent / "fixtures" / "bundled-Q4_K_M.gguf"


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


def test_a_format_is_compared_with_exact_logits():
    exact = torch.tensor([[3.0, 1.0], [1.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    found = compared(exact, exact.flip(-1)[[0, 1, 3, 2]], [[0, 1], [1, 0]])
    assert found["same_choice"] == 0.5
    assert found["divergence"] == pytest.approx(0.5 * mean_divergence(exact[:2], exact[:2].flip(-1)))
    assert compared(exact, exact, [[0, 1], [1, 0]]) | {"perplexity": 0} == {
        "divergence": 0,
        "same_choice": 1,
        "perplexity": 0,
    }


def test_files_of_formats_hold_the_weights_that_the_first_held(tmp_path: Path) -> None:
    before = dequantized(QUANTIZED)
    (_, exact), *_ = islice(files_of(QUANTIZED, {}, tmp_path), 1)
    found = dequantized(exact)
    assert found.keys() == before.keys()
    assert all((found[name] == before[name]).all() for name in before)
    arms = {arm.name: path for arm, path in files_of(QUANTIZED, {"given": QUANTIZED}, tmp_path)}
    assert (arms["bfloat16"], arms["given"]) == (exact, QUANTIZED)
    errors = [
        abs(dequantized(arms[name])["blk.0.ffn_up.weight"] - before["blk.0.ffn_up.weight"]).mean()
        for name in ("Q8_0", "Q4_0")
    ]
    assert 0 < 8 * errors[0] < errors[1]


def test_every_format_is_there_once():
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    assert len({(arm.dtype, arm.cache_dtype, arm.gguf_type, str(arm.options)) for arm in ARMS}) == len(ARMS)
