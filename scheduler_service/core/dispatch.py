"""The scheduler's record of a plan it sent, and how a result is read through it.

A result's rows are resolved here and never by slot alone: by the time it arrives, a slot may have a new owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

from scheduler_service.core.decode_batch import DecodeColumns
from scheduler_service.core.plan import Candidates, Logprobs, RowStatus, StepResult
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.core.sequence import Sequence, SequenceGroup


class ProtocolError(Exception):
    """The other side broke the protocol. The session must end."""


class PlannedRow(NamedTuple):
    """A row that was planned by itself: `sequence` computes positions [start, start + num_tokens) in `slot`."""

    slot: int
    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_tokens_next: int  # what the worker does with it in the next step unless told otherwise
    num_prompt_logprobs: int  # positions whose prompt log-probabilities the result brings

    @property
    def num_candidates(self) -> int | None:
        return self.sequence.group.request.sampling.num_candidates


_slot = attrgetter("slot")


@dataclass(slots=True)
class Dispatch:
    """An unacknowledged plan. `dropped` are sequences whose rows in it no longer count."""

    step: int
    rows: tuple[PlannedRow, ...]  # in the order they were planned: producers of shared blocks before consumers
    columns: DecodeColumns
    extended: tuple[Sequence, ...]  # decoding rows that began a block: the one before is full when the result is here
    num_tokens: int
    num_prompt_tokens: int
    has_moves: bool
    dropped: set[Sequence] = field(default_factory=set)

    def sampling_rows(self) -> list[PlannedRow]:
        """Of the rows that were planned one by one, in slot order."""
        return sorted([row for row in self.rows if row.samples], key=_slot)

    def groups(self) -> set[SequenceGroup]:
        """Whoever computed something in it."""
        return {row.sequence.group for row in self.rows} | {sequence.group for sequence in self.columns.sequences}

    def num_samples_of(self, sequence: Sequence) -> int:
        """Samples on their way that will count. For audits: looks at every row."""
        if sequence in self.dropped:
            return 0
        sampled = [row.sequence for row in self.rows if row.samples] + self.columns.sequences
        return sampled.count(sequence)


class SampledRow(NamedTuple):
    sequence: Sequence
    status: RowStatus
    token_id: int
    logprobs: TokenLogprobs | None
    candidates: list[tuple[int, float]]


class Reading(NamedTuple):
    """A result, resolved. Decoding rows stand in `decoded` where nothing is to be said of them but their token."""

    samples: list[SampledRow]
    decoded: list[int]  # token ids of the columns' rows; empty if these stand in samples
    prompt_logprobs: list[tuple[PlannedRow, list[TokenLogprobs]]]


def read_result(dispatch: Dispatch, result: StepResult, vocab_size: int) -> Reading:
    """Resolve every row. Raises ProtocolError if the columns do not fit the plan."""
    prompt_logprobs = list(_read_prompt_logprobs(dispatch, result, vocab_size))
    rows = dispatch.sampling_rows()
    num_rows = len(rows) + len(dispatch.columns.slots)
    if result.statuses and len(result.statuses) != num_rows:
        raise ProtocolError(f"step {dispatch.step} samples {num_rows} rows, but has {len(result.statuses)} statuses")
    token_ids = result.token_ids
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ProtocolError(f"step {dispatch.step} yields a token outside the vocabulary of {vocab_size}")
    if result.statuses or dispatch.columns.has_logprobs:
        return Reading(_read_samples(dispatch, _merge(rows, dispatch.columns), result, vocab_size), [], prompt_logprobs)
    positions = [dispatch.columns.index_of(row.slot) + i for i, row in enumerate(_choosing(rows))]
    _check_count(dispatch.step, len(dispatch.columns.slots) + len(positions), len(token_ids))
    decoded = list(token_ids)
    chosen = [decoded.pop(position) for position in reversed(positions)]
    mine = StepResult(
        result.epoch,
        result.step,
        token_ids=tuple(reversed(chosen)),
        logprobs=result.logprobs,
        candidates=result.candidates,
    )
    samples = _read_samples(dispatch, [(row.sequence, row.slot) for row in rows], mine, vocab_size)
    return Reading(samples, decoded, prompt_logprobs)


def _choosing(rows: list[PlannedRow]) -> list[PlannedRow]:
    """Those that choose a token, and do not report candidates."""
    return [row for row in rows if row.num_candidates is None]


def _merge(rows: list[PlannedRow], columns: DecodeColumns) -> list[tuple[Sequence, int]]:
    pairs = [(row.sequence, row.slot) for row in rows]
    pairs.extend(zip(columns.sequences, columns.slots, strict=True))
    return sorted(pairs, key=lambda pair: pair[1])


def _check_count(step: int, num_expected: int, num_tokens: int) -> None:
    if num_expected != num_tokens:
        raise ProtocolError(f"step {step} chooses {num_expected} tokens, its result has {num_tokens}")


def _read_samples(
    dispatch: Dispatch, rows: list[tuple[Sequence, int]], result: StepResult, vocab_size: int
) -> list[SampledRow]:
    """`rows`: (sequence, slot) in slot order; the result's columns are theirs."""
    statuses = result.statuses or (RowStatus.OK,) * len(rows)
    good = compress(rows, [status is RowStatus.OK for status in statuses])
    num_chosen = sum(sequence.group.request.sampling.num_candidates is None for sequence, _ in good)
    _check_count(dispatch.step, num_chosen, len(result.token_ids))
    tokens = iter(result.token_ids)
    logprobs = _LogprobReader(result.logprobs, vocab_size)
    candidates = _CandidateReader(result.candidates, vocab_size)
    samples = []
    for (sequence, _), status in zip(rows, statuses, strict=True):
        sampling = sequence.group.request.sampling
        if status is not RowStatus.OK:
            samples.append(SampledRow(sequence, status, -1, None, []))
        elif sampling.num_candidates is not None:
            samples.append(SampledRow(sequence, status, -1, None, candidates.read(sampling.num_candidates)))
        else:
            token_id, num_top = next(tokens), sampling.num_logprobs
            entry = None if num_top is None else logprobs.read(token_id, num_top)
            samples.append(SampledRow(sequence, status, token_id, entry, []))
    logprobs.finish()
    candidates.finish()
    return samples


