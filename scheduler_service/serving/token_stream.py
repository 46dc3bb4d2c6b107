"""From steps to readers: tokens wait per sequence and are handed on in small batches.

The rule of this file: publishing a token is an append, whatever the readers do. Readers are served round robin, a few
per iteration of the event loop, so that the step loop never waits for more than a few of them. A sequence that is not
served before its next token simply gets a longer delta. What waits is bounded by the sequence's own length.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from scheduler_service.core.request import Request, SequenceEnd, TokenLogprobs
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.refusal import RefusedError


class Delta(NamedTuple):
    """The tokens that one sample got since its last delta, to which its output adds their text. The last delta has
    `end`.

    A tuple, because there is one for every token, and a frozen dataclass takes four times as long to make.
    """

    sample_index: int
    first_token: int  # index in the output of the first of token_ids
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    prompt_logprobs: Sequence[TokenLogprobs]
    end: SequenceEnd | None
    cumulative_logprob: float | None = None  # up to the last token; before there is text, of a hypothesis alone
    num_computed: int = 0  # with its end: tokens that the sample got, and what was computed behind the output's end
    text: str = ""
    stop_text: str | None = None  # with its end, which it is the reason for


# Called on the event loop; must not raise.
Deliver = Callable[[Delta], None]


@dataclass(slots=True)
class TokenCounts:
    """How many output tokens clients got, and how many were computed beyond what they got."""

    num_kept: int = 0
    num_discarded: int = 0

    def settle(self, num_computed: int, num_kept: int) -> None:
        """A sample is over of which it was not known what is kept."""
        self.num_kept += num_kept
        self.num_discarded += num_computed - num_kept


class Receiver(Protocol):
    """Gets what comes of a request. Its methods are called on the event loop, never before the request is queued, and
    must not raise."""

    @property
    def ready_list(self) -> "ReadyList | None":
        """The place where plain tokens may wait for their reader instead of being delivered one by one."""

    @property
    def label(self) -> int:
        """The first sample's name in the ready list; those of the others follow it."""

    @property
    def keeps_all(self) -> bool:
        """Whether all tokens go to the client. If not, the receiver tells at the end how many did."""

    def deliver(self, delta: Delta) -> None:
        """Take what one of the samples got."""

    def fail(self, refusal: RefusedError) -> None:
        """Take note that the request, which was queued, is refused after all."""


@dataclass(slots=True, eq=False)
class ReadyList:
    """The place where streams of many requests wait together for one reader, who takes them when it likes."""

    on_news: Callable[[], None]  # called on the event loop when `streams` is no longer empty
    streams: "list[TokenStream]" = field(default_factory=list)  # those with something new

    def take(self) -> "list[TokenStream]":
        streams, self.streams = self.streams, []
        return streams

    def put_back(self, streams: "Sequence[TokenStream]") -> None:
        """Give back streams that were taken, but not read: they come first the next time."""
        self.streams[:0] = streams


@dataclass(slots=True, eq=False)
class TokenStream:
    """The tokens of one sequence on their way out: each once, in order, and exactly one end (S6)."""

    request: Request
    index: int  # which sample of the request
    deliver: Deliver
    arrived_at: float
    ready_list: ReadyList | None = None  # where it waits for its reader; None: it is delivered by itself
    label: int = 0  # its name in the ready list
    keeps_all: bool = True  # see Receiver
    last_token_at: float | None = None
    num_published: int = 0
    num_delivered: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: SequenceEnd | None = None
    cumulative_logprob: float | None = None  # of the tokens of a hypothesis
    is_queued: bool = False

    def __post_init__(self) -> None:
        if self.request.beam is not None:
            self.cumulative_logprob = 0.0

    def publish(self, token_id: int, now: float) -> None:
        if self.end is not None:
            raise RuntimeError(f"a token for sequence {self.end.sequence_id} after its end")
        self.token_ids.append(token_id)
        self.num_published += 1
        self.last_token_at = now

    def finish(self, end: SequenceEnd) -> None:
        """Take the end, which says how many tokens the output has; those published past a stop text are dropped."""
        if self.end is not None:
            raise RuntimeError(f"sequence {end.sequence_id} ended twice")
        if end.num_output_tokens > self.num_published:
            raise RuntimeError(
                f"sequence {end.sequence_id} ended with {end.num_output_tokens} tokens, "
                f"but {self.num_published} were published"
            )
        num_kept = max(0, end.num_output_tokens - self.num_delivered)
        del self.token_ids[num_kept:]
        del self.logprobs[num_kept:]
        self.end = end

    def take_tokens(self) -> list[int] | None:
        """Take what is new, if that is nothing but tokens; None otherwise."""
        if self.end is not None or self.logprobs or self.prompt_logprobs:
            return None
        token_ids = self.token_ids
        self.token_ids = []
        self.num_delivered += len(token_ids)
        self.is_queued = False
        return token_ids

    def hand_over(self) -> None:
        """Deliver whatever is new."""
        self.deliver(self.take())

    def take(self) -> Delta:
        self.is_queued = False
        delta = Delta(
            self.index,
            self.num_delivered,
            self.token_ids,
            self.logprobs,
            self.prompt_logprobs,
            self.end,
            self.cumulative_logprob,
            self.num_published if self.end is not None else 0,
        )
        self.num_delivered += len(self.token_ids)
        self.token_ids, self.logprobs, self.prompt_logprobs = [], [], []
        return delta


class FanOut:
    """Serves the streams that have something to deliver, in order, `batch_size` per iteration of the event loop.

    Those of a ready list wait in it until they are taken, and its reader is told once.
    """

    def __init__(self, clock: Clock, batch_size: int = 16) -> None:
        self._clock = clock
        self._batch_size = batch_size
        self._queue: deque[TokenStream | ReadyList] = deque()
        self._is_scheduled = False

    def enqueue(self, stream: TokenStream) -> None:
        if stream.is_queued:
            return
        stream.is_queued = True
        ready_list = stream.ready_list
        if ready_list is None:
            self._queue.append(stream)
        else:
            ready_list.streams.append(stream)
            if len(ready_list.streams) > 1:
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
                waiting.hand_over()
        if self._queue:
            self._clock.soon(self._serve)
        else:
            self._is_scheduled = False
