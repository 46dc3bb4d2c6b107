"""How a step samples on a device: what its rows ask for, and what the host reads of their samples.

Parameters of one number stand by slot in `DeviceTable`. What only some rows have goes along with the steps in which
they sample: biases, and stop tokens as long as they are suppressed.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_service.device.sampler import SampledTokens, SamplingColumns
from worker_service.device.staging import Upload, aligned
from worker_service.device.table import DeviceTable, has_penalties, num_reported
from worker_service.rows.table import SequenceTable, TableLimits, WorkingRows
from worker_service.step import Candidates, Logprobs, RowStatus, StepPlan


@dataclass(frozen=True, slots=True)
class Samples:
    """What the host knows of a step's samples: the columns of `StepResult`."""

    statuses: tuple[RowStatus, ...]
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    candidates: Candidates


class SamplingRequests:
    """By slot, on the host: what makes sampling more than a token by the parameters on the device."""

    def __init__(self, limits: TableLimits) -> None:
        self._vocab_size = limits.vocab_size
        self._num_reported = np.full(limits.max_num_seqs, -1, np.int64)
        self._is_penalized = np.zeros(limits.max_num_seqs, np.bool_)
        self._is_biased = np.zeros(limits.max_num_seqs, np.bool_)
        self._min_num_tokens = np.zeros(limits.max_num_seqs, np.int64)  # with fewer, stop tokens are suppressed

    def update(self, plan: StepPlan, table: SequenceTable) -> None:
        """Rows have moved in. `table` is as the plan has left it."""
        for slot in (*(opening.slot for opening in plan.openings), *plan.fork_target_slots):
            sampling = table.sampling[slot]
            self._num_reported[slot] = num_reported(sampling, self._vocab_size)
            self._is_penalized[slot] = has_penalties(sampling)
            self._is_biased[slot] = bool(sampling.logit_bias_token_ids)
            has_minimum = sampling.min_tokens and sampling.stop_token_ids
            self._min_num_tokens[slot] = table.num_prompt_tokens[slot] + sampling.min_tokens if has_minimum else 0

    def of_step(self, table: SequenceTable, rows: WorkingRows) -> "StepSampling":
        slots, num_tokens = rows.slots[rows.samples], rows.ends[rows.samples]
        is_beam = table.is_beam[slots]
        min_num_tokens = np.where(num_tokens < self._min_num_tokens[slots], self._min_num_tokens[slots], 0)
        return StepSampling(
            slots=slots,
            num_tokens=num_tokens,
            is_beam=is_beam,
            is_penalized=self._is_penalized[slots],
            num_reported=self._num_reported[slots],
            biases=[
                (table.sampling[slot].logit_bias_token_ids, table.sampling[slot].logit_bias_values) if biased else ()
                for slot, biased in zip(slots, self._is_biased[slots], strict=True)
            ]
            if self._is_biased[slots].any()
            else None,
            stops=[
                tuple(token_id for token_id in table.sampling[slot].stop_token_ids if token_id < self._vocab_size)
                if minimum
                else ()
                for slot, minimum in zip(slots, min_num_tokens, strict=True)
            ]
            if min_num_tokens.any()
            else None,
            min_num_tokens=min_num_tokens,
            vocab_size=self._vocab_size,
        )


