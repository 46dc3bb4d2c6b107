"""The only place where a plan meets a worker: plan -> send -> result -> publish, in one task.

The link to the worker reports `worker_ready`, `moved`, `grammar_ready`, `result` and `worker_lost`; the
link needs no gRPC. All methods belong to the event loop's thread. What the worker reports waits in an inbox that is
emptied before the next plan is made, so a plan always knows the latest news.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from pagewire.common.messages import StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from scheduler_service.core import explain
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.active_request import ActiveRequest, FanOut
from scheduler_service.serving.availability import WorkerAvailability
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.kv_events import KvEventLog, KvEvents
from scheduler_service.serving.observer import Observer
from scheduler_service.serving.output import SampleRecord, TokenCounts
from scheduler_service.serving.refusal import Reason, RefusedError

logger = logging.getLogger(__name__)

# Steps between two looks at the core's invariants.
_CHECK_INTERVAL = 256


class EpochLink(Protocol):
    """The way to the worker for one epoch."""

    def send(self, plan: StepPlan) -> None:
        """Send a plan on its way, without waiting."""

    def close(self, reason: str) -> None:
        """End the epoch: the worker broke the protocol."""


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
        """See WorkerAvailability for `worker_timeout` and `worker_grace`. Without a `clock` it is the event loop's."""
        self._scheduler = scheduler
        self._observers = observers
        self.clock = clock = clock or Clock()
        self.availability = WorkerAvailability(
            scheduler.max_sequence_tokens,
            clock,
            worker_timeout=worker_timeout,
            worker_grace=worker_grace,
            on_grace_ended=partial(self._end_requests, scheduler.worker_grace_ended),
            on_timed_out=partial(self._end_requests, scheduler.worker_timed_out),
        )
        self.kv_events = KvEvents(scheduler, kv_event_log or KvEventLog(), observers, clock)
        self._fan_out = FanOut(clock)
        self._counts = TokenCounts()
        self._samples: dict[int, tuple[SampleRecord, ActiveRequest]] = {}  # that have not ended
        self._inbox: deque[Callable[[float], None]] = deque()  # what the worker told, which gets the time
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._link: EpochLink | None = None
        self._num_unchecked_steps = 0
        self.epoch = 0

    @property
    def state(self) -> Lifecycle:
        """For questions that change nothing; `core.explain` answers them."""
        return self._scheduler.state

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    # Requests

    def submit(self, request: ActiveRequest, trace: Mapping[str, str] = {}) -> None:
        """Queue a request. Raises RefusedError, AdmissionError."""
        asked = request.request
        if refusal := self.availability.refusal(asked.output_mode):
            raise RefusedError(Reason.UNAVAILABLE, refusal)
        now = self.clock.now()
        with ExitStack() as submission:
            for observer in self._observers:
                asked = submission.enter_context(observer.submission(asked, trace))
            sequence_ids = self._scheduler.add(asked, now)
        request.queued(asked, sequence_ids, now)
        self._samples.update((output.sequence_id, (output, request)) for output in request.outputs)
        self._idle.clear()
        self._wake.set()

    def abort(self, tenant: str, request_id: str) -> None:
        """Raises KeyError if there is no such request."""
        self._publish(self._scheduler.abort(tenant, request_id, self.clock.now()))
        self._wake.set()

    def cancel(self, request: ActiveRequest) -> None:
        """Abort what is left of a submitted request, even where another one has its name by now."""
        if any(output.sequence_id in self._samples for output in request.outputs):
            self.abort(request.request.tenant, request.request.request_id)

    def settle(self, output: SampleRecord, num_kept: int) -> None:
        """Count what a client got of a sample, and what was computed beyond."""
        self._counts.settle(output, num_kept)

    def token_counts(self) -> TokenCounts:
        """Return how many tokens clients got, and how many were computed beyond, beams included."""
        num_discarded = self.state.counters.num_discarded_tokens
        return TokenCounts(self._counts.num_kept, self._counts.num_discarded + num_discarded)

    def stop(self, output: SampleRecord, num_tokens: int) -> None:
        """A stop text ended a sample after this many tokens."""
        self._publish(self._scheduler.stop(output.sequence_id, num_tokens, self.clock.now()))
        self._wake.set()

    async def flush_cache(self, patience: float) -> bool:
        """Forget all cached content as soon as there are no requests; False if there are some all the time.

        `patience` in seconds; 0 does not wait.
        """
        try:
            async with asyncio.timeout(patience):
                while self._samples:
                    await self._idle.wait()
        except TimeoutError:
            return False
        self._scheduler.flush_cache(self.clock.now())
        self.kv_events.take()
        return True

    # Running

    async def run(self) -> None:
        """Until cancelled. An exception is a defect of the scheduler, and fatal."""
        if self._link is None:
            self.availability.start_timers()
        try:
            while True:
                await self._wake.wait()
                self.run_once()
        finally:
            self.availability.stop_timers()

    @property
    def is_due(self) -> bool:
        """Whether there is something that `run_once` has not seen yet."""
        return self._wake.is_set()

    def run_once(self) -> None:
        """Take what the worker told, send the plans that follow, and pass on what has happened to the cache."""
        self._wake.clear()
        self._empty_inbox()
        self._send_plans()
        self.kv_events.take()

    async def drain(self) -> None:
        """Take no more requests, and return when those that are there have ended."""
        self.availability.drain()
        await self._idle.wait()

    def end_all(self, message: str) -> None:
        """End every request with NO_WORKER and this message, and every wait for news of the cache."""
        self.availability.drain()
        self.kv_events.end()
        if self._link is not None:
            self._link.close(message)
            self._leave_epoch()
        self._end_requests(self._scheduler.worker_timed_out, message)

    # What the link reports

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: EpochLink) -> None:
        self._link, self.epoch = link, epoch
        for observer in self._observers:
            observer.worker_changed(capacity)
        self._publish(self._scheduler.worker_joined(capacity, epoch, self.clock.now()))
        self._wake.set()
        self.availability.worker_joined(capacity, self._scheduler.max_sequence_tokens)

    def moved(self, step: int) -> None:
        """The moves of all plans up to this step are done. Comes before the result that says so."""
        self._tell(partial(self._scheduler.moved, step))

    def grammar_ready(self, grammar_id: int, error: str) -> None:
        """The worker has prepared a grammar of the epoch, or (with an error) says why it cannot."""
        self._tell(lambda now: self._publish(self._scheduler.grammar_ready(grammar_id, error, now)))

    def result(self, result: StepResult) -> None:
        self._tell(partial(self._take_result, result))

    def worker_lost(self, reason: str) -> None:
        """Nothing happens if no worker is there."""
        self._empty_inbox()
        if self._link is not None:
            self._end_epoch(reason)

    # Steps

    def _tell(self, news: Callable[[float], None]) -> None:
        """Keep news for the next run. A link whose epoch this has ended may still have some, which are dropped."""
        if self._link is not None:
            self._inbox.append(news)
            self._wake.set()

    def _empty_inbox(self) -> None:
        while self._inbox:
            try:
                self._inbox.popleft()(self.clock.now())
            except WorkerProtocolError as error:
                self._fail_epoch(str(error))

    def _take_result(self, result: StepResult, now: float) -> None:
        outputs = self._scheduler.complete(result, now)
        self._publish(outputs)
        if outputs.token_ids or result.candidates.token_ids or result.embeddings:
            self.availability.token_came()
        stats = explain.stats(self.state)
        for observer in self._observers:
            observer.step_finished(result, stats)
        self._num_unchecked_steps += 1
        if self._num_unchecked_steps == _CHECK_INTERVAL:
            self._num_unchecked_steps = 0
            self._check_invariants()

    def _check_invariants(self) -> None:
        """A broken invariant of the cache is gone with the epoch."""
        try:
            self._scheduler.check_sample()
        except AssertionError:
            logger.exception("an invariant of the scheduler is broken; a new epoch begins")
            for observer in self._observers:
                observer.invariant_failed()
            self._fail_epoch("an invariant of the scheduler is broken")

    def _send_plans(self) -> None:
        while self._link is not None:
            plan = self._scheduler.schedule(self.clock.now())
            if plan is None:
                return
            if plan.step == 1:
                self.availability.epoch_began_to_compute()
            self._link.send(plan)

    def _publish(self, outputs: TokenOutputs) -> None:
        now = self.clock.now()
        for hypothesis in outputs.hypotheses:
            output, request = self._samples[hypothesis.sequence_id]
            self._first_token_came(request, now)
            output.add(hypothesis.token_ids, cumulative_logprob=hypothesis.cumulative_logprob)
            self._counts.num_kept += len(hypothesis.token_ids)
        gaps: dict[float, int] = {}
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            output, request = self._samples[sequence_id]
            if output.last_token_at is None:
                self._first_token_came(request, now)
            else:
                gaps[output.last_token_at] = gaps.get(output.last_token_at, 0) + 1
            output.publish(token_id, now)
            self._counts.num_kept += request.keeps_all
            self._fan_out.enqueue(output, request)
        for last_token_at, num_tokens in gaps.items():
            for observer in self._observers:
                observer.tokens_after(now - last_token_at, num_tokens)
        for sequence_id, logprobs in outputs.logprobs.items():
            self._samples[sequence_id][0].new_logprobs.append(logprobs)
        for sequence_id, prompt_logprobs in outputs.prompt_logprobs.items():
            output, request = self._samples[sequence_id]
            output.new_prompt_logprobs.extend(prompt_logprobs)
            self._fan_out.enqueue(output, request)
        for end in outputs.ended:
            output, request = self._samples.pop(end.sequence_id)
            output.finish(end)
            self._fan_out.enqueue(output, request)
            for observer in self._observers:
                observer.sequence_ended(request.request, end, now)
        if not self._samples:
            self._idle.set()

    def _first_token_came(self, request: ActiveRequest, now: float) -> None:
        for observer in self._observers:
            observer.first_token_after(now - request.arrived_at)

    # The ends of epochs and of requests

    def _fail_epoch(self, reason: str) -> None:
        if self._link is not None:
            self._link.close(reason)
            self._end_epoch(reason)

    def _end_epoch(self, reason: str) -> None:
        logger.warning("lost the worker in epoch %d: %s", self.epoch, reason)
        self.availability.worker_lost(reason)
        for observer in self._observers:
            observer.worker_changed(None)
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        self._link = None
        self._inbox.clear()
        self._publish(self._scheduler.worker_lost(self.clock.now()))
        self.kv_events.take()
        self.availability.worker_left()

    def _end_requests(self, event: Callable[[float], TokenOutputs], message: str) -> None:
        outputs = event(self.clock.now())
        self._publish(replace(outputs, ended=[replace(end, message=message) for end in outputs.ended]))
