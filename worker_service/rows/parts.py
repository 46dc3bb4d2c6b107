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

from worker_service.rows.table import WorkingRows

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepPart(Generic[R]):
    """A part of a step: rows in slot order, with the result of their computation.

    A row computes all or a piece of its tokens of the step.
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
) -> list[StepPart[R]]:
    """Compute `rows` at once if memory suffices, else in halves, down to one token of one row. Return the parts.

    If one token does not fit even after `free_memory`, its row fails. `give_up` receives all remaining tokens of the
    row in this step, before any row that may read them is computed. Invariant: `compute` changes nothing when it
    raises.
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
            logger.error("row %d does not fit into memory even alone: its request fails", slot)
            given_up.append(slot)
            row = rows.take(rows.slots == slot)
            give_up(WorkingRows(row.slots, part.starts, row.ends - part.starts, row.samples))
    return parts


def _attempt(
    rows: WorkingRows, compute: Callable[[WorkingRows], R], is_out_of_memory: Callable[[Exception], bool]
) -> StepPart[R] | None:
    """Return the computed part, or None if memory did not suffice.

    On return, no reference keeps the memory that a failed `compute` allocated.
    """
    try:
        return StepPart(rows, compute(rows))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("out of memory for %d tokens of %d rows: %s", rows.num_new_tokens.sum(), len(rows.slots), error)
        return None


def _halve(rows: WorkingRows) -> tuple[WorkingRows, WorkingRows]:
    """Return the first and the second half of the tokens, in the order of the rows' start positions.

    A row in the middle is cut. It samples in the half that contains its last token.
    """
    by_start = rows.take(np.lexsort((rows.slots, rows.starts)))
    before = np.cumsum(by_start.num_new_tokens) - by_start.num_new_tokens
    middle = int(by_start.num_new_tokens.sum()) // 2
    num_first = np.clip(middle - before, 0, by_start.num_new_tokens)
    num_second = by_start.num_new_tokens - num_first
    first = WorkingRows(by_start.slots, by_start.starts, num_first, by_start.samples & (num_second == 0))
    second = WorkingRows(by_start.slots, by_start.starts + num_first, num_second, by_start.samples)
    return _in_slot_order(first), _in_slot_order(second)


def _in_slot_order(rows: WorkingRows) -> WorkingRows:
    """Return the rows in slot order, without rows that have no token to compute."""
    order = np.argsort(rows.slots, kind="stable")
    return rows.take(order[rows.num_new_tokens[order] > 0])