@dataclass(frozen=True, slots=True)
class StepSampling:
    """The R sampling rows of a step, in slot order."""

    slots: NDArray[np.int64]  # [R]
    num_tokens: NDArray[np.int64]  # [R] before the one that is drawn
    is_beam: NDArray[np.bool_]  # [R]
    is_penalized: NDArray[np.bool_]  # [R]
    num_reported: NDArray[np.int64]  # [R], -1: no log-probabilities
    biases: list[tuple] | None  # [R] (token ids, values), () without; None: no row has any
    stops: list[tuple[int, ...]] | None  # [R] tokens to suppress; None: no row has any
    min_num_tokens: NDArray[np.int64]  # [R]
    vocab_size: int

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def max_reported(self) -> int | None:
        """None: no row reports log-probabilities."""
        most = int(self.num_reported.max(initial=-1))
        return None if most < 0 else most

    @property
    def is_plain(self) -> bool:
        """Every row takes one token by its parameters, and tells nothing else."""
        is_edited = self.biases is not None or self.stops is not None or bool(self.is_penalized.any())
        return not is_edited and self.max_reported is None

    def pack(self, upload: Upload, scratch_slot: int) -> "PackedSampling":
        """Send along what `PackedSampling` reads."""
        biases, stops = self.biases or [], self.stops or []
        bias_ids = _padded([bias[0] if bias else () for bias in biases], -1)
        bias_values = _padded([bias[1] if bias else () for bias in biases], 0.0)
        stop_ids = _padded(stops, -1)
        return PackedSampling(
            slots=upload.add(self.slots),
            num_tokens=upload.add(self.num_tokens),
            write_slots=upload.add(np.where(self.is_beam, scratch_slot, self.slots)),
            bias_ids=upload.add(bias_ids) if biases else None,
            bias_values=upload.add_floats(bias_values) if biases else None,
            stop_ids=upload.add(stop_ids) if stops else None,
            min_num_tokens=upload.add(self.min_num_tokens) if stops else None,
            beam_counts=upload.add(2 * (self.is_beam & self.is_penalized)),
            num_rows=self.num_rows,
            is_penalized=bool(self.is_penalized.any()),
            max_reported=self.max_reported,
        )

    @property
    def num_values(self) -> int:
        """That `read` reads."""
        return self.num_rows * (2 if self.max_reported is None else 4 + 2 * self.max_reported)

    def read(self, reading: "Reading") -> Samples:
        """What `PackedSampling.keep` returned."""
        num = self.num_rows
        token_ids, is_nan = reading.integers(num), reading.integers(num) != 0
        logprobs, candidates = Logprobs(), Candidates()
        if self.max_reported is not None:
            chosen, ranks = reading.floats(num), reading.integers(num)
            top_ids = reading.integers(num * self.max_reported).reshape(num, self.max_reported)
            top_logprobs = reading.floats(num * self.max_reported).reshape(num, self.max_reported)
            # Where a logit is infinite, there are no log-probabilities.
            is_nan |= self.is_beam & np.isnan(top_logprobs[:, :1]).any(1)
            asking = np.flatnonzero(~is_nan & ~self.is_beam & (self.num_reported >= 0))
            top = _first(top_ids, self.num_reported, asking), _first(top_logprobs, self.num_reported, asking)
            logprobs = Logprobs(tuple(chosen[asking].tolist()), tuple(ranks[asking].tolist()), *top)
            beams = np.flatnonzero(~is_nan & self.is_beam)
            candidates = Candidates(
                _first(top_ids, self.num_reported, beams), _first(top_logprobs, self.num_reported, beams)
            )
        statuses = tuple(RowStatus.NAN_LOGITS if bad else RowStatus.OK for bad in is_nan) if is_nan.any() else ()
        tokens = tuple(token_ids[~is_nan & ~self.is_beam].tolist())
        return Samples(statuses, tokens, logprobs, candidates)


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """The rows of `StepSampling` on the device: where they lie in the step's packed upload."""

    slots: slice
    num_tokens: slice
    write_slots: slice  # where the tokens go: those of beams to the scratch slot
    bias_ids: slice | None
    bias_values: slice | None
    stop_ids: slice | None
    min_num_tokens: slice | None
    beam_counts: slice  # what the sampler counts for tokens that beams do not take
    num_rows: int
    is_penalized: bool
    max_reported: int | None

    def columns(self, packed: Tensor, table: DeviceTable) -> SamplingColumns:
        columns = table.sampling_columns(packed[aligned(self.slots)], packed[self.num_tokens])
        if self.bias_ids is not None and self.bias_values is not None:
            ids, values = packed[self.bias_ids], packed[self.bias_values].view(torch.float32)
            shape = (self.num_rows, -1)
            columns = replace(columns, bias_token_ids=ids.view(shape), bias_values=values.view(shape))
        if self.stop_ids is not None and self.min_num_tokens is not None:
            stop_ids = packed[self.stop_ids].view(self.num_rows, -1)
            columns = replace(columns, stop_token_ids=stop_ids, min_num_tokens=packed[self.min_num_tokens])
        return columns

    def keep(self, sampled: SampledTokens, packed: Tensor, table: DeviceTable) -> list[Tensor]:
        """Append the tokens to their rows. Returns what `StepSampling.read` reads."""
        positions = packed[self.num_tokens].long()
        table.token_ids[packed[self.write_slots].long(), positions] = sampled.token_ids.int()
        if self.is_penalized and table.token_counts is not None:
            counted = (packed[self.slots].long(), sampled.token_ids)
            uncounted = packed[self.beam_counts] * ~sampled.is_nan
            table.token_counts[counted] = table.token_counts[counted] - uncounted
        told = [sampled.token_ids, sampled.is_nan]
        if self.max_reported is not None:
            told += [sampled.logprobs, sampled.ranks, sampled.top_token_ids, sampled.top_logprobs]
        return told


class Reading:
    """Reads columns from what came back of a step, one after the other."""

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values
        self._num_read = 0

    def integers(self, num: int) -> NDArray[np.int32]:
        start = self._num_read
        self._num_read += num
        return self._values[start : self._num_read]

    def floats(self, num: int) -> NDArray[np.float32]:
        return self.integers(num).view(np.float32)


def _padded(lists: list, vacant: float) -> NDArray:
    """[number of lists, the longest]."""
    width = max((len(values) for values in lists), default=0)
    return np.array([[*values, *([vacant] * (width - len(values)))] for values in lists])


def _first(values: NDArray, nums: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple:
    """The first nums[i] values of each of the rows."""
    return tuple(value for row in rows for value in values[row, : nums[row]].tolist())
