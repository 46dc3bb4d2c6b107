"""From logits to tokens in one call of C for all rows of a step: the tokens of `pagewire.kernels.cpu.sampling.sample`.

Rows whose draw hangs on how a logarithm or a sum is rounded, which is one of many thousands, are computed as that does.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from pagewire.kernels.cpu.paged import check
from pagewire.kernels.cpu.sampling import Indexes, SeenTokens, TokenHistory, choose, report, sample
from pagewire.kernels.sampling import DTYPES, FLOATS, INTEGERS, SampledTokens, SamplingColumns

_NAN, _OPEN = 1, 2  # of `statuses`
_COLUMNS = (*FLOATS, *(name for name in INTEGERS if name != "num_logprobs"), "seeds")


class SamplingStep(ctypes.Structure):
    """Mirrors `sampling_step` of source/sampler.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "entries", "highest", *_COLUMNS, "num_tokens")),
        *((name, ctypes.c_void_p) for name in (*SamplingColumns._field_defaults, "history", "num_prompt_tokens")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "logits_stride", "max_biases", "max_stops")),
        *((name, ctypes.c_int64) for name in ("mask_stride", "history_stride", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("scratch", "token_ids", "statuses")),
    )


class Chosen(NamedTuple):
    """The tokens of rows, and what became of each: 0 chosen, 1 its logits hold NaN, 2 left open."""

    token_ids: Indexes
    statuses: NDArray[np.uint8]


class _Kernel:
    """The call of C. It computes in memory that it keeps, so only one may run at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = library.sample
        self._sample.argtypes, self._sample.restype = [ctypes.c_void_p], None
        self._scratch_size = library.sampling_scratch_size
        self._scratch_size.argtypes, self._scratch_size.restype = [ctypes.c_int64], ctypes.c_int64
        self._scratch = torch.empty(0)
        self._room_of: dict[int, int] = {}  # by size of the vocabulary, for how many threads the scratch is

    def run(self, step: SamplingStep, logits: Tensor, highest: Tensor | None) -> None:
        """Choose tokens by a step in which all else is filled in. Raises ValueError if the logits do not fit."""
        num_rows, vocab_size = logits.shape
        stride, last_stride = logits.stride()
        if logits.dtype != torch.float32 or last_stride != 1:
            raise ValueError(f"the logits are {list(logits.shape)} of {logits.dtype}; make them dense rows of float32")
        if highest is not None:
            check("highest", highest, torch.int64, (num_rows,))
            step.highest = highest.data_ptr()
        else:
            step.highest = None
        num_threads = min(torch.get_num_threads(), max(num_rows, 1))
        step.num_rows, step.vocab_size, step.num_threads = num_rows, vocab_size, num_threads
        step.logits, step.logits_stride = logits.data_ptr(), stride
        step.scratch = self._room(num_threads, vocab_size)
        self._sample(ctypes.addressof(step))

    def _room(self, num_threads: int, vocab_size: int) -> int:
        if self._room_of.get(vocab_size, 0) < num_threads:
            self._scratch = torch.empty(num_threads * self._scratch_size(vocab_size))
            self._room_of = {vocab_size: num_threads}
        return self._scratch.data_ptr()


class CpuSampler:
    """The sampler in C."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernel = _Kernel(library)

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: TokenHistory,
        max_logprobs: int | None = None,
        highest: Tensor | None = None,
    ) -> SampledTokens:
        """See `pagewire.kernels.cpu.sampling.sample`. `columns.slots` name lines of `history`."""
        step = _step(columns, history)
        _put_lists(step, columns)
        num_rows = len(logits)
        num_tokens = columns.num_tokens.numpy().astype(np.int64)
        step.num_tokens = _address(num_tokens, np.int64, num_rows)
        chosen = _outputs(step, num_rows)
        self._kernel.run(step, logits, highest)
        left = np.flatnonzero(chosen.statuses == _OPEN)
        if len(left):
            chosen.token_ids[left] = choose(logits, columns, left)
        return report(logits, columns, chosen.token_ids, chosen.statuses == _NAN, max_logprobs)

    def of_table(self, columns: SamplingColumns, history: TokenHistory) -> "TableSampler":
        """Return the sampler of a table's rows: `columns` have an entry for each slot, and are read at each call."""
        return TableSampler(self._kernel, columns, history)


