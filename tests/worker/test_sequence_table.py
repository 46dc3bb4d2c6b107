"""The sequence table: the semantics of the working set, and that no bad plan corrupts the table."""

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan, WorkerProtocolError
from testing.plans import Row, plan_steps
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.rows.working_rows import WorkingRows

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
    """Apply a plan and advance; return (slot, start, num_new_tokens, samples) of each working row."""
    rows = apply(table, **phases)
    table.put_tokens(rows, np.full(rows.samples.sum(), token_id))
    table.advance(rows)
    columns = (rows.slots, rows.starts, rows.num_new_tokens, rows.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_working_set_persists_and_is_patched() -> None:
    table = SequenceTable(LIMITS)
    openings = (opening(2), opening(0, block_ids=(4, 5)))
    assert step(table, openings=openings, work_slots=(2, 0), work_num_tokens=(3, 6)) == [
        (0, 0, 6, True),
        (2, 0, 3, False),
    ]
    # Row 2 continues with 3 and so reaches its end; row 0 sampled and continues with 1.
    assert step(table) == [(0, 6, 1, True), (2, 3, 3, True)]
    assert step(table, work_slots=(0,), work_num_tokens=(0,)) == [(2, 6, 1, True)]
    assert step(table, work_slots=(0,), work_num_tokens=(1,)) == [(0, 7, 1, True), (2, 7, 1, True)]
    assert table.token_ids[0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert step(table, released_slots=(0,), append_tables=(2,), append_block_ids=(9,)) == [(2, 8, 1, True)]
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
    with pytest.raises(WorkerProtocolError, match="20 positions"):
        apply(table)


def row_of(table: SequenceTable, slot: int) -> dict[str, Any]:
    """Return all state of a row except its work."""
    return {
        "token_ids": table.token_ids[slot, : table.num_tokens[slot]].tolist(),
        "blocks": table.block_tables[slot].tolist(),
        "counts": (table.num_prompt_tokens[slot], table.num_computed_tokens[slot], table.num_blocks[slot]),
        "occupied": table.occupied[slot],
        "sampling": (
            table.sampling.params[slot],
            table.sampling.lines[:, slot].tolist(),
            table.sampling.reports_candidates[slot],
            table.sampling.is_plain[slot],
            table.sampling.num_prompt_logprobs[slot],
            table.sampling.seeds[slot],
        ),
    }


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.5), False),
        (SamplingParams(num_prompt_logprobs=0), False),
        (SamplingParams(num_candidates=1), False),
    ],
)
def test_plain_rows_stay_so_until_one_fails(sampling: SamplingParams, expected: bool) -> None:
    table = SequenceTable(LIMITS)
    apply(table, openings=(opening(2), opening(1, sampling=sampling)))
    # Slot 2 is overwritten by a copy of slot 1.
    rows = apply(table, fork_source_slots=(1,), fork_target_slots=(2,), work_slots=(2,), work_num_tokens=(6,))
    assert (rows.slots.tolist(), rows.are_plain) == ([2], expected)
    table.has_failed[rows.slots] = True
    assert not apply(table).are_plain
    rows = apply(table, released_slots=(2,), openings=(opening(2),), work_slots=(2,), work_num_tokens=(6,))
    assert rows.are_plain


def test_fork_copies_a_row_and_pauses_the_copy() -> None:
    table = SequenceTable(LIMITS)
    sampling = SamplingParams(temperature=0.5, num_prompt_logprobs=2)
    openings = (opening(1, sampling=sampling, seed=2**64 - 1, sample_index=3), opening(3, block_ids=(4, 5, 6, 7, 8)))
    step(table, openings=openings, work_slots=(1, 3), work_num_tokens=(6, 2))
    expected = row_of(table, 1)
    # A vacant and an occupied target; the working set of the source continues.
    assert step(table, fork_source_slots=(1, 1), fork_target_slots=(0, 3)) == [(1, 6, 1, True)]
    assert row_of(table, 0) == row_of(table, 3) == expected
    assert step(table, work_slots=(0, 1), work_num_tokens=(1, 0)) == [(0, 6, 1, True)]


