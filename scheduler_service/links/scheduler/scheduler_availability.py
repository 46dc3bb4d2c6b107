"""The availability of a front end's scheduler, from the scheduler's latest report."""

import asyncio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.refusal import Reason, RefusedError


class SchedulerAvailability:
    """A record of whether a front end accepts requests. It contains the latest report of the scheduler, or the reason
    why the front end is not connected to the scheduler.

    The front end's link to the scheduler updates this record.
    """

    def __init__(self, address: str) -> None:
        """Create the record for a front end that is not connected to its scheduler yet. `address` is the network
        address of the scheduler, for error messages."""
        self._address = address
        self._disconnect_reason: object = "it has not answered yet"  # None while connected
        self._has_answered = asyncio.Event()  # set by the first report or by drain()
        self._is_draining = False
        self._server_info = scheduler_pb2.GetServerInfoResponse()  # the latest
        self.changed = asyncio.Event()  # has one consumer, which clears it
        self.capacity: scheduler_pb2.WorkerInfo | None = None  # of the current or last worker
        self.missing_reason = f"the scheduler at {address} has no worker yet"

    # Questions

    @property
    def is_connected(self) -> bool:
        return self._disconnect_reason is None

    @property
    def unreachable_reason(self) -> str:
        """The reason why the front end cannot send requests to the scheduler now, or an empty string."""
        if self._is_draining:
            return "the front end is shutting down; send the request to another one"
        if not self.is_connected:
            return f"no connection to the scheduler at {self._address}: {self._disconnect_reason}; try again later"
        return ""

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
        """Return the reason why this front end or its scheduler refuses requests now, or an empty string if they are
        accepted.

        `output_mode` has no effect here, because detached requests are forwarded to the scheduler without this check.
        """
        return self.unreachable_reason or self._server_info.unavailable_reason

    @property
    def is_serving(self) -> bool:
        return self.capacity is not None and not self.refusal()

    @property
    def max_sequence_tokens(self) -> int:
        return self._server_info.max_sequence_tokens

    def served_model_names(self) -> tuple[str, ...]:
        """Return the names of the served model that requests may use. Responses contain the first name.

        Before the scheduler's first report, the result is one empty name.
        """
        return (self._server_info.served_model_name, *self._server_info.served_model_aliases)

    def server_info(self) -> scheduler_pb2.GetServerInfoResponse:
        """Return the scheduler's latest report about itself. Its field `unavailable_reason` is replaced by the reason
        why this front end refuses requests.

        Before the scheduler's first report, all other fields are empty.
        """
        info = scheduler_pb2.GetServerInfoResponse()
        info.CopyFrom(self._server_info)
        info.unavailable_reason = self.refusal()
        return info

    async def wait_for_first_worker(self, output_mode: OutputMode) -> None:
        """Wait for the scheduler's first report, which contains the maximum length of a sequence. Also return if the
        front end shuts down."""
        await self._has_answered.wait()

    def lost(self, reason: object) -> RefusedError:
        """Return the error for a request or an RPC that ended because the connection to the scheduler was lost."""
        return RefusedError(
            Reason.UNAVAILABLE, f"the scheduler at {self._address} is gone ({reason}); send the request again"
        )

    # Events

    def reported(self, info: scheduler_pb2.GetServerInfoResponse) -> None:
        """Store the scheduler's latest report about itself, and record that the scheduler is connected."""
        self._disconnect_reason = None
        self._server_info = info
        if info.HasField("worker"):
            self.capacity = info.worker
        self._has_answered.set()
        self.changed.set()

    def disconnected(self, reason: object) -> None:
        """Record that the scheduler is not connected, and why. The event `changed` is not set here: the link sets it
        after each attempt to connect."""
        self._disconnect_reason = reason

    def drain(self) -> None:
        """Refuse all new requests from now on, because the front end shuts down."""
        if not self._is_draining:
            self._is_draining = True
            self._has_answered.set()
            self.changed.set()
