"""Sampling on a CPU, for all rows of a step at once: in plain torch, and with the same result in one call of C.

Specification: `pagewire.kernels.sampling.sample`.

Greedy rows without edits use the highest logit and skip all other work. Edits of the logits are sparse: the edited
places of all rows are gathered and changed in one operation per kind of edit. The filters result in one threshold per
row. Each filter keeps the tokens whose logit reaches a value, so no result depends on the order of equal logits. numpy
finds the maximum and sorts, because on a CPU it is ten times faster at this than torch.

The C code leaves a row undecided if its draw depends on how a logarithm or a sum is rounded. This happens for one row
in many thousands. Undecided rows are sampled in plain torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cpu.abi import Structure, check, constants
from pagewire.kernels.noise import gumbel_noise, noise_keys
from pagewire.kernels.sampling import (
    DTYPES,
    FLOATS,
    INTEGERS,
    LARGEST,
    SampledTokens,
    SamplingColumns,
    logprob_columns,
)

Indexes = NDArray[np.int64]

_COLUMNS = (*FLOATS, *(name for name in INTEGERS if name != "num_logprobs"), "seeds")
_EDITS = tuple(name for name in SamplingColumns._field_defaults if name != "logprob_token_ids")


class TokenHistory(NamedTuple):
    """The prompt and output tokens of all running sequences, for repetition, presence and frequency penalties. Each
    sequence has a slot, its index in these arrays; see `SamplingColumns.slots`. The sampler reads only the tokens of
    sequences with penalties.

    Attributes:
        token_ids: [num_slots, max_num_tokens], the prompt first. The entries after a sequence's last token are
            undefined.
        num_prompt_tokens: [num_slots].
    """

    token_ids: NDArray[np.int32]
    num_prompt_tokens: Indexes


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The distinct tokens in the prompt and output of each row (running sequence) that has penalties. The lists of all
    rows are concatenated and have N entries in total."""

    rows: Indexes  # [N]
    token_ids: Indexes  # [N]
    num_outputs: Indexes  # [N] number of occurrences in the row's output

    @staticmethod
    def of_rows(columns: SamplingColumns, history: TokenHistory) -> "SeenTokens | None":
        """Collect the distinct tokens of all rows that have repetition, presence or frequency penalties, with the
        number of times that each occurs in the row's output. Return None if no row has penalties."""
        slots, num_tokens = columns.slots.numpy(), columns.num_tokens.numpy()
        penalized = np.flatnonzero(slots >= 0)
        if not len(penalized):
            return None
        rows, token_ids, num_outputs = [], [], []
        for row in penalized.tolist():
            tokens = history.token_ids[slots[row], : num_tokens[row]]
            seen = np.unique(tokens).astype(np.int64)
            output, counts = np.unique(tokens[history.num_prompt_tokens[slots[row]] :], return_counts=True)
            num_times = np.zeros(len(seen), np.int64)
            num_times[np.searchsorted(seen, output)] = counts
            rows.append(np.full(len(seen), row, np.int64))
            token_ids.append(seen)
            num_outputs.append(num_times)
        return SeenTokens(np.concatenate(rows), np.concatenate(token_ids), np.concatenate(num_outputs))


class TorchSampler:
    """A sampler of next tokens for CPUs, in plain torch and numpy."""

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: TokenHistory,
        max_logprobs: int | None = None,
        highest: Tensor | None = None,
    ) -> SampledTokens:
        """Sample the next token of each row (one running sequence) from its logits.

        Args:
            logits: [R, vocab_size] float32, overwritten.
            columns: one entry per row. For rows with penalties, `slots` are indexes into `history`.
            max_logprobs: an upper bound of all rows' num_logprobs; None means that no row reports log-probabilities.
            highest: the result of `highest_logits`, if it is known.
        """
        highest = highest_logits(logits) if highest is None else highest
        is_nan, token_ids = highest.numpy() < 0, np.maximum(highest.numpy(), 0)
        edited = _edit(logits, columns, SeenTokens.of_rows(columns, history))
        open_rows = np.union1d(edited, np.flatnonzero(columns.temperature.numpy()))
        if len(open_rows):
            token_ids[open_rows] = choose(logits, columns, open_rows)
        token_ids[is_nan] = 0
        return report(logits, columns, token_ids, is_nan, max_logprobs)


