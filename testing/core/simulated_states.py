"""The states that the rows of a simulated worker read and write, by the rules of `pagewire.worker.v1`.

Every rule that a plan can break is an assertion with its own message.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagewire.common.wire.messages import StepPlan

Write = tuple[int, int]  # the number of tokens, and the state that becomes the state after these tokens


@dataclass(slots=True)
class RowStates:
    """The state that a row reads when it computes next, and the one or two states that it writes."""

    read: int = 0
    own: tuple[int, ...] = ()

    def writes(self, start: int, end: int) -> list[Write]:
        """Return the writes to the row's own states in a step that computes positions `start` to `end`.

        The state before the last position is written unless the row reads it.
        """
        before_last, last = self._in_turn()
        if before_last == last or (before_last == self.read and end - start == 1):
            return [(end, last)]
        return [(end - 1, before_last), (end, last)]

    def advance(self) -> None:
        """Read the state after the last position from now on."""
        self.read = self._in_turn()[1]

    def go_back(self) -> None:
        """Read the state before the last position, which is computed again."""
        assert len(self.own) == 2, f"a row is late and has one state: {self}"
        self.read = self._in_turn()[1]

    def _in_turn(self) -> tuple[int, int]:
        """Return the states that the next step writes before and after its last position."""
        assert self.own, "a row of a model with states has no states"
        first, second = self.own[0], self.own[-1]
        return (second, first) if self.read == second else (first, second)


class StateStep(NamedTuple):
    """One row's part of a step: it computes positions `start` to `end`."""

    slot: int
    states: RowStates
    start: int
    end: int
    may_be_late: bool  # it has a grammar


def check_rows(rows: Iterable[RowStates], num_states: int) -> None:
    """Assert that each state has at most one row that writes it."""
    owned: set[int] = set()
    for row in rows:
        assert len(row.own) in (1, 2), f"a row has {len(row.own)} states: {row}"
        for state in row.own:
            assert 1 <= state <= num_states, f"no such state: {row}"
            assert state not in owned, f"two rows write state {state}"
            owned.add(state)


def writes_of(
    plan: StepPlan, steps: Sequence[StateStep], rows: Iterable[RowStates], ignored: set[tuple[int, int]]
) -> dict[int, list[Write]]:
    """Return the writes of each row that computes, by slot, in the order of positions. Add the step and the state of
    each save that a late row does not reach to `ignored`.

    `rows` are the states of all rows, including those that compute nothing. Asserts that no state has two writers, and
    that no row reads a state that another row or a save writes.
    """
    writes = {step.slot: step.states.writes(step.start, step.end) for step in steps}
    writers = {state: slot for slot, pairs in writes.items() for _, state in pairs}
    read = {step.states.read for step in steps}
    for step in steps:
        writer = writers.get(step.states.read, step.slot)
        assert writer == step.slot, f"slot {step.slot} reads state {step.states.read}, which slot {writer} writes"
    by_slot = {step.slot: step for step in steps}
    owned = {state for row in rows for state in row.own}
    saved: set[int] = set()
    for slot, position, state in zip(plan.save_slots, plan.save_positions, plan.save_states, strict=True):
        assert state not in saved, f"two saves write state {state}"
        assert state not in owned, f"a save writes state {state}, which a row writes"
        assert state not in read, f"a save writes state {state}, which a row reads"
        saved.add(state)
        assert slot in by_slot, f"a save of slot {slot}, which computes nothing"
        _, _, start, end, may_be_late = by_slot[slot]
        if may_be_late and position > end:
            ignored.add((plan.step, state))
            continue
        assert start <= position <= end, f"slot {slot} computes {start} to {end}, and does not pass {position}"
        writes[slot].append((position, state))
    return {slot: sorted(pairs) for slot, pairs in writes.items()}
