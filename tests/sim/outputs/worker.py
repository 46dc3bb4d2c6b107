"""A simulated worker that is lost and comes back, and the step loop's link to it.

Plans go in, and results come out later.
"""

from __future__ import annotations

import asyncio
from random import Random

from pagewire.common.wire.messages import RowStatus, StepPlan, WorkerCapacity
from scheduler_service.serving.step_loop import StepLoop
from testing.core.simulated_worker import SimulatedWorker
from tests.sim.scenario import BAD_TOKEN


class Worker:
    """A worker that computes with one simulated machine after another; each answers plans in order until it is lost."""

    def __init__(self, step_loop: StepLoop, capacity: WorkerCapacity, step_seconds: float, rng: Random) -> None:
        self._step_loop = step_loop
        self._capacity = capacity
        self._step_seconds = step_seconds
        self._rng = rng
        self._link: Link | None = None
        self._epoch = 0
        self.num_losses = 0
        self.bad_sequences: dict[int, RowStatus] = {}  # whose next row that samples has invalid logits

    def begin(self) -> None:
        self._epoch += 1
        self._link = Link(self)
        self._step_loop.exchange.worker_ready(self._capacity, self._epoch, self._link)

    def lose(self, seconds: float) -> None:
        """Lose the worker, and start another one after `seconds`."""
        if self._link is not None:
            self._link = None
            self.num_losses += 1
            self._step_loop.exchange.worker_lost("it was taken away")
            asyncio.get_running_loop().call_later(seconds, self.begin)

    def corrupt(self) -> None:
        """Give one of the rows invalid logits."""
        if self._link is not None and (rows := self._link.machine.rows):
            row = rows[self._rng.choice(sorted(rows))]
            self.bad_sequences[row.opening.sequence_id] = RowStatus.NAN_LOGITS

    def end(self) -> None:
        """Forget the link, which the step loop has dropped at shutdown."""
        self._link = None

    def machine(self) -> SimulatedWorker:
        return SimulatedWorker.of(self._capacity, poisoned=frozenset((BAD_TOKEN,)), bad_sequences=self.bad_sequences)

    def seconds(self) -> float:
        return self._step_seconds * (0.5 + self._rng.random())

    def answer(self, link: Link, plan: StepPlan) -> None:
        if link is self._link:
            result = link.machine.execute(plan)
            self._step_loop.exchange.moved(plan.step)
            self._step_loop.exchange.result(result)


class Link:
    """The step loop's link to the worker for one epoch."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.machine = worker.machine()
        self._free_at = 0.0

    def send(self, plan: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + self._worker.seconds()
        loop.call_at(self._free_at, self._worker.answer, self, plan)

    def close(self, reason: str) -> None:
        self._worker.end()