def test_forks_read_every_source_before_a_target_is_written() -> None:
    table = SequenceTable(LIMITS)
    openings = (opening(0), opening(2, token_ids=(9,) * 11, num_prompt_tokens=11, block_ids=(7, 8, 9), seed=5))
    apply(table, openings=openings, work_slots=(0,), work_num_tokens=(3,))
    first, second = row_of(table, 0), row_of(table, 2)
    # Slots 0 and 2 are swapped; slot 1 gets the row of slot 0.
    assert step(table, fork_source_slots=(0, 2, 0), fork_target_slots=(2, 0, 1)) == []
    assert (row_of(table, 0), row_of(table, 1), row_of(table, 2)) == (second, first, first)


def test_fork_copies_a_row_that_opens_in_the_same_plan() -> None:
    table = SequenceTable(LIMITS)
    apply(table, openings=(opening(2),), fork_source_slots=(2,), fork_target_slots=(0,))
    assert row_of(table, 0) == row_of(table, 2)


def test_blocks_are_set_and_tokens_appended_after_forks() -> None:
    table = SequenceTable(LIMITS)
    beam = opening(0, sampling=SamplingParams(num_candidates=4))
    assert step(table, openings=(beam,), work_slots=(0,), work_num_tokens=(6,)) == [(0, 0, 6, True)]
    assert table.num_tokens[0] == 6
    assert step(table) == []  # a row of a beam pauses until it receives its token
    step(
        table,
        fork_source_slots=(0,),
        fork_target_slots=(3,),
        append_tables=(3, 0, 3),
        append_block_ids=(4, 5, 6),
        set_block_tables=(3, 3),
        set_block_indexes=(1, 4),
        set_block_ids=(9, 10),
        append_token_slots=(3, 0),
        append_token_ids=(40, 41),
    )
    assert table.block_tables[[0, 3]].tolist() == [[1, 2, 3, 5, 0], [1, 9, 3, 4, 10]]
    assert table.token_ids[[0, 3], :7].tolist() == [[1, 2, 3, 4, 5, 6, 41], [1, 2, 3, 4, 5, 6, 40]]
    assert step(table, work_slots=(0, 3), work_num_tokens=(1, 1)) == [(0, 6, 1, True), (3, 6, 1, True)]
    assert step(table) == []


def test_beams_and_others_sample_side_by_side() -> None:
    table = SequenceTable(LIMITS)
    openings = (opening(0), opening(1, block_ids=(4, 5), sampling=SamplingParams(num_candidates=1)))
    slots = {"openings": openings, "work_slots": (0, 1), "work_num_tokens": (6, 6)}
    assert step(table, **slots) == [(0, 0, 6, True), (1, 0, 6, True)]
    assert (table.num_tokens[:2].tolist(), table.work[:2].tolist()) == ([7, 6], [1, 0])


WINDOWED = replace(LIMITS, windows=(5,))


@pytest.mark.parametrize(
    ("num_computed", "block_ids", "is_good"),
    [
        # With a window of 5, a row reads 4 positions before the first position that it computes.
        (12, (0, 0, 3, 4), True),
        (12, (0, 0, 0, 4), False),
        (11, (0, 0, 3, 4), False),
        (11, (0, 2, 3, 4), True),
        (3, (0, 2, 3, 4), False),
        (12, (0, 11, 3, 4), False),
    ],
)
def test_blocks_out_of_the_window_may_be_holes(num_computed: int, block_ids: tuple[int, ...], is_good: bool) -> None:
    row = opening(0, token_ids=(1,) * 15, num_prompt_tokens=15, num_computed_tokens=num_computed, block_ids=block_ids)
    table = SequenceTable(WINDOWED)
    if is_good:
        apply(table, openings=(row,))
        return
    with pytest.raises(WorkerProtocolError, match="slot 0 gets block"):
        apply(table, openings=(row,))


def test_there_are_no_holes_without_a_window() -> None:
    with pytest.raises(WorkerProtocolError, match="slot 0 gets block 0; ids are 1 to 10"):
        apply(SequenceTable(LIMITS), openings=(opening(num_computed_tokens=5, block_ids=(0, 2)),))


# Layer groups: a full one, and one with a window of 5. The tables of slots 0 to 3 have the numbers 0 to 3 and 4 to 7.