def choose(logits: Tensor, columns: SamplingColumns, rows: Indexes) -> Indexes:
    """Choose the next token of each of the N given rows, and return the token ids, [N]. A row with temperature 0 gets
    the token with the highest logit. For the other rows a random token is drawn. The logits must already be edited
    (masks, biases and penalties)."""
    token_ids = _argmax(_rows(logits, rows))
    is_drawing = columns.temperature.numpy()[rows] != 0
    if is_drawing.any():
        token_ids[is_drawing] = _draw(_rows(logits, rows[is_drawing]), columns, rows[is_drawing])
    return token_ids


def report(
    logits: Tensor, columns: SamplingColumns, token_ids: Indexes, is_nan: NDArray[np.bool_], max_logprobs: int | None
) -> SampledTokens:
    """Return the result of a sampling step: the chosen tokens and, for the rows that requested them, log-probabilities
    computed from the edited logits."""
    reports = _report(logits, columns, token_ids, min(max_logprobs or 0, logits.shape[1]))
    return SampledTokens(torch.from_numpy(token_ids), torch.from_numpy(is_nan), *reports)


def _report(logits: Tensor, columns: SamplingColumns, token_ids: Indexes, num_top: int) -> Iterable[Tensor]:
    """Compute the log-probabilities that some rows requested. Return the last four columns of `SampledTokens`, in its
    order: the log-probabilities and the ranks of the chosen tokens, the most likely tokens, and the log-probabilities
    of the most likely tokens."""
    num_rows = len(token_ids)
    reporting = np.flatnonzero(columns.num_logprobs.numpy() >= 0)
    if len(reporting) == num_rows > 0:
        return logprob_columns(logits, torch.from_numpy(token_ids), num_top, columns.logprob_token_ids)
    shapes = ((num_rows,), (num_rows,), (num_rows, num_top), (num_rows, num_top))
    dtypes = (np.float32, np.int32, np.int32, np.float32)
    reports = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if len(reporting):
        listed = None if columns.logprob_token_ids is None else _rows(columns.logprob_token_ids, reporting)
        found = logprob_columns(_rows(logits, reporting), torch.from_numpy(token_ids[reporting]), num_top, listed)
        for report, values in zip(reports, found, strict=True):
            report[reporting] = values.numpy()
    return map(torch.from_numpy, reports)


def highest_logits(logits: Tensor) -> Tensor:
    """Return the token id with the highest logit in each row, [R] int64. If several logits are equal, the lowest token
    id is returned. The result is -1 for a row that contains NaN."""
    token_ids = _argmax(logits)  # argmax treats NaN as the highest value, so checking the highest finds every NaN
    token_ids[np.isnan(logits.numpy()[np.arange(len(token_ids)), token_ids])] = -1
    return torch.from_numpy(token_ids)


def _argmax(logits: Tensor) -> Indexes:
    """Return the index of the highest value in each row, [R]. If several values are equal, the lowest index is
    returned. If a row contains NaN, the index of the first NaN is returned."""
    return logits.numpy().argmax(axis=1)


def _rows(column: Tensor, rows: Indexes) -> Tensor:
    """Return a copy of the given rows of a tensor (the logits or one sampling parameter). The copy is made through
    numpy, which is faster than indexing in torch."""
    return torch.from_numpy(column.numpy()[rows])


# Edits of the logits


