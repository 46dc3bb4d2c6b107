"""The grammars of rows: what state each is in, and which tokens the rows of a step may take."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.common.grammars import GrammarDeadEndError, GrammarLimitError, MaskJob, MaskQueue, Matcher
from pagewire.common.wire.messages import RowStatus, WorkerProtocolError

IntArray = NDArray[np.int64]


# A step that is computed waits for masks as long as this share of what it has taken, and at least so long.
_PATIENCE = 0.25
_MIN_PATIENCE_S = 0.001


class ConstrainedRow:
    """A row's grammar behind its output. Once it has failed, the row fails in every step in which it samples."""

    def __init__(self, matcher: Matcher, queue: MaskQueue, mask_bytes: int, token_ids: Sequence[int] = ()) -> None:
        """`token_ids`: the output that there is."""
        self._matcher = matcher
        self._queue = queue
        self._mask_bytes = mask_bytes
        self.job = self._put(token_ids)  # what may come next

    def consume(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens of the row."""
        self._finish()
        if self.job.error is None:
            self.job = self._put(token_ids)

    def fork(self) -> "ConstrainedRow":
        self._finish()
        forked = copy(self)
        forked._matcher = self._matcher.copy()
        return forked

    @property
    def status(self) -> RowStatus:
        match self.job.error:
            case None:
                return RowStatus.OK
            case GrammarLimitError():
                return RowStatus.GRAMMAR_LIMIT
            case GrammarDeadEndError():
                return RowStatus.GRAMMAR_DEAD_END
        return RowStatus.GRAMMAR_FAILED

    def _put(self, token_ids: Sequence[int]) -> MaskJob:
        job = MaskJob(self._matcher, token_ids, self._mask_bytes)
        self._queue.put(job)
        return job

    def _finish(self) -> None:
        if not self.job.is_done:  # the matcher is being moved on
            self._queue.finish([self.job], None)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of the R rows of a step that sample, at least one of which has a grammar.

    Attributes:
        masks: [M, ceil(vocab_size / 32)] int32, as `pagewire.kernels.sampling` has them.
        lines: [R] int32, each row's line of `masks`; -1: it may take any token.
        rows: the grammars, by index of their row, without those of late rows.
        is_late: [R], the row's mask is not there: it gives no token in this step.
    """

    masks: NDArray[np.int32]
    lines: NDArray[np.int32]
    rows: dict[int, ConstrainedRow]
    is_late: NDArray[np.bool_]

    def take(self, token_ids: NDArray[np.integer], has_sampled: NDArray[np.bool_]) -> None:
        """Move the grammars on by the tokens that those of the R rows have which have sampled one."""
        for index, row in self.rows.items():
            if has_sampled[index]:
                row.consume((int(token_ids[index]),))

    def failures(self) -> dict[int, RowStatus]:
        """Return the statuses of the rows that are late, and of those whose grammar has failed, by index."""
        failed = {index: row.status for index, row in self.rows.items() if row.job.error is not None}
        return {**failed, **dict.fromkeys(np.flatnonzero(self.is_late).tolist(), RowStatus.LATE)}

    def leaves_others(self, index: int, token_ids: Sequence[int]) -> bool:
        """Whether a row may take a token that is none of these."""
        if self.lines[index] < 0:
            return True
        left = self.masks[self.lines[index]].view(np.uint32).copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


def _no_matcher(grammar_id: int) -> Matcher:
    raise WorkerProtocolError(f"a row opens with grammar {grammar_id}, but this worker has none")


class RowMasks:
    """The grammars of all rows, by slot.

    Attributes:
        matcher_of: gives a matcher of its own for a row, by the number of its grammar. Raises WorkerProtocolError.
        queue: computes masks, as soon as it is known behind which tokens.
        waits_for_all: no row is ever late.
        is_constrained: [num_slots], the row has a grammar.
        is_late: [num_slots], the row had no mask when it was to sample in the step under way.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._rows: dict[int, ConstrainedRow] = {}
        self.matcher_of: Callable[[int], Matcher] = _no_matcher
        self.queue = MaskQueue(has_threads=False)
        self.waits_for_all = False
        self.is_constrained = np.zeros(num_slots, np.bool_)
        self.is_late = np.zeros(num_slots, np.bool_)
        self._masks = np.zeros((num_slots, -(-vocab_size // 32)), np.int32)
        self._began_at = 0.0
        self._times: list[tuple[int, int]] = []

    def begin_step(self) -> list[tuple[int, int]]:
        """Return what will have the microseconds that masks of the step have taken, by slot."""
        self._began_at = time.perf_counter()
        self.is_late[:] = False
        self._times = []
        return self._times

    def clear(self) -> None:
        self._rows.clear()
        self.is_constrained[:] = False

    def open(self, slot: int, grammar_id: int, output_token_ids: Sequence[int]) -> None:
        """A row moves in, with a grammar or without (0). Raises WorkerProtocolError for one that there is not."""
        self.release(slot)
        if grammar_id:
            matcher, mask_bytes = self.matcher_of(grammar_id), self._masks.strides[0]
            self._put(slot, ConstrainedRow(matcher, self.queue, mask_bytes, output_token_ids))

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
        self._wait([row.job for row in rows.values()], are_all=len(rows) == len(slots))
        there = {index: row for index, row in rows.items() if row.job.is_done}
        going = [index for index, row in there.items() if row.job.error is None]
        for line, index in enumerate(going):
            lines[index] = line
            self._masks[line] = np.frombuffer(memoryview(there[index].job.mask), np.int32)
        for index, row in there.items():
            if row.job.us:  # it was not told of before
                self._times.append((int(slots[index]), row.job.us))
                row.job.us = 0
        is_late = np.zeros(len(slots), np.bool_)
        is_late[[index for index in rows if index not in there]] = True
        self.is_late[slots] = is_late
        return StepMasks(self._masks[: max(1, len(going))], lines, there, is_late)

    def _wait(self, jobs: Sequence[MaskJob], *, are_all: bool) -> None:
        """Wait for masks, but not long: others wait for the step. `are_all`: no other row samples in it, so that it is
        worth nothing before there is one."""
        now = time.perf_counter()
        patience = max(_MIN_PATIENCE_S, _PATIENCE * (now - self._began_at))
        self.queue.finish(jobs, None if self.waits_for_all else now + patience)
        if are_all and not any(job.is_done for job in jobs):
            self.queue.finish([min(jobs, key=lambda job: job.matcher.pace.seconds)], None)

    def _put(self, slot: int, row: ConstrainedRow) -> None:
        self._rows[slot] = row
        self.is_constrained[slot] = True
