"""A worker that computes nothing, and the core's steps with it. For measurements of the core's use of KV cache blocks.

`testing.core.simulated_worker` checks every position that a row reads, which takes minutes for long prompts.
"""

import random
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.common.wire.messages import SamplingParams, StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.explain import stats
from scheduler_service.core.request import Request, SchedulerStats, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from testing.core.simulated_worker import SimulatedWorker

EPOCH = 1 << 20
STEP_S = 0.02


@dataclass(slots=True)
class QuickRow:
    """A row of the worker. `num_left` is the number of tokens to compute before the row samples."""

    num_left: int
    work: int = 0  # tokens in each step, until a plan changes it


@dataclass(slots=True)
class QuickWorker:
    """A worker that answers plans with random tokens. It supports neither moves nor copies of blocks."""

    vocab_size: int
    rows: dict[int, QuickRow] = field(default_factory=dict)  # by slot
    num_computed_tokens: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def execute(self, plan: StepPlan) -> StepResult:
        assert not plan.copy_source_blocks
        assert not plan.swap_out_device_blocks
        for slot in plan.released_slots:
            del self.rows[slot]
        for opening in plan.openings:
            self.rows[opening.slot] = QuickRow(len(opening.token_ids) - opening.num_computed_tokens)
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            self.rows[slot].work = num_tokens
        num_sampling = 0
        for row in self.rows.values():
            row.num_left -= row.work
            self.num_computed_tokens += row.work
            if not row.num_left:
                num_sampling += 1
                row.num_left = row.work = 1
        tokens = tuple(self.rng.choices(range(self.vocab_size), k=num_sampling))
        return StepResult(plan.epoch, plan.step, token_ids=tokens)


class Worker(Protocol):
    """A worker that computes a plan at once."""

    def execute(self, plan: StepPlan) -> StepResult: ...


def checking_worker(capacity: WorkerCapacity) -> SimulatedWorker:
    """Return a worker of this capacity that checks every position that a row reads."""
    return SimulatedWorker.of(capacity)


class CoreRun:
    """A scheduler core with a worker. Two plans are in flight, as in production."""

    def __init__(self, capacity: WorkerCapacity, options: SchedulerOptions, worker: Worker) -> None:
        """Connect the core with a worker of this capacity, under the epoch `EPOCH`."""
        self.scheduler, self._worker = Scheduler(options), worker
        self.scheduler.worker_joined(capacity, EPOCH, 0.0)
        self.now = 0.0
        self._in_flight: list[StepResult] = []
        self._num_added = 0

    def add(self, prompt: tuple[int, ...], max_tokens: int, session_id: str = "") -> int:
        """Add a request. Return the id of its sequence."""
        self._num_added += 1
        request = Request(str(self._num_added), "", prompt, SamplingParams(), max_tokens, session_id=session_id)
        [sequence_id] = self.scheduler.add(request, self.now)
        return sequence_id

    def step(self) -> TokenOutputs:
        """Plan a step, and process the result of the step before it."""
        self.now += STEP_S
        plan = self.scheduler.schedule(self.now)
        self.scheduler.drop_kv_events()
        if plan is not None:
            self._in_flight.append(self._worker.execute(plan))
        if not self._in_flight or (plan is not None and len(self._in_flight) == 1):
            return TokenOutputs()
        outputs = self.scheduler.complete(self._in_flight.pop(0), self.now)
        self.scheduler.drop_kv_events()
        return outputs

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_requests and not self._in_flight

    @property
    def stats(self) -> SchedulerStats:
        return stats(self.scheduler.state)