@np.errstate(all="ignore")
def _edit(logits: Tensor, columns: SamplingColumns, seen: SeenTokens | None) -> Indexes:
    """Edit the logits of all rows in place before sampling: apply masks, biases, suppression of stop tokens and
    penalties, in this order. Return the indexes of the rows that were changed."""
    changed = []
    values = logits.numpy()
    is_allowed = _allowed(columns, logits.shape[1])
    if is_allowed is not None:
        np.copyto(values, -np.inf, where=~is_allowed)
        changed.append(np.flatnonzero(~is_allowed.all(1)))
    if columns.bias_token_ids is not None and columns.bias_values is not None:
        token_ids = columns.bias_token_ids.numpy()
        rows, entries = np.nonzero(token_ids >= 0)
        if is_allowed is not None:
            is_open = is_allowed[rows, token_ids[rows, entries]]
            rows, entries = rows[is_open], entries[is_open]
        places = (rows, token_ids[rows, entries])
        np.add.at(values, places, columns.bias_values.numpy()[rows, entries])
        values[places] = np.minimum(values[places], LARGEST)  # an infinite bias must not turn differences into NaN
        changed.append(rows)
    if columns.stop_token_ids is not None and columns.min_num_tokens is not None:
        stops = columns.stop_token_ids.numpy()
        is_suppressed = columns.num_tokens.numpy() < columns.min_num_tokens.numpy()
        rows, entries = np.nonzero(is_suppressed[:, None] & (stops >= 0) & (stops < logits.shape[1]))
        values[rows, stops[rows, entries]] = -np.inf
        changed.append(rows)
    if seen is not None:
        _penalize(values, columns, seen)
        changed.append(seen.rows)
    return np.unique(np.concatenate(changed)) if changed else np.empty(0, np.int64)


def _allowed(columns: SamplingColumns, vocab_size: int) -> NDArray[np.bool_] | None:
    """Return a mask of the tokens that each row may choose, [R, vocab_size] bool. Return None if no row has a mask."""
    if columns.masks is None or columns.mask_lines is None:
        return None
    lines = columns.mask_lines.numpy()
    bits = np.where(lines[:, None] >= 0, columns.masks.numpy()[lines], -1).view(np.uint8)
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def _penalize(logits: NDArray[np.float32], columns: SamplingColumns, seen: SeenTokens) -> None:
    """Apply the penalties to the logits in place. The repetition penalty applies to tokens in the prompt or the output.
    The presence and frequency penalties apply only to tokens in the output."""
    presence, frequency, repetition = (
        column.numpy()[seen.rows]
        for column in (columns.presence_penalty, columns.frequency_penalty, columns.repetition_penalty)
    )
    subtrahends = np.where(seen.num_outputs > 0, presence + frequency.astype(np.float64) * seen.num_outputs, 0.0)
    places = (seen.rows, seen.token_ids)
    values = logits[places]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[places] = values - subtrahends.astype(np.float32)


# Draws


def _draw(logits: Tensor, columns: SamplingColumns, rows: Indexes) -> Indexes:
    """Draw a random token for each of the D given rows, and return the token ids, [D]. A token is drawn from the row's
    probability distribution after the temperature and the top-k, top-p and min-p filters. `logits` [D, vocab_size] is
    overwritten."""
    # With the highest logit at 0, no temperature, however small, can overflow.
    logits -= logits.amax(1, keepdim=True).clamp_(min=-LARGEST)
    logits /= _rows(columns.temperature, rows).unsqueeze(1)
    top_k, top_p, min_p = (column.numpy()[rows] for column in (columns.top_k, columns.top_p, columns.min_p))
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if len(filtered):
        kept = _rows(logits, filtered)
        threshold = _threshold(kept, columns, rows[filtered])
        logits.numpy()[filtered] = kept.masked_fill_(kept < threshold, -torch.inf).numpy()
    numbers = (column.numpy()[rows] for column in (columns.seeds, columns.sample_indexes, columns.num_tokens))
    keys = noise_keys(*(column.astype(np.int64) for column in numbers))
    return _argmax(logits.add_(gumbel_noise(torch.from_numpy(keys), logits.shape[1])))


