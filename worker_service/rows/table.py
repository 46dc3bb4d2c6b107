"""The worker's running sequences, one row per slot. Plans patch the table, and steps advance it.

The table protects memory from invalid plans. Invariant: no row that it returns reads or writes a position outside its
blocks, whatever a plan contains. An invalid plan raises WorkerProtocolError. The session then ends, and the next
session starts with an empty table.

Numbers are stored in arrays by slot, so that a step costs a few vector operations instead of a loop over rows. Tokens
are one int32 array [max_num_seqs, max_model_len + 1]. The operating system allocates memory only for written parts.

A row has a block table for each layer group. The table of group g of the row in slot s has the number
g * max_num_seqs + s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagewire.common.wire.messages import (
    PHASES,
    Pooling,
    RowOpening,
    SamplingParams,
    StepPlan,
    WorkerProtocolError,
    illegal_values,
)
from worker_service.rows.masks import IntArray, RowMasks
from worker_service.rows.sampling import SamplingTable, StepSampling
from worker_service.rows.states import RowStates
from worker_service.rows.working_rows import WorkingRows

Column = tuple[int, ...]
_COLUMNS = {phase: attrgetter(*names) for phase, names in PHASES.items()}


@dataclass(frozen=True, slots=True)
class TableLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_device_blocks: int  # usable ones; ids are 1..num_device_blocks
    vocab_size: int
    # [G] positions that the layers of each layer group read back, including the query's own; 0: all
    windows: tuple[int, ...] = (0,)
    is_bidirectional: bool = False  # tokens attend to later tokens, too: a step computes all tokens of a row
    num_device_states: int = 0  # ids are 1..num_device_states; 0: the model has no states

    @property
    def max_num_blocks(self) -> int:
        """The largest number of KV cache blocks in one sequence's block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_tables(self) -> int:
        """The number of block tables of all rows."""
        return len(self.windows) * self.max_num_seqs

    def tables_of(self, slots: IntArray | int) -> IntArray:
        """Return the numbers of the block tables of the given slots, [G, ...], by layer group."""
        return np.add.outer(np.arange(0, self.num_tables, self.max_num_seqs), slots)

    def first_block(self, start: int, window: int) -> int:
        """Return the index of the first block in a block table that the sequence still reads or writes.

        `start` is the next position that the sequence computes. `window` is the window of the table's layer group.
        Blocks before the window are not used.
        """
        return max(0, start - window + 1) // self.block_size if window else 0


