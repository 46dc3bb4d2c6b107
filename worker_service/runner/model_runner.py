"""Execution of plans: grammars -> moves and copies -> rows of the table -> computation -> result.

A `Computation` computes the rows, either on the host or on a device. On a device, `launch` only submits a step, and the
next plan may be launched before the step's result has been read. If memory does not suffice for a step, the step is
computed in parts (`rows/parts.py`). A row for which memory does not suffice even alone fails.

One thread drives a runner. The runner does not need gRPC: any caller that has a StepPlan may call `execute`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pagewire.common.wire.messages import GrammarReport, StepPlan, StepResult, WorkerProtocolError
from worker_service.cache import CacheEngine
from worker_service.device import is_fatal, is_out_of_memory
from worker_service.epoch_grammars import EpochGrammars
from worker_service.models.communicator import Communicator
from worker_service.rows import (
    BegunStep,
    SequenceTable,
    StepOutline,
    StepPart,
    StepWatch,
    WorkingRows,
    join_results,
    run_in_parts,
)
from worker_service.step import LaunchedStep


class Computation(Protocol):
    """The interface of a model's computation on a CPU or a GPU, for the running sequences of a step.

    It stores sampled tokens where the next step reads them. Memory is allocated when a step is launched. If a launch
    raises an exception because memory does not suffice, it has changed nothing.
    """

    table: SequenceTable
    num_graphs: int  # number of graphs that `capture_graphs` captures

    def capture_graphs(self, sum_of_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Capture the CUDA graphs that fit into memory, and log a warning for the others.

        Without communication between tensor-parallel ranks in the graphs, call this once, before the first plan. With
        such communication, pass the ranks' `all_reduce` as `sum_of_ranks`. Then all ranks must call this before the
        first plan of each epoch (session with a scheduler), since a capture exchanges the same data as a step. If
        memory does not suffice, the method then raises an exception. From the next epoch on all ranks skip a graph that
        did not fit one of them.
        """

    def drop_graphs(self) -> None:
        """Discard all captured CUDA graphs. No graph is replayed before the next `capture_graphs`."""

    def run_graphs_uncaptured(self) -> None:
        """Run the operations of the largest CUDA graphs without capturing them, to measure their memory use.

        Call this instead of `capture_graphs`. There must be at least one graph size.
        """

    def prepare(self, step: BegunStep, rows: WorkingRows) -> Callable[[], LaunchedStep]:
        """Apply a plan's changes to the device's copy of the sequence table. Return a function that launches the step.

        The function computes the sequences in `rows`, which may be empty. If the function raises an exception, it may
        be called again.
        """

    def launch(self, step: BegunStep, rows: WorkingRows) -> LaunchedStep:
        """Launch the computation of some sequences of a step that does not fit into memory as a whole.

        `prepare` must have been called for the step.
        """

    def synchronize(self) -> None:
        """Wait until all launched steps are done. Raises an exception if the device is lost."""


