"""The scheduler's record of a plan it sent, and how a result is read through it.

A result's rows are resolved here and never by slot alone: by the time it arrives, a slot may have a new owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from scheduler_service.core.plan import Logprobs, RowStatus, StepResult
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.core.sequence import Sequence


class ProtocolError(Exception):
    """The other side broke the protocol. The session must end."""


class PlannedRow(NamedTuple):
    """A row of a plan: `sequence` computes positions [start, start + num_tokens) in `slot`."""

    slot: int
    sequence: Sequence
    attempt: int
    start: int
    num_tokens: int
    samples: bool
    num_prompt_logprobs: int  # positions whose prompt log-probabilities the result brings


_slot = attrgetter("slot")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An unacknowledged plan."""

    step: int
    rows: tuple[PlannedRow, ...]  # in the order they were planned: producers of shared blocks before consumers
    num_tokens: int

    def sampling_rows(self) -> list[PlannedRow]:
        return sorted([row for row in self.rows if row.samples], key=_slot)


class SampledRow(NamedTuple):
    row: PlannedRow
    status: RowStatus
    token_id: int
    logprobs: TokenLogprobs | None


def read_samples(dispatch: Dispatch, result: StepResult, vocab_size: int) -> list[SampledRow]:
    """The sampling rows in slot order with what they produced. Raises ProtocolError if the columns do not fit."""
    rows = dispatch.sampling_rows()
    statuses = result.statuses or (RowStatus.OK,) * len(rows)
    num_ok = sum(status is RowStatus.OK for status in statuses)
    if len(statuses) != len(rows) or len(result.token_ids) != num_ok:
        raise ProtocolError(
            f"step {dispatch.step} samples {len(rows)} rows, its result has {len(statuses)} statuses and "
            f"{len(result.token_ids)} tokens for {num_ok} good rows"
        )
    if result.token_ids and not 0 <= min(result.token_ids) <= max(result.token_ids) < vocab_size:
        raise ProtocolError(f"step {dispatch.step} yields a token outside the vocabulary of {vocab_size}")
    tokens = iter(result.token_ids)
    logprobs = _LogprobReader(result.logprobs, vocab_size)
    samples = []
    for row, status in zip(rows, statuses, strict=True):
        if status is not RowStatus.OK:
            samples.append(SampledRow(row, status, -1, None))
            continue
        token_id = next(tokens)
        num_top = row.sequence.owner.request.sampling.num_logprobs
        samples.append(SampledRow(row, status, token_id, None if num_top is None else logprobs.read(token_id, num_top)))
    logprobs.finish()
    return samples


def read_prompt_logprobs(
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
