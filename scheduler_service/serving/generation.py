"""One request from when it is queued to its end: what comes of it goes to the outputs of its samples, and from there to
their readers. A client of `Generate`, of `GenerateMany`, of `VllmEngine` and one that attaches all read this."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from scheduler_service.core.request import Request
from scheduler_service.serving.engine import RequestEngine
from scheduler_service.serving.output import OutputBuffer, OutputReader
from scheduler_service.serving.refusal import OF_END, Reason, RefusedError
from scheduler_service.serving.tenants.quota import Claim
from scheduler_service.serving.token_stream import Delta, ReadyList

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


class Generation:
    """A request that an engine carries out: it is the receiver of what comes of it
    (`serving.token_stream.Receiver`)."""

    def __init__(
        self,
        request: Request,
        outputs: Sequence[OutputBuffer],
        engine: RequestEngine,
        ready_list: ReadyList | None = None,
        label: int = 0,
        *,
        keeps_all: bool = True,
        is_relayed: bool = False,
    ) -> None:
        """With a `ready_list` plain tokens wait there, under labels from `label` on. `keeps_all`: there are no stop
        texts. `is_relayed`: the client looks for them, and tells what it has kept."""
        self.request = request
        self.outputs = outputs
        self.ready_list = ready_list
        self.label = label
        self.keeps_all = keeps_all and not is_relayed
        self.is_relayed = is_relayed
        self.num_computed: dict[int, int] = {}  # tokens of the samples that are over, where the client tells of them
        self.sequence_ids: list[int] = []  # known before the first delta
        self.claim: Claim | None = None  # on its tenant's quota
        self.error: RefusedError | None = None  # the request failed
        self.has_ended = False
        self.on_end: Callable[[], None] | None = None  # called once
        self.listeners: set[Callable[[], None]] = set()  # called after every delta
        self._engine = engine

    def deliver(self, delta: Delta) -> None:
        """Take what a sequence got. A stop text in it ends the sequence, whether or not the client reads."""
        if self.claim is not None:
            self.claim.take_news(delta)
        output = self.outputs[delta.sample_index]
        try:
            output.add(delta)
            if output.stop_text is not None and delta.end is None:
                self.stop(delta.sample_index, output.num_tokens)
        except Exception:
            logger.exception("a delta of sequence %d cannot be delivered", self.sequence_ids[delta.sample_index])
            self.error = RefusedError(Reason.INTERNAL, "the output cannot be delivered; see the server's log")
        if delta.end is not None:
            self._settle(delta.sample_index, delta.num_computed)
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

    def _settle(self, index: int, num_computed: int) -> None:
        """Tell the engine what a sample that is over has kept, unless that is known anyway, or the client tells it."""
        if self.is_relayed:
            self.num_computed[index] = num_computed
        elif not self.keeps_all:
            self._engine.settle(self.sequence_ids[index], num_computed, self.outputs[index].num_tokens)

    def stop(self, index: int, num_tokens: int) -> None:
        """Let one of the samples end after so many tokens, since a stop text was found in them."""
        self._engine.stop(self.sequence_ids[index], num_tokens)

    def abort(self) -> None:
        """Let the samples that have not ended end with ABORT."""
        self._engine.cancel(self.sequence_ids)

    def cancel(self) -> None:
        """End what is left of the request, of which nothing is wanted any more. Those who listened and this no
        longer refer to each other, so that both are freed without a garbage collection."""
        self.abort()
        self.listeners.clear()

    async def wait_for_end(self) -> None:
        """Return when every sample has ended, without having been woken before. Raises RefusedError if one fails."""
        news = News()
        self.on_end = news.tell
        if not self.has_ended:
            await news.wait()
        if self.error is not None:
            raise self.error

    async def deltas(self, first_tokens: Sequence[int] | None = None) -> AsyncGenerator[Delta, None]:
        """Yield what comes of all samples until they have ended: of each from its first token on, or from the one that
        is named. Raises RefusedError when the request fails, after what came before that."""
        places = zip(self.outputs, first_tokens or [0] * len(self.outputs), strict=True)
        readers = [OutputReader(output, first_token) for output, first_token in places]
        news = News()
        news.tell()
        self.listeners.add(news.tell)
        try:
            while True:
                await news.wait()
                for reader in readers:
                    for delta in reader.take():
                        yield delta
                if self.error is not None:
                    raise self.error
                if self.has_ended and all(reader.has_ended for reader in readers):
                    return
        finally:
            self.listeners.discard(news.tell)

    def _look_for_end(self) -> None:
        if not self.has_ended and (self.error is not None or all(output.end is not None for output in self.outputs)):
            self.has_ended = True
            if self.on_end is not None:
                self.on_end()
