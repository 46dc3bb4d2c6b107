"""The exceptions of the client, one for each gRPC status that a caller may need to distinguish."""

from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field that the server refused, and the reason."""

    field: str
    description: str


class PagewireError(Exception):
    """The base class of all errors of calls.

    The message names the limit, the actual value and the remedy where the server knows them.

    Attributes:
        code: The gRPC status code.
        field_violations: The fields at fault, each with a description.
        retry_delay: The time in seconds after which the server suggests a retry, or None.
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
    """INVALID_ARGUMENT: a field is out of range, or the request can never fit the server's limits."""

    @classmethod
    def of_field(cls, field: str, text: str) -> "InvalidRequest":
        """Return the error for a field that the client refuses before sending."""
        return cls(text, code=grpc.StatusCode.INVALID_ARGUMENT, field_violations=(FieldViolation(field, text),))


class InvalidText(InvalidRequest, TypeError):
    """A string contains an unpaired surrogate, which cannot be encoded as UTF-8 and sent."""


class NotFound(PagewireError):
    """NOT_FOUND: no running or retained request of this tenant has this id."""


class AlreadyExists(PagewireError):
    """ALREADY_EXISTS: a running or retained request of this tenant already has this id."""


class OutOfRange(PagewireError):
    """OUT_OF_RANGE: the requested first token is beyond the end of the output."""


class ResourceExhausted(PagewireError):
    """RESOURCE_EXHAUSTED: the request queue is full. Retry after `retry_delay`."""


class Unavailable(PagewireError):
    """UNAVAILABLE: the server is unreachable or draining, or has had no worker for too long."""


class DeadlineExceeded(PagewireError):
    """DEADLINE_EXCEEDED: `timeout` passed before the request completed."""


class Cancelled(PagewireError):
    """CANCELLED: the call was cancelled, but not by its caller, or the client was closed during the call."""


class InternalError(PagewireError):
    """INTERNAL: the server failed, or a stream lost or repeated a token."""


class StartError(PagewireError):
    """The services that this process launched failed to start. The message is the reason that they reported."""


class CommandError(Exception):
    """A command verb cannot continue. The message is one line for the user."""
