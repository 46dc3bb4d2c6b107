"""The scheduler's record of a plan in flight, and the reading of its result.

The rows of a result are resolved by this record and never by slot alone. When a result arrives, its slots may have new
owners.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from operator import attrgetter, gt, itemgetter
from typing import NamedTuple

from pagewire.common.wire.messages import Candidates, Logprobs, Pooling, RowStatus, StepResult, WorkerProtocolError
from scheduler_service.core.cache import Save
from scheduler_service.core.plans.decode_batch import DecodeColumns
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.core.sequence import Row, SequenceGroup


class PlannedRow(NamedTuple):
    """The entry of a step plan for one running sequence: the worker computes the token positions from `start` up to,
    but not including, `start + num_tokens`.

    Sequences that decode one token in every step have no such entry.
    """

    slot: int
    row: Row
    start: int
    num_tokens: int
    samples: bool
    num_tokens_next: int  # tokens that the worker computes in the next step by default
    num_prompt_logprobs: int  # positions whose prompt log-probabilities the result contains


_slot = attrgetter("slot")
_NOTHING_ELSE = (Logprobs(), Candidates())  # in a result with tokens alone


@dataclass(slots=True)
class Dispatch:
    """The scheduler's record of a step plan that the worker has received but not answered yet. The scheduler uses it to
    assign the entries of the result to sequences.

    The record does not say whether the scheduler still wants a sequence's result: see `Row.is_dropped`.
    """

    step: int
    rows: tuple[PlannedRow, ...]  # in planning order: producers of shared blocks before consumers
    columns: DecodeColumns
    began_block: tuple[Row, ...]  # decoding rows whose previous block is full once the result arrives
    num_drops: int  # the count of dropped samples of all rows when the plan was sent
    num_tokens: int
    num_prompt_tokens: int
    has_moves: bool
    saves: tuple[Save, ...] = ()
    num_later_steps: int = 0  # of the same lease

    def sampling_rows(self) -> list[PlannedRow]:
        """Return the running sequences that sample a token in this step and were planned individually, sorted by slot.
        Sequences that decode one token in every step are not included."""
        return sorted([row for row in self.rows if row.samples], key=_slot)

    def groups(self) -> set[SequenceGroup]:
        """Return the requests for which this plan computes at least one token."""
        return {row.sequence.group for row in [*self.columns.rows, *(planned.row for planned in self.rows)]}


class SampledRow(NamedTuple):
    """The result of one step for one running sequence that samples.

    If the status is OK, the result is a token, the candidates for a beam, or an embedding.
    """

    row: Row
    status: RowStatus
    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    candidates: list[tuple[int, float]] | None = None  # (token id, logprob), most likely first
    embedding: bytes | None = None


class ResolvedResult(NamedTuple):
    """The result of a step, split into one entry per running sequence.

    If the step returned only tokens for the sequences that decode one token in every step, `decoded` has these tokens.
    Otherwise these sequences have entries in `samples` like all other sequences.
    """

    samples: list[SampledRow]
    decoded: list[int]  # token ids of the columns' rows; empty if these rows are in samples
    prompt_logprobs: list[tuple[PlannedRow, list[TokenLogprobs]]]
    mask_times: list[tuple[Row, int]]  # microseconds used by the rows' grammar masks


def read_result(dispatch: Dispatch, result: StepResult, vocab_size: int) -> ResolvedResult:
    """Check the worker's result for a step, and assign each of its entries to the sequence that it belongs to.
    `dispatch` is the record of the step's plan.

    Raises WorkerProtocolError if the result has the wrong number of entries, or if a token id is not below
    `vocab_size`.
    """
    has_prompts = bool(dispatch.rows or result.prompt_logprobs)
    prompt_logprobs = list(_read_prompt_logprobs(dispatch, result, vocab_size)) if has_prompts else []
    rows = dispatch.sampling_rows()
    mask_times = _read_mask_times(dispatch.step, result, _merge(rows, dispatch.columns)) if result.mask_slots else []
    num_rows = len(rows) + len(dispatch.columns.slots)
    if result.statuses and len(result.statuses) != num_rows:
        raise WorkerProtocolError(
            f"step {dispatch.step} samples {num_rows} rows, but has {len(result.statuses)} statuses"
        )
    token_ids = result.token_ids
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise WorkerProtocolError(f"step {dispatch.step} yields a token outside the vocabulary of {vocab_size}")
    if result.statuses or dispatch.columns.has_logprobs:
        everybody = [row for _, row in _merge(rows, dispatch.columns)]
        samples = _read_samples(dispatch, everybody, token_ids, result, vocab_size)
        return ResolvedResult(samples, [], prompt_logprobs, mask_times)
    choosing = [planned for planned in rows if planned.row.sequence.group.chooses_tokens]
    positions = [bisect_left(dispatch.columns.slots, planned.slot) + i for i, planned in enumerate(choosing)]
    _check_count(dispatch.step, len(dispatch.columns.slots) + len(positions), len(token_ids))
    decoded = list(token_ids)
    chosen = tuple(reversed([decoded.pop(position) for position in reversed(positions)]))
    samples = []
    if rows or result.embeddings or (result.logprobs, result.candidates) != _NOTHING_ELSE:
        samples = _read_samples(dispatch, [planned.row for planned in rows], chosen, result, vocab_size)
    return ResolvedResult(samples, decoded, prompt_logprobs, mask_times)


def _merge(rows: list[PlannedRow], columns: DecodeColumns) -> list[tuple[int, Row]]:
    """Combine two kinds of rows of a plan into one list of (slot, row) pairs, sorted by slot: rows that were planned
    individually, and rows that decode one token in every step. A row is the worker's state of one running sequence."""
    pairs = [(planned.slot, planned.row) for planned in rows]
    pairs.extend(zip(columns.slots, columns.rows, strict=True))
    return sorted(pairs, key=itemgetter(0))


