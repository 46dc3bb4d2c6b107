"""Computation of a step in parts if memory does not suffice, and failure of a row that does not fit even alone.

Rows of a step may read blocks that other rows of the same step write, for example if a row matched a prefix that is
still being computed. One forward pass preserves the order, since a layer writes K and V of all rows before any row
attends. Parts must preserve the order too. A row that starts at position p reads only positions below p, and a shared
block has the same positions in every block table. So every block that a row reads is written by rows that start at an
earlier position. Parts in the order of their rows' start positions are therefore correct wherever they are cut, without
looking at block tables.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from worker_service.rows.working_rows import WorkingRows

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepPart(Generic[R]):
    """A step, or one part of a step that was split for lack of memory, with the result of its computation.

    `rows` are the sequences that the part computes, in slot order. The part may compute all or only some of the tokens
    that the step computes for a sequence.
    """

    rows: WorkingRows
    result: R


def run_in_parts(
    rows: WorkingRows,
    compute: Callable[[WorkingRows], R],
    *,
    is_out_of_memory: Callable[[Exception], bool],
    free_memory: Callable[[], None],
    give_up: Callable[[WorkingRows], None],
    cuts_rows: bool = True,
) -> list[StepPart[R]]:
    """Compute a step at once if memory suffices, else split it in halves. Return the computed parts.

    `rows` are the sequences of the step. A half that does not fit is split again, down to one token of one sequence, or
    without `cuts_rows` to one sequence. If that does not fit even after `free_memory`, its sequence fails. `give_up`
    receives all remaining tokens of the failed sequence in this step, before any sequence that may read them is
    computed. Errors other than those that `is_out_of_memory` recognizes are raised. Invariant: `compute` changes
    nothing when it raises.
    """
    given_up: list[int] = []
    parts: list[StepPart[R]] = []
    waiting = [rows] if len(rows.slots) else []  # the next part is the last element
    while waiting:
        part = waiting.pop()
        if given_up:
            part = part.take(~np.isin(part.slots, given_up))
            if not len(part.slots):
                continue
        outcome = _attempt(part, compute, is_out_of_memory)
        is_single = int(part.num_new_tokens.sum() if cuts_rows else len(part.slots)) == 1
        if outcome is None:
            free_memory()
            outcome = _attempt(part, compute, is_out_of_memory) if is_single else None
        if outcome is not None:
            parts.append(outcome)
        elif not is_single:
            first, second = _halve(part, cuts_rows)
            waiting += [second, first]
        else:
            slot = int(part.slots[0])
            logger.error("row %d does not fit into memory even alone: its request fails", slot)
            given_up.append(slot)
            row = rows.take(rows.slots == slot)
            give_up(WorkingRows(row.slots, part.starts, row.ends - part.starts, row.samples))
    return parts


def _attempt(
    rows: WorkingRows, compute: Callable[[WorkingRows], R], is_out_of_memory: Callable[[Exception], bool]
) -> StepPart[R] | None:
    """Compute a part of a step. Return the part with its result, or None if the computation ran out of memory.

    When this returns None, no reference keeps the memory alive that the failed `compute` allocated. Other errors of
    `compute` are raised.
    """
    try:
        return StepPart(rows, compute(rows))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("out of memory for %d tokens of %d rows: %s", rows.num_new_tokens.sum(), len(rows.slots), error)
        return None


def _halve(rows: WorkingRows, cuts_rows: bool) -> tuple[WorkingRows, WorkingRows]:
    """Split the sequences of a step that does not fit into memory into two parts with half of the tokens each.

    Sequences are ordered by the position of their first token in the step. If the middle falls inside a sequence, both
    parts compute some of its tokens. The sequence samples in the second part, which contains its last token. Without
    `cuts_rows`, such a sequence is in the second part, unless it is the only one before the middle.
    """
    by_start = rows.take(np.lexsort((rows.slots, rows.starts)))
    before = np.cumsum(by_start.num_new_tokens) - by_start.num_new_tokens
    middle = int(by_start.num_new_tokens.sum()) // 2
    num_first = np.clip(middle - before, 0, by_start.num_new_tokens)
    if not cuts_rows:
        last = max(middle, by_start.num_new_tokens[0])
        num_first = np.where(before + by_start.num_new_tokens <= last, by_start.num_new_tokens, 0)
    num_second = by_start.num_new_tokens - num_first
    first = WorkingRows(by_start.slots, by_start.starts, num_first, by_start.samples & (num_second == 0))
    second = WorkingRows(by_start.slots, by_start.starts + num_first, num_second, by_start.samples)
    return _in_slot_order(first), _in_slot_order(second)


def _in_slot_order(rows: WorkingRows) -> WorkingRows:
    """Sort running sequences by their index in the worker's table, and drop sequences that have no token to compute."""
    order = np.argsort(rows.slots, kind="stable")
    return rows.take(order[rows.num_new_tokens[order] > 0])