def _threshold(logits: Tensor, columns: SamplingColumns, rows: Indexes) -> Tensor:
    """Return the lowest logit that the top-k, top-p and min-p filters of each row keep, [F, 1]. All lower logits are to
    be dropped. The highest logit of each row must be 0."""
    vocab_size = logits.shape[1]
    top_k, top_p = columns.top_k.numpy()[rows], _rows(columns.top_p, rows).unsqueeze(1)
    threshold = _rows(columns.min_p, rows).unsqueeze(1).log_()  # log(0) is -inf: keeps all
    if not (top_k.any() or (columns.top_p.numpy()[rows] < 1.0).any()):
        return threshold
    max_kept = np.minimum(np.where(top_k > 0, top_k, vocab_size), vocab_size)
    num_sorted = int(max_kept.max())
    highest = logits.topk(num_sorted, dim=1).values if num_sorted < vocab_size else _sort(logits)
    # A running sum, not a softmax: the tokens that a row keeps must not depend on how many values other rows need.
    probabilities = highest.exp()
    running = probabilities.cumsum(1)
    last = torch.from_numpy(max_kept.astype(np.int64) - 1).unsqueeze(1)
    before = running - probabilities
    num_kept = (before < top_p * running.gather(1, last)).sum(1, keepdim=True).clamp_(min=1)
    num_kept = torch.where(top_p < 1.0, num_kept, vocab_size)
    return torch.maximum(threshold, highest.gather(1, torch.minimum(num_kept - 1, last)))


def _sort(logits: Tensor) -> Tensor:
    """Sort the logits of each row in descending order: [F, vocab_size]."""
    return torch.from_numpy(np.sort(logits.numpy(), axis=1)[:, ::-1].copy())


# In C


class _Kernel:
    """A wrapper of the C function that samples tokens. All calls use the same scratch buffer, so only one call may run
    at a time."""

    def __init__(self, library: Any) -> None:
        self._sample, self._scratch_size = library.sample, library.sampling_scratch_size
        self._scratch = torch.empty(0)

    def run(self, step: Structure, logits: Tensor, highest: Tensor | None) -> None:
        """Sample one token per row with the C function. `step` is the C structure with the arguments; this method adds
        the logits, `highest`, the scratch buffer and the number of threads. The caller must have filled in all other
        members. Raises ValueError if `logits` or `highest` has a wrong shape or dtype."""
        step.at.num_rows, step.at.vocab_size = num_rows, vocab_size = logits.shape
        step.at.logits_stride, last_stride = logits.stride()
        if logits.dtype != torch.float32 or last_stride != 1:
            raise ValueError(
                f"the logits are {list(logits.shape)} of {logits.dtype}; they must be contiguous rows of float32"
            )
        check("highest", highest, torch.int64, (num_rows,))
        step.at.num_threads = num_threads = min(torch.get_num_threads(), max(num_rows, 1))
        num_floats = num_threads * self._scratch_size(vocab_size)
        if self._scratch.numel() < num_floats:
            self._scratch = torch.empty(num_floats)
        step.put(
            logits=logits.data_ptr(),
            scratch=self._scratch.data_ptr(),
            highest=None if highest is None else highest.data_ptr(),
        )
        self._sample(step.at)


class CpuSampler:
    """A sampler of next tokens for CPUs, written in C. It returns the same tokens and log-probabilities as
    `TorchSampler`."""

    def __init__(self, library: Any) -> None:
        self._kernel = _Kernel(library)

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        history: TokenHistory,
        max_logprobs: int | None = None,
        highest: Tensor | None = None,
    ) -> SampledTokens:
        """Sample the next token of each row from its logits, in C. The arguments and results are the same as for
        `TorchSampler.sample`."""
        num_tokens, num_rows = columns.num_tokens.long(), len(logits)
        step = _step(columns, history, num_tokens)
        lists = {name: getattr(columns, name) for name in _EDITS}
        widths = (("max_biases", "bias_token_ids"), ("max_stops", "stop_token_ids"), ("mask_stride", "masks"))
        step.put(**lists, **{width: lists[name].shape[1] for width, name in widths if lists[name] is not None})
        token_ids, statuses = _outputs(step, num_rows)
        self._kernel.run(step, logits, highest)
        left = np.flatnonzero(statuses == constants.ROW_OPEN)
        if len(left):
            token_ids[left] = choose(logits, columns, left)
        return report(logits, columns, token_ids, statuses == constants.ROW_NAN, max_logprobs)

    def of_table(self, columns: SamplingColumns, history: TokenHistory) -> "TableSampler":
        """Return a sampler that reads the sampling parameters of all running sequences from the table `columns`. The
        table has one entry per slot (the index of a sequence). It is read again at each call, so the caller may change
        it between calls."""
        return TableSampler(self._kernel, columns, history)


