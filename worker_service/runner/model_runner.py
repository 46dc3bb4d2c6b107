"""Carries out plans: grammars -> moves and copies -> rows of the table -> computation -> result.

Where the rows are computed, on the host or on a device, is a `Computation`. On a device a step is only launched here,
and the next plan may be launched before its result has been read. A step for which memory does not suffice is
computed in parts (`rows/parts.py`), and a row that does not fit alone is given up.

A runner is driven by one thread. It needs no gRPC: what holds a StepPlan may call `execute`.
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
    """A computation of rows of the table, which writes the tokens that they sample where their next step finds them.

    Memory is taken when something is launched, and whatever raises for want of it has changed nothing.
    """

    table: SequenceTable
    num_graphs: int  # that `capture_graphs` captures

    def capture_graphs(self, sum_of_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Capture what fits the memory, and warn of what does not. To be called before the first plan.

        Where the connections of ranks are captured too, to be called with `sum_of_ranks`, their `all_reduce`, before
        the first plan of each epoch: of all ranks alike, since it has them exchange what a step would. Then it raises
        where memory does not suffice, and from the next epoch on the ranks do without what did not fit one of them.
        """

    def drop_graphs(self) -> None:
        """No graph is replayed any more until the next `capture_graphs`."""

    def rehearse_graphs(self) -> None:
        """Do what the largest graphs would do; there must be some. To be called in place of `capture_graphs`."""

    def prepare(self, step: BegunStep, rows: WorkingRows) -> Callable[[], LaunchedStep]:
        """Take over what the plan has changed in the table. Returns what launches these rows, of which there may be
        none; it may be called again if it raises."""

    def launch(self, step: BegunStep, rows: WorkingRows) -> LaunchedStep:
        """Launch a part of a step that has been prepared."""

    def synchronize(self) -> None:
        """Return when everything that was launched has been done. Raises if the device is lost."""


class ModelRunner:
    """One model, one KV cache, one table of running sequences."""

    def __init__(
        self,
        computation: Computation,
        cache: CacheEngine,
        communicator: Communicator,
        splits_steps: bool = True,
        grammars: EpochGrammars | None = None,
    ) -> None:
        """`splits_steps`: computes a step in parts where memory does not suffice. `grammars`: None: it reads none."""
        self.computation = computation
        self.table = computation.table
        self._cache = cache
        self._communicator = communicator
        self._grammars = grammars or EpochGrammars(None, self.table.limits.vocab_size)
        self._must_capture = False
        self.table.masks.matcher_of = self._grammars.matcher
        self.table.masks.queue = self._grammars.mask_queue
        self.table.masks.waits_for_all = communicator.size > 1  # ranks must agree
        self._is_out_of_memory = is_out_of_memory if splits_steps else lambda error: False

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None] = lambda report: None) -> None:
        """See `Runner.reset`."""
        if self._communicator.size > 1:  # graphs hold the connections of the epoch before, which end now
            self.computation.drop_graphs()
            self._must_capture = True
        self._communicator.begin(epoch)  # what waits on the device for a rank that is lost ends too
        self.computation.synchronize()
        self.table.clear()
        self._cache.reset()
        self._grammars.begin(epoch, report_grammar)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See `Runner.launch`. Raises WorkerProtocolError before any block is touched if the plan breaks a rule."""
        if self._must_capture:  # the ranks have all answered to the epoch by its first plan, and meet now
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
        """Carry out one plan and wait for it."""
        return replace(self.launch(plan).result(), last_moved_step=self._cache.last_moved_step())

    def last_moved_step(self) -> int:
        """The moves of all plans of this epoch up to this step are done."""
        return self._cache.last_moved_step()

    @property
    def is_moving(self) -> bool:
        """Whether moves are under way that no result has told of."""
        return self._cache.is_moving

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is in an error state that stays: then waiting for it fails too."""
        if isinstance(error, WorkerProtocolError):
            return False
        try:
            self.computation.synchronize()
        except Exception:
            return True
        return is_fatal(error)

    def _launch(self, step: BegunStep, rows: WorkingRows) -> LaunchedStep:
        """Launch the rows in one part, unless memory does not suffice or has not for one of the rows."""
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
        )
        if parts and parts[0].rows is rows:
            return parts[0].result
        return _PartsUnderWay(step, StepOutline.of(self.table, rows), parts)

    def _without_failed(self, rows: WorkingRows) -> WorkingRows:
        """Rows that were given up before are given up in every step."""
        has_failed = self.table.has_failed[rows.slots]
        if not has_failed.any():
            return rows
        self._give_up(rows.take(has_failed))
        return rows.take(~has_failed)

    def _give_up(self, rows: WorkingRows) -> None:
        """Give up rows, which are not computed in this step and in any later one; what they should have written is
        spoilt."""
        for slot, start, end in zip(rows.slots, rows.starts, rows.ends, strict=True):
            self._cache.spoil(self.table.block_tables[slot], int(start), int(end))
        self.table.has_failed[rows.slots] = True


@dataclass(frozen=True, slots=True)
class _PartsUnderWay:
    """A step in parts, as `LaunchedStep`."""

    step: BegunStep
    outline: StepOutline
    parts: list[StepPart[LaunchedStep]]

    def is_done(self) -> bool:
        return all(part.result.is_done() for part in self.parts)

    def result(self) -> StepResult:
        return join_results(self.step, self.outline, [StepPart(part.rows, part.result.result()) for part in self.parts])
