"""Why what a client asks for is refused or fails: a reason, one sentence, and the field at fault."""

from enum import Enum
from typing import NamedTuple

from scheduler_service.core.request import AdmissionReason, EndReason

# Of a refusal's text, which goes out three times, once with three bytes for each that is not plain: clients take no
# more than 8 KiB of metadata, and what a text quotes may be theirs.
MAX_MESSAGE_BYTES = 1200


class Reason(Enum):
    """The kinds of refusals: the number of gRPC's status code, the HTTP status, and the seconds after which trying
    again may help, 0 if it cannot."""

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


REASONS = {reason.grpc_code: reason for reason in Reason}  # by the numbers of the wire
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
    """A prompt that does not fit into the context, alone or with its output: agents that know so compact their
    conversation."""

    max_tokens: int  # of prompt and output together
    num_tokens: int | None = None  # that were asked for; None: the prompt is too large to be counted


class RefusedError(Exception):
    """Raised by what serves a call, it ends that call, as the door that it came by says such things.

    The text names limit, actual value and remedy; `field` is the path of the field at fault.
    """

    def __init__(self, reason: Reason, message: str, field: str = "", overflow: ContextOverflow | None = None) -> None:
        super().__init__(message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore"))
        self.reason = reason
        self.field = field
        self.overflow = overflow

    def again(self, field: str | None = None) -> "RefusedError":
        """Return an equal error, under another name of the field if one is given. It has no traceback, whose frames
        would keep the request alive that has the error."""
        return RefusedError(self.reason, str(self), self.field if field is None else field, self.overflow)


def invalid(field: str, message: str, overflow: ContextOverflow | None = None) -> RefusedError:
    """Return the refusal of a field that cannot be taken as it is."""
    return RefusedError(Reason.INVALID_ARGUMENT, message, field, overflow)


def unknown(request_id: str) -> RefusedError:
    """Return the refusal of what is asked of a request that is not there, or is another tenant's."""
    return RefusedError(Reason.NOT_FOUND, f"no request {request_id!r} is running for this tenant", "request_id")


def timed_out() -> RefusedError:
    """Return the refusal of what has not ended in the time that its client gave it."""
    text = "the timeout passed before the request was done; raise it or ask for fewer tokens"
    return RefusedError(Reason.DEADLINE_EXCEEDED, text)
