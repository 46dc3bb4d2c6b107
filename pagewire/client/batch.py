"""Lists of requests that run concurrently over the client's shared call.

The number of requests in flight adapts to the server's queue. Results keep the order of the requests.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from pagewire.client import wire
from pagewire.client.channels import Channels, Connection, NotShared
from pagewire.client.completion import Completion, CompletionBuilder
from pagewire.client.errors import PagewireError, ResourceExhausted
from pagewire.client.retry import Attempts
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# The limit on samples in flight. It is high enough to keep some requests waiting at the server, and low enough to leave
# room in the server's queue.
MAX_IN_FLIGHT = 1024
# Status codes of failures that do not concern an individual request.
_OF_THE_CALL = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(slots=True)
class _Running:
    """A request of a batch that is in flight, and its output received so far."""

    builder: CompletionBuilder
    num_samples: int
    abort: Callable[[], None] = lambda: None


class RequestBatch:
    """The requests of one client call, such as `complete` with a list of prompts, which run concurrently.

    If the server's queue is full, fewer requests are kept in flight. If the server refuses a request for another
    reason, all requests are aborted. The error names the position of the refused request in the list.
    """

    def __init__(self, requests: Sequence[pb.GenerateRequest], channels: Channels, attempts: Attempts) -> None:
        self._requests = requests
        self._channels = channels
        self._attempts = attempts
        self._completions: dict[int, Completion] = {}  # by position in the list
        self._waiting = deque(range(len(requests)))
        self._running: dict[int, _Running] = {}
        self._refused: dict[int, PagewireError] = {}
        self._num_samples = 0  # in flight
        self._max_samples = MAX_IN_FLIGHT
        self._has_news = asyncio.Event()
        self._news: list[tuple[int, bool]] = []

    @property
    def completions(self) -> list[Completion]:
        """The results of the batch, in the order of the requests. Read this property only after all requests have
        ended."""
        return [self._completions[index] for index in range(len(self._requests))]

    async def run(self) -> list[Completion]:
        """Run all requests of the batch and return their results in order.

        Raise PagewireError if a request fails. Every exception aborts the requests that are still running.
        """
        async with contextlib.aclosing(self.news()) as news:
            async for _ in news:
                pass
        return self.completions

    async def news(self) -> AsyncGenerator[list[tuple[int, bool]], None]:
        """Run all requests of the batch and yield progress updates.

        Each update is a list of pairs: the number of new tokens of a request, and whether that request has ended. Raise
        PagewireError if a request fails. Closing the generator aborts the requests that are still running.
        """
        with self._channels.connected() as connection:
            try:
                while len(self._completions) < len(self._requests):
                    self._submit(connection)
                    await self._has_news.wait()
                    self._has_news.clear()
                    if self._refused:
                        await self._put_back(connection)
                    news, self._news = self._news, []
                    yield news
            finally:
                for running in self._running.values():
                    running.abort()

    def _submit(self, connection: Connection) -> None:
        if not connection.can_share:
            raise NotShared(
                "the server's version does not support lists of prompts", code=grpc.StatusCode.UNIMPLEMENTED
            )
        while self._waiting:
            index = self._waiting[0]
            request, num_samples = self._requests[index], wire.num_samples(self._requests[index])
            if self._running and self._num_samples + num_samples > self._max_samples:
                return
            self._waiting.popleft()
            running = self._running[index] = _Running(CompletionBuilder(num_samples, time.monotonic()), num_samples)
            self._num_samples += num_samples
            running.abort = connection.submit(request, partial(self._put, index), self._attempts.timeout_s)

    def _drop(self, index: int) -> _Running:
        running = self._running.pop(index)
        self._num_samples -= running.num_samples
        return running

    def _put(self, index: int, response: pb.GenerateResponse | PagewireError | None) -> None:
        """Record what the server sent for one request of the batch: a delta, the end (None) or a failure.

        A delta that violates the protocol counts as a failure.
        """
        builder = self._running[index].builder
        try:
            if isinstance(response, PagewireError):
                raise response
            if response is None:
                self._completions[index] = builder.finish(time.monotonic())
                self._drop(index)
                self._max_samples = min(self._max_samples + 1, MAX_IN_FLIGHT)
                self._news.append((0, True))
            else:
                builder.add(wire.decode_output(response), time.monotonic())
                self._news.append((len(response.token_ids), False))
        except PagewireError as error:
            self._drop(index).abort()
            self._refused[index] = error
        self._has_news.set()

    async def _put_back(self, connection: Connection) -> None:
        """Put the requests that the server refused back into the queue of requests to send.

        If the server's queue is full and other requests of the batch are running, return at once: the next request is
        sent after one of them ends. Otherwise, wait for the retry delay. Raise the failure if a retry cannot help.
        """
        refused, self._refused = self._refused, {}
        self._waiting.extendleft(sorted(refused, reverse=True))
        index, failure = min(refused.items(), key=lambda item: isinstance(item[1], ResourceExhausted))
        if isinstance(failure, ResourceExhausted) and self._running:
            self._max_samples = max(1, self._num_samples)
            return
        if len(self._requests) > 1 and failure.code not in _OF_THE_CALL:
            failure = type(failure)(
                f"prompt {index}: {failure}",
                code=failure.code,
                field_violations=failure.field_violations,
                retry_delay=failure.retry_delay,
            )
        await connection.wait(self._attempts.next_delay(failure))
