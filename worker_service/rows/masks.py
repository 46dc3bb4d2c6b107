"""The grammars of rows: what state each is in, and which tokens the rows of a step may take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.grammars import GrammarError, GrammarLimitError, Matcher, fill_masks
from worker_service.step import ProtocolError, RowStatus

IntArray = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class ConstrainedRow:
    """A row's grammar behind its output. Once it has failed, the row fails in every step in which it samples."""

    matcher: Matcher
    error: GrammarError | None = None

    def consume(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens of the row."""
        if self.error is None:
            try:
                self.matcher.consume(token_ids)
            except GrammarError as error:
                self.error = error

    def fork(self) -> "ConstrainedRow":
        return ConstrainedRow(self.matcher.copy(), self.error)

    @property
    def status(self) -> RowStatus:
        if self.error is None:
            return RowStatus.OK
        return RowStatus.GRAMMAR_LIMIT if isinstance(self.error, GrammarLimitError) else RowStatus.GRAMMAR_FAILED


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of the R rows of a step that sample, at least one of which has a grammar.

    Attributes:
        masks: [M, ceil(vocab_size / 32)] int32, as `pagewire.kernels.sampling` has them.
        lines: [R] int32, each row's line of `masks`; -1: it may take any token.
        rows: the grammars, by index of their row.
    """

    masks: NDArray[np.int32]
    lines: NDArray[np.int32]
    rows: dict[int, ConstrainedRow]

    def take(self, token_ids: NDArray[np.integer], has_sampled: NDArray[np.bool_]) -> None:
        """Move the grammars on by the tokens that those of the R rows have which have sampled one."""
        for index, row in self.rows.items():
            if has_sampled[index]:
                row.consume((int(token_ids[index]),))

    def failures(self) -> dict[int, RowStatus]:
        """Return the statuses of the rows whose grammar has failed, by index."""
        return {index: row.status for index, row in self.rows.items() if row.error is not None}

    def leaves_others(self, index: int, token_ids: Sequence[int]) -> bool:
        """Whether a row may take a token that is none of these."""
        if self.lines[index] < 0:
            return True
        left = self.masks[self.lines[index]].view(np.uint32).copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


def _no_matcher(grammar_id: int) -> Matcher:
    raise ProtocolError(f"a row opens with grammar {grammar_id}, but this worker has none")


class RowMasks:
    """The grammars of all rows, by slot.

    Attributes:
        matcher_of: gives a matcher of its own for a row, by the number of its grammar. Raises ProtocolError.
        is_constrained: [num_slots], the row has a grammar.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._rows: dict[int, ConstrainedRow] = {}
        self.matcher_of: Callable[[int], Matcher] = _no_matcher
        self.is_constrained = np.zeros(num_slots, np.bool_)
        self._masks = np.zeros((num_slots, -(-vocab_size // 32)), np.int32)

    def clear(self) -> None:
        self._rows.clear()
        self.is_constrained[:] = False

    def open(self, slot: int, grammar_id: int, output_token_ids: Sequence[int]) -> None:
        """A row moves in, with a grammar or without (0). Raises ProtocolError for one that there is not."""
        self.release(slot)
        if grammar_id:
            row = ConstrainedRow(self.matcher_of(grammar_id))
            row.consume(output_token_ids)
            self._put(slot, row)

    def release(self, slot: int) -> None:
        self._rows.pop(slot, None)
        self.is_constrained[slot] = False

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Rows become copies of others. Every source is read before a target is written."""
        copies = [row and row.fork() for row in map(self._rows.get, sources.tolist())]
        for target, row in zip(targets.tolist(), copies, strict=True):
            self.release(target)
            if row is not None:
                self._put(target, row)

    def append(self, slots: IntArray, token_ids: IntArray) -> None:
        """Rows are given a token each."""
        if self._rows:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if row := self._rows.get(slot):
                    row.consume((token_id,))

    def of_step(self, slots: IntArray) -> StepMasks | None:
        """Return which tokens the rows of a step may take that sample; None: any, all of them."""
        if not self._rows or not self.is_constrained[slots].any():
            return None
        lines = np.full(len(slots), -1, np.int32)
        rows = {index: self._rows[slots[index]] for index in np.flatnonzero(self.is_constrained[slots]).tolist()}
        going = [(index, row) for index, row in rows.items() if row.error is None]
        masks = self._masks[: max(1, len(going))]
        errors = fill_masks(
            [(row.matcher, line) for line, (_, row) in enumerate(going)], masks.ctypes.data, masks.strides[0]
        )
        for line, (index, row) in enumerate(going):
            row.error = errors.get(line)
            if row.error is None:
                lines[index] = line
        return StepMasks(masks, lines, rows)

    def _put(self, slot: int, row: ConstrainedRow) -> None:
        self._rows[slot] = row
        self.is_constrained[slot] = True
