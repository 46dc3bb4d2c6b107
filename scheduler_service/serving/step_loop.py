"""The only place where a plan meets a worker: plan -> send -> result -> publish, in one task.

Whoever holds the link to the worker reports `worker_ready`, `moved`, `result` and `worker_lost`; the link needs no
gRPC. All methods belong to the event loop's thread. What the worker reports waits in an inbox that is emptied before
the next plan is made, so a plan always knows the latest news.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from scheduler_service.core.plan import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.request import (
    BlockMap,
    KvEventCounts,
    OutputMode,
    Request,
    RequestReport,
    SchedulerStats,
    SequenceEnd,
    TokenOutputs,
    count_kv_events,
)
from scheduler_service.core.scheduler import Scheduler, WorkerProtocolError
from scheduler_service.serving.kv_event_log import KvEventBatch, KvEventLog
from scheduler_service.serving.recording_scheduler import RecordingScheduler
from scheduler_service.serving.token_stream import FanOut, Receiver, TokenStream

logger = logging.getLogger(__name__)

# A worker that is lost this often before a token comes back is not merely being restarted.
_MAX_FRUITLESS_EPOCHS = 10
# Steps between two looks at the core's invariants.
_CHECK_INTERVAL = 256


class EpochLink(Protocol):
    """The way to the worker for one epoch."""

    def send(self, plan: StepPlan) -> None: ...

    def close(self, reason: str) -> None:
        """End the epoch: the worker broke the protocol."""


class StepObserver(Protocol):
    """Who keeps the metrics. Everything is reported per step, never per token."""

    def step_finished(self, result: StepResult, stats: SchedulerStats, now: float) -> None: ...

    def first_token_after(self, seconds: float) -> None: ...

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` sequences got a token this long after the one before."""

    def sequence_ended(self, end: SequenceEnd, now: float) -> None: ...

    def worker_changed(self, capacity: WorkerCapacity | None, epoch: int) -> None:
        """A worker joined, or (None) was lost."""

    def kv_events_happened(self, counts: KvEventCounts) -> None: ...

    def invariant_failed(self) -> None: ...


