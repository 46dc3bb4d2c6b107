"""From logits to tokens in one call of C for all rows of a step: the tokens of `pagewire.kernels.cpu.sampling.sample`.

Rows whose draw hangs on how a logarithm or a sum is rounded, which is one of many thousands, are computed as that does.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cpu.paged import check
from pagewire.kernels.cpu.sampling import Indexes, SeenTokens, TokenHistory, choose, report, sample
from pagewire.kernels.sampling import SampledTokens, SamplingColumns

_NAN, _OPEN = 1, 2  # of `statuses`
_COLUMNS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "sample_indexes", "slots", "seeds"),
)
_LISTS = ("bias_token_ids", "bias_values", "stop_token_ids", "min_num_tokens")


class SamplingStep(ctypes.Structure):
    """Mirrors `sampling_step` of source/sampler.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "entries", "highest", *_COLUMNS, "num_tokens", *_LISTS)),
        *((name, ctypes.c_void_p) for name in ("history", "num_prompt_tokens")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "max_biases", "max_stops")),
        *((name, ctypes.c_int64) for name in ("history_stride", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("scratch", "token_ids", "statuses")),
    )


class Chosen(NamedTuple):
    """The tokens of rows, and what became of each: 0 chosen, 1 its logits hold NaN, 2 left open."""

    token_ids: Indexes
    statuses: NDArray[np.uint8]


class CpuSampler:
    """The sampler in C. It computes in memory that it keeps, so only one call may run at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = library.sample
        self._sample.argtypes, self._sample.restype = [ctypes.c_void_p], None
        self._scratch_size = library.sampling_scratch_size
        self._scratch_size.argtypes, self._scratch_size.restype = [ctypes.c_int64], ctypes.c_int64
        self._scratch = np.empty(0, np.float32)

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: TokenHistory,
        max_logprobs: int | None = None,
        highest: Tensor | None = None,
    ) -> SampledTokens:
        """See `pagewire.kernels.cpu.sampling.sample`. Slots are lines of `history`."""
        num_tokens = columns.num_tokens.numpy().astype(np.int64)
        chosen = self._choose(logits, columns, num_tokens, history, highest, None)
        is_nan = chosen.statuses == _NAN
        left = np.flatnonzero(chosen.statuses == _OPEN)
        if len(left):
            chosen.token_ids[left] = choose(logits, columns, left)
        return report(logits, columns, chosen.token_ids, is_nan, max_logprobs)

    def _choose(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        num_tokens: Indexes,
        history: TokenHistory | None,
        highest: Tensor | None,
        entries: Indexes | None,
    ) -> Chosen:
        num_rows, vocab_size = logits.shape
        check("logits", logits, torch.float32, (num_rows, vocab_size))
        num_threads = min(torch.get_num_threads(), max(num_rows, 1))
        chosen = Chosen(np.empty(num_rows, np.int64), np.empty(num_rows, np.uint8))
        step = SamplingStep(
            logits=logits.data_ptr(),
            highest=None if highest is None else highest.data_ptr(),
            entries=None if entries is None else entries.ctypes.data,
            num_tokens=num_tokens.ctypes.data,
            num_rows=num_rows,
            vocab_size=vocab_size,
            num_threads=num_threads,
            scratch=self._room(num_threads * self._scratch_size(vocab_size)),
            token_ids=chosen.token_ids.ctypes.data,
            statuses=chosen.statuses.ctypes.data,
        )
        for name in _COLUMNS:
            setattr(step, name, getattr(columns, name).data_ptr())
        _put_lists(step, columns)
        if history is not None:
            step.history, step.num_prompt_tokens = history.token_ids.ctypes.data, history.num_prompt_tokens.ctypes.data
            step.history_stride = history.token_ids.shape[1]
        self._sample(ctypes.addressof(step))
        return chosen

    def _room(self, num_floats: int) -> int:
        if len(self._scratch) < num_floats:
            self._scratch = np.empty(num_floats, np.float32)
        return self._scratch.ctypes.data


class TorchSampler:
    """The same in plain torch."""

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


def _put_lists(step: SamplingStep, columns: SamplingColumns) -> None:
    if columns.bias_token_ids is not None:
        step.max_biases = columns.bias_token_ids.shape[1]
    if columns.stop_token_ids is not None:
        step.max_stops = columns.stop_token_ids.shape[1]
    for name in _LISTS:
        column = getattr(columns, name)
        if column is not None:
            setattr(step, name, column.data_ptr())
