"""The step loop, the only place where plans are sent to a worker and results are received from it.

One task repeats the cycle: schedule a plan, send it, process the result, publish the outputs. The link to the worker
calls `worker_ready`, `moved`, `grammar_ready`, `result` and `worker_lost`. The link need not use gRPC. All methods
belong to the event loop's thread. Reports of the worker wait in an inbox. The inbox is emptied before the next plan is
made, so a plan always depends on the latest reports.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from pagewire.common.wire.messages import StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from scheduler_service.core.request import TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.active_request import ActiveRequest, Publisher
from scheduler_service.serving.availability import WorkerAvailability
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.kv_events import KvEventLog, KvEvents
from scheduler_service.serving.observer import Observer, Observers
from scheduler_service.serving.output import SampleRecord, TokenCounts
from scheduler_service.serving.refusal import Reason, RefusedError

logger = logging.getLogger(__name__)

# The number of steps between two checks of the core's invariants.
_CHECK_INTERVAL = 256


class EpochLink(Protocol):
    """The connection to the worker during one epoch. An epoch begins when a worker connects and ends when it is
    lost."""

    def send(self, plan: StepPlan) -> None:
        """Send the plan of a step to the worker. The plan says what the worker computes in the step. Return before the
        plan has been transmitted."""

    def close(self, reason: str) -> None:
        """End the epoch by closing the connection to the worker, for example because the worker violated the protocol.
        `reason` is for the log."""


class PlanExchange:
    """The part of the step loop that exchanges messages with the worker. It sends plans (each says what to compute in
    one step) and processes the results. It remains when a worker is lost; the next worker has a new link."""

    def __init__(
        self,
        scheduler: Scheduler,
        publisher: Publisher,
        observers: Observers,
        availability: WorkerAvailability,
        kv_events: KvEvents,
        wake: asyncio.Event,
        clock: Clock,
    ) -> None:
        """Prepare the exchange of plans and results with a worker. No worker is connected yet. `wake` is the event for
        which the step loop waits. The exchange sets it when a worker has connected or sent a report."""
        self._scheduler = scheduler
        self._counters = scheduler.state.counters
        self._publisher = publisher
        self._observers = observers
        self.availability = availability
        self._kv_events = kv_events
        self._wake = wake
        self._clock = clock
        self._inbox: deque[Callable[[float], None]] = deque()  # reports to process, called with the time
        self._link: EpochLink | None = None
        self._num_unchecked_steps = 0
        self._is_fruitless = False  # the epoch has a plan, but no token yet
        self.epoch = 0  # the number of the current or the last epoch

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: EpochLink) -> None:
        self._link, self.epoch, self._is_fruitless = link, epoch, False
        for tell in self._observers.worker_changed:
            tell(capacity)
        self._publisher.publish(self._scheduler.worker_joined(capacity, epoch, self._clock.now()))
        self._wake.set()
        self.availability.worker_joined(capacity, self._scheduler.max_sequence_tokens)

    def moved(self, step: int) -> None:
        """Report that the worker has finished moving KV cache blocks between device and host memory, for all plans up
        to this step. If a result acknowledges these moves, the link must call this method before it passes on the
        result."""
        self._tell(partial(self._scheduler.moved, step))

    def grammar_ready(self, grammar_id: int, error: str) -> None:
        """Report that the worker has compiled the grammar with this id, or has failed. If it has failed, `error` is the
        reason; otherwise `error` is empty."""
        self._tell(lambda now: self._publisher.publish(self._scheduler.grammar_ready(grammar_id, error, now)))

    def result(self, result: StepResult, age: float = 0.0) -> None:
        """Report the result of a step. It was `age` seconds old when it arrived, because it came with a later one."""
        self._tell(partial(self._take_result, result, age))

    def worker_lost(self, reason: str) -> None:
        """Report that the connection to the worker is lost, which ends the epoch (the time of one connection). Do
        nothing if no worker is connected."""
        self.empty_inbox()
        if self._link is not None:
            self._end_epoch(reason)

    def _tell(self, news: Callable[[float], None]) -> None:
        """Queue a report of the worker and wake up the step loop, which processes the report. Drop the report if the
        worker is no longer connected."""
        if self._link is not None:
            self._inbox.append(news)
            self._wake.set()

    def empty_inbox(self) -> None:
        """Process all waiting reports of the worker. If a report violates the protocol, close the connection to the
        worker, which ends the epoch."""
        while self._inbox:
            try:
                self._inbox.popleft()(self._clock.now())
            except WorkerProtocolError as error:
                self._fail_epoch(str(error))

    def _take_result(self, result: StepResult, age: float, now: float) -> None:
        outputs = self._scheduler.complete(result, now)
        self._publisher.publish(outputs, age)
        if self._is_fruitless and (outputs.token_ids or result.candidates.token_ids or result.embeddings):
            self._is_fruitless = False
            self.availability.has_computed_token()
        for tell in self._observers.step_finished:
            tell(result, self._counters.num_prompt_tokens - self._counters.num_cached_prompt_tokens)
        self._num_unchecked_steps += 1
        if self._num_unchecked_steps == _CHECK_INTERVAL:
            self._num_unchecked_steps = 0
            self._check_invariants()

    def _check_invariants(self) -> None:
        """Check a few invariants of the scheduler core. If one is violated, close the connection to the worker, so that
        the state of the KV cache is discarded."""
        try:
            self._scheduler.check_sample()
        except AssertionError:
            logger.exception("an invariant of the scheduler is broken; a new epoch begins")
            for tell in self._observers.invariant_failed:
                tell()
            self._fail_epoch("an invariant of the scheduler is broken")

    def send_plans(self) -> None:
        """Ask the scheduler core for plans (each says what to compute in one step) and send them to the worker, until
        the core returns None. The core returns None if no work remains, or if the worker already has enough unfinished
        plans."""
        while self._link is not None:
            plan = self._scheduler.schedule(self._clock.now())
            if plan is None:
                return
            self._is_fruitless |= plan.step == 1
            self._link.send(plan)

    def close(self, message: str) -> None:
        """Close the connection to the worker because the scheduler shuts down. Do nothing if no worker is connected."""
        if self._link is not None:
            self._link.close(message)
            self._leave_epoch()

    def _fail_epoch(self, reason: str) -> None:
        if self._link is not None:
            self._link.close(reason)
            self._end_epoch(reason)

    def _end_epoch(self, reason: str) -> None:
        logger.warning("lost the worker in epoch %d: %s", self.epoch, reason)
        self.availability.worker_lost(reason, has_no_token=self._is_fruitless)
        for tell in self._observers.worker_changed:
            tell(None)
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        self._link = None
        self._inbox.clear()
        self._publisher.publish(self._scheduler.worker_lost(self._clock.now()))
        self._kv_events.take()
        self.availability.worker_left()


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        observers: Sequence[Observer],
        *,
        worker_timeout: float,
        worker_grace: float | None = None,
        kv_event_log: KvEventLog | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the step loop of a scheduler, with its observers. `worker_timeout` and `worker_grace` limit the time
        in seconds that requests wait for a missing worker; see WorkerAvailability. The default `clock` is the event
        loop's clock."""
        self._scheduler = scheduler
        self.state = scheduler.state  # read-only, for `core.explain`
        heard_by = Observers(observers)
        self._submissions = heard_by.submission
        self.clock = clock = clock or Clock()
        self.availability = WorkerAvailability(
            scheduler.max_sequence_tokens,
            clock,
            worker_timeout=worker_timeout,
            worker_grace=worker_grace,
            on_grace_ended=partial(self._end_requests, scheduler.worker_grace_ended),
            on_timed_out=partial(self._end_requests, scheduler.worker_timed_out),
        )
        self.kv_events = KvEvents(scheduler, kv_event_log or KvEventLog(), clock)
        self._publisher = publisher = Publisher(heard_by, clock)
        self._wake = asyncio.Event()
        self.exchange = PlanExchange(
            scheduler, publisher, heard_by, self.availability, self.kv_events, self._wake, clock
        )

    # Requests

    def submit(self, request: ActiveRequest, trace: Mapping[str, str] = {}) -> None:
        """Queue a request in the scheduler core. Raise RefusedError if no requests are accepted now, for example during
        shutdown. Raise AdmissionError if the core refuses the request, for example because its queue is full."""
        asked = request.request
        if refusal := self.availability.refusal(asked.output_mode):
            raise RefusedError(Reason.UNAVAILABLE, refusal)
        now = self.clock.now()
        with ExitStack() as submission:
            for begin in self._submissions:
                asked = submission.enter_context(begin(asked, trace))
            sequence_ids = self._scheduler.add(asked, now)
        request.queued(asked, sequence_ids, now)
        self._publisher.add(request)
        self._wake.set()

    def abort(self, tenant: str, request_id: str) -> None:
        """Abort a tenant's request by its id, so that its samples end with the reason ABORT. Raise KeyError if no such
        request is waiting or running."""
        self._publisher.publish(self._scheduler.abort(tenant, request_id, self.clock.now()))
        self._wake.set()

    def cancel(self, request: ActiveRequest) -> None:
        """Abort a submitted request if some of its samples are unfinished. Do nothing if the request has ended, because
        another request may have the same id now."""
        if any(output.sequence_id in self._publisher.samples for output in request.outputs):
            self.abort(request.request.tenant, request.request.request_id)

    def count_kept_tokens(self, output: SampleRecord, num_kept: int) -> None:
        """Record how many output tokens of a sample the client kept. The remaining computed tokens count as
        discarded."""
        self._publisher.counts.count_kept_tokens(output, num_kept)

    def token_counts(self) -> TokenCounts:
        """Return the number of output tokens that clients received, and the number that were computed but discarded.
        Tokens of beams that a beam search did not return count as discarded."""
        counts, num_discarded = self._publisher.counts, self.state.counters.num_discarded_tokens
        return TokenCounts(counts.num_kept, counts.num_discarded + num_discarded)

    def stop(self, output: SampleRecord, num_tokens: int) -> None:
        """End a sample after its first `num_tokens` output tokens, because its output contains a stop text."""
        self._publisher.publish(self._scheduler.stop(output.sequence_id, num_tokens, self.clock.now()))
        self._wake.set()

    async def flush_cache(self, patience: float) -> bool:
        """Remove all content from the prefix cache when no requests are waiting or running. Return True if the cache
        was emptied. Return False, and keep the content, if requests still remain after `patience` seconds. With a
        `patience` of 0 the method does not wait."""
        try:
            async with asyncio.timeout(patience):
                while self._publisher.samples:
                    await self._publisher.idle.wait()
        except TimeoutError:
            return False
        self._scheduler.flush_cache(self.clock.now())
        self.kv_events.take()
        return True

    # Running

    async def run(self) -> None:
        """Run the step loop until the task is cancelled: make plans, send them to the worker and process the results.
        An exception that this method raises is a bug in the scheduler, and the process must end."""
        if not self.exchange.is_connected:
            self.availability.start_timers()
        try:
            while True:
                await self._wake.wait()
                self.run_once()
        finally:
            self.availability.stop_timers()

    @property
    def is_due(self) -> bool:
        """Whether `run_once` has something to process: new requests or reports of the worker."""
        return self._wake.is_set()

    def run_once(self) -> None:
        """Run the step loop once: process the worker's reports, send the next plans (what to compute in a step) to the
        worker, and collect the events of the KV cache."""
        self._wake.clear()
        self.exchange.empty_inbox()
        self.exchange.send_plans()
        self.kv_events.take()

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all accepted requests have ended."""
        self.availability.drain()
        await self._publisher.idle.wait()

    def end_all(self, message: str) -> None:
        """End every request because the server shuts down. The end reason is NO_WORKER, and `message` is the error
        message. Also end the subscriptions to the events of the KV cache."""
        self.availability.drain()
        self.kv_events.end()
        self.exchange.close(message)
        self._end_requests(self._scheduler.worker_timed_out, message)

    def _end_requests(self, event: Callable[[float], TokenOutputs], message: str) -> None:
        outputs = event(self.clock.now())
        self._publisher.publish(replace(outputs, ended=[replace(end, message=message) for end in outputs.ended]))
