"""The states that rows read and write: one or two own states, saves, forks, late rows, and steps in parts.

A state contains the tokens that it was computed from, so a wrong state is visible.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan, WorkerProtocolError
from pagewire.kernels.states import StateRows
from worker_service.device.inputs import fit_states, pad_states, state_lengths
from worker_service.rows import run_in_parts
from worker_service.rows.states import PartStates
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.rows.working_rows import WorkingRows

NUM_STATES, MAX_LEN = 20, 24
LIMITS = TableLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=MAX_LEN,
    block_size=4,
    num_device_blocks=100,
    vocab_size=1000,
    num_device_states=NUM_STATES,
)
BEAM = SamplingParams(num_candidates=2)


def compute(rows: StateRows, tokens: Sequence[Sequence[int]]) -> None:
    """Write the states of a model whose state is the list of a sequence's tokens."""
    read = rows.states[rows.reads.long()].clone()
    for row, (state, new) in enumerate(zip(read, tokens, strict=True)):
        counts = [count for count, _ in rows.saves(row)]
        assert counts == sorted(counts)
        assert counts[-1] == len(new)
        for count, target in rows.saves(row):
            num = int((state != 0).sum())
            saved = state.clone()
            saved[num : num + count] = torch.tensor(new[:count], dtype=torch.float32)
            rows.states[target] = saved


@dataclass
class Worker:
    """A table with states, and a model whose state is the list of a sequence's tokens."""

    table: SequenceTable = field(default_factory=lambda: SequenceTable(LIMITS))
    states: torch.Tensor = field(default_factory=lambda: torch.full((NUM_STATES + 1, MAX_LEN), float("nan")))
    fits: Callable[[WorkingRows], bool] = lambda rows: True
    given_up: list[WorkingRows] = field(default_factory=list)
    late: tuple[int, ...] = ()  # slots whose masks are not ready in the next step

    def __post_init__(self) -> None:
        self.states[0] = 0

    def launch(self, rows: WorkingRows) -> None:
        if not self.fits(rows):
            raise MemoryError
        query_start_loc = torch.tensor([0, *np.cumsum(rows.num_new_tokens)], dtype=torch.int32)
        part = self.table.states.of_part(rows)
        of_rows = part.rows(self.states, query_start_loc)
        assert saves_of(self.table.states.of_part(rows.take(np.arange(len(rows.slots))[::-1]))) == saves_of(part)[::-1]
        before = self.states.clone()
        tokens = [self.table.token_ids[slot, start:end].tolist() for slot, start, end in spans(rows)]
        compute(of_rows, tokens)
        read = of_rows.reads.long()
        assert torch.equal(self.states[0], before[0])
        assert not before[read].isnan().any()
        assert part.overwrites == (not torch.equal(self.states[read], before[read]))
        self.table.states.advance(part)

    def run(self, **columns: Any) -> None:
        rows = self.table.apply(StepPlan(1, 1, **columns))
        run_in_parts(
            rows,
            self.launch,
            is_out_of_memory=lambda error: isinstance(error, MemoryError),
            free_memory=lambda: None,
            give_up=self.given_up.append,
        )
        self.table.masks.is_late[:] = False
        self.table.masks.is_late[list(self.late)] = True
        self.table.put_tokens(rows, np.full(rows.samples.sum(), 99))
        self.table.advance(replace(rows, are_plain=False))
        self.late = ()

    def content(self, state: int) -> list[int]:
        found = self.states[state]
        return found[found != 0].int().tolist()

    def tokens(self, slot: int, num: int) -> list[int]:
        return self.table.token_ids[slot, :num].tolist()


