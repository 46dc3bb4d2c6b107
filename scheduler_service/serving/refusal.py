"""Refusals and failures of client requests, each with a reason, a message of one sentence, and the path of the invalid
field."""

from enum import Enum
from typing import NamedTuple

from scheduler_service.core.request import AdmissionReason, EndReason

# The limit on a refusal's message. The message is sent three times, once percent-encoded, with three bytes for a
# special byte. Clients accept at most 8 KiB of metadata, and the message may quote text of the client.
MAX_MESSAGE_BYTES = 1200


class Reason(Enum):
    """The kinds of errors with which requests are refused or fail. Each kind has a gRPC status code, an HTTP status and
    a retry delay. The retry delay is the time in seconds after which a client may retry, or 0 if a retry cannot
    succeed."""

    CANCELLED = 1, 499, 0
    INVALID_ARGUMENT = 3, 400, 0
    DEADLINE_EXCEEDED = 4, 504, 0
    NOT_FOUND = 5, 404, 0
    ALREADY_EXISTS = 6, 409, 0
    PERMISSION_DENIED = 7, 403, 0
    RESOURCE_EXHAUSTED = 8, 429, 1
    FAILED_PRECONDITION = 9, 400, 0
    OUT_OF_RANGE = 11, 400, 0
    UNIMPLEMENTED = 12, 501, 0
    INTERNAL = 13, 500, 0
    UNAVAILABLE = 14, 503, 2
    UNAUTHENTICATED = 16, 401, 0

    def __init__(self, grpc_code: int, http_status: int, retry_delay_s: int) -> None:
        self.grpc_code = grpc_code
        self.http_status = http_status
        self.retry_delay_s = retry_delay_s


REASONS = {reason.grpc_code: reason for reason in Reason}  # by gRPC status code
OF_ADMISSION = {
    AdmissionReason.INVALID: Reason.INVALID_ARGUMENT,
    AdmissionReason.DUPLICATE: Reason.ALREADY_EXISTS,
    AdmissionReason.QUEUE_FULL: Reason.RESOURCE_EXHAUSTED,
}
OF_END = {
    EndReason.NAN_LOGITS: Reason.INTERNAL,
    EndReason.OUT_OF_MEMORY: Reason.RESOURCE_EXHAUSTED,
    EndReason.GRAMMAR_FAILED: Reason.INTERNAL,
    EndReason.GRAMMAR_DEAD_END: Reason.INVALID_ARGUMENT,
    EndReason.GRAMMAR_LIMIT: Reason.RESOURCE_EXHAUSTED,
    EndReason.CRASHES_WORKER: Reason.INTERNAL,
    EndReason.NO_LONGER_FITS: Reason.RESOURCE_EXHAUSTED,
    EndReason.NO_WORKER: Reason.UNAVAILABLE,
}


class ContextOverflow(NamedTuple):
    """The sizes of a prompt that does not fit into the model's context, alone or together with the requested output. An
    error contains them, so that an agent can shorten its conversation."""

    max_tokens: int  # limit on prompt and output together
    num_tokens: int | None = None  # requested; None: the prompt is too large to be counted


class RefusedError(Exception):
    """An error with which a client's request is refused or fails. Each API converts it to its own status code. The
    message contains the limit, the actual value and the remedy. `field` is the path of the invalid request field, or
    empty."""

    def __init__(self, reason: Reason, message: str, field: str = "", overflow: ContextOverflow | None = None) -> None:
        super().__init__(message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore"))
        self.reason = reason
        self.field = field
        self.overflow = overflow

    def again(self, field: str | None = None) -> "RefusedError":
        """Return a copy of the error, with another field path if `field` is given. Raise the copy instead of the error
        itself: the frames of a traceback would keep the failed request in memory."""
        return RefusedError(self.reason, str(self), self.field if field is None else field, self.overflow)


def invalid(field: str, message: str, overflow: ContextOverflow | None = None) -> RefusedError:
    """Return the error for a request with an invalid field. `field` is the path of this field."""
    return RefusedError(Reason.INVALID_ARGUMENT, message, field, overflow)


def unknown(request_id: str) -> RefusedError:
    """Return the error for an operation on a request that is not running, or that belongs to another tenant."""
    return RefusedError(
        Reason.NOT_FOUND, f"no request {request_id!r} is running for this tenant; it may have ended", "request_id"
    )


def timed_out() -> RefusedError:
    """Return the error for a request that has not ended within its client's timeout."""
    text = "the timeout passed before the request was done; raise it or ask for fewer tokens"
    return RefusedError(Reason.DEADLINE_EXCEEDED, text)
