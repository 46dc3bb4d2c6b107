"""The table: working-set semantics, and that no plan, however bad, gets past it."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.worker.plans import Row, plan_steps
from worker_service.sequence_table import SequenceTable, TableLimits, WorkingRows
from worker_service.session import ProtocolError
from worker_service.step import RowOpening, SamplingParams, StepPlan

LIMITS = TableLimits(
    max_num_seqs=4, max_num_batched_tokens=12, max_model_len=20, block_size=4, num_device_blocks=10, vocab_size=50
)


def opening(slot: int = 0, **fields: Any) -> RowOpening:
    base = RowOpening(
        slot=slot,
        sequence_id=1,
        token_ids=(1, 2, 3, 4, 5, 6),
        num_prompt_tokens=6,
        num_computed_tokens=0,
        block_ids=(1, 2, 3),
        sampling=SamplingParams(),
        seed=0,
        sample_index=0,
    )
    return replace(base, **fields)


def apply(table: SequenceTable, **phases: Any) -> WorkingRows:
    return table.apply(StepPlan(1, 1, **phases))


def step(table: SequenceTable, token_id: int = 7, **phases: Any) -> list[tuple[int, int, int, bool]]:
    """Apply and advance; (slot, start, num_new_tokens, samples) of each working row."""
    rows = apply(table, **phases)
    table.advance(rows, np.full(rows.samples.sum(), token_id))
    columns = (rows.slots, rows.starts, rows.num_new_tokens, rows.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_working_set_persists_and_is_patched() -> None:
    table = SequenceTable(LIMITS)
    openings = (opening(2), opening(0, block_ids=(4, 5)))
    assert step(table, openings=openings, work_slots=(2, 0), work_num_tokens=(3, 6)) == [
        (0, 0, 6, True),
        (2, 0, 3, False),
    ]
    # Row 2 goes on with 3 and so reaches its end; row 0 sampled and goes on with 1.
    assert step(table) == [(0, 6, 1, True), (2, 3, 3, True)]
    assert step(table, work_slots=(0,), work_num_tokens=(0,)) == [(2, 6, 1, True)]
    assert step(table, work_slots=(0,), work_num_tokens=(1,)) == [(0, 7, 1, True), (2, 7, 1, True)]
    assert table.token_ids[0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert step(table, released_slots=(0,), append_slots=(2,), append_block_ids=(9,)) == [(2, 8, 1, True)]
    assert table.block_tables[2].tolist() == [1, 2, 3, 9, 0]
    assert not table.block_tables[0].any()


def test_slot_may_be_released_and_opened_in_one_plan() -> None:
    table = SequenceTable(LIMITS)
    step(table, openings=(opening(),), work_slots=(0,), work_num_tokens=(6,))
    again = opening(token_ids=(9,), num_prompt_tokens=1, block_ids=(8,))
    assert step(table, released_slots=(0,), openings=(again,)) == []
    assert step(table, work_slots=(0,), work_num_tokens=(1,)) == [(0, 0, 1, True)]
    assert table.block_tables[0].tolist() == [8, 0, 0, 0, 0]


def test_opening_may_hold_computed_tokens_and_output() -> None:
    table = SequenceTable(LIMITS)
    resumed = opening(num_prompt_tokens=2, num_computed_tokens=4)
    assert step(table, openings=(resumed,), work_slots=(0,), work_num_tokens=(2,)) == [(0, 4, 2, True)]


def test_row_may_fill_the_model_length_but_not_go_beyond() -> None:
    table = SequenceTable(LIMITS)
    full = opening(token_ids=(1,) * 20, num_prompt_tokens=20, num_computed_tokens=15, block_ids=(1, 2, 3, 4, 5))
    assert step(table, openings=(full,), work_slots=(0,), work_num_tokens=(5,)) == [(0, 15, 5, True)]
    with pytest.raises(ProtocolError, match="20 positions"):
        apply(table)


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ({"released_slots": (1,)}, "slot 1 is vacant"),
        ({"released_slots": (4,)}, "slot 4 is out of range"),
        ({"released_slots": (0, 0)}, "slot 0 is vacant"),
        ({"openings": (opening(0),)}, "slot 0 is occupied"),
        ({"openings": (opening(4),)}, "out of range"),
        ({"openings": (opening(1, token_ids=(), num_prompt_tokens=0),)}, "opens with 0 tokens"),
        ({"openings": (opening(1, token_ids=(1,) * 21),)}, "a row has 1 to 20"),
        ({"openings": (opening(1, token_ids=(1, 50), num_prompt_tokens=1),)}, "ids are below 50"),
        ({"openings": (opening(1, num_prompt_tokens=0),)}, "0 of them prompt"),
        ({"openings": (opening(1, num_prompt_tokens=7),)}, "7 of them prompt"),
        ({"openings": (opening(1, num_computed_tokens=6),)}, "one must be left"),
        ({"openings": (opening(1, block_ids=(1, 0)),)}, "ids are 1 to 10"),
        ({"openings": (opening(1, block_ids=(11,)),)}, "ids are 1 to 10"),
        ({"openings": (opening(1, block_ids=(1, 2, 3, 4, 5, 6)),)}, "max_model_len takes 5"),
        ({"openings": (opening(1, num_computed_tokens=5, block_ids=(1,)),)}, "5 computed tokens in 1 blocks"),
        ({"openings": (opening(1, sampling=SamplingParams(temperature=float("nan"))),)}, "temperature nan"),
        ({"openings": (opening(1, sampling=SamplingParams(top_p=0.0)),)}, "top_p 0.0"),
        ({"openings": (opening(1, sampling=SamplingParams(repetition_penalty=0.0)),)}, "repetition_penalty"),
        ({"openings": (opening(1, sampling=SamplingParams(logit_bias_token_ids=(50,))),)}, "logit_bias_token_ids"),
        ({"openings": (opening(1, sampling=SamplingParams(logit_bias_token_ids=(1,))),)}, "0 biases for 1 tokens"),
        ({"append_slots": (0,)}, "appended blocks: the columns have 1, 0 entries"),
        ({"append_slots": (1,), "append_block_ids": (1,)}, "slot 1 is vacant"),
        ({"append_slots": (0,), "append_block_ids": (0,)}, "gets block 0"),
        ({"append_slots": (0,), "append_block_ids": (11,)}, "gets block 11"),
        ({"append_slots": (0,) * 3, "append_block_ids": (4, 5, 6)}, "has 5 blocks already"),
        ({"work_slots": (0,)}, "patches of work: the columns have 1, 0 entries"),
        ({"work_slots": (1,), "work_num_tokens": (1,)}, "slot 1 is vacant"),
        ({"work_slots": (0, 0), "work_num_tokens": (1, 1)}, "two patches of work name the same slot"),
        ({"work_slots": (0,), "work_num_tokens": (13,)}, "at most 12"),
        ({"work_slots": (0,), "work_num_tokens": (2,)}, "it has 7 tokens"),
        (
            {"openings": (opening(1), opening(2)), "work_slots": (1, 2), "work_num_tokens": (6, 6)},
            "13 tokens; it computes at most 12",
        ),
        (
            {"openings": (opening(1, block_ids=(4,)),), "work_slots": (1,), "work_num_tokens": (5,)},
            "it has 4 positions in its blocks",
        ),
    ],
)
def test_bad_plans(phases: dict[str, Any], text: str) -> None:
    """Row 0 is open and decoding."""
    table = SequenceTable(LIMITS)
    step(table, openings=(opening(),), work_slots=(0,), work_num_tokens=(6,))
    with pytest.raises(ProtocolError, match=text):
        apply(table, **phases)


def test_clear_empties_the_table() -> None:
    table = SequenceTable(LIMITS)
    step(table, openings=(opening(),), work_slots=(0,), work_num_tokens=(6,))
    table.clear()
    assert step(table) == []
    assert step(table, openings=(opening(block_ids=(4, 5)),)) == []
    assert table.block_tables[0].tolist() == [4, 5, 0, 0, 0]


def test_mutated_plans_never_get_out_of_range() -> None:
    """Good plans with numbers changed: each is carried out within bounds or refused as a whole."""
    rng = random.Random(20)
    num_refused = num_applied = 0
    for _ in range(2000):
        table = SequenceTable(LIMITS)
        rows = [Row([rng.randrange(50) for _ in range(rng.randrange(1, 8))], rng.randrange(1, 5)) for _ in range(3)]
        for planned in plan_steps(rows, block_size=4, max_num_batched_tokens=9):
            plan = mutate(planned.plan, rng) if rng.random() < 0.3 else planned.plan
            try:
                working = table.apply(plan)
            except ProtocolError:
                num_refused += 1
                break
            check_in_range(table, working)
            table.advance(working, np.zeros(working.samples.sum(), np.int64))
            num_applied += 1
    assert num_refused > 1000
    assert num_applied > 2000


def mutate(plan: StepPlan, rng: random.Random) -> StepPlan:
    """Change one number of one column, or its length."""
    edges = (0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 49, 50, 2**31, 2**32 - 1)
    if plan.openings and rng.random() < 0.5:
        target = rng.randrange(len(plan.openings))
        old = plan.openings[target]
        name = rng.choice(["slot", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids"])
        value = getattr(old, name)
        new = replace(old, **{name: changed(value, rng, edges) if isinstance(value, tuple) else rng.choice(edges)})
        return replace(plan, openings=(*plan.openings[:target], new, *plan.openings[target + 1 :]))
    name = rng.choice(["released_slots", "append_slots", "append_block_ids", "work_slots", "work_num_tokens"])
    return replace(plan, **{name: changed(getattr(plan, name), rng, edges)})


def changed(values: tuple[int, ...], rng: random.Random, edges: tuple[int, ...]) -> tuple[int, ...]:
    kind = rng.randrange(3)
    if kind == 0 or not values:
        return (*values, rng.choice(edges))
    target = rng.randrange(len(values))
    return values[:target] + ((rng.choice(edges),) if kind == 1 else ()) + values[target + 1 :]


def check_in_range(table: SequenceTable, rows: WorkingRows) -> None:
    assert rows.num_new_tokens.sum() <= LIMITS.max_num_batched_tokens
    for slot, end, samples in zip(rows.slots, rows.ends, rows.samples, strict=True):
        assert table.occupied[slot]
        assert end <= min(table.num_tokens[slot], LIMITS.max_model_len)
        assert samples == (end == table.num_tokens[slot])
        used = table.block_tables[slot, : -(-int(end) // LIMITS.block_size)]
        assert used.min() >= 1
        assert used.max() <= LIMITS.num_device_blocks
        assert table.token_ids[slot, :end].max() < LIMITS.vocab_size
        assert table.num_tokens[slot] < table.token_ids.shape[1]
