"""The grammars of rows: the state of each grammar, and the tokens that the rows of a step may choose."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.common.grammars import GrammarDeadEndError, GrammarLimitError, MaskJob, MaskQueue, Matcher
from pagewire.common.wire.messages import RowStatus, WorkerProtocolError

IntArray = NDArray[np.int64]


# A step waits for masks for this share of its elapsed time, and at least for `_MIN_MASK_WAIT_S`.
_MASK_WAIT_SHARE = 0.25
_MIN_MASK_WAIT_S = 0.001


class ConstrainedRow:
    """The grammar that restricts the output of one running sequence (structured output), and the grammar's state.

    The state follows from the tokens that the sequence has chosen. If the grammar has failed, the sequence fails in
    every step in which it samples.
    """

    def __init__(self, matcher: Matcher, queue: MaskQueue, mask_bytes: int, token_ids: Sequence[int] = ()) -> None:
        """Start computing the grammar's first token mask in the background.

        `token_ids` is the output that the sequence already has. The grammar is advanced by these tokens first.
        """
        self._matcher = matcher
        self._queue = queue
        self._mask_bytes = mask_bytes
        self.job = self._put(token_ids)  # computes the mask of the next token

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance the grammar by tokens that the sequence has chosen, and start computing the next token mask."""
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
        if not self.job.is_done:  # the job is still advancing the matcher
            self._queue.finish([self.job], None)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The grammar masks of the R rows that sample in one step. At least one of the rows has a grammar.

    A row is the worker's state of one running sequence. A mask is a bit set of the tokens that a row may choose.

    Attributes:
        masks: [M, ceil(vocab_size / 32)] int32, in the format of `pagewire.kernels.sampling`.
        lines: [R] int32, each row's index in `masks`; -1: the row may choose any token.
        rows: the rows' grammars, by index 0 to R - 1, without late rows.
        is_late: [R], whether the row's mask is not ready, so that the row returns no token in this step.
    """

    masks: NDArray[np.int32]
    lines: NDArray[np.int32]
    rows: dict[int, ConstrainedRow]
    is_late: NDArray[np.bool_]

    def consume(self, token_ids: NDArray[np.integer], has_sampled: NDArray[np.bool_]) -> None:
        """Advance the grammar of each sequence by the token that the sequence has just sampled.

        `token_ids` and `has_sampled` are [R]. A grammar stays as it is if `has_sampled` is False for its sequence.
        """
        for index, row in self.rows.items():
            if has_sampled[index]:
                row.consume((int(token_ids[index]),))

    def failures(self) -> dict[int, RowStatus]:
        """Return the statuses of the sequences that return no token in this step because of their grammar.

        The keys are the sequences' indexes in the step. The status is LATE if the token mask is not ready in time.
        Otherwise it is the reason why the grammar has failed.
        """
        failed = {index: row.status for index, row in self.rows.items() if row.job.error is not None}
        return {**failed, **dict.fromkeys(np.flatnonzero(self.is_late).tolist(), RowStatus.LATE)}

    def allows_other_than(self, index: int, token_ids: Sequence[int]) -> bool:
        """Return whether the grammar of a sequence allows any token that is not in `token_ids`.

        Stop tokens are suppressed only if the grammar allows another token. `index` is the sequence's index in the
        step. The result is True for a sequence without a grammar.
        """
        if self.lines[index] < 0:
            return True
        left = self.masks[self.lines[index]].view(np.uint32).copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


def _no_matcher(grammar_id: int) -> Matcher:
    raise WorkerProtocolError(f"a row opens with grammar {grammar_id}, but this worker has no grammars")


class RowMasks:
    """The grammars of all running sequences of a worker, by slot (the index of a sequence in the worker's table).

    Attributes:
        matcher_of: returns a new matcher for a row, by grammar id. Raises WorkerProtocolError if the grammar is not
            ready.
        queue: computes each mask as soon as the tokens before it are known.
        waits_for_all: whether steps wait for all masks, so that no row is late.
        is_constrained: [num_slots], whether the row has a grammar.
        is_late: [num_slots], whether the row had no mask when it should have sampled in the current step.
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
        """Begin a step. Return an empty list, to which the step adds the durations of its grammar mask computations.

        For each mask that the step uses, the list gets a pair (slot of the sequence, microseconds).
        """
        self._began_at = time.perf_counter()
        self.is_late[:] = False
        self._times = []
        return self._times

    def clear(self) -> None:
        self._rows.clear()
        self.is_constrained[:] = False

    def open(self, slot: int, grammar_id: int, output_token_ids: Sequence[int]) -> None:
        """Register a new sequence in `slot`, with the grammar `grammar_id`, or without a grammar if the id is 0.

        The grammar is advanced by `output_token_ids`, the output that the sequence already has. Raises
        WorkerProtocolError if the grammar has not been compiled successfully.
        """
        self.release(slot)
        if grammar_id:
            matcher, mask_bytes = self.matcher_of(grammar_id), self._masks.strides[0]
            self._put(slot, ConstrainedRow(matcher, self.queue, mask_bytes, output_token_ids))

    def release(self, slot: int) -> None:
        self._rows.pop(slot, None)
        self.is_constrained[slot] = False

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy the grammars of the sequences in slots `sources` to slots `targets`, because the sequences are forked.

        All sources are read before any target is written.
        """
        copies = [row and row.fork() for row in map(self._rows.get, sources.tolist())]
        for target, row in zip(targets.tolist(), copies, strict=True):
            self.release(target)
            if row is not None:
                self._put(target, row)

    def append(self, slots: IntArray, token_ids: IntArray) -> None:
        """Advance the grammars of the sequences in `slots` by one token each.

        Sequences without a grammar are skipped.
        """
        if self._rows:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if row := self._rows.get(slot):
                    row.consume((token_id,))

    def of_step(self, slots: IntArray) -> StepMasks | None:
        """Return the grammar masks of the sequences that sample in a step, or None if no such sequence has a grammar.

        `slots` [R] are the sequences' indexes in the worker's table. This waits a limited time for masks that are not
        ready.
        """
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
            if row.job.us:  # each job's time is reported once
                self._times.append((int(slots[index]), row.job.us))
                row.job.us = 0
        is_late = np.zeros(len(slots), np.bool_)
        is_late[[index for index in rows if index not in there]] = True
        self.is_late[slots] = is_late
        return StepMasks(self._masks[: max(1, len(going))], lines, there, is_late)

    def _wait(self, jobs: Sequence[MaskJob], *, are_all: bool) -> None:
        """Wait until the grammar masks of a step are ready, but only for a limited time.

        The time is limited because sequences without a grammar wait for the same step. If every sampling sequence of
        the step has a grammar (`are_all`), wait until at least one mask is ready, since the step would yield no token
        without one. If `waits_for_all` is set, wait for all masks.
        """
        now = time.perf_counter()
        patience = max(_MIN_MASK_WAIT_S, _MASK_WAIT_SHARE * (now - self._began_at))
        self.queue.finish(jobs, None if self.waits_for_all else now + patience)
        if are_all and not any(job.is_done for job in jobs):
            self.queue.finish([min(jobs, key=lambda job: job.matcher.pace.seconds)], None)

    def _put(self, slot: int, row: ConstrainedRow) -> None:
        self._rows[slot] = row
        self.is_constrained[slot] = True
