"""The exceptions of the client, one for each gRPC status that a caller may need to distinguish."""

from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request that the server did not accept, and the reason."""

    field: str
    description: str


class PagewireError(Exception):
    """The base class of all errors that calls of the client raise.

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
    """Raised for the gRPC status INVALID_ARGUMENT: a field of the request is out of range, or the request can never fit
    the server's limits."""

    @classmethod
    def of_field(cls, field: str, text: str) -> "InvalidRequest":
        """Return the error for a request field with an invalid value. The client raises this error before sending the
        request."""
        return cls(text, code=grpc.StatusCode.INVALID_ARGUMENT, field_violations=(FieldViolation(field, text),))


class InvalidText(InvalidRequest, TypeError):
    """Raised for a string with an unpaired surrogate. Such a string cannot be encoded as UTF-8 and sent to the
    server."""


class NotFound(PagewireError):
    """Raised for the gRPC status NOT_FOUND: no running or retained request of this tenant has the given id."""


class AlreadyExists(PagewireError):
    """Raised for the gRPC status ALREADY_EXISTS: a running or retained request of this tenant already has the given
    id."""


class OutOfRange(PagewireError):
    """Raised for the gRPC status OUT_OF_RANGE: the first token to return is beyond the end of the request's output."""


class ResourceExhausted(PagewireError):
    """Raised for the gRPC status RESOURCE_EXHAUSTED: the server's request queue is full. Retry after `retry_delay`
    seconds."""


class Unavailable(PagewireError):
    """Raised for the gRPC status UNAVAILABLE: the server is unreachable or draining, or has had no worker for too
    long."""


class DeadlineExceeded(PagewireError):
    """Raised for the gRPC status DEADLINE_EXCEEDED: the `timeout` of a call passed before the request completed."""


class Cancelled(PagewireError):
    """Raised if a call to the server was cancelled by someone other than its caller, or if the client was closed during
    the call. The gRPC status is CANCELLED."""


class InternalError(PagewireError):
    """Raised for the gRPC status INTERNAL: the server failed, or the stream of a request's output lost or repeated a
    token."""


class StartError(PagewireError):
    """Raised if the services that this process launched to serve a model failed to start. The message is the reason
    that the services reported."""


class CommandError(Exception):
    """Raised if a command, such as `pagewire chat`, cannot continue. The message is one line for the user."""
