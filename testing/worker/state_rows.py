"""The states that the rows of a step read and write, for tests that drive a model themselves."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pagewire.kernels.states import StateRows

# A row's number of new tokens, the state that it reads, and its saves: pairs of a number of new tokens and a state.
Row = tuple[int, int, Sequence[tuple[int, int]]]


def new_states(state_size: int, num_states: int) -> Tensor:
    """Return states that contain NaN, except for state 0."""
    states = torch.full((num_states + 1, state_size), float("nan"))
    states[0] = 0
    return states


def state_rows(states: Tensor, rows: Sequence[Row]) -> StateRows | None:
    """Return the argument of a step with the given rows, or None for a model without states."""
    nums, reads, saves = zip(*rows, strict=True)
    starts, save_starts = (list(accumulate(sizes, initial=0)) for sizes in (nums, map(len, saves)))
    counts, targets = zip(*[save for of_row in saves for save in of_row], strict=True)
    columns = starts, reads, save_starts, counts, targets
    of_step = StateRows(states, *(torch.tensor(column, dtype=torch.int32) for column in columns))
    return of_step if states.shape[1] else None