GROUPED = replace(LIMITS, windows=(0, 5))


def grouped(*tables: tuple[int, ...], **fields: Any) -> RowOpening:
    return opening(block_ids=sum(tables, ()), table_lengths=tuple(map(len, tables)), **fields)


def test_a_row_has_a_table_of_each_layer_group() -> None:
    table = SequenceTable(GROUPED)
    openings = (grouped((1, 2), (3,), slot=0), grouped((4, 5), (6, 7), slot=2))
    step(table, openings=openings, work_slots=(0, 2), work_num_tokens=(4, 6))
    changes = {"append_tables": (4, 0, 6, 4), "append_block_ids": (8, 9, 10, 1)}
    sets = {"set_block_tables": (6,), "set_block_indexes": (1,), "set_block_ids": (3,)}
    step(
        table, **changes, **sets, fork_source_slots=(2,), fork_target_slots=(3,), work_slots=(0,), work_num_tokens=(2,)
    )
    assert table.block_tables[[0, 4], :4].tolist() == [[1, 2, 9, 0], [3, 8, 1, 0]]
    assert table.block_tables[[2, 6], :4].tolist() == [[4, 5, 0, 0], [6, 3, 10, 0]]
    assert table.block_tables[[3, 7], :4].tolist() == [[4, 5, 0, 0], [6, 7, 0, 0]]
    assert table.num_blocks.tolist() == [3, 0, 2, 2, 3, 0, 3, 2]
    step(table, released_slots=(2,))
    assert not table.block_tables[[2, 6]].any()
    assert table.num_blocks.tolist() == [3, 0, 0, 2, 3, 0, 0, 2]


def test_a_row_computes_up_to_the_end_of_its_shortest_table() -> None:
    table = SequenceTable(GROUPED)
    apply(table, openings=(grouped((1, 2, 3), (4,)),))
    with pytest.raises(WorkerProtocolError, match="up to position 5; it has 4 positions in its blocks"):
        apply(table, work_slots=(0,), work_num_tokens=(5,))
    assert step(table, work_slots=(0,), work_num_tokens=(4,)) == [(0, 0, 4, False)]


