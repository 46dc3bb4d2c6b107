"""The rows that compute tokens in one step, or in a part of a step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_service.rows.masks import IntArray


@dataclass(frozen=True, slots=True)
class WorkingRows:
    """The running sequences (rows) that compute tokens in one step, in slot order.

    Row i computes positions [starts[i], starts[i] + num_new_tokens[i]).
    """

    slots: IntArray  # [S]
    starts: IntArray  # [S]
    num_new_tokens: IntArray  # [S], each at least 1
    samples: NDArray[np.bool_]  # [S], whether the row reaches its end
    # whether all rows are plain (see `SamplingTable.is_plain`) and have not failed; False: unknown
    are_plain: bool = False

    @property
    def ends(self) -> IntArray:
        return self.starts + self.num_new_tokens

    def take(self, which: NDArray) -> "WorkingRows":
        """Return the sequences that `which` selects. `which` is a boolean mask or an array of indices."""
        columns = (self.slots[which], self.starts[which], self.num_new_tokens[which], self.samples[which])
        return WorkingRows(*columns, self.are_plain)

    def flatten(self) -> tuple[IntArray, IntArray, IntArray]:
        """Concatenate the new tokens of all S sequences to one batch of T tokens. Return (slots, positions, offsets).

        `slots` [T] and `positions` [T] describe each token. The tokens of sequence i are at indexes offsets[i] to
        offsets[i + 1] - 1 of the batch; `offsets` is [S + 1].
        """
        query_start_loc = np.zeros(len(self.slots) + 1, np.int64)
        np.cumsum(self.num_new_tokens, out=query_start_loc[1:])
        # Within a row, the position and the flat index increase together, so their difference is constant.
        shifts = np.repeat(self.starts - query_start_loc[:-1], self.num_new_tokens)
        return np.repeat(self.slots, self.num_new_tokens), np.arange(len(shifts)) + shifts, query_start_loc
