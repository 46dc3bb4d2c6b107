"""A step for which memory does not suffice, computed in parts; and a row that does not fit alone, given up.

Rows of a step may read blocks that other rows of it write: whoever matched a prefix that is being computed. In one
forward pass that is in order, since a layer's K and V of all rows are written before any row attends. Parts must keep
the order by themselves. A row that starts at position p reads positions below p alone, and a shared block holds the
same positions in every table: so whatever a row reads is written by rows that start before it. Parts in the order of
their rows' starts are right, wherever they are cut, and no table needs to be looked at.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from worker_service.rows.table import IntArray, SequenceTable, WorkingRows
from worker_service.step import Candidates, Logprobs, PromptLogprobs, RowStatus, SamplingParams, StepPlan, StepResult

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepPart(Generic[R]):
    """Rows in slot order, each computing all that it has in the step or a piece of it, and what came of them."""

    rows: WorkingRows
    result: R


def run_in_parts(
    rows: WorkingRows,
    compute: Callable[[WorkingRows], R],
    *,
    is_out_of_memory: Callable[[Exception], bool],
    free_memory: Callable[[], None],
    give_up: Callable[[WorkingRows], None],
) -> list[StepPart[R]]:
    """Compute `rows`, at once if memory suffices, else in halves, halves of these, down to one token of one row.

    One token that does not fit twice, the second time after `free_memory`, is the end of its row: `give_up` gets all
    that the row has left in this step, before anything that may read it is computed. `compute` must change nothing
    when it raises.
    """
    given_up: list[int] = []
    parts: list[StepPart[R]] = []
    waiting = [rows] if len(rows.slots) else []  # the next one last
    while waiting:
        part = waiting.pop()
        if given_up:
            part = take_rows(part, ~np.isin(part.slots, given_up))
            if not len(part.slots):
                continue
        outcome = _attempt(part, compute, is_out_of_memory)
        is_single = int(part.num_new_tokens.sum()) == 1
        if outcome is None:
            free_memory()
            outcome = _attempt(part, compute, is_out_of_memory) if is_single else None
        if outcome is not None:
            parts.append(outcome)
        elif not is_single:
            first, second = _halve(part)
            waiting += [second, first]
        else:
            slot = int(part.slots[0])
            logger.error("row %d does not fit into memory alone: its request fails", slot)
            given_up.append(slot)
            row = take_rows(rows, rows.slots == slot)
            give_up(WorkingRows(row.slots, part.starts, row.ends - part.starts, row.samples))
    return parts


def take_rows(rows: WorkingRows, which: np.ndarray) -> WorkingRows:
    """`which`: a mask, or indices."""
    return WorkingRows(
        rows.slots[which], rows.starts[which], rows.num_new_tokens[which], rows.samples[which], rows.are_plain
    )


def _attempt(
    rows: WorkingRows, compute: Callable[[WorkingRows], R], is_out_of_memory: Callable[[Exception], bool]
) -> StepPart[R] | None:
    """None if there was not enough memory. By then nothing holds on to what `compute` had allocated."""
    try:
        return StepPart(rows, compute(rows))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("%d tokens of %d rows: %s", rows.num_new_tokens.sum(), len(rows.slots), error)
        return None


def _halve(rows: WorkingRows) -> tuple[WorkingRows, WorkingRows]:
    """The first and the second half of the tokens, by starts. A row in the middle is cut, and samples at its end."""
    by_start = take_rows(rows, np.lexsort((rows.slots, rows.starts)))
    before = np.cumsum(by_start.num_new_tokens) - by_start.num_new_tokens
    middle = int(by_start.num_new_tokens.sum()) // 2
    num_first = np.clip(middle - before, 0, by_start.num_new_tokens)
    num_second = by_start.num_new_tokens - num_first
    first = WorkingRows(by_start.slots, by_start.starts, num_first, by_start.samples & (num_second == 0))
    second = WorkingRows(by_start.slots, by_start.starts + num_first, num_second, by_start.samples)
    return _in_slot_order(first), _in_slot_order(second)


def _in_slot_order(rows: WorkingRows) -> WorkingRows:
    """Without those that have nothing to compute."""
    order = np.argsort(rows.slots, kind="stable")
    return take_rows(rows, order[rows.num_new_tokens[order] > 0])


_NO_LOGPROBS = Logprobs()
_NO_CANDIDATES = Candidates()


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one row brought."""

    status: RowStatus
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = _NO_LOGPROBS
    candidates: Candidates = _NO_CANDIDATES


