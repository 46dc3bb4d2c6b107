"""Shares one GenerateMany call among the requests of a client. It is opened when it is first needed, and again after it
broke."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio

from pagewire import wire
from pagewire.common.sampling_ranges import MAX_SAMPLES
from pagewire.errors import DeadlineExceeded, PagewireError, Unavailable
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# What gRPC says of a call to which a write failed because the peer had ended it: the peer's own status is lost.
FAILED_WRITE = "Internal error from Core"
# Of a request that shares a call. A server refuses a message that is too large together with the call that brought it.
MAX_SHARED_BYTES = 1 << 20


class NotShared(PagewireError):
    """UNIMPLEMENTED: the server does not know GenerateMany."""


@dataclass(slots=True)
class _Request:
    """A request in flight: what takes its responses, and what its failure, after which nothing comes."""

    put: Callable[[pb.GenerateResponse], None]
    fail: Callable[[PagewireError], None]
    num_open: int  # samples that have not ended
    timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class SharedStream:
    def __init__(self, open_call: Callable[[], grpc.aio.StreamStreamCall], url: str) -> None:
        self._open_call = open_call
        self._url = url
        self._connection: _Connection | None = None
        self._alone: set[_Connection] = set()

    def submit(
        self,
        request: pb.GenerateRequest,
        put: Callable[[pb.GenerateResponse], None],
        fail: Callable[[PagewireError], None],
        timeout: float | None,
    ) -> Callable[[], None]:
        """Sends a request: `put` gets each response to it, and `fail` what ends it otherwise. Returns what aborts it,
        if it has not ended. A request that is too large to share has a call of its own."""
        if request.ByteSize() > MAX_SHARED_BYTES:
            alone = _Connection(self._open_call(), self._url, self._alone.discard)
            self._alone.add(alone)
            return alone.submit(request, put, fail, timeout)
        if self._connection is None or self._connection.is_over:
            self._connection = _Connection(self._open_call(), self._url)
        return self._connection.submit(request, put, fail, timeout)

    async def responses(
        self,
        request: pb.GenerateRequest,
        timeout: float | None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the responses to one request as a call of Generate does: closing the generator aborts the request.
        Raises PagewireError."""
        inbox: asyncio.Queue[pb.GenerateResponse | PagewireError] = asyncio.Queue()
        abort = self.submit(request, inbox.put_nowait, inbox.put_nowait, timeout)
        num_open = wire.num_samples(request)
        try:
            while num_open:
                response = await inbox.get()
                if isinstance(response, PagewireError):
                    raise response
                num_open -= response.HasField("usage")
                yield response
        finally:
            abort()

    async def close(self) -> None:
        """Ends all requests."""
        for connection in (self._connection, *self._alone):
            if connection is not None:
                await connection.close()


class _Connection:
    """One GenerateMany call, while it lasts. One that is `when_idle` told of its end ends with its only request."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall, url: str, when_idle: "Callable[[_Connection], None] | None" = None
    ) -> None:
        self._call = call
        self._url = url
        self._when_idle = when_idle
        self._requests: dict[int, _Request] = {}
        self._next_stream_id = 0
        self._outbox: asyncio.Queue[pb.GenerateManyRequest] = asyncio.Queue()
        self._has_begun = asyncio.Event()
        self.is_over = False
        self._sending = asyncio.create_task(self._send())
        self._receiving = asyncio.create_task(self._receive())

    def submit(
        self,
        request: pb.GenerateRequest,
        put: Callable[[pb.GenerateResponse], None],
        fail: Callable[[PagewireError], None],
        timeout: float | None,
    ) -> Callable[[], None]:
        stream_id, num_samples = self._next_stream_id, wire.num_samples(request)
        submitted = self._requests[stream_id] = _Request(put, fail, num_samples)
        if timeout is not None:
            late = DeadlineExceeded(wire.TIMEOUT_PASSED, code=grpc.StatusCode.DEADLINE_EXCEEDED)
            submitted.timer = asyncio.get_running_loop().call_later(timeout, fail, late)
        # A server refuses more samples; the request then has one stream.
        self._next_stream_id += min(num_samples, MAX_SAMPLES)
        submission = wire.message(pb.Submission, stream_id=stream_id, request=request, timeout_seconds=timeout)
        self._outbox.put_nowait(pb.GenerateManyRequest(submit=submission))
        return partial(self._abort, stream_id)

    async def close(self) -> None:
        self._call.cancel()
        self._sending.cancel()
        await asyncio.gather(self._sending, self._receiving, return_exceptions=True)

    def _abort(self, stream_id: int) -> None:
        if self._end(stream_id) is not None and not self.is_over:
            abort = pb.StreamAbort(stream_id=stream_id)
            self._outbox.put_nowait(pb.GenerateManyRequest(abort=abort))

    def _end(self, stream_id: int) -> _Request | None:
        """Forgets a request, which ends a call that was its own."""
        request = self._requests.pop(stream_id, None)
        if request is not None:
            request.end()
            if self._when_idle is not None:
                self._call.cancel()
        return request

    async def _send(self) -> None:
        # A server that knows the method answers at once. Of one that does not, a failed write would hide the status.
        await self._has_begun.wait()
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # what was wrong is what reading ends with
            while True:
                await self._call.write(await self._outbox.get())

    async def _receive(self) -> None:
        failure: PagewireError = wire.closed()
        try:
            async for message in self._call:
                self._has_begun.set()
                self._take(message)
            failure = Unavailable(f"the server at {self._url} has shut down", code=grpc.StatusCode.UNAVAILABLE)
        except grpc.RpcError as error:
            failure = wire.decode_error(error, self._url)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                failure = NotShared(str(failure), code=failure.code)
            elif error.details() == FAILED_WRITE:
                text = f"the connection to {self._url} broke"
                failure = Unavailable(text, code=grpc.StatusCode.UNAVAILABLE)
        finally:
            self.is_over = True
            self._sending.cancel()
            if self._when_idle is not None:
                self._when_idle(self)
            for stream_id in list(self._requests):
                if request := self._end(stream_id):
                    request.fail(failure)

    def _take(self, message: pb.GenerateManyResponse) -> None:
        for entry in message.deltas:
            stream_id = entry.stream_id - entry.delta.index
            request = self._requests.get(stream_id)
            if request is not None:
                request.put(entry.delta)
                request.num_open -= entry.delta.HasField("usage")
                if request.num_open == 0:
                    self._end(stream_id)
        for failed in message.failures:
            request = self._end(failed.stream_id)
            if request is not None:
                request.fail(wire.decode_failure(failed))
