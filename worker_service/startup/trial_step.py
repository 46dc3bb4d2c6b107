"""Steps of rows that no request asked for, in an empty table: to measure memory, and to have kernels compiled."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.common.messages import RowOpening, SamplingParams, StepPlan


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A row that computes the last `num_new` of its `num_tokens`."""

    num_tokens: int
    num_new: int
    sampling: SamplingParams
    grammar_id: int = 0

    def num_blocks(self, block_size: int) -> int:
        """Count the blocks that hold its tokens."""
        return -(-self.num_tokens // block_size)


def plan_trial(rows: Sequence[TrialRow], block_size: int) -> StepPlan:
    """A plan that opens the rows, with blocks from 1 on, and computes what is new of them."""
    openings, next_block = [], 1
    for slot, row in enumerate(rows):
        past_block = next_block + row.num_blocks(block_size)
        openings.append(
            RowOpening(
                slot=slot,
                sequence_id=slot,
                token_ids=(0,) * row.num_tokens,
                num_prompt_tokens=row.num_tokens,
                num_computed_tokens=row.num_tokens - row.num_new,
                block_ids=tuple(range(next_block, past_block)),
                sampling=row.sampling,
                seed=0,
                sample_index=0,
                grammar_id=row.grammar_id,
            )
        )
        next_block = past_block
    return StepPlan(
        epoch=0,
        step=1,
        openings=tuple(openings),
        work_slots=tuple(range(len(rows))),
        work_num_tokens=tuple(row.num_new for row in rows),
    )
