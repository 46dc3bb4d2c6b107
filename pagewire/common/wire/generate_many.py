"""The client side of one GenerateMany RPC, which multiplexes many requests as numbered streams.

Commands are sent in order. The owners of the RPC read the responses and distribute them to the streams.
"""

import asyncio
import contextlib

import grpc
import grpc.aio

from pagewire.common.wire.sampling_rules import MAX_SAMPLES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# gRPC's message for an RPC in which a write failed because the peer had ended it. The peer's own status is lost.
_FAILED_WRITE = "Internal error from Core"


class GenerateManyClient:
    def __init__(self, call: grpc.aio.StreamStreamCall, first_stream_id: int = 0) -> None:
        self.call = call
        self.next_stream_id = first_stream_id
        self._unsent: dict[tuple[str, int], pb.GenerateManyRequest] = {}  # keyed by command and stream
        self._outbox: asyncio.Queue[tuple[str, int]] = asyncio.Queue()  # keys of commands, in order; some were dropped
        self._sending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to send commands on the GenerateMany RPC. Call this only after the first message from the server has
        arrived.

        A server that supports the method sends a message at once. Sending earlier to a server without the method would
        cause a failed write, and this failure would hide the status that the server returned.
        """
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    def submit(self, submission: pb.GenerateManyRequest, num_samples: int) -> None:
        """Send a generation request on the RPC. The request's streams, one per sample, are numbered from
        `next_stream_id`.
        """
        # A server refuses more samples, and such a request then has one stream.
        self.next_stream_id += min(num_samples, MAX_SAMPLES)
        self.send(submission)

    def abort(self, stream_id: int) -> bool:
        """Abort a generation request. Return whether the request was already sent to the server.

        A request that was not sent yet is dropped, and the server never receives it. Otherwise a slow server would
        start the request, and read the abort much later.
        """
        if self._unsent.pop(("submit", stream_id), None) is not None:
            return False
        self.send(pb.GenerateManyRequest(abort=pb.StreamAbort(stream_id=stream_id)))
        return True

    def send(self, message: pb.GenerateManyRequest) -> None:
        """Queue a command for the server. If a command of the same kind for the same stream is still unsent, the new
        command replaces it.
        """
        kind = message.WhichOneof("command")
        key = kind, getattr(getattr(message, kind), "stream_id", 0)
        self._unsent[key] = message
        self._outbox.put_nowait(key)

    def end(self) -> None:
        """Cancel the GenerateMany RPC, and stop sending commands."""
        self.call.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader of responses gets the error
            while True:
                message = self._unsent.pop(await self._outbox.get(), None)
                if message is not None:
                    await self.call.write(message)


def is_broken(error: grpc.RpcError) -> bool:
    """Return whether an RPC failed without a status from the server, because a write failed after the server had ended
    the RPC.
    """
    return error.details() == _FAILED_WRITE
