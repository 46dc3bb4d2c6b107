"""The sampling parameters of rows, by slot: every field of SamplingParams, in every column that samplers read."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from pagewire.common.wire.messages import Pooling, RowOpening, SamplingParams
from pagewire.kernels.sampling import FLOATS, INTEGERS
from worker_service.rows.sampling import SamplingTable

VOCAB_SIZE = 50
# Fields that change the output of a row, each with the fields that it requires.
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "logit_bias_token_ids": {"logit_bias_token_ids": (3,), "logit_bias_values": (0.5,)},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (4,)},
    "num_logprobs": {"num_logprobs": 0},
    "num_prompt_logprobs": {"num_prompt_logprobs": 0},
    "logprob_token_ids": {"num_logprobs": 1, "logprob_token_ids": (3,)},
    "num_candidates": {"num_candidates": 1},
    "pooling": {"pooling": Pooling.LAST},
}
# Fields that have no effect alone: filters of a draw, and the fields named above beside another.
DEPENDENT = {"top_k", "top_p", "min_p", "logit_bias_values", "stop_token_ids"}


def opened(sampling: SamplingParams, slot: int = 2) -> SamplingTable:
    table = SamplingTable(4, VOCAB_SIZE)
    table.open(RowOpening(slot, 7, (1, 2), 2, 0, (1,), sampling, seed=2**64 - 1, sample_index=2**32 - 1))
    return table


def test_every_field_is_known() -> None:
    assert ASKED.keys() | DEPENDENT == {field.name for field in fields(SamplingParams)}


def test_every_field_says_what_is_legal() -> None:
    """Token ids are excluded: they are checked against the vocabulary, or may be outside it."""
    unchecked = {field.name for field in fields(SamplingParams) if not field.metadata}
    assert unchecked == {"logit_bias_token_ids", "stop_token_ids", "logprob_token_ids"}
    for field in fields(SamplingParams):
        assert field.name in unchecked or field.metadata["is_legal"](field.default), field.name


@pytest.mark.parametrize("name", ASKED)
def test_a_row_that_asks_for_anything_is_not_plain(name: str) -> None:
    assert opened(SamplingParams(top_k=3, top_p=0.5, min_p=0.1)).is_plain[2]
    assert not opened(SamplingParams(**ASKED[name])).is_plain[2]


def test_columns_hold_what_every_row_asks_for() -> None:
    sampling = SamplingParams(
        *(0.5, 1000, 0.75, 0.25, 1.5, 0.125, -0.5, (3, 4), (0.5, -1.0), 3, (5, VOCAB_SIZE)),
        num_logprobs=2,
        logprob_token_ids=(6, 5),
    )
    table = opened(sampling)
    table.copy(np.array([2]), np.array([0]))
    slots, num_tokens = np.array([0, 2]), np.array([4, 5])
    step = table.of_step(slots, num_tokens)
    columns = table.columns(step)
    found = {name: column.tolist() for name, column in columns._asdict().items() if column is not None}
    named = {name: [getattr(sampling, name)] * 2 for name in FLOATS}
    integers = {
        "top_k": [VOCAB_SIZE] * 2,
        "sample_indexes": [-1, -1],
        "slots": [0, 2],
        "num_logprobs": [2] * 2,
    }
    assert integers.keys() == set(INTEGERS)
    # The row has five tokens with the third token of its output. Its stop tokens are suppressed before that.
    edits = {
        "bias_token_ids": [[3, 4]] * 2,
        "bias_values": [[0.5, -1.0]] * 2,
        "stop_token_ids": [[5], [-1]],
        "min_num_tokens": [5, 5],
        "logprob_token_ids": [[6, 5]] * 2,
    }
    assert found == {**named, **integers, **edits, "seeds": [-1, -1], "num_tokens": [4, 5]}


def test_rows_that_report_all_tokens_widen_no_column() -> None:
    table = opened(SamplingParams(num_logprobs=VOCAB_SIZE))
    table.copy(np.array([2]), np.array([0]))
    step = table.of_step(np.array([0, 1, 2]), np.array([4, 4, 4]))
    assert (step.whole_rows, step.max_reported) == ([0, 2], 0)
    listed = opened(SamplingParams(num_logprobs=VOCAB_SIZE, logprob_token_ids=tuple(range(VOCAB_SIZE))))
    of_listed = listed.of_step(np.array([2]), np.array([4]))
    assert (of_listed.whole_rows, of_listed.max_reported) == ([], VOCAB_SIZE)


def test_a_step_whose_rows_take_tokens_only_has_no_edits() -> None:
    table = opened(SamplingParams(temperature=1.0, min_tokens=2**32 - 1, stop_token_ids=()))
    assert table.of_step(np.array([2]), np.array([3])).takes_tokens_only
    delayed = opened(SamplingParams(min_tokens=2**32 - 1, stop_token_ids=(1,)))
    assert delayed.of_step(np.array([2]), np.array([1 << 20])).edits["stop_token_ids"].tolist() == [[1]]