def _read_prompt_logprobs(
    dispatch: Dispatch, result: StepResult, vocab_size: int
) -> Iterator[tuple[PlannedRow, list[TokenLogprobs]]]:
    """The rows whose step computed prompt log-probabilities, each with one entry per position from its start on."""
    expected = sorted((row for row in dispatch.rows if row.num_prompt_logprobs > 0), key=_slot)
    if len(expected) != len(result.prompt_logprobs):
        raise ProtocolError(
            f"step {dispatch.step} owes prompt log-probabilities of {len(expected)} rows, not "
            f"{len(result.prompt_logprobs)}"
        )
    for row, chunk in zip(expected, result.prompt_logprobs, strict=True):
        if (chunk.slot, chunk.first_position) != (row.slot, row.start + 1):
            raise ProtocolError(
                f"prompt log-probabilities are of slot {chunk.slot} from {chunk.first_position}, not of slot "
                f"{row.slot} from {row.start + 1}"
            )
        num_top = row.sequence.num_prompt_logprobs
        assert num_top is not None
        reader = _LogprobReader(chunk.logprobs, vocab_size)
        first = row.start + 1
        token_ids = row.sequence.token_ids[first : first + row.num_prompt_logprobs]
        entries = [reader.read(token_id, num_top) for token_id in token_ids]
        reader.finish()
        yield row, entries


class _LogprobReader:
    """Reads the columns position by position."""

    def __init__(self, columns: Logprobs, vocab_size: int) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._position = 0
        self._top = 0

    def read(self, token_id: int, num_top: int) -> TokenLogprobs:
        columns, start = self._columns, self._top
        end = start + min(num_top, self._vocab_size)
        if self._position >= min(len(columns.chosen), len(columns.ranks)) or end > min(
            len(columns.top_token_ids), len(columns.top_logprobs)
        ):
            raise ProtocolError("the columns of log-probabilities are too short")
        top = tuple(zip(columns.top_token_ids[start:end], columns.top_logprobs[start:end], strict=True))
        entry = TokenLogprobs(token_id, columns.chosen[self._position], columns.ranks[self._position], top)
        self._position += 1
        self._top = end
        return entry

    def finish(self) -> None:
        columns = self._columns
        lengths = (len(columns.chosen), len(columns.ranks), len(columns.top_token_ids), len(columns.top_logprobs))
        if lengths != (self._position, self._position, self._top, self._top):
            raise ProtocolError(f"the columns of log-probabilities are too long: {lengths}")


class _CandidateReader:
    """The same for candidates."""

    def __init__(self, columns: Candidates, vocab_size: int) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._position = 0

    def read(self, num_candidates: int) -> list[tuple[int, float]]:
        start = self._position
        end = self._position = start + min(num_candidates, self._vocab_size)
        token_ids, logprobs = self._columns.token_ids[start:end], self._columns.logprobs[start:end]
        if len(token_ids) < end - start or len(logprobs) < end - start:
            raise ProtocolError("the columns of candidates are too short")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ProtocolError(f"a candidate is outside the vocabulary of {self._vocab_size}")
        return list(zip(token_ids, logprobs, strict=True))

    def finish(self) -> None:
        if not len(self._columns.token_ids) == len(self._columns.logprobs) == self._position:
            raise ProtocolError("the columns of candidates are too long")
