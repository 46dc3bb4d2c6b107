"""A minimal scheduler: it computes all plans for a set of prompts in advance, without any results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    blocks: list[int] = field(default_factory=list)

    @property
    def num_uncomputed(self) -> int:
        return len(self.prompt) + self.num_planned_outputs - self.num_computed


@dataclass(frozen=True)
class PlannedStep:
    plan: StepPlan
    sampling_slots: list[int]


def plan_steps(
    rows: Sequence[Row], *, block_size: int, max_num_batched_tokens: int, epoch: int = 1
) -> list[PlannedStep]:
    """Return the steps. Row i uses slot i from the first step to its last token. Blocks are allocated when needed."""
    steps: list[PlannedStep] = []
    work = dict.fromkeys(range(len(rows)), 0)
    next_block = 1
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
            new = list(range(next_block, next_block + max(0, -(-end // block_size) - len(row.blocks))))
            next_block += len(new)
            row.blocks += new
            if not steps:
                openings.append(
                    RowOpening(
                        slot, slot, tuple(row.prompt), len(row.prompt), 0, tuple(new), row.sampling, row.seed,
                        row.sample_index,
                    )
                )  # fmt: skip
            else:
                appends += [(slot, block) for block in new]
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
            append_tables=tuple(slot for slot, _ in appends),
            append_block_ids=tuple(block for _, block in appends),
            work_slots=tuple(slot for slot, _ in patches),
            work_num_tokens=tuple(num_tokens for _, num_tokens in patches),
        )
        steps.append(PlannedStep(plan, sampling_slots))
        released = [slot for slot in sampling_slots if rows[slot].num_planned_outputs == rows[slot].num_outputs]
    return steps


def num_blocks_needed(rows: Sequence[Row], block_size: int) -> int:
    return sum(-(-(len(row.prompt) + row.num_outputs) // block_size) for row in rows)
