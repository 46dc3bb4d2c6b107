"""A request from the time it is queued until it ends.

The engine publishes tokens to the output records of the request's samples (`SampleRecord`). Readers receive the output
as deltas of these records. The APIs `Generate`, `GenerateMany` and `VllmEngine` read requests through this module, and
so do clients that attach to a detached request.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from scheduler_service.core.request import Request, TokenOutputs
from scheduler_service.serving.availability import Availability
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.observer import Observers
from scheduler_service.serving.output import (
    MAX_DELTA_TOKENS,
    Delta,
    OutputReader,
    ReadyList,
    SampleRecord,
    TokenCounts,
)
from scheduler_service.serving.refusal import OF_END, Reason, RefusedError

logger = logging.getLogger(__name__)


class News:
    """An event that wakes up one waiting task. It costs half as much as an `asyncio.Event`.

    The event refers neither to the callers of `tell` nor to the waiting object, so it creates no reference cycle
    between them.
    """

    def __init__(self) -> None:
        self._is_told = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self._is_told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `tell` is called. Return immediately if `tell` has been called since the previous wait."""
        if not self._is_told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_told = False


class ActiveRequest:
    """A client's request, from the time when it is queued in an engine until it ends. It contains the output records of
    its samples: the engine appends the output to these records, and the APIs read it."""

    def __init__(
        self,
        request: Request,
        outputs: Sequence[SampleRecord],
        engine: "RequestEngine",
        ready_list: ReadyList | None = None,
        *,
        keeps_all: bool = True,
        is_relayed: bool = False,
    ) -> None:
        """Create the record of a request that is about to be queued. A `ready_list` collects samples with new output
        for a reader that reads many requests. Without it, the event loop processes each new output. With `keeps_all`,
        the request has no stop texts, so the client keeps every output token. With `is_relayed`, the client itself
        looks for stop texts and reports how many tokens it kept."""
        self.request = request
        self.outputs = outputs
        self.ready_list = ready_list
        self.keeps_all = keeps_all and not is_relayed
        self.is_relayed = is_relayed
        self.arrived_at = 0.0  # a time of the engine's clock
        self.error: RefusedError | None = None  # set if the request failed
        self.has_ended = False
        self.on_news: Callable[[bool], None] | None = None  # called when a sample has new output; True: it is over
        self.on_end: Callable[[], None] | None = None  # called once, at the end
        self.listeners: dict[Callable[[], None], None] = {}  # an ordered set; called after new output
        self._engine = engine

    @property
    def max_delta_tokens(self) -> int:
        """The maximum number of output tokens in one delta of this request. The number is smaller for a request with
        log-probabilities, because each token then has several entries."""
        sampling = self.request.sampling
        num_entries = 1 + max(sampling.num_logprobs or 0, sampling.num_prompt_logprobs or 0)
        return max(1, MAX_DELTA_TOKENS // num_entries)

    # Called by the engine

    def queued(self, request: Request, sequence_ids: Sequence[int], now: float) -> None:
        """Record that the engine has queued the request. `sequence_ids` are the ids of its samples, and `now` is its
        arrival time in seconds of the engine's clock. The engine calls this method before it publishes any output."""
        self.request, self.arrived_at = request, now
        for output, sequence_id in zip(self.outputs, sequence_ids, strict=True):
            output.sequence_id = sequence_id

    def process_output(self, output: SampleRecord, *news: Any) -> None:
        """Process the new output of one sample, and notify the listeners of the request. If `news` is given, first pass
        it to `SampleRecord.add` as arguments. A stop text in the output ends the sample even if no client reads the
        output."""
        try:
            if news:
                output.add(*news)
            output.process_output()
            if output.stop_text is not None and not output.is_over:
                self._engine.stop(output, output.num_tokens)
        except Exception:
            logger.exception("the output of sequence %d cannot be processed", output.sequence_id)
            self.error = RefusedError(Reason.INTERNAL, "the output cannot be delivered; see the server's log")
        if self.on_news is not None:
            self.on_news(output.is_over)
        # Report the number of kept tokens, unless all are kept or the client reports the number.
        if output.is_over and not self.keeps_all and not self.is_relayed:
            self._engine.count_kept_tokens(output, output.num_tokens)
        if output.failure is not None:
            self.error = RefusedError(OF_END[output.failure.reason], output.failure.message)
        for tell in self.listeners:
            tell()
        if output.is_over or self.error is not None:
            self._look_for_end()

    def fail(self, refusal: RefusedError) -> None:
        """End this request with an error. Each reader of the request raises this error."""
        self.error = refusal
        for tell in self.listeners:
            tell()
        self._look_for_end()

    # Called by readers

    def abort(self) -> None:
        """Ask the engine to end the unfinished samples of this request with the end reason ABORT."""
        self._engine.cancel(self)

    def cancel(self) -> None:
        """End the unfinished samples of this request, because no client needs its output.

        Also remove the references between the request and its listeners, so that both are freed without a garbage
        collection.
        """
        self.abort()
        self.listeners.clear()
        ready_list, self.ready_list = self.ready_list, None  # its reader ignores this request
        for output in self.outputs:
            if ready_list is not None and output.is_queued:
                self.process_output(output)

    async def wait_for_end(self) -> None:
        """Wait until every sample of the request has ended. New tokens do not wake up the waiting task. Raise
        RefusedError if the request fails."""
        news = News()
        self.on_end = news.tell
        if not self.has_ended:
            await news.wait()
        if self.error is not None:
            raise self.error.again()

    async def deltas(self, first_tokens: Sequence[int] | None = None) -> AsyncGenerator[Delta, None]:
        """Yield the new output of all samples of the request as deltas, until all samples have ended. `first_tokens`
        contains, for each sample, the index of the first output token to read; the default is 0. If the request fails,
        first yield the output that precedes the failure, then raise RefusedError."""
        places = zip(self.outputs, first_tokens or [0] * len(self.outputs), strict=True)
        readers = [OutputReader(output, first_token, self.max_delta_tokens) for output, first_token in places]
        news = News()
        news.tell()
        self.listeners[news.tell] = None
        try:
            while True:
                await news.wait()
                for reader in readers:
                    for delta in reader.take():
                        yield delta
                if self.error is not None:
                    raise self.error.again()
                if self.has_ended and all(reader.has_ended for reader in readers):
                    return
        finally:
            self.listeners.pop(news.tell, None)

    def _look_for_end(self) -> None:
        if not self.has_ended and (self.error is not None or all(output.end is not None for output in self.outputs)):
            self.has_ended = True
            if self.on_end is not None:
                self.on_end()


class Publisher:
    """The part of an engine that passes computed tokens to the requests. It appends the tokens to the output records of
    unfinished samples, and processes these records later on the event loop.

    Each iteration of the event loop processes at most `batch_size` samples, in order, so the step loop never waits
    long. If a sample receives more tokens before it is processed, all of its new tokens are processed together. Samples
    of a request with a ready list are added to this list instead, and its reader is notified once.
    """

    def __init__(self, observers: Observers, clock: Clock, batch_size: int = 16) -> None:
        self._observers = observers
        self._clock = clock
        self.samples: dict[int, tuple[SampleRecord, ActiveRequest]] = {}  # unfinished, by sequence id
        self.idle = asyncio.Event()  # set while no sample is unfinished
        self.idle.set()
        self.counts = TokenCounts()
        self._batch_size = batch_size
        self._published_at = 0.0  # the time of the last output
        self._queue: deque[tuple[SampleRecord, ActiveRequest] | ReadyList] = deque()
        self._is_scheduled = False

    def add(self, request: ActiveRequest) -> None:
        """Register the samples of a newly queued request, so that their output can be published."""
        self.samples.update((output.sequence_id, (output, request)) for output in request.outputs)
        self.idle.clear()

    def publish(self, outputs: TokenOutputs, age: float = 0.0) -> None:
        """Append new output to the output records of the samples, and notify the observers. `outputs` contains the
        tokens, log-probabilities and ends that one event of the scheduler core produced, `age` seconds ago."""
        self._published_at = now = max(self._published_at, self._clock.now() - age)
        for hypothesis in outputs.hypotheses:
            output, request = self.samples[hypothesis.sequence_id]
            self._first_token_came(request, now)
            output.add(hypothesis.token_ids, cumulative_logprob=hypothesis.cumulative_logprob)
            self.counts.num_kept += len(hypothesis.token_ids)
        gaps: dict[float, int] = {}
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            output, request = self.samples[sequence_id]
            if output.last_token_at is None:
                self._first_token_came(request, now)
            else:
                gaps[output.last_token_at] = gaps.get(output.last_token_at, 0) + 1
            output.publish(token_id, now)
            self.counts.num_kept += request.keeps_all
            self.enqueue(output, request)
        for last_token_at, num_tokens in gaps.items():
            for tell in self._observers.tokens_after:
                tell(now - last_token_at, num_tokens)
        for sequence_id, logprobs in outputs.logprobs.items():
            self.samples[sequence_id][0].new_logprobs.append(logprobs)
        for sequence_id, prompt_logprobs in outputs.prompt_logprobs.items():
            output, request = self.samples[sequence_id]
            output.new_prompt_logprobs.extend(prompt_logprobs)
            self.enqueue(output, request)
        for end in outputs.ended:
            output, request = self.samples.pop(end.sequence_id)
            output.finish(end)
            self.enqueue(output, request)
            for ended in self._observers.sequence_ended:
                ended(request.request, end, self._clock.now())
        if not self.samples:
            self.idle.set()

    def _first_token_came(self, request: ActiveRequest, now: float) -> None:
        for tell in self._observers.first_token_after:
            tell(now - request.arrived_at)

    def enqueue(self, output: SampleRecord, request: ActiveRequest) -> None:
        if output.is_queued:
            return
        output.is_queued = True
        ready_list = request.ready_list
        if ready_list is None:
            self._queue.append((output, request))
        else:
            ready_list.outputs.append(output)
            if len(ready_list.outputs) > 1:
                return
            self._queue.append(ready_list)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._clock.soon(self._serve)

    def _serve(self) -> None:
        for _ in range(min(self._batch_size, len(self._queue))):
            waiting = self._queue.popleft()
            if isinstance(waiting, ReadyList):
                waiting.on_news()
            else:
                output, request = waiting
                request.process_output(output)
        if self._queue:
            self._clock.soon(self._serve)
        else:
            self._is_scheduled = False


class RequestEngine(Protocol):
    """The interface of an engine, which runs requests. It has two implementations: the step loop of a scheduler, and a
    front end's link to its scheduler. The APIs use only this interface."""

    @property
    def clock(self) -> Clock:
        """The clock in whose time the deadlines of requests are given."""

    @property
    def availability(self) -> Availability:
        """Whether the engine accepts requests now, and how long a sequence may be."""

    def submit(self, request: ActiveRequest, trace: Mapping[str, str]) -> None:
        """Queue a request. `trace` contains the HTTP or gRPC headers of the distributed trace to which the request
        belongs. Raise AdmissionError or RefusedError if the engine refuses the request. In a front end, the scheduler
        may also refuse the request after this call; the request then fails."""

    def abort(self, tenant: str, request_id: str) -> None:
        """End all samples of a tenant's request with the end reason ABORT. Raise KeyError if no unfinished request has
        this id."""

    def cancel(self, request: ActiveRequest) -> None:
        """End the unfinished samples of this request with the end reason ABORT. If the request has ended and another
        request now uses the same id, the other request is not affected."""

    def count_kept_tokens(self, output: SampleRecord, num_kept: int) -> None:
        """Record how many output tokens of a sample the client kept. The remaining tokens count as discarded. This
        method is only called for a request whose client may not keep all tokens."""

    def stop(self, output: SampleRecord, num_tokens: int) -> None:
        """End a sample after its first `num_tokens` output tokens, because the text of the output contains a stop
        text."""
