"""Carries out plans: moves and copies -> table -> batch -> attention -> model -> logits -> sampler -> table.

A runner is driven by one thread. It needs no gRPC: whoever holds a StepPlan may call `execute`. A GPU has a runner of
its own (`cuda_runner.py`); this one is done with a step before it returns.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from worker_service.attention import Attend, AttentionBackend
from worker_service.device.errors import free_memory, is_fatal, is_out_of_memory
from worker_service.engine import FinishedStep
from worker_service.host.batch import Batch, build_batch
from worker_service.host.decoder import CpuDecoder
from worker_service.host.sampler import Samples, SamplingRow, logprob_columns, sample
from worker_service.memory.cache_engine import CacheEngine
from worker_service.models.communicator import Communicator
from worker_service.rows.parts import StepOutline, join_results, num_prompt_positions, run_in_parts, take_rows
from worker_service.rows.table import IntArray, SequenceTable, TableLimits, WorkingRows
from worker_service.step import Logprobs, PromptLogprobs, RowStatus, StepParts, StepPlan, StepResult

# Prompt positions whose logits exist at the same time: bounds their memory, 128 x vocab_size float32.
_MAX_LOGITS_POSITIONS = 128


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, hidden_size] of T tokens."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] float32 of hidden states [R, hidden_size]."""


