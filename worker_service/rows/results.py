"""The time and the result of a step, including the result of a step that was computed in parts."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from pagewire.common.wire.messages import (
    Candidates,
    Logprobs,
    Pooling,
    PromptLogprobs,
    RowStatus,
    SamplingParams,
    StepParts,
    StepPlan,
    StepResult,
)
from worker_service.rows.parts import StepPart
from worker_service.rows.prompt_logprobs import PromptChunk, prompt_chunks
from worker_service.rows.sampling import Samples
from worker_service.rows.table import SequenceTable
from worker_service.rows.working_rows import WorkingRows

_PART_NAMES = tuple(field.name for field in fields(StepParts))
_SAMPLE_COLUMNS = tuple(field.name for field in fields(Samples))


class StepWatch:
    """A stopwatch for the phases of a step, such as the forward pass and sampling. It starts when it is created."""

    def __init__(self) -> None:
        self.began_ns = self._last_ns = self._taken_ns = time.perf_counter_ns()
        self._ns: dict[str, int] = {}

    def end(self, part: str, known: dict[str, int] | None = None) -> None:
        """End the phase `part` of a step: add the time since the last call of this method to the phase.

        `known` contains the durations of other phases, in nanoseconds, that were measured within this time. They are
        subtracted from `part` and added to those phases.
        """
        now = time.perf_counter_ns()
        inside = known or {}
        for name, ns in {part: now - self._last_ns - sum(inside.values()), **inside}.items():
            self._ns[name] = self._ns.get(name, 0) + ns
        self._last_ns = now

    def take(self) -> tuple[int, StepParts]:
        """Return the time from the last call of `take` to the last call of `end`, as a total and by phase.

        Times are in microseconds.
        """
        duration_us, self._taken_ns = (self._last_ns - self._taken_ns) // 1000, self._last_ns
        parts = StepParts(**{f"{name}_us": max(0, ns // 1000) for name, ns in self._ns.items()})
        self._ns.clear()
        return duration_us, parts


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose plan the worker has applied, and whose computation is being launched or in progress."""

    plan: StepPlan
    last_moved_step: int  # when the step begins
    watch: StepWatch
    mask_times: list[tuple[int, int]]  # (slot, microseconds) for masks; complete when the step has been launched

    def result(
        self, samples: Samples, prompt_logprobs: tuple[PromptLogprobs, ...], duration_us: int, parts: StepParts
    ) -> StepResult:
        """Build the result message of the step from its samples.

        `duration_us` and `parts` are the step's duration in microseconds, as a total and by phase.
        """
        return StepResult(
            epoch=self.plan.epoch,
            step=self.plan.step,
            **{name: getattr(samples, name) for name in _SAMPLE_COLUMNS},
            prompt_logprobs=prompt_logprobs,
            duration_us=duration_us,
            last_moved_step=self.last_moved_step,
            parts=parts,
            mask_slots=tuple(slot for slot, _ in self.mask_times),
            mask_us=tuple(us for _, us in self.mask_times),
        )


@dataclass(frozen=True, slots=True)
class StepOutline:
    """A copy of the facts about a step that are needed to join the results of its parts, if the step was split.

    The facts are copied from the table of sequences at launch, because the table changes before the results are read.
    """

    sampling: dict[int, SamplingParams]  # of the sampling rows, by slot, in order
    prompt_chunks: tuple[PromptChunk, ...]
    vocab_size: int

    @staticmethod
    def of(table: SequenceTable, rows: WorkingRows) -> "StepOutline":
        sampling = {slot: table.sampling.params[slot] for slot in rows.slots[rows.samples].tolist()}
        return StepOutline(sampling, tuple(prompt_chunks(table, rows)), table.limits.vocab_size)