def _read_mask_times(step: int, result: StepResult, rows: list[tuple[int, Row]]) -> list[tuple[Row, int]]:
    by_slot = dict(rows)
    slots = result.mask_slots
    if len(slots) != len(result.mask_us) or len(set(slots)) != len(slots) or not by_slot.keys() >= set(slots):
        raise WorkerProtocolError(
            f"step {step} reports {len(result.mask_us)} mask times for slots {list(slots)}, but samples slots "
            f"{list(by_slot)}"
        )
    return [(by_slot[slot], us) for slot, us in zip(slots, result.mask_us, strict=True)]


def _check_count(step: int, num_expected: int, num_tokens: int) -> None:
    if num_expected != num_tokens:
        raise WorkerProtocolError(f"step {step} must yield {num_expected} tokens, but its result has {num_tokens}")


def _read_samples(
    dispatch: Dispatch, rows: list[Row], token_ids: tuple[int, ...], result: StepResult, vocab_size: int
) -> list[SampledRow]:
    """Build one `SampledRow` for each of `rows` from a step's result. The result stores each kind of value (token ids,
    log-probabilities, candidates, embeddings) in a separate list.

    `rows` are sorted by slot, and the lists have entries for these rows only. Raises WorkerProtocolError if a list has
    the wrong number of entries.
    """
    statuses = result.statuses or (RowStatus.OK,) * len(rows)
    pairs = list(zip(rows, statuses, strict=True))
    groups = [row.sequence.group for row, status in pairs if status is RowStatus.OK]
    choosing = [group.request.sampling for group in groups if group.chooses_tokens]
    wanted = [group.request.sampling for group in groups]
    _check_count(dispatch.step, len(choosing), len(token_ids))
    tokens = iter(token_ids)
    reported = [
        (token_id, sampling.num_logprobs, bool(sampling.logprob_token_ids))
        for token_id, sampling in zip(token_ids, choosing, strict=True)
        if sampling.num_logprobs is not None
    ]
    logprobs = iter(_read_logprobs(result.logprobs, reported, vocab_size))
    asked = [sampling.num_candidates for sampling in wanted if sampling.num_candidates is not None]
    candidates = iter(_read_candidates(result.candidates, asked, vocab_size))
    num_pooled = sum(sampling.pooling is not Pooling.NONE for sampling in wanted)
    embeddings = iter(_read_embeddings(dispatch.step, result.embeddings, num_pooled))
    samples = []
    for row, status in pairs:
        sampling = row.sequence.group.request.sampling
        if status is not RowStatus.OK:
            samples.append(SampledRow(row, status))
        elif sampling.num_candidates is not None:
            samples.append(SampledRow(row, status, candidates=next(candidates)))
        elif sampling.pooling is not Pooling.NONE:
            samples.append(SampledRow(row, status, embedding=next(embeddings)))
        else:
            entry = None if sampling.num_logprobs is None else next(logprobs)
            samples.append(SampledRow(row, status, next(tokens), entry))
    return samples