def test_only_a_group_with_a_window_may_have_holes() -> None:
    row = {"token_ids": (1,) * 15, "num_prompt_tokens": 15, "num_computed_tokens": 12}
    apply(SequenceTable(GROUPED), openings=(grouped((1, 2, 3, 4), (0, 0, 5), **row),))
    for tables in (((0, 2, 3), (0, 0, 5)), ((1, 2, 3), (0, 0, 0))):
        with pytest.raises(WorkerProtocolError, match="slot 0 gets block 0; ids are 1 to 10"):
            apply(SequenceTable(GROUPED), openings=(grouped(*tables, **row),))


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ({"openings": (opening(0),)}, "opens with 3 blocks, in block tables of 3; the model has 2 layer groups"),
        ({"openings": (grouped((1,), (2,), (3,)),)}, "in block tables of 1, 1, 1; the model has 2"),
        ({"openings": (opening(0, table_lengths=(1, 1)),)}, "opens with 3 blocks, in block tables of 1, 1"),
        ({"openings": (grouped((1,), (2, 3, 4, 5, 6, 7)),)}, "opens with 6 blocks; max_model_len allows 5"),
        ({"openings": (grouped((1, 2), (3,), num_computed_tokens=5),)}, "5 computed tokens in 1 blocks"),
        ({"append_tables": (8,), "append_block_ids": (1,)}, "block table 8 is out of range: there are 8"),
        ({"append_tables": (7,), "append_block_ids": (1,)}, "slot 3 is vacant"),
        (
            {"set_block_tables": (2**32 - 1,), "set_block_indexes": (0,), "set_block_ids": (1,)},
            "block table 4294967295 is out of range",
        ),
        (
            {
                "openings": (grouped((1,), (2,)),),
                "set_block_tables": (4,),
                "set_block_indexes": (1,),
                "set_block_ids": (1,),
            },
            "slot 0 gets block 1 set; it has 1",
        ),
    ],
)
def test_bad_plans_of_layer_groups(phases: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkerProtocolError, match=text):
        apply(SequenceTable(GROUPED), **phases)


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
        ({"openings": (opening(1, block_ids=(1, 2, 3, 4, 5, 6)),)}, "max_model_len allows 5"),
        ({"openings": (opening(1, num_computed_tokens=5, block_ids=(1,)),)}, "5 computed tokens in 1 blocks"),
        ({"openings": (opening(1, sampling=SamplingParams(temperature=float("nan"))),)}, "temperature nan"),
        ({"openings": (opening(1, sampling=SamplingParams(top_p=0.0)),)}, "top_p 0.0"),
        ({"openings": (opening(1, sampling=SamplingParams(repetition_penalty=0.0)),)}, "repetition_penalty"),
        ({"openings": (opening(1, sampling=SamplingParams(logit_bias_token_ids=(50,))),)}, "logit_bias_token_ids"),
        ({"openings": (opening(1, sampling=SamplingParams(logit_bias_token_ids=(1,))),)}, "0 biases for 1 tokens"),
        *(
            ({"openings": (opening(1, sampling=SamplingParams(num_logprobs=num, logprob_token_ids=ids)),)}, reason)
            for num, ids, reason in (
                (1, (50,), "logprob_token_ids"),
                (None, (1,), "must be num_logprobs distinct tokens"),
                (1, (1, 2), "must be num_logprobs distinct tokens"),
                (2, (1, 1), "must be num_logprobs distinct tokens"),
            )
        ),
        ({"openings": (opening(1, sampling=SamplingParams(num_candidates=0)),)}, "num_candidates 0"),
        ({"fork_source_slots": (0,)}, "forks: the columns have different lengths: 1, 0"),
        ({"fork_target_slots": (1,)}, "forks: the columns have different lengths: 0, 1"),
        ({"fork_source_slots": (1,), "fork_target_slots": (2,)}, "slot 1 is vacant"),
        ({"fork_source_slots": (4,), "fork_target_slots": (2,)}, "slot 4 is out of range"),
        ({"fork_source_slots": (0,), "fork_target_slots": (2**32 - 1,)}, "slot 4294967295 is out of range"),
        ({"fork_source_slots": (0, 0), "fork_target_slots": (1, 1)}, "two forks have the same target"),
        (
            {"set_block_tables": (0,), "set_block_indexes": (0,)},
            "set blocks: the columns have different lengths: 1, 1, 0",
        ),
        ({"set_block_ids": (1,)}, "set blocks: the columns have different lengths: 0, 0, 1"),
        ({"set_block_tables": (1,), "set_block_indexes": (0,), "set_block_ids": (1,)}, "slot 1 is vacant"),
        ({"set_block_tables": (0,), "set_block_indexes": (3,), "set_block_ids": (1,)}, "gets block 3 set; it has 3"),
        ({"set_block_tables": (0,), "set_block_indexes": (2**32 - 1,), "set_block_ids": (1,)}, "it has 3"),
        ({"set_block_tables": (0,), "set_block_indexes": (0,), "set_block_ids": (0,)}, "gets block 0"),
        ({"set_block_tables": (0,), "set_block_indexes": (0,), "set_block_ids": (11,)}, "gets block 11"),
        ({"append_token_slots": (0,)}, "appended tokens: the columns have different lengths: 1, 0"),
        ({"append_token_slots": (1,), "append_token_ids": (1,)}, "slot 1 is vacant"),
        ({"append_token_slots": (0,), "append_token_ids": (50,)}, "slot 0 gets token 50; ids are below 50"),
        ({"append_token_slots": (0, 0), "append_token_ids": (1, 1)}, "two tokens are appended to the same slot"),
        (
            {
                "openings": (opening(1, token_ids=(1,) * 20, num_prompt_tokens=20),),
                "append_token_slots": (1,),
                "append_token_ids": (1,),
            },
            "slot 1 gets a token and has 20",
        ),
        ({"append_tables": (0,)}, "appended blocks: the columns have different lengths: 1, 0"),
        ({"append_tables": (1,), "append_block_ids": (1,)}, "slot 1 is vacant"),
        ({"append_tables": (0,), "append_block_ids": (0,)}, "gets block 0"),
        ({"append_tables": (0,), "append_block_ids": (11,)}, "gets block 11"),
        ({"append_tables": (0,) * 3, "append_block_ids": (4, 5, 6)}, "has 5 blocks already"),
        ({"work_slots": (0,)}, "patches of work: the columns have different lengths: 1, 0"),
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
    """Row 0 is allocated and decodes."""
    table = SequenceTable(LIMITS)
    step(table, openings=(opening(),), work_slots=(0,), work_num_tokens=(6,))
    with pytest.raises(WorkerProtocolError, match=text):
        apply(table, **phases)