class TableSampler:
    """Chooses tokens of rows by slot, where nothing else is asked for: no biases, suppression or log-probabilities."""

    def __init__(self, kernel: _Kernel, columns: SamplingColumns, history: TokenHistory) -> None:
        self._kernel = kernel
        self._columns, self._history = columns, history  # whose memory the step names
        self._step = _step(columns, history)
        num_slots = len(columns.seeds)
        self._slots, self._num_tokens = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self._step.entries = _address(self._slots, np.int64, num_slots)
        self._step.num_tokens = _address(self._num_tokens, np.int64, num_slots)
        self._chosen = _outputs(self._step, num_slots)

    def take_tokens(
        self,
        logits: Tensor,
        slots: Indexes,
        num_tokens: Indexes,
        highest: Tensor | None = None,
        masks: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
    ) -> tuple[Indexes, NDArray[np.bool_]]:
        """Return the tokens of the rows of some slots, and where the logits hold NaN.

        Args:
            logits: [R, vocab_size] float32, overwritten.
            slots: [R] int64, none twice.
            num_tokens: [R] int64, as `SamplingColumns` has them.
            highest: see `pagewire.kernels.cpu.sampling.sample`.
            masks: `masks` and `mask_lines` as `SamplingColumns` has them; None: every row may take any token.

        Raises:
            ValueError: the arguments do not fit each other.
        """
        num_rows = len(slots)
        if len(logits) != num_rows or len(num_tokens) != num_rows:
            raise ValueError(f"{num_rows} slots come with {len(logits)} logits and {len(num_tokens)} lengths")
        self._slots[:num_rows], self._num_tokens[:num_rows] = slots, num_tokens
        _put_masks(self._step, masks, num_rows)
        self._kernel.run(self._step, logits, highest)
        token_ids, statuses = self._chosen.token_ids[:num_rows].copy(), self._chosen.statuses[:num_rows]
        left = statuses == _OPEN
        if left.any():
            token_ids[left] = choose(logits, self._columns_of(slots, num_tokens), np.flatnonzero(left))
        return token_ids, statuses == _NAN

    def _columns_of(self, slots: Indexes, num_tokens: Indexes) -> SamplingColumns:
        columns = {name: torch.from_numpy(getattr(self._columns, name).numpy()[slots]) for name in _COLUMNS}
        columns["num_tokens"] = torch.from_numpy(num_tokens.astype(np.int32))
        return self._columns._replace(**columns)


class TorchSampler:
    """The sampler in plain torch."""

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: TokenHistory,
        max_logprobs: int | None = None,
        highest: Tensor | None = None,
    ) -> SampledTokens:
        """See `CpuSampler.sample`."""
        return sample(logits, columns, SeenTokens.of_rows(columns, history), max_logprobs, highest)


def _step(columns: SamplingColumns, history: TokenHistory) -> SamplingStep:
    """The step of these columns and nothing else."""
    step = SamplingStep()
    for name in _COLUMNS:
        column = getattr(columns, name)
        check(name, column, DTYPES[name], (len(columns.seeds),))
        setattr(step, name, column.data_ptr())
    tokens, num_prompt_tokens = history
    step.history = _address(tokens, np.int32, len(tokens))
    step.num_prompt_tokens = _address(num_prompt_tokens, np.int64, len(tokens))
    step.history_stride = tokens.shape[1]
    return step


def _outputs(step: SamplingStep, num_rows: int) -> Chosen:
    """Where the step puts what it finds."""
    chosen = Chosen(np.empty(num_rows, np.int64), np.empty(num_rows, np.uint8))
    step.token_ids, step.statuses = (_address(column, column.dtype, num_rows) for column in chosen)
    return chosen


def _address(array: NDArray, dtype: DTypeLike, length: int) -> int:
    """Where a dense array begins. Raises ValueError if it is not what the kernel reads."""
    if array.dtype != dtype or len(array) != length or not array.flags.c_contiguous:
        raise ValueError(f"an array is {array.shape} of {array.dtype}; make it {length} of {dtype}, dense")
    return array.__array_interface__["data"][0]


def _put_masks(step: SamplingStep, masks: tuple[NDArray, NDArray] | None, num_rows: int) -> None:
    if masks is None:
        step.masks = step.mask_lines = None
        return
    lines, mask_lines = masks
    step.masks, step.mask_stride = _address(lines, np.int32, len(lines)), lines.shape[1]
    step.mask_lines = _address(mask_lines, np.int32, num_rows)


def _put_lists(step: SamplingStep, columns: SamplingColumns) -> None:
    if columns.bias_token_ids is not None:
        step.max_biases = columns.bias_token_ids.shape[1]
    if columns.stop_token_ids is not None:
        step.max_stops = columns.stop_token_ids.shape[1]
    if columns.masks is not None:
        step.mask_stride = columns.masks.shape[1]
    for name in SamplingColumns._field_defaults:
        column = getattr(columns, name)
        if column is not None:
            setattr(step, name, column.data_ptr())
