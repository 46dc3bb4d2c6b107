"""The sampling of rows: the request of each row, the combined request of a step's rows, and the samples.

Parameters that are single numbers are stored in columns by slot, named as in `pagewire.kernels.sampling`. A device has
a copy of these columns. Biases, listed tokens, and suppressed stop tokens are sent with each step in which their rows
sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import Candidates, Logprobs, Pooling, RowOpening, RowStatus, SamplingParams
from pagewire.kernels.sampling import FLOATS, INTEGERS, SampledTokens, SamplingColumns, logprob_columns
from worker_service.rows.masks import IntArray, StepMasks
from worker_service.rows.reading import ValueReader

_MAX_INT32 = (1 << 31) - 1
_NO_LOGPROBS = Logprobs()
_NO_CANDIDATES = Candidates()


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampling results of a step, after their copy to the host. Each field is also a field of `StepResult`."""

    statuses: tuple[RowStatus, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = _NO_LOGPROBS
    candidates: Candidates = _NO_CANDIDATES
    embeddings: tuple[bytes, ...] = ()


class SamplingTable:
    """The sampling parameters of all running sequences of a worker, as arrays indexed by slot.

    A slot is the index of a sequence's row in the worker's table. Entries of a vacant slot are undefined.

    Attributes:
        lines: [len(FLOATS) + len(INTEGERS), num_slots] int32; floats are stored as bits.
        seeds: [num_slots] uint64.
        params: the parameters that the scheduler sent.
        num_prompt_logprobs: [num_slots], -1: not requested.
        reports_candidates: [num_slots], whether the row reports candidates instead of choosing a token.
        reports_all: [num_slots], whether the row reports the log probability of every token of the vocabulary. For such
            a row the sampler reports only the chosen token's, so that the columns of the other rows stay narrow.
        is_pooled: [num_slots], whether the row reports an embedding instead of choosing a token, and has no logits.
        is_plain: [num_slots], whether the row returns the token with the model's highest logit and reports nothing
            else.
        takes_token: [num_slots], whether the row returns one token that depends only on its logits, its numbers in
            `lines` and its grammar, and reports nothing else.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.lines = np.zeros((len(FLOATS) + len(INTEGERS), num_slots), np.int32)
        self._floats = dict(zip(FLOATS, self.lines[: len(FLOATS)].view(np.float32), strict=True))
        self._integers = dict(zip(INTEGERS, self.lines[len(FLOATS) :], strict=True))
        self.seeds = np.zeros(num_slots, np.uint64)
        self.params: list[SamplingParams] = [SamplingParams()] * num_slots
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int64)
        self.reports_candidates = np.zeros(num_slots, np.bool_)
        self.reports_all = np.zeros(num_slots, np.bool_)
        self.is_pooled = np.zeros(num_slots, np.bool_)
        self.is_plain = np.zeros(num_slots, np.bool_)
        self.takes_token = np.zeros(num_slots, np.bool_)
        self._is_biased = np.zeros(num_slots, np.bool_)
        self._lists_tokens = np.zeros(num_slots, np.bool_)
        self._min_num_tokens = np.zeros(num_slots, np.int64)  # with fewer tokens, stop tokens are suppressed; 0: never

    @property
    def is_penalized(self) -> NDArray[np.bool_]:
        """For each slot, whether its sequence has penalties, [num_slots].

        Penalties need counts of the sequence's earlier tokens.
        """
        return self._integers["slots"] >= 0

    def open(self, opening: RowOpening) -> None:
        """Store the sampling parameters of a new sequence.

        `opening` is the scheduler's message that starts the sequence.
        """
        slot, sampling = opening.slot, opening.sampling
        self.params[slot] = sampling
        self.seeds[slot] = opening.seed
        for name, floats in self._floats.items():
            floats[slot] = getattr(sampling, name)
        reports_candidates, is_penalized = sampling.num_candidates is not None, has_penalties(sampling)
        num_reported = sampling.num_candidates if reports_candidates else sampling.num_logprobs
        if reports_candidates:
            self._floats["temperature"][slot] = 0.0  # the drawn token is never used
        integers = self._integers
        integers["top_k"][slot] = min(sampling.top_k, self._vocab_size)
        integers["sample_indexes"][slot] = np.uint32(opening.sample_index).view(np.int32)
        integers["slots"][slot] = slot if is_penalized else -1
        lists_tokens = bool(sampling.logprob_token_ids)
        is_whole = num_reported is not None and num_reported >= self._vocab_size
        self.reports_all[slot] = reports_all = is_whole and not (reports_candidates or lists_tokens)
        self._lists_tokens[slot] = lists_tokens
        integers["num_logprobs"][slot] = (
            -1 if num_reported is None else 0 if reports_all else min(num_reported, self._vocab_size)
        )
        num_prompt_logprobs = -1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        is_biased = bool(sampling.logit_bias_token_ids)
        is_delayed = bool(sampling.min_tokens and sampling.stop_token_ids)
        min_num_tokens = min(opening.num_prompt_tokens + sampling.min_tokens, _MAX_INT32)
        self.num_prompt_logprobs[slot] = num_prompt_logprobs
        self.reports_candidates[slot] = reports_candidates
        self.is_pooled[slot] = is_pooled = sampling.pooling is not Pooling.NONE
        self._is_biased[slot] = is_biased
        self._min_num_tokens[slot] = min_num_tokens if is_delayed else 0
        takes_token = not (is_biased or is_delayed or is_pooled) and num_reported is None and num_prompt_logprobs < 0
        self.takes_token[slot] = takes_token
        is_greedy = sampling.temperature == 0.0
        self.is_plain[slot] = takes_token and is_greedy and not is_penalized and not opening.grammar_id

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy the sampling parameters of slots `sources` to slots `targets`, for forked sequences.

        All sources are read before any target is written.
        """
        self.lines[:, targets] = self.lines[:, sources]
        self._integers["slots"][targets] = np.where(self.is_penalized[targets], targets, -1)
        for column in (
            *(self.seeds, self.num_prompt_logprobs, self.reports_candidates, self.is_plain, self.takes_token),
            *(self.reports_all, self.is_pooled),
            *(self._is_biased, self._lists_tokens, self._min_num_tokens),
        ):
            column[targets] = column[sources]
        for target, params in zip(targets, [self.params[source] for source in sources], strict=True):
            self.params[target] = params

    def of_step(self, slots: IntArray, num_tokens: IntArray, masks: StepMasks | None = None) -> "StepSampling":
        """Combine the sampling parameters of the R sequences that sample in a step into one object.

        `slots` and `num_tokens` are [R] each, in slot order. `num_tokens` is the number of tokens before the sampled
        token. `masks` are the grammar masks of these sequences, or None if no sequence has a grammar.
        """
        return StepSampling(
            slots=slots,
            num_tokens=num_tokens,
            reports_candidates=self.reports_candidates[slots],
            is_penalized=self._integers["slots"][slots] >= 0,
            num_reported=self._integers["num_logprobs"][slots],
            whole_rows=np.flatnonzero(self.reports_all[slots]).tolist(),
            vocab_size=self._vocab_size,
            edits=self._edits(slots, num_tokens, masks),
            masks=masks,
        )

    def all_columns(self) -> SamplingColumns:
        """Return the sampling parameters of all running sequences in the form that the sampling kernels read.

        The columns share the table's memory. The column with the sequences' numbers of tokens is undefined.
        """
        return _columns(self.lines, self.seeds, np.zeros(len(self.seeds), np.int32))

    def columns(self, step: "StepSampling") -> SamplingColumns:
        """Return the sampling parameters of the sequences that sample in a step, in the form that CPU kernels read."""
        columns = _columns(
            self.lines.take(step.slots, axis=1), self.seeds[step.slots], step.num_tokens.astype(np.int32)
        )
        edits = {name: torch.from_numpy(column) for name, column in step.edits.items()}
        return columns._replace(**edits) if edits else columns

    def _edits(self, slots: IntArray, num_tokens: IntArray, masks: StepMasks | None) -> dict[str, NDArray]:
        edits: dict[str, NDArray] = {}
        if masks is not None:
            edits["masks"], edits["mask_lines"] = masks.masks, masks.lines
        if self._is_biased[slots].any():
            rows = [self.params[slot] for slot in slots]
            edits["bias_token_ids"] = _padded([row.logit_bias_token_ids for row in rows], -1, np.int32)
            edits["bias_values"] = _padded([row.logit_bias_values for row in rows], 0.0, np.float32)
        if self._lists_tokens[slots].any():
            listed = [self.params[slot].logprob_token_ids for slot in slots]
            edits["logprob_token_ids"] = _padded(listed, -1, np.int32)
        min_num_tokens = self._min_num_tokens[slots]
        suppresses = num_tokens < min_num_tokens
        if suppresses.any():
            stops = [self._stops(slot) if is_in else () for slot, is_in in zip(slots, suppresses, strict=True)]
            if masks is not None:  # if a grammar allows only stop tokens, the output ends
                stops = [row if masks.allows_other_than(index, row) else () for index, row in enumerate(stops)]
            edits["stop_token_ids"] = _padded(stops, -1, np.int32)
            edits["min_num_tokens"] = min_num_tokens.astype(np.int32)
        return edits

    def _stops(self, slot: int) -> tuple[int, ...]:
        """Return the stop tokens of a sequence.

        Ids outside the vocabulary are left out, because they can never be chosen.
        """
        return tuple(token_id for token_id in self.params[slot].stop_token_ids if token_id < self._vocab_size)


@dataclass(frozen=True, slots=True)
class StepSampling:
    """The sampling parameters of the R sequences (rows) that sample in one step, in slot order."""

    slots: IntArray  # [R]
    num_tokens: IntArray  # [R] without the token that is sampled
    reports_candidates: NDArray[np.bool_]  # [R]
    is_penalized: NDArray[np.bool_]  # [R]
    num_reported: NDArray[np.int32]  # [R], -1: no log probabilities
    whole_rows: list[int]  # indices of the rows that report all tokens of the vocabulary
    vocab_size: int
    # fields of `SamplingColumns`: biases, stop tokens, masks and listed tokens, each if any row has some
    edits: dict[str, NDArray]
    masks: StepMasks | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def discards_token(self) -> NDArray[np.bool_]:
        """[R], whether the token that is sampled for a sequence is discarded.

        This is so if the sequence reports candidates instead of a token, or if its grammar mask is not ready in time.
        """
        return self.reports_candidates if self.masks is None else self.reports_candidates | self.masks.is_late

    @property
    def max_reported(self) -> int | None:
        """The largest number of log probabilities that a sequence of this step requests, or None if none does."""
        most = int(self.num_reported.max(initial=-1))
        return None if most < 0 else most

    @property
    def takes_tokens_only(self) -> bool:
        """Whether the plain sampler, which only samples one token for each sequence, can compute this step.

        It can if no sequence has penalties, biases, suppressed stop tokens, a grammar mask, or log probabilities to
        report.
        """
        return not self.edits and not self.is_penalized.any() and self.max_reported is None

    def results(self, sampled: SampledTokens, logits: Tensor) -> list[Tensor]:
        """Return the tensors with the tokens, NaN flags and log probabilities, in the order in which `read` reads them.

        `logits` [R, vocab_size] are the logits after sampling.
        """
        return [sampled.token_ids, sampled.is_nan, *self.reports(sampled, logits)]

    def reports(self, sampled: SampledTokens, logits: Tensor) -> list[Tensor]:
        """Return the tensors with the requested log probabilities, in the order in which `read` reads them.

        The list is empty if no sequence requests any. In the results of a step, these tensors follow the tokens and the
        NaN flags.
        """
        if self.max_reported is None:
            return []
        reports = [sampled.logprobs, sampled.ranks, sampled.top_token_ids, sampled.top_logprobs]
        for row in self.whole_rows:
            one = slice(row, row + 1)
            # A copy, since the bits of a sum may depend on the alignment of its terms.
            reports += logprob_columns(logits[one].clone(), sampled.token_ids[one], self.vocab_size)
        return reports

    @property
    def num_values(self) -> int:
        """The number of int32 and float32 values that `read` reads for the sequences that sample in this step."""
        num_whole = 2 * len(self.whole_rows) * (1 + self.vocab_size)
        return num_whole + self.num_rows * (2 if self.max_reported is None else 4 + 2 * self.max_reported)

    def read(self, reading: ValueReader) -> Samples:
        num = self.num_rows
        token_ids, is_nan = reading.integers(num), reading.integers(num) != 0
        chooses = ~self.reports_candidates
        failures: dict[int, RowStatus] = {}
        if self.masks is not None:
            self.masks.consume(token_ids, ~is_nan & chooses)
            failures = self.masks.failures()
        is_nan[list(failures)] = True
        logprobs, candidates = _NO_LOGPROBS, _NO_CANDIDATES
        if self.max_reported is not None:
            chosen, ranks = reading.floats(num), reading.integers(num)
            top_ids = reading.integers(num * self.max_reported).reshape(num, self.max_reported)
            top_logprobs = reading.floats(num * self.max_reported).reshape(num, self.max_reported)
            is_first = np.arange(self.max_reported) < self.num_reported[:, None]
            if self.reports_candidates.any():
                # Rows with an infinite logit have no log probabilities.
                is_nan |= self.reports_candidates & np.isnan(top_logprobs[:, :1]).any(1)
                tells = ~is_nan & ~chooses
                reported = is_first & tells[:, None] & (top_logprobs > -np.inf)
                columns = (top_ids[reported], top_logprobs[reported], reported.sum(axis=1)[tells])
                candidates = Candidates(*(tuple(column.tolist()) for column in columns))
            asks = ~is_nan & chooses & (self.num_reported >= 0)
            logprobs = self._logprobs(reading, asks, (chosen, ranks), is_first, (top_ids, top_logprobs))
        token_ids = token_ids[~is_nan & chooses]
        return Samples(row_statuses(is_nan, failures), tuple(token_ids.tolist()), logprobs, candidates)

    def _logprobs(
        self,
        reading: ValueReader,
        asks: NDArray[np.bool_],
        own: tuple[NDArray, ...],
        is_first: NDArray[np.bool_],
        top: tuple[NDArray, ...],
    ) -> Logprobs:
        """Collect the log probabilities of the sequences that `asks` marks, as columns of the step's result.

        `own` are the chosen tokens' log probabilities and ranks. `top` are the ids and the log probabilities of the
        most probable tokens, and `is_first` marks as many of them as each sequence requests. If a sequence reports the
        whole vocabulary, its values are read from `reading`.
        """
        has_top = is_first & asks[:, None]
        ends = has_top.sum(axis=1).cumsum()
        whole = []
        for row in self.whole_rows:
            for column, values in zip(own, (reading.floats(1), reading.integers(1)), strict=True):
                column[row] = values[0]
            whole.append((row, (reading.integers(self.vocab_size), reading.floats(self.vocab_size))))
        columns = [column[has_top] for column in top]
        for row, found in reversed(whole):
            if asks[row]:
                columns = [np.insert(*each) for each in zip(columns, (ends[row],) * 2, found, strict=True)]
        return Logprobs(*(tuple(column.tolist()) for column in (*(each[asks] for each in own), *columns)))


def _columns(lines: NDArray[np.int32], seeds: NDArray[np.uint64], num_tokens: NDArray[np.int32]) -> SamplingColumns:
    return SamplingColumns.of(*map(torch.from_numpy, (lines, seeds.view(np.int64), num_tokens)))


def has_penalties(sampling: SamplingParams) -> bool:
    """Return whether a request has penalties, so that its logits depend on its tokens.

    The penalties are the repetition penalty, the presence penalty and the frequency penalty.
    """
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def row_statuses(is_bad: NDArray[np.bool_], failures: Mapping[int, RowStatus] | None = None) -> tuple[RowStatus, ...]:
    """Return the statuses of a step's sampling sequences for `StepResult`. An empty tuple means that all are good.

    `is_bad` marks the sequences that return no token. A bad sequence without an entry in `failures` has NaN logits.
    """
    if not is_bad.any():
        return ()
    known = failures or {}
    statuses = [known.get(i, RowStatus.NAN_LOGITS) if bad else RowStatus.OK for i, bad in enumerate(is_bad)]
    return tuple(statuses)


def _padded(lists: Sequence[Sequence[float]], vacant: float, dtype: type) -> NDArray:
    """Return lists of numbers as one array [number of lists, longest length].

    Shorter lists are padded with `vacant`.
    """
    width = max((len(values) for values in lists), default=0)
    return np.array([[*values, *([vacant] * (width - len(values)))] for values in lists], dtype)
