"""A client's side of one GenerateMany call: commands go out in order, and each stream has its number. What comes of the
streams is for those who share the call.
"""

import asyncio
import contextlib

import grpc
import grpc.aio

from pagewire.common.wire.sampling_rules import MAX_SAMPLES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# What gRPC says of a call to which a write failed because the peer had ended it: the peer's own status is lost.
_FAILED_WRITE = "Internal error from Core"


class GenerateManyClient:
    def __init__(self, call: grpc.aio.StreamStreamCall, first_stream_id: int = 0) -> None:
        self.call = call
        self.next_stream_id = first_stream_id
        self._unsent: dict[tuple[str, int], pb.GenerateManyRequest] = {}  # by command and stream
        self._outbox: asyncio.Queue[tuple[str, int]] = asyncio.Queue()  # of what is unsent, or was dropped, in order
        self._sending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Send from now on, after the first message has come: a server that knows the method answers at once. Of one
        that does not, a failed write would hide the status."""
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    def submit(self, submission: pb.GenerateManyRequest, num_samples: int) -> None:
        """Send a request on its way, whose streams count up from `next_stream_id`."""
        # A server refuses more samples; the request then has one stream.
        self.next_stream_id += min(num_samples, MAX_SAMPLES)
        self.send(submission)

    def abort(self, stream_id: int) -> bool:
        """Have a request aborted. Return whether it was on its way: what is unsent is dropped, since a slow server
        would begin it, and read much later that it is wanted no more."""
        if self._unsent.pop(("submit", stream_id), None) is not None:
            return False
        self.send(pb.GenerateManyRequest(abort=pb.StreamAbort(stream_id=stream_id)))
        return True

    def send(self, message: pb.GenerateManyRequest) -> None:
        """Send a command, in the place of an unsent one of the same kind for the same stream."""
        kind = message.WhichOneof("command")
        key = kind, getattr(getattr(message, kind), "stream_id", 0)
        self._unsent[key] = message
        self._outbox.put_nowait(key)

    def end(self) -> None:
        """End the call."""
        self.call.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # what was wrong is what reading ends with
            while True:
                message = self._unsent.pop(await self._outbox.get(), None)
                if message is not None:
                    await self.call.write(message)


def is_broken(error: grpc.RpcError) -> bool:
    """Say whether a call ended without a word of the server."""
    return error.details() == _FAILED_WRITE