def test_clear_empties_the_table() -> None:
    table = SequenceTable(LIMITS)
    step(table, openings=(opening(),), work_slots=(0,), work_num_tokens=(6,))
    table.clear()
    assert step(table) == []
    assert step(table, openings=(opening(block_ids=(4, 5)),)) == []
    assert table.block_tables[0].tolist() == [4, 5, 0, 0, 0]


def test_mutated_plans_never_get_out_of_range() -> None:
    """Good plans with changed numbers: each is executed within bounds, or refused as a whole."""
    rng = random.Random(20)
    num_refused = num_applied = 0
    for _ in range(2000):
        limits = rng.choice([LIMITS, GROUPED])
        table = SequenceTable(limits)
        rows = [Row([rng.randrange(50) for _ in range(rng.randrange(1, 8))], rng.randrange(1, 5)) for _ in range(3)]
        for planned in plan_steps(
            rows, block_size=4, max_num_batched_tokens=9, windows=limits.windows, max_num_seqs=4, rng=rng
        ):
            plan = with_forks(planned.plan, rng)
            plan = mutate(plan, rng) if rng.random() < 0.3 else plan
            try:
                working = table.apply(plan)
            except WorkerProtocolError:
                num_refused += 1
                break
            check_in_range(table, working)
            table.put_tokens(working, np.zeros(working.samples.sum(), np.int64))
            table.advance(working)
            num_applied += 1
    assert num_refused > 1000
    assert num_applied > 2000


def with_forks(plan: StepPlan, rng: random.Random) -> StepPlan:
    """Return the plan with a row forked into slot 3, which no other row uses, and with a block and a token for it."""
    if rng.random() < 0.5:
        return plan
    return replace(
        plan,
        fork_source_slots=(rng.choice([0, 1, 2, 3]) if plan.step > 1 else 0,),
        fork_target_slots=(3,),
        set_block_tables=(3,),
        set_block_indexes=(0,),
        set_block_ids=(rng.randrange(1, 11),),
        append_token_slots=(3,),
        append_token_ids=(rng.randrange(50),),
        work_slots=(*plan.work_slots, 3),
        work_num_tokens=(*plan.work_num_tokens, rng.choice([0, 1])),
    )


COLUMNS = [field.name for field in fields(StepPlan) if field.default == () and field.name != "openings"]


def mutate(plan: StepPlan, rng: random.Random) -> StepPlan:
    """Return the plan with one number of one column changed, or with the column's length changed."""
    edges = (0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 49, 50, 2**31, 2**32 - 1)
    if plan.openings and rng.random() < 0.5:
        target = rng.randrange(len(plan.openings))
        old = plan.openings[target]
        name = rng.choice(
            ["slot", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "table_lengths"]
        )
        value = getattr(old, name)
        new = replace(old, **{name: changed(value, rng, edges) if isinstance(value, tuple) else rng.choice(edges)})
        return replace(plan, openings=(*plan.openings[:target], new, *plan.openings[target + 1 :]))
    name = rng.choice([name for name in COLUMNS if not name.startswith(("swap", "copy"))])
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
        for number, window in zip(table.limits.tables_of(slot), table.limits.windows, strict=True):
            first = table.limits.first_block(int(table.num_computed_tokens[slot]), window)
            used = table.block_tables[number, first : -(-int(end) // LIMITS.block_size)]
            assert used.min() >= 1
            assert used.max() <= LIMITS.num_device_blocks
        assert table.token_ids[slot, :end].max() < LIMITS.vocab_size
        assert table.num_tokens[slot] < table.token_ids.shape[1]