def saves_of(part: PartStates) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return for each row the state that it reads, and its saves as (number of new tokens, state)."""
    reads, starts, counts, targets = (column.tolist() for column in part.columns)
    saves = list(zip(counts, targets, strict=True))
    return [(reads[row], saves[starts[row] : starts[row + 1]]) for row in range(len(reads))]


def test_graphs_compute_padding_rows_that_write_nothing() -> None:
    worker = Worker()
    rows = worker.table.apply(
        StepPlan(1, 1, openings=(opening(0, (1,)), opening(2, (3, 4))), work_slots=(0, 2), work_num_tokens=(2, 5))
    )
    part = worker.table.states.of_part(rows)
    assert [num_rows for num_rows in range(2, 6) if fit_states(part, num_rows)] == [2, 3, 4, 5]
    padded = PartStates(tuple(pad_states(part, np.array([6, 0]))), part.slots, part.lasts, part.overwrites)
    assert saves_of(padded) == [(0, [(2, 1)]), (0, [(4, 3), (5, 4)]), (0, [(6, 0)]), (0, [(0, 0)])]
    assert tuple(map(len, padded.columns)) == state_lengths(4)
    saves = {"save_slots": (2,) * 3, "save_positions": (1, 2, 3), "save_states": (5, 6, 7)}
    part = worker.table.states.of_part(worker.table.apply(StepPlan(1, 2, **saves)))
    assert [num_rows for num_rows in range(2, 9) if fit_states(part, num_rows)] == [4, 5, 6, 7, 8]


def spans(rows: WorkingRows) -> list[tuple[int, int, int]]:
    return list(zip(rows.slots.tolist(), rows.starts.tolist(), rows.ends.tolist(), strict=True))


def opening(slot: int, own: tuple[int, ...], read: int = 0, num_computed: int = 0, **fields: Any) -> RowOpening:
    blocks = tuple(range(1 + 6 * slot, 7 + 6 * slot))
    base = RowOpening(
        slot, slot, tuple(range(1, 11)), 10, num_computed, blocks, SamplingParams(), 0, 0, read_state=read,
        own_states=own,
    )  # fmt: skip
    return replace(base, **fields)


def work(slot: int, num: int) -> dict[str, Any]:
    return {"work_slots": (slot,), "work_num_tokens": (num,)}


def saves(*entries: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("save_slots", "save_positions", "save_states"), zip(*entries, strict=True), strict=True))


def test_a_row_with_one_state_computes_in_place() -> None:
    worker = Worker()
    worker.run(openings=(opening(0, (7,)), opening(1, (3,))), work_slots=(0, 1), work_num_tokens=(4, 10))
    assert (worker.content(7), worker.content(3)) == ([1, 2, 3, 4], list(range(1, 11)))
    worker.run(**work(0, 6))
    worker.run()
    assert worker.content(7) == worker.tokens(0, 11)
    assert worker.content(3) == worker.tokens(1, 12)
    assert worker.states[[1, 2, *range(8, 21)]].isnan().all()


def test_a_row_with_two_states_keeps_the_state_before_its_last_token() -> None:
    worker = Worker()
    worker.run(openings=(opening(0, (7, 2)),), **work(0, 4))
    assert (worker.content(7), worker.content(2)) == ([1, 2, 3], [1, 2, 3, 4])
    worker.run(**work(0, 6))
    assert (worker.content(7), worker.content(2)) == (worker.tokens(0, 10), worker.tokens(0, 9))
    for num_computed in (11, 12, 13):
        worker.run()
        assert sorted(map(worker.content, (7, 2)), key=len) == [
            worker.tokens(0, num_computed - 1),
            worker.tokens(0, num_computed),
        ]


@pytest.mark.parametrize("num_first", [9, 10])
@pytest.mark.parametrize("own", [(7, 2), (2, 7)])
def test_a_late_row_computes_its_last_position_again(num_first: int, own: tuple[int, int]) -> None:
    worker = Worker()
    worker.run(openings=(opening(0, own),), **work(0, num_first))
    if num_first < 10:
        worker.late = (0,)
        worker.run(**work(0, 1))
    for late in ((0,), (0,), (), (0,), ()):
        worker.late = late
        worker.run()
        num = int(worker.table.num_computed_tokens[0])
        assert worker.tokens(0, num) in map(worker.content, own)
    assert int(worker.table.num_computed_tokens[0]) == (12 if num_first == 10 else 11)


@pytest.mark.parametrize("own", [(7,), (7, 2)])
@pytest.mark.parametrize("position", [4, 5, 8, 9, 10])
def test_a_saved_state_is_that_after_its_position(own: tuple[int, ...], position: int) -> None:
    """The positions include the start and the end of the step, and the state before the last token."""
    worker = Worker()
    worker.run(openings=(opening(0, own),), **work(0, 4))
    worker.run(**work(0, 6), **saves((0, position, 12), (0, 7, 11), (0, position, 13)))
    assert worker.content(12) == worker.content(13) == worker.tokens(0, position)
    assert worker.content(11) == worker.tokens(0, 7)
    assert worker.tokens(0, 10) in map(worker.content, own)
    # Another row continues from the saved state while the first one goes on.
    other = opening(1, (5,), 12, position, token_ids=tuple(range(1, 13)), num_prompt_tokens=12)
    worker.run(openings=(other,), **work(1, 12 - position), **saves((0, 10, 14)))
    assert worker.content(5) == list(range(1, 13))
    assert worker.content(12) == list(range(1, position + 1))
    assert worker.content(14) == worker.tokens(0, 10)


def test_forks_continue_from_the_state_of_their_source() -> None:
    worker = Worker()
    worker.run(openings=(opening(0, (1, 2), sampling=BEAM),), **work(0, 10))
    for step in range(3):
        targets = (1, 2) if step == 0 else ()
        forks = {
            "fork_source_slots": (0,) * len(targets),
            "fork_target_slots": targets,
            "set_state_slots": targets,
            "set_state_firsts": (3, 5)[: len(targets)],
            "set_state_seconds": (4, 6)[: len(targets)],
        }
        tokens = {"append_token_slots": (0, 1, 2), "append_token_ids": (20 + step, 30 + step, 40 + step)}
        worker.run(**forks, **tokens, work_slots=(0, 1, 2), work_num_tokens=(1, 1, 1))
        for slot, own in enumerate([(1, 2), (3, 4), (5, 6)]):
            lengths = sorted(map(worker.content, own), key=len)
            assert lengths == [worker.tokens(slot, 10 + step), worker.tokens(slot, 11 + step)]


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_a_step_write_what_the_whole_step_writes(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    limit = rng.choice([1, 2, 3, 7])
    workers = Worker(), Worker(fits=lambda rows: int(rows.num_new_tokens.sum()) <= limit)
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    positions = rng.sample(range(first, 11), 2)
    for worker in workers:
        rows = (opening(0, (1,)), opening(1, (2, 3)))
        worker.run(openings=rows, work_slots=(0, 1), work_num_tokens=(first, second))
        entries = saves((0, positions[0], 10), (0, positions[1], 11), (1, rng.randint(second, 10), 12))
        worker.run(work_slots=(0, 1), work_num_tokens=(10 - first, 10 - second), **entries)
        assert worker.content(1) == worker.tokens(0, 10)
        assert [worker.content(state) for state in (10, 11)] == [worker.tokens(0, num) for num in positions]
        assert sorted(map(worker.content, (2, 3)), key=len) == [worker.tokens(1, 9), worker.tokens(1, 10)]
        worker.late = (1,)
        worker.run()
        worker.run()
        assert worker.content(1) == worker.tokens(0, 12)
        assert sorted(map(worker.content, (2, 3)), key=len) == [worker.tokens(1, 10), worker.tokens(1, 11)]


def test_the_saves_of_a_row_that_failed_are_known() -> None:
    worker = Worker(fits=lambda rows: 0 not in rows.slots)
    openings = (opening(0, (1,)), opening(1, (2,)))
    entries = saves((0, 0, 9), (0, 4, 10), (1, 4, 11))
    worker.run(openings=openings, work_slots=(0, 1), work_num_tokens=(10, 10), **entries)
    (rows,) = worker.given_up
    assert worker.table.states.saved_states(rows) == [9, 10]
    assert worker.content(11) == [1, 2, 3, 4]
    assert worker.states[[9, 10]].isnan().all()


NONE = replace(LIMITS, num_device_states=0)
GRAMMAR = {"grammar_id": 1}


@pytest.mark.parametrize(
    ("limits", "row", "text"),
    [
        (LIMITS, opening(0, ()), r"slot 0 opens with own states \(\); it must have 1 or 2"),
        (LIMITS, opening(0, (1, 2, 3)), "must have 1 or 2"),
        (LIMITS, opening(0, (1, 1)), "must have 1 or 2"),
        (LIMITS, opening(0, (1,), **GRAMMAR), "two different states, because it has a grammar"),
        (LIMITS, opening(0, (1,), sampling=BEAM), "two different states, because it has a grammar or reports"),
        (LIMITS, opening(0, (NUM_STATES + 1,)), "slot 0 gets state 21; ids are 1 to 20"),
        (LIMITS, opening(0, (1, 0)), "gets state 0"),
        (LIMITS, opening(0, (1,), 3), "opens with 0 computed tokens and state 3"),
        (LIMITS, opening(0, (1,), 0, 4), "opens with 4 computed tokens and state 0"),
        (LIMITS, opening(0, (1,), 21, 4), "gets state 21"),
        (NONE, opening(0, (1,)), r"opens with states \(0, 1\); the model has no states"),
        (NONE, opening(0, (), 1, 4), "the model has no states"),
    ],
)
def test_bad_states_of_an_opening(limits: TableLimits, row: RowOpening, text: str) -> None:
    with pytest.raises(WorkerProtocolError, match=text):
        SequenceTable(limits).apply(StepPlan(1, 1, openings=(row,)))


FORK = {"fork_source_slots": (0,), "fork_target_slots": (3,)}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (saves((0, 3, 9)), "slot 0 is to save the state at position 3, but the step computes positions 4 to 10"),
        (saves((0, 11, 9)), "position 11, but the step computes positions 4 to 10 of it"),
        (saves((1, 4, 9)), "slot 1 is to save the state at position 4, but the step does not compute it"),
        (saves((2, 4, 9)), "slot 2 is vacant"),
        (saves((0, 5, 0)), "slot 0 gets state 0; ids are 1 to 20"),
        (saves((0, 5, 21)), "gets state 21"),
        (saves((0, 5, 9), (0, 6, 9)), "two saves write the same state"),
        ({"save_slots": (0,), "save_positions": (5,)}, "saves: the columns have different lengths: 1, 1, 0"),
        (FORK, r"slots \(3,\) are forks, so each must get its own states"),
        ({**FORK, "set_state_slots": (3,), "set_state_firsts": (0,), "set_state_seconds": (9,)}, "gets state 0"),
        ({**FORK, "set_state_slots": (3,), "set_state_firsts": (9,), "set_state_seconds": (21,)}, "gets state 21"),
        ({**FORK, "set_state_slots": (3,), "set_state_firsts": (9,), "set_state_seconds": (9,)}, "state 9 twice"),
        ({"set_state_slots": (2,), "set_state_firsts": (8,), "set_state_seconds": (9,)}, "slot 2 is vacant"),
    ],
)
def test_bad_saves_and_forks(columns: dict[str, Any], text: str) -> None:
    worker = Worker()
    worker.run(openings=(opening(0, (1,)), opening(1, (2,))), work_slots=(0, 1), work_num_tokens=(4, 4))
    with pytest.raises(WorkerProtocolError, match=text):
        worker.run(**columns, work_slots=(0, 1), work_num_tokens=(6, 0))


def test_a_late_row_ignores_the_save_that_it_does_not_reach() -> None:
    worker = Worker()
    worker.run(openings=(opening(0, (1, 2)),), **work(0, 10))
    worker.table.masks.is_constrained[0] = True
    worker.late = (0,)
    worker.run()
    worker.run(**saves((0, 12, 9)))
    assert worker.states[9].isnan().all()
    with pytest.raises(WorkerProtocolError, match="position 10"):
        worker.run(**saves((0, 10, 9)))


def test_a_model_without_states_saves_none() -> None:
    worker = Worker(SequenceTable(NONE))
    worker.table.apply(StepPlan(1, 1, openings=(opening(0, ()),)))
    with pytest.raises(WorkerProtocolError, match="slot 0 gets state 1; the model has no states"):
        worker.table.apply(StepPlan(1, 1, **work(0, 4), **saves((0, 4, 1))))
