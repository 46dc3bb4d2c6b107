"""The decoding rows.

Each computes one token and samples in every plan, until something changes. Most rows decode, so no work is done per row
and step. The counters of a row follow the number of plans. The step at which a row needs a block, or samples its last
token, is known when the row joins. The columns are rebuilt only when a row joins or leaves.
"""

from collections import defaultdict
from dataclasses import dataclass

from scheduler_service.core.cache import StepCount
from scheduler_service.core.sequence import Row


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The rows that decode one token in every plan, in slot order. Each property that is needed to read a step's result
    is a list with one entry per row."""

    slots: list[int]
    rows: list[Row]
    sequence_ids: list[int]
    token_lists: list[list[int]]  # the sequences' own lists
    stop_sets: list[frozenset[int]]
    any_stop: frozenset[int]  # the union of stop_sets
    has_logprobs: bool

    def take(self, kept: list[int]) -> "DecodeColumns":
        """Return new columns with only the rows (running sequences) at the indices `kept`.

        `any_stop` and `has_logprobs` keep their values.
        """
        return DecodeColumns(
            slots=[self.slots[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            sequence_ids=[self.sequence_ids[i] for i in kept],
            token_lists=[self.token_lists[i] for i in kept],
            stop_sets=[self.stop_sets[i] for i in kept],
            any_stop=self.any_stop,
            has_logprobs=self.has_logprobs,
        )


class DecodeBatch:
    """The rows (running sequences on the worker) that decode one token in every plan, by slot.

    The scheduler visits such a row only when it needs a KV cache block, samples its last token, or leaves.
    """

    def __init__(self, steps: StepCount, block_size: int) -> None:
        self._steps = steps
        self._block_size = block_size
        self._rows: dict[int, Row] = {}  # by slot
        # By step. An entry is valid if the step is still the row's due_step.
        self._due: defaultdict[int, list[Row]] = defaultdict(list)
        self._columns: DecodeColumns | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, row: Row) -> None:
        """Add a row (running sequence) that samples a token in the last plan. From the next plan on, the row decodes
        one token in every plan."""
        num_in_table = row.allocation.num_granted_blocks * self._block_size - row.allocation.num_computed_tokens
        row.join_decoding(self._steps)
        self._rows[row.slot] = row
        self._columns = None
        self._due[row.set_due_step(self._steps.num_steps + num_in_table + 1)].append(row)

    def got_block(self, row: Row, step: int) -> None:
        """Record that the plan of `step` gave a decoding row its next KV cache block. The row is examined again when
        this block is full."""
        self._due[row.set_due_step(step + self._block_size)].append(row)

    def leave(self, row: Row) -> None:
        """Remove a row (running sequence) that no longer decodes one token in every plan, for example because its
        sequence has ended."""
        del self._rows[row.slot]
        row.leave_decoding(self._steps)
        self._columns = None

    def take_due(self, step: int) -> list[Row]:
        """Remove and return the decoding rows (running sequences) that the plan of `step` must examine, because they
        need a KV cache block or sample their last token.

        A row that left and joined again may have two entries. It is returned once.
        """
        return [row for row in dict.fromkeys(self._due.pop(step, ())) if row.due_step == step]

    def columns(self) -> DecodeColumns:
        """Return the columns of all rows that decode one token in every plan. They are rebuilt only after a row has
        joined or left."""
        if self._columns is None:
            slots = sorted(self._rows)
            rows = [self._rows[slot] for slot in slots]
            sequences = [row.sequence for row in rows]
            stop_sets = [sequence.stop_token_ids for sequence in sequences]
            self._columns = DecodeColumns(
                slots=slots,
                rows=rows,
                sequence_ids=[sequence.sequence_id for sequence in sequences],
                token_lists=[sequence.token_ids for sequence in sequences],
                stop_sets=stop_sets,
                any_stop=frozenset().union(*set(stop_sets)),
                has_logprobs=any(sequence.group.request.sampling.num_logprobs is not None for sequence in sequences),
            )
        return self._columns