class ModelRunner:
    """A runner that carries out the scheduler's step plans for one model.

    It has the KV cache and the table of running sequences.
    """

    def __init__(
        self,
        computation: Computation,
        cache: CacheEngine,
        communicator: Communicator,
        splits_steps: bool = True,
        grammars: EpochGrammars | None = None,
    ) -> None:
        """Create a runner. If `splits_steps` is set, a step for which memory does not suffice is computed in parts.

        If `grammars` is None, the runner rejects plans with grammars.
        """
        self.computation = computation
        self.table = computation.table
        self._cache = cache
        self._communicator = communicator
        self._grammars = grammars or EpochGrammars(None, self.table.limits.vocab_size)
        self._must_capture = False
        self.table.masks.matcher_of = self._grammars.matcher
        self.table.masks.queue = self._grammars.mask_queue
        self.table.masks.waits_for_all = communicator.size > 1  # all ranks must sample the same rows
        self._is_out_of_memory = is_out_of_memory if splits_steps else lambda error: False

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None] = lambda report: None) -> None:
        """Begin a session with a scheduler: wait until all started steps have finished, then forget all sequences.

        `epoch` identifies the session. See `Runner.reset`.
        """
        if self._communicator.size > 1:  # the graphs contain the previous epoch's connections, which end now
            self.computation.drop_graphs()
            self._must_capture = True
        self._communicator.begin(epoch)  # also ends device operations that wait for a lost rank
        self.computation.synchronize()
        self.table.clear()
        self._cache.reset()
        self._grammars.begin(epoch, report_grammar)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step of one plan, after the steps launched earlier. See `Runner.launch`.

        Raises WorkerProtocolError if the plan is invalid, before any KV cache block is changed.
        """
        # by the first plan of an epoch, all ranks have joined the epoch, so they can communicate
        if self._must_capture:
            self.computation.capture_graphs(self._communicator.all_reduce)
            self._must_capture = False
        watch = StepWatch()
        self._cache.check(plan)
        self._grammars.apply(plan)
        mask_times = self.table.masks.begin_step()
        rows = self.table.apply(plan)
        self._cache.move(plan)
        self._cache.copy(plan)
        step = BegunStep(plan, self._cache.last_moved_step(), watch, mask_times)
        watch.end("plan")
        launched = self._launch(step, rows)
        self.table.advance(rows)
        return launched

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the step of one plan, wait until it is done, and return its result."""
        return replace(self.launch(plan).result(), last_moved_step=self._cache.last_moved_step())

    def last_moved_step(self) -> int:
        """Return the number of the last step whose moves of KV cache blocks between device and host have finished.

        The moves of all earlier steps have finished too.
        """
        return self._cache.last_moved_step()

    @property
    def is_moving(self) -> bool:
        """Whether any move of KV cache blocks between device and host is unfinished.

        The value stays True until `last_moved_step` has reported that the moves have finished.
        """
        return self._cache.is_moving

    def is_fatal(self, error: Exception) -> bool:
        """Return whether `error` means that the device is lost, so that only a new process can compute.

        The result is also True if waiting for the device fails. It is always False for a WorkerProtocolError.
        """
        if isinstance(error, WorkerProtocolError):
            return False
        try:
            self.computation.synchronize()
        except Exception:
            return True
        return is_fatal(error)

    def _launch(self, step: BegunStep, rows: WorkingRows) -> LaunchedStep:
        """Launch the computation of a step's sequences (`rows`), and return the step in progress.

        The step is split into several parts if memory does not suffice. Sequences that have failed are not computed.
        """
        good_rows = self._without_failed(rows)
        launch = self.computation.prepare(step, good_rows)
        if not len(rows.slots):
            return launch()
        parts = run_in_parts(
            good_rows,
            lambda part: launch() if part is good_rows else self.computation.launch(step, part),
            is_out_of_memory=self._is_out_of_memory,
            free_memory=torch.cuda.empty_cache,
            give_up=self._give_up,
            cuts_rows=not self.table.limits.is_bidirectional,
        )
        if parts and parts[0].rows is rows:
            return parts[0].result
        return _SplitStep(step, StepOutline.of(self.table, rows), parts)

    def _without_failed(self, rows: WorkingRows) -> WorkingRows:
        """Return the sequences of a step without those that failed in an earlier step. Those fail again."""
        has_failed = self.table.has_failed[rows.slots]
        if not has_failed.any():
            return rows
        self._give_up(rows.take(has_failed))
        return rows.take(~has_failed)

    def _give_up(self, rows: WorkingRows) -> None:
        """Mark sequences as failed, and fill the KV cache positions of their new tokens, and their saves, with NaN.

        Failed sequences are not computed in this step or in any later step.
        """
        for slot, start, end in zip(rows.slots, rows.starts, rows.ends, strict=True):
            tables = self.table.block_tables[slot :: self.table.limits.max_num_seqs]
            self._cache.fill_with_nan(tables.tolist(), int(start), int(end))
        self._cache.fill_states_with_nan(self.table.states.saved_states(rows))
        self.table.has_failed[rows.slots] = True


@dataclass(frozen=True, slots=True)
class _SplitStep:
    """A launched step that is computed in several parts, because memory did not suffice or some sequences failed."""

    step: BegunStep
    outline: StepOutline
    parts: list[StepPart[LaunchedStep]]

    def is_done(self) -> bool:
        return all(part.result.is_done() for part in self.parts)

    def result(self) -> StepResult:
        return join_results(self.step, self.outline, [StepPart(part.rows, part.result.result()) for part in self.parts])