class ModelRunner:
    """One model, one KV cache, one table of running sequences."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        backend: AttentionBackend,
        limits: TableLimits,
        device: torch.device,
        communicator: Communicator,
        splits_steps: bool = True,
    ) -> None:
        self.table = SequenceTable(limits)
        self._model = model
        self._cache = cache
        self._backend = backend
        self._device = device
        self._communicator = communicator
        self._is_out_of_memory = is_out_of_memory if splits_steps else lambda error: False

    def reset(self, epoch: int) -> None:
        """Begin an epoch: no rows, and everything that was started has finished."""
        self.table.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._cache.reset()
        self._communicator.begin(epoch)

    def launch(self, plan: StepPlan) -> FinishedStep:
        """See `Runner.launch`."""
        return FinishedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan. Raises ProtocolError before any block is touched if the plan breaks a rule."""
        watch = _Watch()
        self._cache.check(plan)
        rows = self.table.apply(plan)
        self._cache.move(plan)
        self._cache.copy(plan)
        watch.end("plan")
        result = self._compute_in_parts(plan, rows, watch)
        return replace(
            result,
            duration_us=watch.elapsed_us(),
            parts=watch.parts(),
            last_moved_step=self._cache.last_moved_step(),
        )

    def last_moved_step(self) -> int:
        """The moves of all plans of this epoch up to this step are done."""
        return self._cache.last_moved_step()

    @property
    def is_moving(self) -> bool:
        """Whether moves are under way that no result has told of."""
        return self._cache.is_moving

    def is_fatal(self, error: Exception) -> bool:
        """An error of the device stays: every later call fails too."""
        return is_fatal(error)

    def _compute_in_parts(self, plan: StepPlan, rows: WorkingRows, watch: "_Watch") -> StepResult:
        """In one part, unless memory does not suffice or has not for one of the rows."""
        good_rows = rows
        if not rows.are_plain and (has_failed := self.table.has_failed[rows.slots]).any():
            self._give_up(take_rows(rows, has_failed))
            good_rows = take_rows(rows, ~has_failed)
        parts = run_in_parts(
            good_rows,
            lambda part: self._compute(plan, part, watch),
            is_out_of_memory=self._is_out_of_memory,
            free_memory=partial(free_memory, self._device),
            give_up=self._give_up,
        )
        if len(parts) == 1 and len(parts[0].rows.slots) == len(rows.slots):
            return parts[0].result
        return join_results(plan, StepOutline.of(self.table, rows), parts)

    def _give_up(self, rows: WorkingRows) -> None:
        """These rows are not computed, in this step and in any later one; what they should have written is spoilt."""
        for slot, start, end in zip(rows.slots, rows.starts, rows.ends, strict=True):
            self._cache.spoil(self.table.block_tables[slot], int(start), int(end))
        self.table.fail(rows.slots)
        chooses = ~self.table.is_beam[rows.slots[rows.samples]]
        self.table.advance(rows, np.zeros(int(chooses.sum()), np.int64))

    def _compute(self, plan: StepPlan, rows: WorkingRows, watch: "_Watch") -> StepResult:
        batch = build_batch(self.table, rows, self._device)
        attend = self._backend.prepare(batch.attention, self._cache.layers)
        watch.end("batch")
        hidden, logits, highest = self._forward(batch, attend, watch)
        prompt_logprobs = () if rows.are_plain else self._prompt_logprobs(rows, batch, hidden)
        samples = sample(logits, () if rows.are_plain else self._special_rows(rows), highest)
        chosen, told = self._chosen_tokens(rows, samples)
        self.table.advance(rows, chosen)
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            statuses=_statuses(samples),
            token_ids=told,
            logprobs=samples.logprobs,
            candidates=samples.candidates,
            prompt_logprobs=prompt_logprobs,
        )
        watch.end("sampling")
        return result

    def _forward(
        self, batch: Batch, attend: Attend, watch: "_Watch"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, hidden_size], logits [R, vocab_size] of the rows that sample, and `highest` of `sample`."""
        model, indices = self._model, batch.sampling_indices
        if isinstance(model, CpuDecoder):
            outputs = model.forward_logits(batch.token_ids, batch.positions, attend, indices)
            watch.end("model", model.times())
            return outputs
        hidden = model.forward(batch.token_ids, batch.positions, attend)
        watch.end("model")
        if not len(indices):
            return hidden, torch.empty(0, self.table.limits.vocab_size, device=hidden.device), None
        logits = model.compute_logits(hidden if len(indices) == len(hidden) else hidden.index_select(0, indices))
        watch.end("head")
        return hidden, logits, None

    def _chosen_tokens(self, rows: WorkingRows, samples: Samples) -> tuple[IntArray, tuple[int, ...]]:
        """Of the rows that choose a token: what the table gets; and what the result tells, which leaves out NaN."""
        token_ids = np.array(samples.token_ids, np.int64)
        if rows.are_plain and not any(samples.is_nan):
            return token_ids, tuple(samples.token_ids)
        chooses = ~self.table.is_beam[rows.slots[rows.samples]]
        is_good = chooses & ~np.array(samples.is_nan, np.bool_)
        return token_ids[chooses], tuple(token_ids[is_good].tolist())

    def _special_rows(self, rows: WorkingRows) -> list[SamplingRow]:
        slots = rows.slots[rows.samples]
        special = np.flatnonzero(self.table.is_special[slots])
        return [self._sampling_row(int(index), int(slots[index])) for index in special]

    def _sampling_row(self, index: int, slot: int) -> SamplingRow:
        table = self.table
        return SamplingRow(
            index=index,
            sampling=table.sampling[slot],
            token_ids=table.token_ids[slot, : table.num_tokens[slot]],
            num_prompt_tokens=int(table.num_prompt_tokens[slot]),
            seed=int(table.seeds[slot]),
            sample_index=int(table.sample_indexes[slot]),
        )

    def _prompt_logprobs(self, rows: WorkingRows, batch: Batch, hidden: torch.Tensor) -> tuple[PromptLogprobs, ...]:
        """Of the rows that asked and computed prompt positions: position p tells of prompt token p + 1."""
        table = self.table
        num_positions = num_prompt_positions(table, rows)
        chunks = []
        for row in np.flatnonzero(num_positions > 0):
            slot, first = int(rows.slots[row]), int(rows.starts[row]) + 1
            start = batch.attention.query_start_loc[row]
            chunk_hidden = hidden[start : start + int(num_positions[row])]
            told = table.token_ids[slot, first : first + len(chunk_hidden)].astype(np.int64)
            token_ids = torch.from_numpy(told).to(self._device)
            logprobs = self._position_logprobs(chunk_hidden, token_ids, int(table.num_prompt_logprobs[slot]))
            chunks.append(PromptLogprobs(slot, first, logprobs))
        return tuple(chunks)

    def _position_logprobs(self, hidden: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
        """Columns over positions: the raw log_softmax of the logits, at the tokens that did follow."""
        return _concatenate(
            logprob_columns(self._model.compute_logits(part).log_softmax(1), told, [num_top] * len(part))
            for part, told in zip(
                hidden.split(_MAX_LOGITS_POSITIONS), token_ids.split(_MAX_LOGITS_POSITIONS), strict=True
            )
        )


class _Watch:
    """Times the parts of a step one after the other. On a GPU they are the times to start them."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter_ns()
        self._ns: dict[str, int] = {}

    def end(self, part: str, known: dict[str, int] | None = None) -> None:
        """Books the time since the last call to a part, but what is `known` to have gone to others."""
        now = time.perf_counter_ns()
        inside = known or {}
        for name, ns in {part: now - self._last - sum(inside.values()), **inside}.items():
            self._ns[name] = self._ns.get(name, 0) + ns
        self._last = now

    def elapsed_us(self) -> int:
        """From the beginning to the last call, so that the parts are all there is."""
        return (self._last - self._started) // 1000

    def parts(self) -> StepParts:
        return StepParts(**{f"{name}_us": max(0, ns // 1000) for name, ns in self._ns.items()})


def _statuses(samples: Samples) -> tuple[RowStatus, ...]:
    if not any(samples.is_nan):
        return ()
    return tuple(RowStatus.NAN_LOGITS if nan else RowStatus.OK for nan in samples.is_nan)


def _concatenate(parts: Iterable[Logprobs]) -> Logprobs:
    columns = list(parts)
    return Logprobs(
        chosen=tuple(value for part in columns for value in part.chosen),
        ranks=tuple(rank for part in columns for rank in part.ranks),
        top_token_ids=tuple(token_id for part in columns for token_id in part.top_token_ids),
        top_logprobs=tuple(value for part in columns for value in part.top_logprobs),
    )