class RefusedError(Exception):
    """The request cannot be served now. The text says why."""


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler | RecordingScheduler,
        observer: StepObserver,
        *,
        worker_timeout: float,
        worker_grace: float | None = None,
        fan_out: FanOut | None = None,
        kv_event_log: KvEventLog | None = None,
        on_availability_changed: Callable[[], None] = lambda: None,
        begin_trace: Callable[[Request], Request] = lambda request: request,
        on_submitted: Callable[[Request], None] = lambda request: None,
        on_sequence_ended: Callable[[Request, SequenceEnd, float], None] = lambda request, end, now: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_timeout` is how many seconds any request waits for a worker, `worker_grace` how many those wait that
        could as well begin elsewhere, by default as many.

        `begin_trace` gets every request before it is taken, in the task of its caller, and may add its trace;
        `on_submitted` gets those that were taken, `on_sequence_ended` the end of every sample, with its request and the
        time."""
        self._scheduler = scheduler
        self._observer = observer
        self._worker_timeout = worker_timeout
        self._worker_grace = worker_timeout if worker_grace is None else worker_grace
        self._fan_out = fan_out or FanOut()
        self._kv_event_log = kv_event_log or KvEventLog(max_batches=10_000)
        self._kv_event_log_grew = asyncio.Event()  # a new one for each batch
        self._on_availability_changed = on_availability_changed
        self._begin_trace = begin_trace
        self._on_submitted = on_submitted
        self._on_sequence_ended = on_sequence_ended
        self._clock = clock
        self._streams: dict[int, TokenStream] = {}
        self._inbox: deque[StepResult | int] = deque()  # results, and steps up to which all moves are done
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._availability_changed = asyncio.Event()  # a new one for each change
        self._link: EpochLink | None = None
        self._timers: list[asyncio.TimerHandle] = []  # while no worker is there
        self._grace_has_ended = self._has_timed_out = False
        self._is_draining = False
        self._has_ended = False
        self._epoch_is_fruitless = False  # it has a plan, but no token yet
        self._num_fruitless_epochs = 0
        self._num_unchecked_steps = 0
        self.epoch = 0
        self.capacity: WorkerCapacity | None = None  # of the worker that is there or was there last
        self.num_worker_losses = 0
        self.missing_reason = ""  # why there is no worker, as far as is known

    # Requests

    def submit(self, request: Request, receiver: Receiver) -> list[int]:
        """Queue a request; the ids of its sequences. Raises RefusedError, AdmissionError."""
        refusal = self.refusal(request.output_mode)
        if refusal:
            raise RefusedError(refusal)
        now = self._clock()
        request = self._begin_trace(request)
        sequence_ids = self._scheduler.add(request, now)
        for index, sequence_id in enumerate(sequence_ids):
            self._streams[sequence_id] = TokenStream(
                request, index, receiver.deliver, now, receiver.outlet, receiver.label + index
            )
        self._on_submitted(request)
        self._idle.clear()
        self._wake.set()
        return sequence_ids

    def abort(self, tenant: str, request_id: str) -> None:
        """Raises KeyError if there is no such request."""
        self._publish(self._scheduler.abort(tenant, request_id, self._clock()))
        self._wake.set()

    def cancel(self, sequence_ids: list[int]) -> None:
        """Abort what is left of a submitted request, whoever else uses its name by now."""
        stream = next((self._streams[id] for id in sequence_ids if id in self._streams), None)
        if stream is not None:
            self.abort(stream.request.tenant, stream.request.request_id)

    def stop(self, sequence_id: int, num_output_tokens: int) -> None:
        """A stop text ended a sequence after this many tokens."""
        self._publish(self._scheduler.stop(sequence_id, num_output_tokens, self._clock()))
        self._wake.set()

    # The worker

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: EpochLink) -> None:
        self._stop_timers()
        self._grace_has_ended = self._has_timed_out = False
        self._link, self.capacity, self.epoch = link, capacity, epoch
        self._epoch_is_fruitless = False
        self.missing_reason = ""
        self._observer.worker_changed(capacity, epoch)
        self._publish(self._scheduler.worker_joined(capacity, epoch, self._clock()))
        self._wake.set()
        self._tell_availability()

    def moved(self, step: int) -> None:
        """The moves of all plans up to this step are done. Comes before the result that says so."""
        self._inbox.append(step)
        self._wake.set()

    def result(self, result: StepResult) -> None:
        self._inbox.append(result)
        self._wake.set()

    def worker_lost(self, reason: str) -> None:
        """Nothing happens if no worker is there."""
        if self._link is not None:
            self._empty_inbox()
        if self._link is not None:
            self._end_epoch(reason)

    def worker_missing(self, reason: str) -> None:
        """The worker does not begin an epoch."""
        self.missing_reason = reason

    # Running

    async def run(self) -> None:
        """Until cancelled. An exception is a defect of the scheduler, and fatal."""
        if self._link is None:
            self._start_timers()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._empty_inbox()
                self._send_plans()
                self._take_kv_events()
        finally:
            self._stop_timers()

    async def drain(self) -> None:
        """Take no more requests, and return when those that are there have ended."""
        self._is_draining = True
        self._tell_availability()
        await self._idle.wait()

    def end_all(self, message: str) -> None:
        """End every request with NO_WORKER and this message, and whoever waits for news of the cache."""
        self._is_draining = self._has_ended = True
        self._kv_event_log_grew.set()
        if self._link is not None:
            self._link.close(message)
            self._leave_epoch()
        self._end_requests(self._scheduler.worker_timed_out, message)

    # What others may ask

    @property
    def unavailable_reason(self) -> str:
        """Why requests are refused now, or nothing. Detached ones may be taken all the same."""
        return self.refusal(OutputMode.STREAMED)

    def refusal(self, output_mode: OutputMode) -> str:
        """Why requests of this kind are refused now, or nothing."""
        if self._is_draining:
            return "the server is shutting down; send the request to another one"
        if self._has_timed_out:
            return f"no worker has been connected for {self._worker_timeout:g} s; try again later"
        if self._grace_has_ended and output_mode is not OutputMode.DETACHED:
            return f"no worker has been connected for {self._worker_grace:g} s; send the request to another server"
        return ""

    @property
    def is_serving(self) -> bool:
        """Whether requests are worth sending here: a lost worker may still be awaited."""
        has_hope = self._num_fruitless_epochs < _MAX_FRUITLESS_EPOCHS
        return self.capacity is not None and has_hope and not self.unavailable_reason

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have, by the worker that is there or was there last."""
        limit = self._scheduler.max_sequence_tokens
        if self.capacity is None:
            return limit
        num_positions = self.capacity.num_device_blocks * self.capacity.block_size
        return min(limit, self.capacity.max_model_len, num_positions + 1)

    def now(self) -> float:
        """The clock of all times here, of `Request.deadline` too."""
        return self._clock()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def report(self, tenant: str, request_id: str) -> RequestReport:
        """Raises KeyError if there is no such request."""
        return self._scheduler.report(tenant, request_id)

    def block_map(self) -> BlockMap:
        return self._scheduler.block_map()

    async def wait_for_first_worker(self, output_mode: OutputMode = OutputMode.STREAMED) -> None:
        """Before it, nobody knows what fits. Returns too when requests of this kind are refused meanwhile."""
        while self.capacity is None and not self.refusal(output_mode):
            await self._availability_changed.wait()

    # The prefix cache

    async def flush_cache(self, patience: float) -> bool:
        """Forget all cached content as soon as there are no requests; False if there are some all the time.

        `patience` in seconds; 0 does not wait.
        """
        try:
            async with asyncio.timeout(patience):
                while self._streams:
                    await self._idle.wait()
        except TimeoutError:
            return False
        self._scheduler.flush_cache(self._clock())
        self._take_kv_events()
        return True

    @contextmanager
    def following_kv_events(self) -> Iterator[None]:
        """Inside the block, what happens to the cache is kept. Otherwise nobody is there to read it."""
        self._take_kv_events()
        self._kv_event_log.follow()
        try:
            yield
        finally:
            self._kv_event_log.leave(self._clock())

    def kv_snapshot(self) -> KvEventBatch:
        """What is cached now, under the number of the last batch."""
        self._take_kv_events()
        return KvEventBatch(self._kv_event_log.last_sequence_number, tuple(self._scheduler.kv_snapshot()))

    @property
    def kv_event_starts(self) -> tuple[int, int]:
        """The smallest and the greatest number that `next_kv_events` takes."""
        return self._kv_event_log.first_start, self._kv_event_log.last_sequence_number

    async def next_kv_events(self, sequence_number: int) -> KvEventBatch | None:
        """The batch after this one, as soon as there is one; None when there will be none any more. Raises LookupError
        if it is no longer held, or if this one has not been yet."""
        while (batch := self._kv_event_log.after(sequence_number)) is None and not self._has_ended:
            await self._kv_event_log_grew.wait()
        return batch

    def _take_kv_events(self) -> None:
        if not self._kv_event_log.is_kept(self._clock()):
            counts = self._scheduler.drop_kv_events()
            if any(counts):
                self._kv_event_log.skip()
                self._observer.kv_events_happened(counts)
            return
        events = self._scheduler.take_kv_events()
        if events:
            self._kv_event_log.append(events)
            self._observer.kv_events_happened(count_kv_events(events))
            self._kv_event_log_grew.set()
            self._kv_event_log_grew = asyncio.Event()

    # The steps themselves

    def _empty_inbox(self) -> None:
        while self._inbox and self._link is not None:
            news, now = self._inbox.popleft(), self._clock()
            try:
                if isinstance(news, StepResult):
                    self._take_result(news, now)
                else:
                    self._scheduler.moved(news, now)
            except WorkerProtocolError as error:
                self._fail_epoch(str(error))

    def _take_result(self, result: StepResult, now: float) -> None:
        outputs = self._scheduler.complete(result, now)
        self._publish(outputs)
        if outputs.token_ids or result.candidates.token_ids:
            self._token_confirmed()
        self._observer.step_finished(result, self._scheduler.stats(), now)
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
            self._observer.invariant_failed()
            self._fail_epoch("an invariant of the scheduler is broken")

    def _send_plans(self) -> None:
        while self._link is not None:
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                return
            if plan.step == 1:
                self._epoch_is_fruitless = True
            self._link.send(plan)

    def _publish(self, outputs: TokenOutputs) -> None:
        now = self._clock()
        for hypothesis in outputs.hypotheses:
            stream = self._streams[hypothesis.sequence_id]
            self._observer.first_token_after(now - stream.arrived_at)
            for token_id in hypothesis.token_ids:
                stream.publish(token_id, now)
            stream.cumulative_logprob = hypothesis.cumulative_logprob
        gaps: dict[float, int] = {}
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            stream = self._streams[sequence_id]
            if stream.last_token_at is None:
                self._observer.first_token_after(now - stream.arrived_at)
            else:
                gaps[stream.last_token_at] = gaps.get(stream.last_token_at, 0) + 1
            stream.publish(token_id, now)
            self._fan_out.enqueue(stream)
        for last_token_at, num_tokens in gaps.items():
            self._observer.tokens_after(now - last_token_at, num_tokens)
        for sequence_id, logprobs in outputs.logprobs.items():
            self._streams[sequence_id].logprobs.append(logprobs)
        for sequence_id, prompt_logprobs in outputs.prompt_logprobs.items():
            self._streams[sequence_id].prompt_logprobs.extend(prompt_logprobs)
            self._fan_out.enqueue(self._streams[sequence_id])
        for end in outputs.ended:
            stream = self._streams.pop(end.sequence_id)
            stream.finish(end)
            self._fan_out.enqueue(stream)
            self._observer.sequence_ended(end, now)
            self._on_sequence_ended(stream.request, end, now)
        if not self._streams:
            self._idle.set()

    # Epochs

    def _fail_epoch(self, reason: str) -> None:
        if self._link is not None:
            self._link.close(reason)
            self._end_epoch(reason)

    def _end_epoch(self, reason: str) -> None:
        logger.warning("lost the worker in epoch %d: %s", self.epoch, reason)
        self.num_worker_losses += 1
        if self._epoch_is_fruitless:
            self._num_fruitless_epochs += 1
            if self._num_fruitless_epochs == _MAX_FRUITLESS_EPOCHS:
                logger.error("not serving: %d epochs without one token; %s", _MAX_FRUITLESS_EPOCHS, reason)
        self._observer.worker_changed(None, self.epoch)
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        self._link = None
        self._inbox.clear()
        self._publish(self._scheduler.worker_lost(self._clock()))
        self._take_kv_events()
        self._start_timers()
        self._tell_availability()

    def _token_confirmed(self) -> None:
        self._epoch_is_fruitless = False
        if self._num_fruitless_epochs:
            self._num_fruitless_epochs = 0
            self._tell_availability()

    def _tell_availability(self) -> None:
        self._availability_changed.set()
        self._availability_changed = asyncio.Event()
        self._on_availability_changed()

    # Without a worker

    def _start_timers(self) -> None:
        self._stop_timers()
        call_later = asyncio.get_running_loop().call_later
        self._timers.append(call_later(self._worker_timeout, self._worker_timed_out))
        if self._worker_grace < self._worker_timeout:
            self._timers.append(call_later(self._worker_grace, self._worker_grace_ended))

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _worker_grace_ended(self) -> None:
        text = "no worker for %g s: requests without a token fail until one joins, streams and detached ones wait"
        logger.log(self._level_of_absence(logging.WARNING), text, self._worker_grace)
        self._grace_has_ended = True
        self._end_requests(self._scheduler.worker_grace_ended, self.unavailable_reason)
        self._tell_availability()

    def _worker_timed_out(self) -> None:
        level = self._level_of_absence(logging.ERROR)
        logger.log(level, "no worker for %g s: requests fail until one joins", self._worker_timeout)
        self._has_timed_out = True
        self._end_requests(self._scheduler.worker_timed_out, self.unavailable_reason)
        self._tell_availability()

    def _level_of_absence(self, level: int) -> int:
        """A worker that is still loading its first model is no accident."""
        return logging.INFO if self.capacity is None else level

    def _end_requests(self, event: Callable[[float], TokenOutputs], message: str) -> None:
        outputs = event(self._clock())
        self._publish(replace(outputs, ended=[replace(end, message=message) for end in outputs.ended]))
