"""The rows that decode: each computes one token and samples in every plan, until something changes.

They are the many, so nothing here is done per row and step. A row's counters follow the clock of plans; the step at
which it needs a block, or samples its last token, is known when it joins; and their columns are made again only when a
row joins or leaves.
"""

from collections import defaultdict
from dataclasses import dataclass

from scheduler_service.core.cache_manager import StepCount
from scheduler_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The decoding rows in slot order, a column for each thing that a result needs to know of them."""

    slots: list[int]
    sequences: list[Sequence]
    sequence_ids: list[int]
    token_lists: list[list[int]]  # each sequence's own
    stop_sets: list[frozenset[int]]
    any_stop: frozenset[int]  # in one of them
    has_logprobs: bool

    def take(self, kept: list[int]) -> "DecodeColumns":
        """Make the same columns of these rows alone."""
        return DecodeColumns(
            slots=[self.slots[i] for i in kept],
            sequences=[self.sequences[i] for i in kept],
            sequence_ids=[self.sequence_ids[i] for i in kept],
            token_lists=[self.token_lists[i] for i in kept],
            stop_sets=[self.stop_sets[i] for i in kept],
            any_stop=self.any_stop,
            has_logprobs=self.has_logprobs,
        )


class DecodeBatch:
    """The rows that decode in the next plan, by slot."""

    def __init__(self, steps: StepCount, block_size: int) -> None:
        self._steps = steps
        self._block_size = block_size
        self._rows: dict[int, Sequence] = {}  # by slot
        # By step. An entry counts if it is still the row's due_step.
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._columns: DecodeColumns | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, sequence: Sequence) -> None:
        """Let a row that samples in the last plan made go on by itself."""
        num_steps = self._steps.num_steps
        sequence.join_decoding(self._steps)
        self._rows[sequence.slot] = sequence
        self._columns = None
        num_steps_in_table = len(sequence.holding.block_table) * self._block_size - sequence.num_computed_tokens + 1
        self._set_due(sequence, num_steps + num_steps_in_table)

    def got_block(self, sequence: Sequence, step: int) -> None:
        """The plan of `step` gave a due row the block that it needs in it."""
        self._set_due(sequence, step + self._block_size)

    def leave(self, sequence: Sequence) -> None:
        """Let a row no longer go on by itself."""
        del self._rows[sequence.slot]
        sequence.leave_decoding()
        self._columns = None

    def take_due(self, step: int) -> list[Sequence]:
        """Take the rows that the plan of `step` must look at. One that left and joined again may have two entries."""
        return [sequence for sequence in dict.fromkeys(self._due.pop(step, ())) if sequence.due_step == step]

    def columns(self) -> DecodeColumns:
        """The columns of all rows, made anew only if a row has joined or left."""
        if self._columns is None:
            slots = sorted(self._rows)
            sequences = [self._rows[slot] for slot in slots]
            stop_sets = [sequence.stop_token_ids for sequence in sequences]
            self._columns = DecodeColumns(
                slots=slots,
                sequences=sequences,
                sequence_ids=[sequence.sequence_id for sequence in sequences],
                token_lists=[sequence.token_ids for sequence in sequences],
                stop_sets=stop_sets,
                any_stop=frozenset().union(*set(stop_sets)),
                has_logprobs=any(sequence.group.request.sampling.num_logprobs is not None for sequence in sequences),
            )
        return self._columns

    def _set_due(self, sequence: Sequence, block_step: int) -> None:
        self._due[sequence.due_by(block_step)].append(sequence)