class SequenceTable:
    """The worker's state of all running sequences, as arrays indexed by slot (a sequence's index in the table).

    Every array has one entry per slot, except `block_tables` and `num_blocks`, which have one per block table. If no
    sequence uses a slot, its entries are undefined, except `work`, which is 0.
    """

    def __init__(self, limits: TableLimits, *, gates_grammars: bool = False) -> None:
        """Create an empty table.

        If `gates_grammars` is set, a sequence with a grammar pauses after each sampled token until the scheduler
        continues it.
        """
        self.limits = limits
        self.gates_grammars = gates_grammars
        size = limits.max_num_seqs
        self.token_ids = np.zeros((size, limits.max_model_len + 1), np.int32)
        self.block_tables = np.zeros((limits.num_tables, limits.max_num_blocks), np.int32)  # 0 beyond its num_blocks
        self.num_blocks = np.zeros(limits.num_tables, np.int64)
        self._num_blocks_of_groups = self.num_blocks.reshape(-1, size)  # the same memory
        self.occupied = np.zeros(size, np.bool_)
        self.num_tokens = np.zeros(size, np.int64)
        self.num_prompt_tokens = np.zeros(size, np.int64)
        self.num_computed_tokens = np.zeros(size, np.int64)
        self.work = np.zeros(size, np.int64)  # tokens to compute in each step; 0: paused
        self.has_failed = np.zeros(size, np.bool_)  # failed rows compute nothing until they are released
        # All columns with one value per row, except `work`.
        self._row_columns: tuple[NDArray, ...] = (
            self.occupied,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.has_failed,
        )
        self.sampling = SamplingTable(size, limits.vocab_size)
        self.masks = RowMasks(size, limits.vocab_size)
        self.states = RowStates(size, limits.num_device_states)

    def clear(self) -> None:
        self.occupied[:] = False
        self.work[:] = 0
        self.block_tables[:] = 0
        self.num_blocks[:] = 0
        self.masks.clear()

    def apply(self, plan: StepPlan) -> WorkingRows:
        """Apply the scheduler's plan for one step to the table. Return the sequences that compute tokens in the step.

        Raises WorkerProtocolError if the plan is invalid, for example if it names a vacant slot or a block out of
        range.
        """
        for slot in plan.released_slots:
            self._release(slot)
        for opening in plan.openings:
            self._open(opening)
        for phase, change in (
            ("forks", self._fork),
            ("set_states", self._set_states),
            ("appended_blocks", self._append_blocks),
            ("set_blocks", self._set_blocks),
            ("appended_tokens", self._append_tokens),
            ("patches_of_work", self._patch_work),
        ):
            columns = _COLUMNS[phase](plan)
            if any(columns):
                _check_lengths(phase, columns)
                change(*columns)
        if self.states.num_states and not set(plan.fork_target_slots) <= set(plan.set_state_slots):
            raise WorkerProtocolError(f"slots {plan.fork_target_slots} are forks, so each must get its own states")
        rows = self._working_rows()
        self._begin_saves(rows, _COLUMNS["saves"](plan))
        return rows

    def advance(self, rows: WorkingRows) -> None:
        """Record the launch of a step: its positions are now computed, and sequences that sample have one more token.

        Sequences that report candidates or an embedding get no token and pause instead. If grammars are gated,
        sequences with a grammar get their token and then pause until the scheduler continues them. For late sequences,
        whose grammar mask was not ready, the last position is not recorded as computed.

        The computation stores the tokens themselves. The CPU stores them with `put_tokens`. A device stores them only
        on the device, so `token_ids` is undefined for those positions.
        """
        self.num_computed_tokens[rows.slots] = rows.ends
        slots = rows.slots[rows.samples]
        self.work[slots] = 1
        if not rows.are_plain:
            gives_none = self.sampling.reports_candidates[slots] | self.sampling.is_pooled[slots]
            is_late = self.masks.is_late[slots]
            rests = gives_none | self.masks.is_constrained[slots] if self.gates_grammars else gives_none
            self.work[slots[rests]] = 0
            self.num_computed_tokens[slots[is_late]] -= 1
            self.states.step_back(slots[is_late])
            slots = slots[~gives_none & ~is_late]
        self.num_tokens[slots] += 1

    def sampling_of(self, rows: WorkingRows) -> StepSampling:
        """Combine the sampling parameters of the sequences that sample in a step into one object.

        This may wait for grammar masks.
        """
        slots = rows.slots[rows.samples]
        return self.sampling.of_step(slots, rows.ends[rows.samples], self.masks.of_step(slots))

    def put_tokens(self, rows: WorkingRows, token_ids: IntArray) -> None:
        """Append the sampled tokens to their sequences. `token_ids` has one entry for each sequence that samples.

        For a sequence that chooses no token, the table's entry after the last token becomes undefined.
        """
        slots = rows.slots[rows.samples]
        self.token_ids[slots, self.num_tokens[slots]] = token_ids

    def _check_slot(self, slot: int, *, occupied: bool) -> None:
        if not 0 <= slot < self.limits.max_num_seqs:
            raise WorkerProtocolError(f"slot {slot} is out of range: there are {self.limits.max_num_seqs}")
        if self.occupied[slot] != occupied:
            raise WorkerProtocolError(f"slot {slot} is {'vacant' if occupied else 'occupied'}")

    def _occupied_slots(self, slots: tuple[int, ...]) -> IntArray:
        """Check the slots that a step plan names, and return them as an array.

        Raises WorkerProtocolError if a slot is out of range or has no running sequence.
        """
        array = _as_array(slots)
        _check_range(array, self.limits.max_num_seqs, "slot")
        _refuse_any(~self.occupied[array], lambda i: f"slot {array[i]} is vacant")
        return array

    def _occupied_tables(self, tables: tuple[int, ...]) -> tuple[IntArray, IntArray]:
        """Check the block tables that a step plan names. Return their numbers and their slots as arrays.

        Raises WorkerProtocolError if a number is out of range or its slot has no running sequence.
        """
        array = _as_array(tables)
        _check_range(array, self.limits.num_tables, "block table")
        slots = array % self.limits.max_num_seqs
        _refuse_any(~self.occupied[slots], lambda i: f"slot {slots[i]} is vacant")
        return array, slots

    def _refuse_pooled(self, slots: IntArray, what: str) -> None:
        _refuse_any(self.sampling.is_pooled[slots], lambda i: f"slot {slots[i]} {what}, but has pooling")

    def _release(self, slot: int) -> None:
        self._check_slot(slot, occupied=True)
        self.occupied[slot] = False
        self.work[slot] = 0
        for table in self.limits.tables_of(slot):
            self.block_tables[table, : self.num_blocks[table]] = 0
            self.num_blocks[table] = 0
        self.masks.release(slot)

    def _open(self, opening: RowOpening) -> None:
        slot = opening.slot
        self._check_slot(slot, occupied=False)
        token_ids = _as_array(opening.token_ids)
        _check_opening(opening, token_ids, self.limits)
        _check_sampling(slot, opening.sampling, self.limits.vocab_size)
        _check_pooling(opening)
        self.states.open(opening)
        self.masks.open(slot, opening.grammar_id, opening.token_ids[opening.num_prompt_tokens :])
        self.occupied[slot] = True
        self.token_ids[slot, : len(token_ids)] = token_ids
        for table, block_ids in zip(self.limits.tables_of(slot), opening.block_tables, strict=True):
            self.block_tables[table, : len(block_ids)] = block_ids
            self.num_blocks[table] = len(block_ids)
        self.num_tokens[slot] = len(token_ids)
        self.num_prompt_tokens[slot] = opening.num_prompt_tokens
        self.num_computed_tokens[slot] = opening.num_computed_tokens
        self.has_failed[slot] = False
        self.sampling.open(opening)

    def _fork(self, source_slots: Column, target_slots: Column) -> None:
        sources = self._occupied_slots(source_slots)
        self._refuse_pooled(sources, "is forked")
        targets = _as_array(target_slots)
        _check_range(targets, self.limits.max_num_seqs, "slot")
        _check_distinct("forks have the same target", target_slots)
        # Indexing an array by an array copies it, so every source is read before any target is written.
        num_tokens = self.num_tokens[sources].max()
        self.token_ids[targets, :num_tokens] = self.token_ids[sources, :num_tokens]
        read, written = self.limits.tables_of(sources), self.limits.tables_of(targets)
        num_blocks = max(self.num_blocks[read].max(), self.num_blocks[written].max())
        self.block_tables[written, :num_blocks] = self.block_tables[read, :num_blocks]
        self.num_blocks[written] = self.num_blocks[read]
        for column in self._row_columns:
            column[targets] = column[sources]
        self.sampling.copy(sources, targets)
        self.masks.copy(sources, targets)
        self.states.copy(sources, targets)
        self.work[targets] = 0

    def _set_states(self, row_slots: Column, firsts: Column, seconds: Column) -> None:
        self.states.replace(self._occupied_slots(row_slots), _as_array(firsts), _as_array(seconds))

    def _begin_saves(self, rows: WorkingRows, columns: tuple[Column, Column, Column]) -> None:
        """Check the states that a plan saves while the step computes `rows`, and register them."""
        self.states.begin_step()
        if any(columns):
            _check_lengths("saves", columns)
            slots, positions, states = self._occupied_slots(columns[0]), *map(_as_array, columns[1:])
            self.states.save(rows, self.masks.is_constrained[slots], (slots, positions, states))

    def _append_blocks(self, numbers: Column, ids: Column) -> None:
        (tables, slots), block_ids = self._occupied_tables(numbers), _as_array(ids)
        _check_block_ids(slots, block_ids, self.limits)
        indexes = self.num_blocks[tables]
        if len(set(numbers)) < len(tables):
            indexes += _count_earlier_equals(tables)
        _refuse_any(
            indexes >= self.limits.max_num_blocks,
            lambda i: f"slot {slots[i]} has {indexes[i]} blocks already, enough for max_model_len",
        )
        self.block_tables[tables, indexes] = block_ids
        np.maximum.at(self.num_blocks, tables, indexes + 1)

    def _set_blocks(self, numbers: Column, places: Column, ids: Column) -> None:
        (tables, slots), indexes, block_ids = self._occupied_tables(numbers), _as_array(places), _as_array(ids)
        _check_block_ids(slots, block_ids, self.limits)
        num_blocks = self.num_blocks[tables]
        is_beyond = (indexes < 0) | (indexes >= num_blocks)
        _refuse_any(is_beyond, lambda i: f"slot {slots[i]} gets block {indexes[i]} set; it has {num_blocks[i]}")
        self.block_tables[tables, indexes] = block_ids

    def _append_tokens(self, row_slots: Column, ids: Column) -> None:
        slots, token_ids = self._occupied_slots(row_slots), _as_array(ids)
        self._refuse_pooled(slots, "gets a token")
        _check_distinct("tokens are appended to the same slot", row_slots)
        num_tokens, vocab_size = self.num_tokens[slots], self.limits.vocab_size
        is_beyond = (token_ids < 0) | (token_ids >= vocab_size)
        _refuse_any(is_beyond, lambda i: f"slot {slots[i]} gets token {token_ids[i]}; ids are below {vocab_size}")
        _refuse_any(
            num_tokens >= self.limits.max_model_len,
            lambda i: f"slot {slots[i]} gets a token and has {num_tokens[i]}, the most that max_model_len allows",
        )
        self.token_ids[slots, num_tokens] = token_ids
        self.num_tokens[slots] = num_tokens + 1
        self.masks.append(slots, token_ids)

    def _patch_work(self, row_slots: Column, counts: Column) -> None:
        slots, num_tokens = self._occupied_slots(row_slots), _as_array(counts)
        _check_distinct("patches of work name the same slot", row_slots)
        most = self.limits.max_num_batched_tokens
        _refuse_any(
            (num_tokens < 0) | (num_tokens > most),
            lambda i: f"slot {slots[i]} is to compute {num_tokens[i]} tokens; a step computes at most {most}",
        )
        self.work[slots] = num_tokens

    def _working_rows(self) -> WorkingRows:
        limits = self.limits
        slots = np.flatnonzero(self.work)
        starts = self.num_computed_tokens[slots]
        num_new_tokens = self.work[slots]
        ends = starts + num_new_tokens
        num_tokens = self.num_tokens[slots]
        num_step_tokens = int(num_new_tokens.sum())
        if num_step_tokens > limits.max_num_batched_tokens:
            raise WorkerProtocolError(
                f"a step is to compute {num_step_tokens} tokens; it computes at most {limits.max_num_batched_tokens}"
            )
        num_positions = np.minimum.reduce(self._num_blocks_of_groups.take(slots, 1)) * limits.block_size
        if not (ends <= np.minimum(np.minimum(num_tokens, num_positions), limits.max_model_len)).all():
            _check_ends(slots, ends, num_tokens, "tokens")
            _check_ends(slots, ends, num_positions, "positions in its blocks")
            _check_ends(slots, ends, np.full_like(ends, limits.max_model_len), "positions by max_model_len")
        if limits.is_bidirectional:
            _refuse_any(
                num_new_tokens != num_tokens,
                lambda i: (
                    f"slot {slots[i]} is to compute {num_new_tokens[i]} of {num_tokens[i]} tokens; this model's "
                    "tokens attend to later tokens, so a step computes all of them"
                ),
            )
        are_plain = bool((self.sampling.is_plain[slots] & ~self.has_failed[slots]).all())
        return WorkingRows(slots, starts, num_new_tokens, ends == num_tokens, are_plain)


