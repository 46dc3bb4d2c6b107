"""The decoding rows.

Each computes one token and samples in every plan, until something changes. Most rows decode, so no work is done per row
and step. The counters of a row follow the number of plans. The step at which a row needs a block, or samples its last
token, is known when the row joins. The columns are rebuilt only when a row joins or leaves.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.cache import StepCount
from scheduler_service.core.sequence import Row


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The sequences that decode one token in every step, sorted by slot. Each field that is needed to process a step's
    result is a list with one entry per sequence."""

    slots: list[int]
    rows: list[Row]
    sequence_ids: list[int]
    token_lists: list[list[int]]  # the sequences' own lists
    stop_sets: list[frozenset[int]]
    any_stop: frozenset[int]  # the union of stop_sets
    has_logprobs: bool
    may_be_leased: bool  # no client looks for stop texts in their outputs

    def take(self, kept: list[int]) -> "DecodeColumns":
        """Return a copy that contains only the sequences at the indices `kept`. The copy has the same `any_stop` and
        `has_logprobs`."""
        return DecodeColumns(
            slots=[self.slots[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            sequence_ids=[self.sequence_ids[i] for i in kept],
            token_lists=[self.token_lists[i] for i in kept],
            stop_sets=[self.stop_sets[i] for i in kept],
            any_stop=self.any_stop,
            has_logprobs=self.has_logprobs,
            may_be_leased=self.may_be_leased,
        )


class DecodeBatch:
    """The set of running sequences that decode one token in every step.

    The scheduler does no work for such a sequence in most steps. It examines the sequence only when the sequence needs
    another KV cache block, when it samples its last token, or when it leaves this set.
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
        """Add a sequence to the set of sequences that decode one token in every step, starting with the next step. The
        last plan must sample a token for this sequence."""
        num_in_block = -row.allocation.num_computed_tokens % self._block_size
        row.join_decoding(self._steps)
        self._rows[row.slot] = row
        self._columns = None
        self._due[row.set_due_step(self._steps.num_steps + num_in_block + 1)].append(row)

    def got_block(self, row: Row, step: int) -> None:
        """Record that the plan of `step` gave a decoding sequence its next KV cache block. The scheduler will examine
        the sequence again when this block is full."""
        self._due[row.set_due_step(step + self._block_size)].append(row)

    def leave(self, row: Row) -> None:
        """Remove a sequence from the set of sequences that decode one token in every step. The sequence has ended, was
        preempted, or is planned individually from now on."""
        del self._rows[row.slot]
        row.leave_decoding(self._steps)
        self._columns = None

    def take_due(self, step: int) -> list[Row]:
        """Return the decoding sequences that the scheduler must examine for the plan of `step`: each needs another KV
        cache block, or samples its last token. The entries for this step are removed.

        A sequence that left the set and joined again may have two entries, but is returned once.
        """
        return _still_due(self._due.pop(step, ()), step)

    def due(self, step: int) -> list[Row]:
        """Return the decoding sequences that the scheduler must examine for the step `step`, and keep the entries."""
        return _still_due(self._due.get(step, ()), step)

    def columns(self) -> DecodeColumns:
        """Return the sequences that decode one token in every step, with one list per field. The lists are rebuilt only
        after a sequence has joined or left."""
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
                may_be_leased=not any(sequence.group.request.has_stop_texts for sequence in sequences),
            )
        return self._columns


def _still_due(rows: Iterable[Row], step: int) -> list[Row]:
    return [row for row in dict.fromkeys(rows) if row.due_step == step]
