"""Whether a front end accepts requests, and what fits, by the latest report of its scheduler."""

import asyncio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.refusal import Reason, RefusedError


class SchedulerAvailability:
    """The availability of a scheduler: its latest report while it is connected, else the reason why it is not.

    The link reports every change.
    """

    def __init__(self, address: str) -> None:
        """`address` is for messages."""
        self._address = address
        self._disconnect_reason: object = "it has not answered yet"  # None while connected
        self._has_answered = asyncio.Event()  # once, or no caller waits for that any more
        self._is_draining = False
        self._server_info = scheduler_pb2.GetServerInfoResponse()  # the latest
        self.changed = asyncio.Event()  # for one follower, who clears it
        self.capacity: scheduler_pb2.WorkerInfo | None = None  # of the present or last worker
        self.missing_reason = f"the scheduler at {address} has no worker yet"

    # Questions

    @property
    def is_connected(self) -> bool:
        return self._disconnect_reason is None

    @property
    def unreachable_reason(self) -> str:
        """Why no call goes to the scheduler now, or nothing."""
        if self._is_draining:
            return "the front end is shutting down; send the request to another one"
        if not self.is_connected:
            return f"no connection to the scheduler at {self._address}: {self._disconnect_reason}; try again later"
        return ""

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
        """Return why requests are refused now, here or by the scheduler, or nothing. Detached requests are forwarded
        and do not ask."""
        return self.unreachable_reason or self._server_info.unavailable_reason

    @property
    def is_serving(self) -> bool:
        return self.capacity is not None and not self.refusal()

    @property
    def max_sequence_tokens(self) -> int:
        return self._server_info.max_sequence_tokens

    def served_model_names(self) -> tuple[str, ...]:
        """The names by which requests may ask for the model, first the one in answers; that one is empty before the
        scheduler has answered."""
        return (self._server_info.served_model_name, *self._server_info.served_model_aliases)

    def server_info(self) -> scheduler_pb2.GetServerInfoResponse:
        """Return the latest report of the scheduler, empty before the first, with this front end's own
        `unavailable_reason`."""
        info = scheduler_pb2.GetServerInfoResponse()
        info.CopyFrom(self._server_info)
        info.unavailable_reason = self.refusal()
        return info

    async def wait_for_first_worker(self, output_mode: OutputMode) -> None:
        """Return when the scheduler has answered, which waits for its worker itself: before, it is not known what
        fits."""
        await self._has_answered.wait()

    def lost(self, reason: object) -> RefusedError:
        """Return the error of a request or call that ended with the connection."""
        return RefusedError(
            Reason.UNAVAILABLE, f"the scheduler at {self._address} is gone ({reason}); send the request again"
        )

    # Events

    def reported(self, info: scheduler_pb2.GetServerInfoResponse) -> None:
        """Record a report of the scheduler, which is connected then."""
        self._disconnect_reason = None
        self._server_info = info
        if info.HasField("worker"):
            self.capacity = info.worker
        self._has_answered.set()
        self.changed.set()

    def disconnected(self, reason: object) -> None:
        """Record why there is no connection. The link sets `changed` after each attempt."""
        self._disconnect_reason = reason

    def drain(self) -> None:
        """Refuse requests from now on."""
        if not self._is_draining:
            self._is_draining = True
            self._has_answered.set()
            self.changed.set()
