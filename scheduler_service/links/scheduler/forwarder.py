"""Forwarding of calls from a front end to its scheduler, for example calls about detached requests."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from scheduler_service.api.authentication import forwarded_metadata, refusal_of
from scheduler_service.links.scheduler.scheduler_availability import SchedulerAvailability
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call

# The limit of forwarded calls in progress. A scheduler's limit per connection is slightly higher and includes the
# link's own call.
_MAX_CALLS = 4_000


class Forwarder:
    """A forwarder of RPCs from a front end's clients to the scheduler, over the connection of the front end's link. It
    is used for RPCs that only the scheduler can answer."""

    def __init__(
        self,
        availability: SchedulerAvailability,
        read_metadata: Callable[[], Sequence[tuple[str, str]]],
        tenants_revision: Callable[[], str],
    ) -> None:
        """Create a forwarder of RPCs to the scheduler. `read_metadata` and `tenants_revision` are documented in
        `SchedulerLink`."""
        self._availability = availability
        self._read_metadata = read_metadata
        self._tenants_revision = tenants_revision
        self._num_calls = 0
        self.stub: Any = None  # the gRPC stub of the latest connection

    async def forward(self, method: str, message: Message, call: Call) -> AsyncGenerator[Any, None]:
        """Call the RPC `method` of the scheduler, and yield the messages of its answer: one for a unary RPC, any number
        for a stream. `message` is the request message; it must name the caller's tenant.

        The generator reads a stream only as fast as its caller reads the messages. Closing the generator early cancels
        the RPC. Raise RefusedError with the scheduler's status if the RPC fails. Raise RefusedError too if the
        scheduler is not connected, or if too many RPCs are being forwarded.
        """
        if reason := self._availability.unreachable_reason:
            raise RefusedError(Reason.UNAVAILABLE, reason)
        if self._num_calls >= _MAX_CALLS:
            text = f"{self._num_calls} calls are forwarded to the scheduler now, which is the limit; try again later"
            raise RefusedError(Reason.RESOURCE_EXHAUSTED, text)
        metadata = (*self._read_metadata(), *forwarded_metadata(call, self._tenants_revision()))
        forwarded = getattr(self.stub, method)(message, timeout=call.time_remaining, metadata=metadata)
        self._num_calls += 1
        try:
            if isinstance(forwarded, grpc.aio.UnaryUnaryCall):
                yield await forwarded
            else:
                async for answer in forwarded:
                    yield answer
        except grpc.aio.AioRpcError as error:
            is_lost = error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata()
            raise self._availability.lost(error.details() or "") if is_lost else refusal_of(error) from None
        finally:
            self._num_calls -= 1
            forwarded.cancel()
