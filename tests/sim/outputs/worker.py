"""A worker that comes and goes, and the step loop's link to it in one: plans in, results out, later."""

from __future__ import annotations

import asyncio
from random import Random

from pagewire.common.wire.messages import RowStatus, StepPlan, WorkerCapacity
from scheduler_service.serving.step_loop import StepLoop
from testing.core.simulated_worker import SimulatedWorker
from tests.sim.scenario import BAD_TOKEN


class Worker:
    """Computes with one machine after another. Each answers plans in order until it is lost."""

    def __init__(self, step_loop: StepLoop, capacity: WorkerCapacity, step_seconds: float, rng: Random) -> None:
        self._step_loop = step_loop
        self._capacity = capacity
        self._step_seconds = step_seconds
        self._rng = rng
        self._link: Link | None = None
        self._epoch = 0
        self.num_losses = 0
        self.bad_sequences: dict[int, RowStatus] = {}  # whose next row that samples has no good logits

    def begin(self) -> None:
        self._epoch += 1
        self._link = Link(self)
        self._step_loop.exchange.worker_ready(self._capacity, self._epoch, self._link)

    def lose(self, seconds: float) -> None:
        """The worker is gone, and another one comes after a while."""
        if self._link is not None:
            self._link = None
            self.num_losses += 1
            self._step_loop.exchange.worker_lost("it was taken away")
            asyncio.get_running_loop().call_later(seconds, self.begin)

    def spoil(self) -> None:
        """Let one of the rows fail."""
        if self._link is not None and (rows := self._link.machine.rows):
            row = rows[self._rng.choice(sorted(rows))]
            self.bad_sequences[row.opening.sequence_id] = RowStatus.NAN_LOGITS

    def end(self) -> None:
        """The step loop is shutting down, and has let go of it."""
        self._link = None

    def machine(self) -> SimulatedWorker:
        capacity = self._capacity
        return SimulatedWorker(
            capacity.num_device_blocks,
            capacity.block_size,
            capacity.vocab_size,
            capacity.max_num_seqs,
            capacity.max_num_batched_tokens,
            capacity.num_host_blocks,
            poisoned=frozenset((BAD_TOKEN,)),
            bad_sequences=self.bad_sequences,
        )

    def seconds(self) -> float:
        return self._step_seconds * (0.5 + self._rng.random())

    def answer(self, link: Link, plan: StepPlan) -> None:
        if link is self._link:
            result = link.machine.execute(plan)
            self._step_loop.exchange.moved(plan.step)
            self._step_loop.exchange.result(result)


class Link:
    """The step loop's way to the worker for one epoch."""

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