def _as_array(values: tuple[int, ...]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _refuse_any(is_bad: NDArray[np.bool_], describe: Callable[[int], str]) -> None:
    """Raise WorkerProtocolError if any entry of `is_bad` is True.

    `describe` returns the message for the first such index.
    """
    if is_bad.any():
        raise WorkerProtocolError(describe(int(is_bad.argmax())))


def _check_range(numbers: IntArray, count: int, what: str) -> None:
    is_beyond = (numbers < 0) | (numbers >= count)
    _refuse_any(is_beyond, lambda i: f"{what} {numbers[i]} is out of range: there are {count}")


def _check_lengths(phase: str, columns: Sequence[Column]) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        what = phase.replace("_", " ")
        raise WorkerProtocolError(f"{what}: the columns have different lengths: {', '.join(map(str, lengths))}")


def _check_distinct(what: str, values: tuple[int, ...]) -> None:
    if len(set(values)) != len(values):
        raise WorkerProtocolError(f"two {what}")


def _count_earlier_equals(values: IntArray) -> IntArray:
    """Return, for each value, how many equal values precede it in the array: [0, 0, 1] for [7, 3, 7]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    places = np.arange(len(values))
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    counts = np.empty(len(values), np.int64)
    counts[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return counts


def _check_ends(slots: IntArray, ends: IntArray, limits: IntArray, what: str) -> None:
    _refuse_any(
        ends > limits, lambda i: f"slot {slots[i]} is to compute up to position {ends[i]}; it has {limits[i]} {what}"
    )


def _check_opening(opening: RowOpening, token_ids: IntArray, limits: TableLimits) -> None:
    slot, num_tokens = opening.slot, len(token_ids)
    if not 1 <= num_tokens <= limits.max_model_len:
        raise WorkerProtocolError(f"slot {slot} opens with {num_tokens} tokens; a row has 1 to {limits.max_model_len}")
    if not (token_ids.min() >= 0 and token_ids.max() < limits.vocab_size):
        raise WorkerProtocolError(
            f"slot {slot} opens with tokens {token_ids.min()} to {token_ids.max()}; ids are below {limits.vocab_size}"
        )
    if not 1 <= opening.num_prompt_tokens <= num_tokens:
        raise WorkerProtocolError(
            f"slot {slot} opens with {num_tokens} tokens, {opening.num_prompt_tokens} of them prompt"
        )
    if not 0 <= opening.num_computed_tokens < num_tokens:
        raise WorkerProtocolError(
            f"slot {slot} opens with {opening.num_computed_tokens} of {num_tokens} tokens computed; one must be left"
        )
    _check_tables(opening, limits)


def _check_block_ids(slots: ArrayLike, block_ids: IntArray, limits: TableLimits) -> None:
    """Raise WorkerProtocolError if a KV cache block id of a plan is out of range.

    `slots` are the slots of the sequences that get the blocks, for the error message. There is one slot for each block,
    or one for all blocks.
    """
    last = limits.num_device_blocks
    owners = np.broadcast_to(slots, block_ids.shape)
    is_beyond = (block_ids < 1) | (block_ids > last)
    _refuse_any(is_beyond, lambda i: f"slot {owners[i]} gets block {block_ids[i]}; ids are 1 to {last}")


def _check_tables(opening: RowOpening, limits: TableLimits) -> None:
    """Raise WorkerProtocolError if the block tables of a new sequence are too long or short, or contain invalid ids.

    Blocks before a layer group's window may be 0, since the sequence neither reads nor writes them.
    """
    slot, lengths = opening.slot, [len(table) for table in opening.block_tables]
    if len(lengths) != len(limits.windows) or sum(lengths) != len(opening.block_ids):
        raise WorkerProtocolError(
            f"slot {slot} opens with {len(opening.block_ids)} blocks, in block tables of "
            f"{', '.join(map(str, lengths))}; the model has {len(limits.windows)} layer groups, with a table each"
        )
    if max(lengths) > limits.max_num_blocks:
        raise WorkerProtocolError(
            f"slot {slot} opens with {max(lengths)} blocks; max_model_len allows {limits.max_num_blocks}"
        )
    if opening.num_computed_tokens > min(lengths) * limits.block_size:
        raise WorkerProtocolError(
            f"slot {slot} opens with {opening.num_computed_tokens} computed tokens in {min(lengths)} blocks "
            f"of {limits.block_size}"
        )
    for table, window in zip(opening.block_tables, limits.windows, strict=True):
        block_ids, first = _as_array(table), limits.first_block(opening.num_computed_tokens, window)
        before = block_ids[:first]
        _check_block_ids(slot, before[before != 0], limits)
        _check_block_ids(slot, block_ids[first:], limits)


def _check_pooling(opening: RowOpening) -> None:
    sampling = opening.sampling
    if sampling.pooling is Pooling.NONE:
        return
    if sampling.num_candidates is not None:
        raise WorkerProtocolError(f"slot {opening.slot} opens with pooling and num_candidates; a row has one of them")
    if opening.grammar_id:
        raise WorkerProtocolError(f"slot {opening.slot} opens with pooling and a grammar; a row has one of them")
    if sampling.pooling is Pooling.MEAN and opening.num_computed_tokens:
        raise WorkerProtocolError(
            f"slot {opening.slot} opens with {opening.num_computed_tokens} tokens computed; a mean needs all of them"
        )


def _check_sampling(slot: int, sampling: SamplingParams, vocab_size: int) -> None:
    for name, value in illegal_values(sampling):
        raise WorkerProtocolError(f"slot {slot} opens with {name} {value}, which is out of range")
    for name in ("logit_bias_token_ids", "logprob_token_ids"):
        if not all(0 <= token_id < vocab_size for token_id in getattr(sampling, name)):
            raise WorkerProtocolError(f"slot {slot} opens with {name} {getattr(sampling, name)}, which is out of range")
    listed, token_ids = sampling.logprob_token_ids, sampling.logit_bias_token_ids
    if listed and not len(listed) == len(set(listed)) == sampling.num_logprobs:
        raise WorkerProtocolError(
            f"slot {slot} opens with num_logprobs {sampling.num_logprobs} and logprob_token_ids {listed}; these must "
            "be num_logprobs distinct tokens"
        )
    if len(token_ids) != len(sampling.logit_bias_values):
        raise WorkerProtocolError(
            f"slot {slot} opens with {len(sampling.logit_bias_values)} biases for {len(token_ids)} tokens"
        )
