"""Shares one GenerateMany call among the requests of a client. It is opened when it is first needed, and again after it
broke."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable

import grpc
import grpc.aio

from pagewire import wire
from pagewire.common.sampling_ranges import MAX_SAMPLES
from pagewire.errors import DeadlineExceeded, Unavailable
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# What gRPC says of a call to which a write failed because the peer had ended it: the peer's own status is lost.
FAILED_WRITE = "Internal error from Core"


class NotShared(Exception):
    """The server does not know GenerateMany."""


class SharedStream:
    def __init__(self, open_call: Callable[[], grpc.aio.StreamStreamCall], url: str) -> None:
        self._open_call = open_call
        self._url = url
        self._connection: _Connection | None = None

    async def responses(
        self,
        request: pb.GenerateRequest,
        timeout: float | None,  # noqa: ASYNC109 - sent to the server too
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the responses to one request as a call of Generate does: closing the generator aborts the request.
        Raises PagewireError, and NotShared."""
        if self._connection is None or self._connection.is_over:
            self._connection = _Connection(self._open_call(), self._url)
        connection = self._connection
        reader = connection.submit(request, timeout)
        try:
            while not reader.has_ended:
                yield await reader.next()
        finally:
            connection.leave(reader)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class _Reader:
    """The responses to one request that have come and were not read yet."""

    def __init__(self, stream_id: int, num_samples: int, timeout: float | None) -> None:
        self.stream_id = stream_id
        self._num_open = num_samples
        self._waiting: deque[pb.GenerateResponse] = deque()
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout), self._expire)

    @property
    def has_ended(self) -> bool:
        """Whether all responses have been read."""
        return self._num_open == 0

    def put(self, response: pb.GenerateResponse) -> None:
        self._waiting.append(response)
        self._news.set()

    def fail(self, failure: Exception) -> None:
        """Lets `next` raise this failure once everything before it has been read. The first failure counts."""
        self._failure = self._failure or failure
        self._news.set()

    async def next(self) -> pb.GenerateResponse:
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        response = self._waiting.popleft()
        self._num_open -= response.HasField("usage")
        return response

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.fail(DeadlineExceeded(wire.TIMEOUT_PASSED, code=grpc.StatusCode.DEADLINE_EXCEEDED))


class _Connection:
    """One GenerateMany call, while it lasts."""

    def __init__(self, call: grpc.aio.StreamStreamCall, url: str) -> None:
        self._call = call
        self._url = url
        self._readers: dict[int, _Reader] = {}
        self._next_stream_id = 0
        self._outbox: asyncio.Queue[pb.GenerateManyRequest] = asyncio.Queue()
        self._has_begun = asyncio.Event()
        self.is_over = False
        self._sending = asyncio.create_task(self._send())
        self._receiving = asyncio.create_task(self._receive())

    def submit(self, request: pb.GenerateRequest, timeout: float | None) -> _Reader:
        num_samples = wire.num_samples(request)
        reader = _Reader(self._next_stream_id, num_samples, timeout)
        # A server refuses more samples; the request then has one stream.
        self._next_stream_id += min(num_samples, MAX_SAMPLES)
        self._readers[reader.stream_id] = reader
        submission = wire.message(pb.Submission, stream_id=reader.stream_id, request=request, timeout_seconds=timeout)
        self._outbox.put_nowait(pb.GenerateManyRequest(submit=submission))
        return reader

    def leave(self, reader: _Reader) -> None:
        """Aborts the request of a reader that nobody reads any more, unless it has ended."""
        reader.close()
        if self._readers.pop(reader.stream_id, None) is not None and not reader.has_ended and not self.is_over:
            abort = pb.StreamAbort(stream_id=reader.stream_id)
            self._outbox.put_nowait(pb.GenerateManyRequest(abort=abort))

    async def close(self) -> None:
        self._call.cancel()
        self._sending.cancel()
        await asyncio.gather(self._sending, self._receiving, return_exceptions=True)

    async def _send(self) -> None:
        # A server that knows the method answers at once. Of one that does not, a failed write would hide the status.
        await self._has_begun.wait()
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # what was wrong is what reading ends with
            while True:
                await self._call.write(await self._outbox.get())

    async def _receive(self) -> None:
        failure: Exception = Unavailable("the connection was closed", code=grpc.StatusCode.UNAVAILABLE)
        try:
            async for message in self._call:
                self._has_begun.set()
                self._take(message)
            failure = Unavailable(f"the server at {self._url} has shut down", code=grpc.StatusCode.UNAVAILABLE)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                failure = NotShared()
            elif error.details() == FAILED_WRITE:
                text = f"the connection to {self._url} broke"
                failure = Unavailable(text, code=grpc.StatusCode.UNAVAILABLE)
            else:
                failure = wire.decode_error(error, self._url)
        finally:
            self.is_over = True
            self._sending.cancel()
            for reader in self._readers.values():
                reader.fail(failure)

    def _take(self, message: pb.GenerateManyResponse) -> None:
        for entry in message.deltas:
            reader = self._readers.get(entry.stream_id - entry.delta.index)
            if reader is not None:
                reader.put(entry.delta)
        for failure in message.failures:
            reader = self._readers.get(failure.stream_id)
            if reader is not None:
                reader.fail(wire.decode_failure(failure))