@dataclass(frozen=True, slots=True)
class StepOutline:
    """What a step's result tells, as it is known before: a table changes until the result is read."""

    sampling: dict[int, SamplingParams]  # of the sampling rows by slot, in order
    prompt_chunks: tuple[tuple[int, int, int, int], ...]  # slot, first position, positions, top tokens of each
    vocab_size: int

    @staticmethod
    def of(table: SequenceTable, rows: WorkingRows) -> "StepOutline":
        vocab_size = table.limits.vocab_size
        num_owed = num_prompt_positions(table, rows)
        chunks = []
        for row in np.flatnonzero(num_owed > 0):
            slot = int(rows.slots[row])
            num_top = min(int(table.num_prompt_logprobs[slot]), vocab_size)
            chunks.append((slot, int(rows.starts[row]) + 1, int(num_owed[row]), num_top))
        sampling = {slot: table.sampling[slot] for slot in rows.slots[rows.samples].tolist()}
        return StepOutline(sampling, tuple(chunks), vocab_size)


def join_results(plan: StepPlan, outline: StepOutline, parts: Sequence[StepPart[StepResult]]) -> StepResult:
    """The result of a step from those of its parts. Rows that no part finished are out of memory."""
    samples: dict[int, _Sample] = {}
    chunks: dict[int, list[Logprobs]] = {}
    for part in parts:
        samples.update(_samples(outline, part))
        for chunk in part.result.prompt_logprobs:
            chunks.setdefault(chunk.slot, []).append(chunk.logprobs)
    failed = _Sample(RowStatus.OUT_OF_MEMORY)
    in_order = [samples.get(slot, failed) for slot in outline.sampling]
    is_good = all(sample.status is RowStatus.OK for sample in in_order)
    return StepResult(
        plan.epoch,
        plan.step,
        statuses=() if is_good else tuple(sample.status for sample in in_order),
        token_ids=tuple(token_id for sample in in_order for token_id in sample.token_ids),
        logprobs=_joined([sample.logprobs for sample in in_order]),
        candidates=Candidates(
            tuple(token_id for sample in in_order for token_id in sample.candidates.token_ids),
            tuple(logprob for sample in in_order for logprob in sample.candidates.logprobs),
        ),
        prompt_logprobs=tuple(_prompt_logprobs(outline, chunks)),
    )


def _samples(outline: StepOutline, part: StepPart[StepResult]) -> Iterator[tuple[int, _Sample]]:
    """Slot and sample of each sampling row of a part: the columns, taken apart."""
    result, vocab_size = part.result, outline.vocab_size
    slots = part.rows.slots[part.rows.samples].tolist()
    num_tokens = num_positions = num_top = num_candidates = 0
    for slot, status in zip(slots, result.statuses or (RowStatus.OK,) * len(slots), strict=True):
        sampling = outline.sampling[slot]
        if status is not RowStatus.OK:
            yield slot, _Sample(status)
            continue
        if sampling.num_candidates is not None:
            start, num_candidates = num_candidates, num_candidates + min(sampling.num_candidates, vocab_size)
            ids, values = result.candidates.token_ids, result.candidates.logprobs
            found = Candidates(ids[start:num_candidates], values[start:num_candidates])
            yield slot, _Sample(status, candidates=found)
            continue
        logprobs = _NO_LOGPROBS
        if sampling.num_logprobs is not None:
            start, num_top = num_top, num_top + min(sampling.num_logprobs, vocab_size)
            position, num_positions = num_positions, num_positions + 1
            columns = result.logprobs
            logprobs = Logprobs(
                columns.chosen[position:num_positions],
                columns.ranks[position:num_positions],
                columns.top_token_ids[start:num_top],
                columns.top_logprobs[start:num_top],
            )
        yield slot, _Sample(status, (result.token_ids[num_tokens],), logprobs)
        num_tokens += 1


def _prompt_logprobs(outline: StepOutline, chunks: dict[int, list[Logprobs]]) -> Iterator[PromptLogprobs]:
    """One chunk of each row that owes one. Positions that were not computed have NaN, as with logits that are."""
    for slot, first, num_positions, num_top in outline.prompt_chunks:
        found = _joined(chunks.get(slot, []))
        num_missing, nan = num_positions - len(found.chosen), float("nan")
        num_tops = num_missing * num_top
        missing = Logprobs((nan,) * num_missing, (0,) * num_missing, (0,) * num_tops, (nan,) * num_tops)
        yield PromptLogprobs(slot, first, _joined([found, missing]))


def num_prompt_positions(table: SequenceTable, rows: WorkingRows) -> IntArray:
    """Of each row, the positions of this step that tell of a prompt token, if the row asked for that; else 0 or less.

    Position p tells of prompt token p + 1.
    """
    num_positions = np.minimum(rows.ends, table.num_prompt_tokens[rows.slots] - 1) - rows.starts
    return np.where(table.num_prompt_logprobs[rows.slots] >= 0, num_positions, 0)


def _joined(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tuple(value for part in parts for value in part.chosen),
        tuple(rank for part in parts for rank in part.ranks),
        tuple(token_id for part in parts for token_id in part.top_token_ids),
        tuple(value for part in parts for value in part.top_logprobs),
    )
