"""A step for which memory does not suffice, computed in parts; and a row that does not fit alone, given up.

Rows of a step may read blocks that other rows of it write: a row that matched a prefix which is being computed. In one
forward pass that is in order, since a layer's K and V of all rows are written before any row attends. Parts must keep
the order by themselves. A row that starts at position p reads positions below p alone, and a shared block holds the
same positions in every table: so whatever a row reads is written by rows that start before it. Parts in the order of
their rows' starts are right, wherever they are cut, and no table needs to be looked at.
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
            logger.error("row %d does not fit into memory alone: its request fails", slot)
            given_up.append(slot)
            row = rows.take(rows.slots == slot)
            give_up(WorkingRows(row.slots, part.starts, row.ends - part.starts, row.samples))
    return parts


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
    by_start = rows.take(np.lexsort((rows.slots, rows.starts)))
    before = np.cumsum(by_start.num_new_tokens) - by_start.num_new_tokens
    middle = int(by_start.num_new_tokens.sum()) // 2
    num_first = np.clip(middle - before, 0, by_start.num_new_tokens)
    num_second = by_start.num_new_tokens - num_first
    first = WorkingRows(by_start.slots, by_start.starts, num_first, by_start.samples & (num_second == 0))
    second = WorkingRows(by_start.slots, by_start.starts + num_first, num_second, by_start.samples)
    return _in_slot_order(first), _in_slot_order(second)


def _in_slot_order(rows: WorkingRows) -> WorkingRows:
    """Return the rows in slot order, without those that have nothing to compute."""
    order = np.argsort(rows.slots, kind="stable")
    return rows.take(order[rows.num_new_tokens[order] > 0])
