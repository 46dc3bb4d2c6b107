"""Beam selection on small numbers. `tests/worker/test_beam_parity.py` compares it with transformers."""

import math

import pytest

from scheduler_service.core.beam import BeamSearch, BeamState, BeamStep, Child
from scheduler_service.core.request import BeamParams, EarlyStopping

STOP = 0


def search(
    width: int, *, max_tokens: int = 8, min_tokens: int = 0, stops: set[int] | None = None, **params
) -> BeamSearch:
    return BeamSearch(
        BeamParams(width, **params), frozenset({STOP} if stops is None else stops), min_tokens, max_tokens
    )


def first_beam() -> list[BeamState]:
    return [BeamState(0.0, ())]


def following(beams: list[BeamState], step: BeamStep) -> list[BeamState]:
    return [
        BeamState(child.cumulative_logprob, (*beams[child.parent].output_token_ids, child.token_id))
        for child in step.children
    ]


def test_the_first_step_continues_one_beam_with_its_best_tokens() -> None:
    step = search(2).advance(first_beam(), [[(5, -1.0), (6, -2.0), (7, -3.0)]])
    assert step == BeamStep([Child(0, 5, -1.0), Child(0, 6, -2.0)], is_done=False)


def test_children_come_from_any_beam_in_order_of_the_sum() -> None:
    beams = [BeamState(-1.0, (5,)), BeamState(-1.5, (6,))]
    step = search(2).advance(beams, [[(1, -2.0), (2, -3.0), (3, -4.0)], [(4, -0.25), (5, -1.0), (6, -9.0)]])
    assert step.children == [Child(1, 4, -1.75), Child(1, 5, -2.5)]


def test_equal_sums_rank_by_beam() -> None:
    beams = [BeamState(-1.0, (5,)), BeamState(-1.0, (6,))]
    step = search(2).advance(beams, [[(9, -1.0), (8, -2.0)], [(1, -1.0), (2, -2.0)]])
    assert step.children == [Child(0, 9, -2.0), Child(1, 1, -2.0)]


def test_a_stop_token_finishes_only_among_the_best_of_the_beams_width() -> None:
    beam = search(2)
    step = beam.advance(first_beam(), [[(5, -1.0), (6, -2.0), (STOP, -3.0)]])
    assert beam.best(2) == []
    step = beam.advance(following(first_beam(), step), [[(STOP, -0.5), (1, -1.0), (2, -2.0)], [(3, -5.0)] * 3])
    assert [(found.token_ids, found.stop_token_id) for found in beam.best(2)] == [((5, STOP), STOP)]
    assert step.children == [Child(0, 1, -2.0), Child(0, 2, -3.0)]
    assert not step.is_done


def test_scores_divide_by_a_power_of_the_length_with_its_stop_token() -> None:
    beam = search(1, length_penalty=2.0, max_tokens=2)
    beam.advance([BeamState(-1.0, (5,))], [[(STOP, -0.5), (1, -1.0)]])
    (found,) = beam.best(1)
    assert found.cumulative_logprob == -1.5
    assert found.score == pytest.approx(-1.5 / 4, rel=1e-12)


def test_the_last_token_finishes_the_best_of_all_candidates() -> None:
    beam = search(2, max_tokens=1)
    step = beam.advance(first_beam(), [[(5, -1.0), (STOP, -2.0), (7, -3.0)]])
    assert step == BeamStep([], is_done=True)
    assert [(found.token_ids, found.stop_token_id) for found in beam.best(2)] == [((5,), None), ((STOP,), STOP)]
    assert len(beam.best(1)) == 1


def test_a_worse_hypothesis_is_forgotten() -> None:
    beam = search(1, early_stopping=EarlyStopping.NEVER)
    beam.advance([BeamState(-1.0, (5,))], [[(STOP, -0.1), (6, -0.2)]])
    beam.advance([BeamState(-1.2, (5, 6))], [[(STOP, -9.0), (6, -10.0)]])
    assert [found.token_ids for found in beam.best(1)] == [(5, STOP)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        # One hypothesis has the score -1.5 / 2. The best running beam has the sum -1.6 after 2 of 8 tokens.
        (EarlyStopping.FIRST, 1.0, True),
        (EarlyStopping.HEURISTIC, 1.0, True),  # -1.6 / 2 is worse
        (EarlyStopping.NEVER, 1.0, False),  # -1.6 / 8 would be better
        (EarlyStopping.NEVER, 0.0, True),  # sums only fall
        (EarlyStopping.NEVER, -1.0, True),
        (EarlyStopping.HEURISTIC, -1.0, True),
    ],
)
def test_when_a_full_search_ends(early_stopping: EarlyStopping, length_penalty: float, is_done: bool) -> None:
    beam = search(1, early_stopping=early_stopping, length_penalty=length_penalty)
    step = beam.advance([BeamState(-1.0, (5,))], [[(STOP, -0.5), (1, -0.6)]])
    assert step.is_done is is_done
    assert len(step.children) == 1


def test_never_looks_as_far_as_the_last_token_allowed() -> None:
    for max_tokens, is_done in ((7, True), (8, False)):  # -1.6 / 7 < -0.21 < -1.6 / 8
        beam = search(1, early_stopping=EarlyStopping.NEVER, max_tokens=max_tokens)
        assert beam.advance([BeamState(-0.2, (5,))], [[(STOP, -0.22), (1, -1.4)]]).is_done is is_done


def test_never_looks_at_the_present_length_where_longer_is_worse() -> None:
    beam = search(2, early_stopping=EarlyStopping.NEVER, length_penalty=-1.0)
    step = beam.advance(first_beam(), [[(5, -1.0), (STOP, -10.0), (6, -11.0)]])
    candidates = [[(STOP, -0.5), (1, -0.6), (2, -0.7)], [(STOP, -1.0), (1, -1.0), (2, -1.0)]]
    step = beam.advance(following(first_beam(), step), candidates)
    assert [found.score for found in beam.best(2)] == pytest.approx([-3.0, -10.0])
    assert not step.is_done  # -1.6 * 2 is better than -10, -1.6 * 8 would not be


def test_below_min_tokens_a_stop_token_is_no_candidate() -> None:
    beam = search(1, min_tokens=1)
    step = beam.advance(first_beam(), [[(STOP, -0.1), (5, -1.0)]])
    assert step == BeamStep([Child(0, 5, -1.0)], is_done=False)
    beam.advance(following(first_beam(), step), [[(STOP, -0.1), (5, -1.0)]])
    assert [found.token_ids for found in beam.best(1)] == [(5, STOP)]


def test_tokens_that_cannot_be_are_no_candidates() -> None:
    step = search(3).advance(first_beam(), [[(5, -1.0), (6, -math.inf), (7, -math.inf)]])
    assert step == BeamStep([Child(0, 5, -1.0)], is_done=False)


def test_search_over_stop_tokens_only_returns_finished_hypotheses() -> None:
    beam = search(4, stops={0, 1})
    step = beam.advance(first_beam(), [[(0, -0.5), (1, -1.0)]])
    assert step == BeamStep([], is_done=True)
    assert len(beam.best(4)) == 2


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 5000.0, -5000.0])
def test_an_extreme_penalty_is_no_error(length_penalty: float) -> None:
    beam = search(2, length_penalty=length_penalty, max_tokens=3)
    beams = [BeamState(-1.0, (5, 6)), BeamState(-2.0, (7, 8))]
    assert beam.advance(beams, [[(1, -0.5), (2, -1.0)], [(1, 0.0), (2, -1.0)]]).is_done
    assert len(beam.best(2)) == 2