class TableSampler:
    """A sampler, written in C, that reads the sampling parameters of running sequences from a table with one entry per
    slot (the index of a sequence). It does not support logit biases, suppression of stop tokens or
    log-probabilities."""

    def __init__(self, kernel: _Kernel, columns: SamplingColumns, history: TokenHistory) -> None:
        self._kernel = kernel
        self._columns, self._history = columns, history  # keeps alive the memory that the step points to
        slots, num_tokens = torch.zeros(2, len(columns.seeds), dtype=torch.int64)
        self._slots, self._num_tokens = slots.numpy(), num_tokens.numpy()
        self._step = _step(columns, history, num_tokens)
        self._step.put(entries=slots)
        self._token_ids, self._statuses = _outputs(self._step, len(columns.seeds))

    def sample_tokens(
        self,
        logits: Tensor,
        slots: Indexes,
        num_tokens: Indexes,
        highest: Tensor | None = None,
        masks: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
    ) -> tuple[Indexes, NDArray[np.bool_]]:
        """Sample the next token of each of R running sequences. Return the token ids, [R], and a mask of the sequences
        whose logits contain NaN, [R].

        Args:
            logits: [R, vocab_size] float32, overwritten.
            slots: [R] int64, the index of each sequence in the table, without duplicates.
            num_tokens: [R] int64, as in `SamplingColumns`.
            highest: the result of `highest_logits`, if it is known.
            masks: `masks` and `mask_lines` as in `SamplingColumns`; None means that all tokens are allowed.

        Raises:
            ValueError: the arguments do not fit each other.
        """
        num_rows = len(slots)
        if logits.shape[0] != num_rows or len(num_tokens) != num_rows:
            raise ValueError(
                f"{num_rows} slots, {len(logits)} rows of logits and {len(num_tokens)} lengths do not match"
            )
        self._slots[:num_rows], self._num_tokens[:num_rows] = slots, num_tokens
        if masks is not None or self._step.at.masks:
            lines, mask_lines = (None, None) if masks is None else map(torch.from_numpy, masks)
            check("mask_lines", mask_lines, torch.int32, (num_rows,))
            self._step.put(masks=lines, mask_lines=mask_lines, mask_stride=0 if lines is None else lines.shape[1])
        self._kernel.run(self._step, logits, highest)
        token_ids, statuses = self._token_ids[:num_rows].copy(), self._statuses[:num_rows]
        left = statuses == constants.ROW_OPEN
        if left.any():
            token_ids[left] = choose(logits, self._columns_of(slots, num_tokens), np.flatnonzero(left))
        return token_ids, statuses == constants.ROW_NAN

    def _columns_of(self, slots: Indexes, num_tokens: Indexes) -> SamplingColumns:
        columns = {name: torch.from_numpy(getattr(self._columns, name).numpy()[slots]) for name in _COLUMNS}
        columns["num_tokens"] = torch.from_numpy(num_tokens.astype(np.int32))
        return self._columns._replace(**columns)


def _step(columns: SamplingColumns, history: TokenHistory, num_tokens: Tensor) -> Structure:
    """Return a C structure for the sampling function in which only the sampling parameters and the token history are
    filled in. The caller adds the remaining members."""
    for name in _COLUMNS:
        check(name, getattr(columns, name), DTYPES[name], (len(columns.seeds),))
    tokens, num_prompt_tokens = map(torch.from_numpy, history)
    check("num_prompt_tokens", num_prompt_tokens, torch.int64, (len(tokens),))
    return Structure(
        "sampling_step",
        num_tokens=num_tokens,
        history=tokens,
        history_stride=tokens.shape[1],
        num_prompt_tokens=num_prompt_tokens,
        **{name: getattr(columns, name) for name in _COLUMNS},
    )


def _outputs(step: Structure, num_rows: int) -> tuple[Indexes, NDArray[np.uint8]]:
    """Allocate the output arrays of the C sampling function and write their addresses to `step`. Return two arrays with
    one entry per row: the token ids, and the status codes."""
    token_ids, statuses = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.uint8)
    step.put(token_ids=token_ids, statuses=statuses)
    return token_ids.numpy(), statuses.numpy()
