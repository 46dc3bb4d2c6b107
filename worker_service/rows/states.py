"""The states of rows besides K and V (see `pagewire.kernels.states`): the states that each row reads and writes.

A row has one or two own states. A row with one state overwrites it in each step. A row with two states may compute its
last position again, so after a step one of them, `last`, is the state after all computed tokens, and the other one,
`mid`, is the state after all but the last. A row that reads one of them keeps it as `mid`, which a step of one token
does not write. A row that reads another state, such as a saved one, writes both.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import RowOpening, WorkerProtocolError
from pagewire.kernels.states import StateRows
from worker_service.rows.masks import IntArray
from worker_service.rows.working_rows import WorkingRows

_NO_SAVES = np.zeros((3, 0), np.int64)


@dataclass(frozen=True, slots=True)
class PartStates:
    """The states of the rows of a step, or of a part of a step.

    Attributes:
        columns: reads, save_start_loc, save_counts and save_states of `StateRows`, int32.
        slots: [R], the slots of the rows.
        lasts: [R] int32, the states after all tokens of the part.
        overwrites: whether a row overwrites the state that it reads, so that it cannot be computed again.
    """

    columns: tuple[NDArray[np.int32], ...]
    slots: IntArray
    lasts: NDArray[np.int32]
    overwrites: bool

    def rows(self, states: Tensor, query_start_loc: Tensor) -> StateRows:
        """Return the states for a model on a CPU: `states` is their memory, and `query_start_loc` [R + 1] int32."""
        return StateRows(states, query_start_loc, *map(torch.from_numpy, self.columns))


_NONE = np.empty(0, np.int32)
# The states of a part without rows.
NO_ROW_STATES = PartStates((_NONE, np.zeros(1, np.int32), _NONE, _NONE), np.empty(0, np.int64), _NONE, overwrites=False)


class RowStates:
    """The numbers of the states that rows read and write, by slot. Entries of a vacant slot are undefined.

    Only ids are checked, to protect memory. Whether two rows write the same state is the scheduler's responsibility.
    """

    def __init__(self, num_slots: int, num_states: int) -> None:
        """Create the columns. States are numbered from 1 to `num_states`; 0: the model has no states."""
        self.num_states = num_states
        self._reads = np.zeros(num_slots, np.int32)
        self._firsts = np.zeros(num_slots, np.int32)
        self._seconds = np.zeros(num_slots, np.int32)  # of a row with one state: this state
        self._saves = _NO_SAVES  # slots, positions and states of the current step
        self._starts = np.arange(num_slots + 1, dtype=np.int32)

    def open(self, opening: RowOpening) -> None:
        """Register the states of a new row. Raises WorkerProtocolError if the states of `opening` are invalid."""
        slot, read, own = opening.slot, opening.read_state, opening.own_states
        if not self.num_states:
            if read or own:
                raise WorkerProtocolError(f"slot {slot} opens with states {(read, *own)}; the model has no states")
            return
        is_repeated = opening.grammar_id != 0 or opening.sampling.num_candidates is not None
        if not 1 + is_repeated <= len(set(own)) == len(own) <= 2:
            needed = "two different states, because it has a grammar or reports candidates" if is_repeated else "1 or 2"
            raise WorkerProtocolError(f"slot {slot} opens with own states {own}; it must have {needed}")
        if (read == 0) != (opening.num_computed_tokens == 0):
            raise WorkerProtocolError(
                f"slot {slot} opens with {opening.num_computed_tokens} computed tokens and state {read}; state 0 is "
                "the state of a row without computed tokens"
            )
        self._check(slot, np.array([read or 1, *own]))
        self._reads[slot], self._firsts[slot], self._seconds[slot] = read, own[0], own[-1]

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Let the rows in `targets`, which are forks, read the states that the rows in `sources` read.

        `replace` must follow.
        """
        self._reads[targets] = self._reads[sources]

    def replace(self, slots: IntArray, firsts: IntArray, seconds: IntArray) -> None:
        """Replace the own states of rows. Raises WorkerProtocolError if a state is invalid."""
        for slot, first, second in zip(slots, firsts, seconds, strict=True):
            if first == second:
                raise WorkerProtocolError(f"slot {slot} gets state {first} twice; it must get two different states")
        self._check(slots, firsts)
        self._check(slots, seconds)
        self._firsts[slots], self._seconds[slots] = firsts, seconds

    def begin_step(self) -> None:
        """Forget the saves of the previous step."""
        self._saves = _NO_SAVES

    def save(self, rows: WorkingRows, may_be_late: NDArray[np.bool_], saves: tuple[IntArray, ...]) -> None:
        """Register the saves of a step: the slots, the positions and the states.

        `rows` are the rows of the step. `may_be_late` specifies for each save whether its row may have computed less
        than the scheduler expected. Such a row ignores positions beyond its end. Raises WorkerProtocolError if a state
        or a position is invalid.
        """
        slots, positions, states = saves
        self._check(slots, states)
        if len(set(states.tolist())) < len(states):
            raise WorkerProtocolError("two saves write the same state")
        starts, ends = np.zeros_like(slots), np.full_like(slots, -1)
        is_computed = np.isin(slots, rows.slots)
        indexes = np.searchsorted(rows.slots, slots[is_computed])
        starts[is_computed], ends[is_computed] = rows.starts[indexes], rows.ends[indexes]
        is_beyond = (positions < starts) | ((positions > ends) & ~may_be_late)
        if is_beyond.any():
            i = int(is_beyond.argmax())
            raise WorkerProtocolError(
                f"slot {slots[i]} is to save the state at position {positions[i]}, but the step "
                + (f"computes positions {starts[i]} to {ends[i]} of it" if is_computed[i] else "does not compute it")
            )
        self._saves = np.stack(saves)

    def saved_states(self, rows: WorkingRows) -> list[int]:
        """Return the states that the step saves at the positions of these rows."""
        _, _, states = self._saves_of(rows)
        return states.tolist()

    def of_part(self, rows: WorkingRows) -> PartStates:
        """Return the states that the rows of a step, or of a part of a step, read and write.

        Every part reads the states that `advance` recorded after the previous part. The result is in the order of
        `rows`, which may be any.
        """
        slots, counts = rows.slots, rows.num_new_tokens
        reads, firsts, seconds = self._reads[slots], self._firsts[slots], self._seconds[slots]
        lasts = np.where(reads == seconds, firsts, seconds)
        mids = firsts + seconds - lasts
        writes_mid = (mids != lasts) & ((mids != reads) | (counts > 1))
        overwrites = bool(((lasts == reads) | (writes_mid & (mids == reads))).any())
        starts: NDArray[np.integer]
        if self._saves.shape[1] or writes_mid.any():
            which = np.flatnonzero(writes_mid)
            every = np.stack([np.arange(len(slots)), counts, lasts])
            more = np.stack([which, counts[which] - 1, mids[which]])
            starts, (save_counts, save_states) = _merge(len(slots), every, more, self._saves_of(rows))
        else:
            starts, save_counts, save_states = self._starts[: len(slots) + 1], counts, lasts
        columns = tuple(np.ascontiguousarray(each, np.int32) for each in (reads, starts, save_counts, save_states))
        return PartStates(columns, slots, lasts, overwrites)

    def advance(self, part: PartStates) -> None:
        """Record that the model has computed a part. From now on its rows read the states that it wrote."""
        self._reads[part.slots] = part.lasts

    def step_back(self, slots: IntArray) -> None:
        """Let rows with two states read the state before their last position, which they compute again."""
        self._reads[slots] = self._firsts[slots] + self._seconds[slots] - self._reads[slots]

    def _saves_of(self, rows: WorkingRows) -> IntArray:
        """Return the saves at the positions of these rows: [3, S], indexes of rows, numbers of new tokens, states."""
        slots, positions, states = self._saves[:, np.isin(self._saves[0], rows.slots)]
        order = np.argsort(rows.slots)
        indexes = order[np.searchsorted(rows.slots, slots, sorter=order)]
        counts = positions - rows.starts[indexes]
        which = (counts >= 0) & (counts <= rows.num_new_tokens[indexes])
        return np.stack([indexes, counts, states])[:, which]

    def _check(self, slots: IntArray | int, states: IntArray) -> None:
        is_beyond = (states < 1) | (states > self.num_states)
        if is_beyond.any():
            slot, state = np.broadcast_to(slots, states.shape)[is_beyond][0], states[is_beyond][0]
            ids = f"ids are 1 to {self.num_states}" if self.num_states else "the model has no states"
            raise WorkerProtocolError(f"slot {slot} gets state {state}; {ids}")


def _merge(num_rows: int, *parts: IntArray) -> tuple[IntArray, IntArray]:
    """Join writes of states, each [3, any] with indexes of rows, numbers of new tokens, and states.

    Return `save_start_loc` of `StateRows`, then `save_counts` and `save_states`, [2, S].
    """
    writes = np.concatenate(parts, axis=1)
    writes = writes[:, np.lexsort((writes[1], writes[0]))]
    return np.searchsorted(writes[0], np.arange(num_rows + 1)), writes[1:]
