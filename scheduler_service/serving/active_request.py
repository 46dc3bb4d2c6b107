"""One request from when it is queued to its end: what comes of it is in the outputs of its samples, and goes from there
to their readers. A client of `Generate`, of `GenerateMany`, of `VllmEngine` and one that attaches all read this."""

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
    """An event for one waiter, at half the price of asyncio's. It refers to neither side, so that those who tell it and
    the one who waits do not refer to each other through it."""

    def __init__(self) -> None:
        self._is_told = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self._is_told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there has been news since the last wait."""
        if not self._is_told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_told = False


class ActiveRequest:
    """A request that an engine carries out."""

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
        """With a `ready_list` plain tokens wait there for their reader, instead of being taken in one by one.
        `keeps_all`: there are no stop texts. `is_relayed`: the client looks for them, and tells what it has kept."""
        self.request = request
        self.outputs = outputs
        self.ready_list = ready_list
        self.keeps_all = keeps_all and not is_relayed
        self.is_relayed = is_relayed
        self.arrived_at = 0.0  # at the engine
        self.error: RefusedError | None = None  # the request failed
        self.has_ended = False
        self.on_news: Callable[[bool], None] | None = None  # told when a sample gets something, and whether its end
        self.on_end: Callable[[], None] | None = None  # called once
        self.listeners: dict[Callable[[], None], None] = {}  # in order; called after everything that came
        self._engine = engine

    @property
    def max_delta_tokens(self) -> int:
        """The most tokens of one delta: fewer with log-probabilities, so that it has no more of those."""
        sampling = self.request.sampling
        num_entries = 1 + max(sampling.num_logprobs or 0, sampling.num_prompt_logprobs or 0)
        return max(1, MAX_DELTA_TOKENS // num_entries)

    # What the engine does

    def queued(self, request: Request, sequence_ids: Sequence[int], now: float) -> None:
        """Take note of how the request was queued, before anything comes of it."""
        self.request, self.arrived_at = request, now
        for output, sequence_id in zip(self.outputs, sequence_ids, strict=True):
            output.sequence_id = sequence_id

    def take_in(self, output: SampleRecord, *news: Any) -> None:
        """Take in what was published of one of the outputs, and `news` (`SampleRecord.add`) behind it. A stop text in
        it ends the sample, whether or not the client reads."""
        try:
            if news:
                output.add(*news)
            output.take_in()
            if output.stop_text is not None and not output.is_over:
                self._engine.stop(output, output.num_tokens)
        except Exception:
            logger.exception("what came of sequence %d cannot be taken in", output.sequence_id)
            self.error = RefusedError(Reason.INTERNAL, "the output cannot be delivered; see the server's log")
        if self.on_news is not None:
            self.on_news(output.is_over)
        # The engine is told what a sample that is over has kept, unless that is known anyway, or the client tells it.
        if output.is_over and not self.keeps_all and not self.is_relayed:
            self._engine.settle(output, output.num_tokens)
        if output.failure is not None:
            self.error = RefusedError(OF_END[output.failure.reason], output.failure.message)
        for tell in self.listeners:
            tell()
        if output.is_over or self.error is not None:
            self._look_for_end()

    def fail(self, refusal: RefusedError) -> None:
        """End the request, which was queued, and is refused after all."""
        self.error = refusal
        for tell in self.listeners:
            tell()
        self._look_for_end()

    # What its readers do

    def abort(self) -> None:
        """Let the samples that have not ended end with ABORT."""
        self._engine.cancel(self)

    def cancel(self) -> None:
        """End what is left of the request, of which nothing is wanted any more. Those who listened and this no
        longer refer to each other, so that both are freed without a garbage collection."""
        self.abort()
        self.listeners.clear()
        ready_list, self.ready_list = self.ready_list, None  # whose reader takes no more of it
        for output in self.outputs:
            if ready_list is not None and output.is_queued:
                self.take_in(output)

    async def wait_for_end(self) -> None:
        """Return when every sample has ended, without having been woken before. Raises RefusedError if one fails."""
        news = News()
        self.on_end = news.tell
        if not self.has_ended:
            await news.wait()
        if self.error is not None:
            raise self.error.again()

    async def deltas(self, first_tokens: Sequence[int] | None = None) -> AsyncGenerator[Delta, None]:
        """Yield what comes of all samples until they have ended: of each from its first token on, or from the one that
        is named. Raises RefusedError when the request fails, after what came before that."""
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
    """Publishes what the core yields to the samples that have not ended, and has these take it in: in order,
    `batch_size` per iteration of the event loop, so that the step loop never waits for more than a few of them. An
    output whose turn does not come before its next token gets more at once.

    Those of a ready list wait in it until they are taken, and its reader is told once.
    """

    def __init__(self, observers: Observers, clock: Clock, batch_size: int = 16) -> None:
        self._observers = observers
        self._clock = clock
        self.samples: dict[int, tuple[SampleRecord, ActiveRequest]] = {}  # that have not ended
        self.idle = asyncio.Event()  # there are none
        self.idle.set()
        self.counts = TokenCounts()
        self._batch_size = batch_size
        self._queue: deque[tuple[SampleRecord, ActiveRequest] | ReadyList] = deque()
        self._is_scheduled = False

    def add(self, request: ActiveRequest) -> None:
        """A request is queued."""
        self.samples.update((output.sequence_id, (output, request)) for output in request.outputs)
        self.idle.clear()

    def publish(self, outputs: TokenOutputs) -> None:
        """Hand the outputs of an event to the records of their samples."""
        now = self._clock.now()
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
                ended(request.request, end, now)
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
                request.take_in(output)
        if self._queue:
            self._clock.soon(self._serve)
        else:
            self._is_scheduled = False


class RequestEngine(Protocol):
    """Whatever carries requests out: the step loop, or a front end's link to its scheduler. Those that take calls know
    nothing else of it."""

    @property
    def clock(self) -> Clock:
        """The clock of which the deadlines of requests are."""

    @property
    def availability(self) -> Availability:
        """Whether requests are taken now, and what fits."""

    def submit(self, request: ActiveRequest, trace: Mapping[str, str]) -> None:
        """Queue a request that is part of the trace which these headers tell. Raises AdmissionError or RefusedError if
        it is refused at once; a link hears of some refusals later, and lets the request fail."""

    def abort(self, tenant: str, request_id: str) -> None:
        """Let a request end with ABORT. Raises KeyError if there is none of that name."""

    def cancel(self, request: ActiveRequest) -> None:
        """Let what is left of a request end with ABORT, even if another uses its name by now."""

    def settle(self, output: SampleRecord, num_kept: int) -> None:
        """Take note of how many tokens of a sample its client got, of those that came. For samples whose request does
        not keep all."""

    def stop(self, output: SampleRecord, num_tokens: int) -> None:
        """End a sample after this many tokens, since a stop text was found in them."""
