"""A minimal scheduler: it computes all plans for a set of prompts in advance, without any results."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan, WorkerCapacity

GREEDY = SamplingParams()
_RETURN_SHARE = 0.3


@dataclass
class Row:
    """The state of a prompt in a slot."""

    prompt: Sequence[int]
    num_outputs: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    sample_index: int = 0
    num_computed: int = 0
    num_planned_outputs: int = 0
    tables: list[list[int]] = field(default_factory=list)  # of each layer group
    state: int = 0  # the state that the row writes; 0: the model has no states

    @property
    def num_uncomputed(self) -> int:
        return len(self.prompt) + self.num_planned_outputs - self.num_computed

    def opening(self, slot: int) -> RowOpening:
        lengths = tuple(map(len, self.tables)) if len(self.tables) > 1 else ()
        return RowOpening(
            slot, slot, tuple(self.prompt), len(self.prompt), self.num_computed, tuple(chain(*self.tables)),
            self.sampling, self.seed, self.sample_index, table_lengths=lengths,
            read_state=self.state if self.num_computed else 0, own_states=(self.state,) if self.state else (),
        )  # fmt: skip


@dataclass(frozen=True)
class PlannedStep:
    plan: StepPlan
    sampling_slots: list[int]
    free_blocks: list[int]  # blocks of rows that no row needs after the step


def plan_steps(
    rows: Sequence[Row],
    *,
    block_size: int,
    max_num_batched_tokens: int,
    epoch: int = 1,
    windows: Sequence[int] = (0,),
    max_num_seqs: int = 0,
    rng: random.Random | None = None,
    has_states: bool = False,
) -> list[PlannedStep]:
    """Return the steps. Row i uses slot i from the first step to its last token. Blocks are allocated when needed.

    Args:
        windows: the window of each layer group. If there is more than one, `max_num_seqs` must be the worker's.
        rng: if it is set, blocks that no row needs any more are used again, by rows and layer groups in random order.
            Rows whose prompt is not yet computed are sometimes released and opened again, without the blocks that
            their windows have passed.
        has_states: whether the model has states. Row i uses state i + 1.
    """
    for slot, row in enumerate(rows):
        row.state = slot + 1 if has_states else 0
    planner = _Planner(rows, block_size, windows, max_num_seqs, rng)
    steps: list[PlannedStep] = []
    while any(row.num_planned_outputs < row.num_outputs for row in rows):
        steps.append(planner.step(epoch, len(steps) + 1, max_num_batched_tokens))
    return steps


def plan_for(
    worker: WorkerCapacity, rows: Sequence[Row], max_num_batched_tokens: int, **options: Any
) -> list[PlannedStep]:
    """Return the steps for a worker with this capacity. `options` are further options of `plan_steps`."""
    own: dict[str, Any] = {
        "block_size": worker.block_size,
        "windows": worker.windows,
        "max_num_seqs": worker.max_num_seqs,
    }
    own["has_states"] = worker.num_device_states > 0
    return plan_steps(rows, max_num_batched_tokens=max_num_batched_tokens, **own, **options)


class _Planner:
    def __init__(
        self,
        rows: Sequence[Row],
        block_size: int,
        windows: Sequence[int],
        max_num_seqs: int,
        rng: random.Random | None,
    ) -> None:
        self._rows, self._block_size, self._windows, self._max_num_seqs = rows, block_size, windows, max_num_seqs
        self._rng = rng
        self._free: list[int] = []
        self._next_block = 1
        self._work = dict.fromkeys(range(len(rows)), 0)
        self._released: list[int] = []
        for row in rows:
            row.tables = [[] for _ in windows]

    def step(self, epoch: int, number: int, budget: int) -> PlannedStep:
        openings, appends, patches, sampling_slots = [], [], [], []
        for slot, row in enumerate(self._rows):
            if row.num_planned_outputs == row.num_outputs:
                continue
            num_tokens = min(row.num_uncomputed, budget)
            budget -= num_tokens
            end = row.num_computed + num_tokens
            appended = self._extend(slot, row, end)
            if number == 1 or self._returns(slot, row):
                openings.append(row.opening(slot))
            else:
                appends += appended
            if self._work[slot] != num_tokens:
                patches.append((slot, num_tokens))
            self._work[slot] = num_tokens
            samples = 0 < num_tokens == row.num_uncomputed
            row.num_computed = end
            if samples:
                sampling_slots.append(slot)
                row.num_planned_outputs += 1
                self._work[slot] = 1
        plan = StepPlan(
            epoch=epoch,
            step=number,
            released_slots=tuple(self._released),
            openings=tuple(openings),
            append_tables=tuple(table for table, _ in appends),
            append_block_ids=tuple(block for _, block in appends),
            work_slots=tuple(slot for slot, _ in patches),
            work_num_tokens=tuple(num_tokens for _, num_tokens in patches),
        )
        done = [slot for slot in sampling_slots if self._rows[slot].num_planned_outputs == self._rows[slot].num_outputs]
        self._released = done
        self._free_passed()
        return PlannedStep(plan, sampling_slots, [*self._free])

    def _extend(self, slot: int, row: Row, end: int) -> list[tuple[int, int]]:
        """Allocate the blocks of a row up to a position. Return the appended (table number, block) pairs."""
        appended = []
        for group, table in enumerate(row.tables):
            while len(table) * self._block_size < end:
                if not self._free or self._rng is None:
                    self._free.append(self._next_block)
                    self._next_block += 1
                table.append(self._free.pop())
                appended.append((group * self._max_num_seqs + slot, table[-1]))
        return appended

    def _returns(self, slot: int, row: Row) -> bool:
        """Decide whether the row is released and opened again. Its tokens are only known until it samples."""
        if self._rng is None or row.num_planned_outputs or self._rng.random() > _RETURN_SHARE:
            return False
        self._released.append(slot)
        self._work[slot] = 0
        return True

    def _free_passed(self) -> None:
        """Free the blocks that the windows of rows have passed, and the blocks of rows that are done."""
        for row in self._rows:
            is_done = row.num_planned_outputs == row.num_outputs
            for window, table in zip(self._windows, row.tables, strict=True):
                first = max(0, row.num_computed - window + 1) // self._block_size if window else 0
                num_passed = len(table) if is_done else first
                self._free += [block for block in table[:num_passed] if block]
                table[:num_passed] = [0] * num_passed
        if self._rng is not None:
            self._rng.shuffle(self._free)


def num_blocks_needed(rows: Sequence[Row], block_size: int) -> int:
    return sum(-(-(len(row.prompt) + row.num_outputs) // block_size) for row in rows)