def _read_prompt_logprobs(
    dispatch: Dispatch, result: StepResult, vocab_size: int
) -> Iterator[tuple[PlannedRow, list[TokenLogprobs]]]:
    """Yield each sequence for which the step computed log-probabilities of prompt tokens, with a list of one entry per
    token position.

    If the step computed the sequence from position p on, the first entry is for the token at position p + 1. Raises
    WorkerProtocolError if the entries do not fit the plan.
    """
    expected = sorted((planned for planned in dispatch.rows if planned.num_prompt_logprobs > 0), key=_slot)
    if len(expected) != len(result.prompt_logprobs):
        raise WorkerProtocolError(
            f"step {dispatch.step} must yield prompt log-probabilities of {len(expected)} rows, but its result "
            f"has {len(result.prompt_logprobs)}"
        )
    for planned, chunk in zip(expected, result.prompt_logprobs, strict=True):
        if (chunk.slot, chunk.first_position) != (planned.slot, planned.start + 1):
            raise WorkerProtocolError(
                f"the result has prompt log-probabilities of slot {chunk.slot} from position {chunk.first_position}, "
                f"but slot {planned.slot} from position {planned.start + 1} was expected"
            )
        num_top = planned.row.sequence.num_prompt_logprobs
        assert num_top is not None
        first, past = planned.start + 1, planned.start + 1 + planned.num_prompt_logprobs
        tokens = [(token_id, num_top, False) for token_id in planned.row.sequence.token_ids[first:past]]
        yield planned, _read_logprobs(chunk.logprobs, tokens, vocab_size)


def _read_logprobs(columns: Logprobs, tokens: list[tuple[int, int, bool]], vocab_size: int) -> list[TokenLogprobs]:
    """Split the log-probability columns of a step's result into one entry for each of `tokens`.

    `tokens` are (token id, number of other tokens requested, whether the request listed these other tokens). If the
    request listed tokens, the entry's own token comes first. Otherwise the most likely tokens are given, without tokens
    of probability 0. For example, a grammar may allow fewer tokens than requested. Raises WorkerProtocolError if the
    number of entries is wrong.
    """
    num_tops = [min(num_top, vocab_size) for _, num_top, _ in tokens]
    num_top_tokens = sum(num_tops)
    if not (
        len(columns.chosen) == len(columns.ranks) == len(tokens)
        and len(columns.top_token_ids) == len(columns.top_logprobs) == num_top_tokens
    ):
        raise WorkerProtocolError(f"the log-probability columns do not fit the {len(tokens)} tokens of the rows")
    pairs = zip(columns.top_token_ids, columns.top_logprobs, strict=True)
    entries = []
    for token, num_top, logprob, rank in zip(tokens, num_tops, columns.chosen, columns.ranks, strict=True):
        token_id, _, is_listed = token
        if is_listed:
            top = tuple({token_id: logprob, **dict(islice(pairs, num_top))}.items())
        else:
            top = tuple(islice(pairs, num_top))  # best first
            top = top[: bisect_left(top, True, key=lambda pair: pair[1] == -inf)]
        entries.append(TokenLogprobs(token_id, logprob, rank, top))
    return entries


def _read_candidates(columns: Candidates, asked: list[int], vocab_size: int) -> list[list[tuple[int, float]]]:
    """Return a list of candidates for each beam in a step's result, as (token id, log-probability) pairs.

    `asked` has the number of candidates requested for each beam. Raises WorkerProtocolError if a beam has more
    candidates, if the number of entries is wrong, or if a token is outside the vocabulary.
    """
    if len(columns.counts) != len(asked) or any(map(gt, columns.counts, asked)):
        raise WorkerProtocolError(f"rows requested {asked} candidates, but the result has {list(columns.counts)}")
    num_candidates = sum(columns.counts)
    if not len(columns.token_ids) == len(columns.logprobs) == num_candidates:
        raise WorkerProtocolError(f"the candidate columns do not have {num_candidates} entries each")
    if num_candidates and not 0 <= min(columns.token_ids) <= max(columns.token_ids) < vocab_size:
        raise WorkerProtocolError(f"a candidate is outside the vocabulary of {vocab_size}")
    pairs = zip(columns.token_ids, columns.logprobs, strict=True)
    return [list(islice(pairs, count)) for count in columns.counts]


def _read_embeddings(step: int, embeddings: tuple[bytes, ...], num_pooled: int) -> tuple[bytes, ...]:
    sizes = {len(embedding) for embedding in embeddings}
    if len(embeddings) != num_pooled or len(sizes) > 1 or any(not size or size % 4 for size in sizes):
        raise WorkerProtocolError(
            f"step {step} must yield {num_pooled} embeddings, but has {len(embeddings)} of {sizes} bytes"
        )
    return embeddings