def join_results(step: BegunStep, outline: StepOutline, parts: Sequence[StepPart[StepResult]]) -> StepResult:
    """Join the results of the parts of a step that was split for lack of memory. Return the result of the step.

    A sequence that samples in this step gets the status OUT_OF_MEMORY if no part computed its last token.
    """
    samples: dict[int, Samples] = {}
    chunks: dict[int, list[Logprobs]] = {}
    for part in parts:
        samples.update(_samples(outline, part))
        for chunk in part.result.prompt_logprobs:
            chunks.setdefault(chunk.slot, []).append(chunk.logprobs)
    failed = Samples((RowStatus.OUT_OF_MEMORY,))
    in_order = [samples.get(slot, failed) for slot in outline.sampling]
    joined = _concatenate(Samples(()), in_order)
    if not set(joined.statuses) - {RowStatus.OK}:
        joined = replace(joined, statuses=())
    duration_us = sum(part.result.duration_us for part in parts)
    times = {name: sum(getattr(part.result.parts, name) for part in parts) for name in _PART_NAMES}
    prompt_logprobs = tuple(_prompt_logprobs(outline, chunks))
    return step.result(joined, prompt_logprobs, duration_us, StepParts(**times))


def _samples(outline: StepOutline, part: StepPart[StepResult]) -> Iterator[tuple[int, Samples]]:
    """Split the result of one part of a step by sequence. Yield (slot, sample) for each sequence that samples."""
    result, vocab_size = part.result, outline.vocab_size
    slots = part.rows.slots[part.rows.samples].tolist()
    num_tokens = num_positions = num_top = num_candidates = 0
    embeddings, counts = iter(result.embeddings), iter(result.candidates.counts)
    for slot, status in zip(slots, result.statuses or (RowStatus.OK,) * len(slots), strict=True):
        sampling = outline.sampling[slot]
        if status is not RowStatus.OK:
            yield slot, Samples((status,))
            continue
        if sampling.pooling is not Pooling.NONE:
            yield slot, Samples((status,), embeddings=(next(embeddings),))
            continue
        if sampling.num_candidates is not None:
            count = next(counts)
            start, num_candidates = num_candidates, num_candidates + count
            ids, values = result.candidates.token_ids, result.candidates.logprobs
            found = Candidates(ids[start:num_candidates], values[start:num_candidates], (count,))
            yield slot, Samples((status,), candidates=found)
            continue
        logprobs = Logprobs()
        if sampling.num_logprobs is not None:
            start, num_top = num_top, num_top + min(sampling.num_logprobs, vocab_size)
            position, num_positions = num_positions, num_positions + 1
            columns = result.logprobs
            logprobs = Logprobs(
                columns.chosen[position:num_positions],
                columns.ranks[position:num_positions],
                columns.top_token_ids[start:num_top],
                columns.top_logprobs[start:num_top],
            )
        yield slot, Samples((status,), (result.token_ids[num_tokens],), logprobs)
        num_tokens += 1


def _prompt_logprobs(outline: StepOutline, chunks: dict[int, list[Logprobs]]) -> Iterator[PromptLogprobs]:
    """Yield the prompt log probabilities of each sequence that must report some in this step.

    A value is NaN if lack of memory prevented its computation, or if its logits are NaN.
    """
    for chunk in outline.prompt_chunks:
        found = _concatenate(Logprobs(), chunks.get(chunk.slot, []))
        num_missing, nan = chunk.num - len(found.chosen), float("nan")
        num_tops = num_missing * chunk.num_top
        missing = Logprobs((nan,) * num_missing, (0,) * num_missing, (0,) * num_tops, (nan,) * num_tops)
        yield PromptLogprobs(chunk.slot, chunk.first, _concatenate(Logprobs(), [found, missing]))


def _concatenate(empty: Any, parts: Sequence[Any]) -> Any:
    """Concatenate dataclass instances of one type, field by field. Nested dataclasses are concatenated in the same way.

    `empty` is an instance without entries. It defines the type and the fields of the result.
    """
    joined: dict[str, Any] = {}
    for field in fields(empty):
        nothing, found = getattr(empty, field.name), [getattr(part, field.name) for part in parts]
        joined[field.name] = tuple(chain(*found)) if isinstance(nothing, tuple) else _concatenate(nothing, found)
    return type(empty)(**joined)
