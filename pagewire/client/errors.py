"""The errors of calls: one class for each status that a caller may want to tell apart."""

from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that the server refused, and why."""

    field: str
    description: str


class PagewireError(Exception):
    """A call failed. The text names the limit, the actual value and the remedy where the server knows them.

    `code` is the gRPC status; `field_violations` names the fields at fault; `retry_delay` is the time in seconds after
    which the server suggests to try again, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field_violations = field_violations
        self.retry_delay = retry_delay


class InvalidRequest(PagewireError, ValueError):
    """INVALID_ARGUMENT: a field is out of its range, or the request can never fit."""

    @classmethod
    def of_field(cls, field: str, text: str) -> "InvalidRequest":
        """Returns the error of a field that is refused before it is sent."""
        return cls(text, code=grpc.StatusCode.INVALID_ARGUMENT, field_violations=(FieldViolation(field, text),))


class InvalidText(InvalidRequest, TypeError):
    """A string that is no text: it holds half a character, which cannot be sent."""


class NotFound(PagewireError):
    """NOT_FOUND: no running request, or none that is kept, of this tenant has that id."""


class AlreadyExists(PagewireError):
    """ALREADY_EXISTS: a request of this tenant that runs or is kept has that id."""


class OutOfRange(PagewireError):
    """OUT_OF_RANGE: the output has fewer tokens than were asked for."""


class ResourceExhausted(PagewireError):
    """RESOURCE_EXHAUSTED: the queue is full; try again after `retry_delay`."""


class Unavailable(PagewireError):
    """UNAVAILABLE: the server is not there, is draining, or has had no worker for too long."""


class DeadlineExceeded(PagewireError):
    """DEADLINE_EXCEEDED: `timeout` passed before the request was done."""


class Cancelled(PagewireError):
    """CANCELLED: the call was cancelled, and not by its caller; or the client was closed while it ran."""


class InternalError(PagewireError):
    """INTERNAL: a fault of the server, or a stream that lost or repeated a token."""


class StartError(PagewireError):
    """The services that this process started for itself did not come up. The text gives the reason that they gave."""


class CommandError(Exception):
    """A verb of the command cannot go on. The text tells its user why, in one line."""
