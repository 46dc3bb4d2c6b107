"""Shares one GenerateMany call among requests of a client."""

import asyncio
import contextlib
from collections.abc import Callable
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
# What comes of a request: its responses, and at its end None, or the error that it failed with.
Put = Callable[[pb.GenerateResponse | PagewireError | None], None]


class NotShared(PagewireError):
    """UNIMPLEMENTED: the server does not know GenerateMany."""


@dataclass(slots=True)
class _Request:
    """A request in flight."""

    put: Put
    num_open: int  # samples that have not ended
    timer: asyncio.TimerHandle | None = None


class SharedCall:
    """One GenerateMany call, while it lasts. One with a request too large to share `is_alone`, and ends with that."""

    def __init__(self, call: grpc.aio.StreamStreamCall, url: str, *, is_alone: bool = False) -> None:
        self._call = call
        self._url = url
        self.is_alone = is_alone
        self._requests: dict[int, _Request] = {}
        self._next_stream_id = 0
        self._outbox: asyncio.Queue[pb.GenerateManyRequest] = asyncio.Queue()
        self._has_begun = asyncio.Event()
        self.is_over = False
        self._sending = asyncio.create_task(self._send())
        self._receiving = asyncio.create_task(self._receive())

    def submit(self, request: pb.GenerateRequest, put: Put, timeout: float | None) -> Callable[[], None]:
        """Sends a request. Returns what aborts it if it has not ended; nothing comes of it then."""
        stream_id, num_samples = self._next_stream_id, wire.num_samples(request)
        submitted = self._requests[stream_id] = _Request(put, num_samples)
        if timeout is not None:
            late = DeadlineExceeded(wire.TIMEOUT_PASSED, code=grpc.StatusCode.DEADLINE_EXCEEDED)
            submitted.timer = asyncio.get_running_loop().call_later(timeout, put, late)
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
        if request is not None and request.timer is not None:
            request.timer.cancel()
        if request is not None and self.is_alone:
            self._call.cancel()
        return request

    def _finish(self, stream_id: int, failure: PagewireError | None) -> None:
        if request := self._end(stream_id):
            request.put(failure)

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
            for stream_id in list(self._requests):
                self._finish(stream_id, failure)

    def _take(self, message: pb.GenerateManyResponse) -> None:
        for entry in message.deltas:
            stream_id = entry.stream_id - entry.delta.index
            request = self._requests.get(stream_id)
            if request is not None:
                request.put(entry.delta)
                request.num_open -= entry.delta.HasField("usage")
                if request.num_open == 0:
                    self._finish(stream_id, None)
        for failed in message.failures:
            self._finish(failed.stream_id, wire.decode_failure(failed))
