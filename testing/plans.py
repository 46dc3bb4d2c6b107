"""A minimal scheduler: it computes all plans for a set of prompts in advance, without any results."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan

GREEDY = SamplingParams()


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

    @property
    def num_uncomputed(self) -> int:
        return len(self.prompt) + self.num_planned_outputs - self.num_computed


@dataclass(frozen=True)
class PlannedStep:
    plan: StepPlan
    sampling_slots: list[int]


def plan_steps(
    rows: Sequence[Row],
    *,
    block_size: int,
    max_num_batched_tokens: int,
    epoch: int = 1,
    windows: Sequence[int] = (0,),
    max_num_seqs: int = 0,
    seed: int | None = None,
) -> list[PlannedStep]:
    """Return the steps. Row i uses slot i from the first step to its last token. Blocks are allocated when needed.

    `windows` has the window of each layer group. With more than one, `max_num_seqs` must be the worker's. With a
    `seed`, blocks that no row reads any more are reused for any layer group, in random order.
    """
    steps: list[PlannedStep] = []
    pool = _Blocks(None if seed is None else random.Random(seed))
    work = dict.fromkeys(range(len(rows)), 0)
    for row in rows:
        row.tables = [[] for _ in windows]
    released: list[int] = []
    while any(row.num_planned_outputs < row.num_outputs for row in rows):
        budget = max_num_batched_tokens
        openings, appends, patches, sampling_slots = [], [], [], []
        for slot, row in enumerate(rows):
            if row.num_planned_outputs == row.num_outputs:
                continue
            num_tokens = min(row.num_uncomputed, budget)
            budget -= num_tokens
            end = row.num_computed + num_tokens
            new = [pool.extend(table, -(-end // block_size)) for table in row.tables]
            if not steps:
                openings.append(
                    RowOpening(
                        slot, slot, tuple(row.prompt), len(row.prompt), 0, tuple(chain(*new)), row.sampling, row.seed,
                        row.sample_index, table_lengths=tuple(map(len, new)) if len(new) > 1 else (),
                    )
                )  # fmt: skip
            else:
                appends += [(group * max_num_seqs + slot, block) for group, ids in enumerate(new) for block in ids]
            if work[slot] != num_tokens:
                patches.append((slot, num_tokens))
            work[slot] = num_tokens
            samples = 0 < num_tokens == row.num_uncomputed
            row.num_computed = end
            if samples:
                sampling_slots.append(slot)
                row.num_planned_outputs += 1
                work[slot] = 1
        plan = StepPlan(
            epoch=epoch,
            step=len(steps) + 1,
            released_slots=tuple(released),
            openings=tuple(openings),
            append_tables=tuple(table for table, _ in appends),
            append_block_ids=tuple(block for _, block in appends),
            work_slots=tuple(slot for slot, _ in patches),
            work_num_tokens=tuple(num_tokens for _, num_tokens in patches),
        )
        steps.append(PlannedStep(plan, sampling_slots))
        for row in rows:
            for window, table in zip(windows, row.tables, strict=True):
                pool.free(table, max(0, row.num_computed - window + 1) // block_size if window else 0)
        released = [slot for slot in sampling_slots if rows[slot].num_planned_outputs == rows[slot].num_outputs]
    return steps


class _Blocks:
    """A pool of blocks. Without random numbers, freed blocks are not used again."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng
        self._free: list[int] = []
        self._next = 1

    def extend(self, table: list[int], num_blocks: int) -> list[int]:
        """Append blocks to a table up to this number. Return the new blocks."""
        new = []
        while len(table) < num_blocks:
            if not self._free:
                self._free.append(self._next)
                self._next += 1
            new.append(self._free.pop())
            table.append(new[-1])
        return new

    def free(self, table: list[int], num_passed: int) -> None:
        """Free the first blocks of a table, which its row does not read any more."""
        if self._rng is not None:
            self._free += [block for block in table[:num_passed] if block]
            self._rng.shuffle(self._free)
            table[:num_passed] = [0] * num_passed


def num_blocks_needed(rows: Sequence[Row], block_size: int) -> int:
    return sum(-(-(len(row.prompt) + row.num_outputs) // block_size) for row in rows)
