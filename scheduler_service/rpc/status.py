"""How errors look to clients: one status code, one sentence, and google.rpc details."""

from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a machine with a grpcio of its own may lack googleapis-common-protos: errors then have no details
    error_details_pb2 = status_pb2 = None

DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata, as grpcio-status has it
# Seconds after which trying again may help.
RETRY_DELAYS = {grpc.StatusCode.RESOURCE_EXHAUSTED: 1, grpc.StatusCode.UNAVAILABLE: 2}


class RpcError(Exception):
    """Ends a call. The text names limit, actual value and remedy; `field` is the path of the field at fault."""

    def __init__(self, code: grpc.StatusCode, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


def invalid(field: str, message: str) -> RpcError:
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, field)


class CallEnded(BaseException):
    """Unwinds a call whose status is set, to `interception.py`, which is where it ends. Nobody else takes it for an
    error."""


async def abort(context: grpc.aio.ServicerContext, error: RpcError) -> NoReturn:
    """End the call with the error's status.

    gRPC's own abort keeps its exception with the call, and so the call, its frames and its request refer to each other
    until a garbage collection comes.
    """
    set_status(context, error)
    raise CallEnded


def set_status(context: grpc.aio.ServicerContext, error: RpcError) -> None:
    """With what the call ends, when it ends."""
    context.set_trailing_metadata(_details(error))
    context.set_details(str(error))
    context.set_code(error.code)


def has_status(context: grpc.aio.ServicerContext) -> bool:
    """Whether somebody has set with what the call ends."""
    return context.code() not in (None, 0, grpc.StatusCode.OK)


def _details(error: RpcError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that tells of the field at fault and of when to try again."""
    if status_pb2 is None:
        return ()
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code in RETRY_DELAYS:
        delay = Duration(seconds=RETRY_DELAYS[error.code])
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return ((DETAILS_KEY, status.SerializeToString()),)
