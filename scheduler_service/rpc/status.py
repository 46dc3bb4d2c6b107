"""How errors look to clients: one status code, one sentence, and google.rpc details."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from pagewire.common.transport.interception import Unreadable

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a machine with a grpcio of its own may lack googleapis-common-protos: errors then have no details
    error_details_pb2 = status_pb2 = None

# Of an error's text, which goes out three times, once with three bytes for each that is not plain: clients take no more
# than 8 KiB of metadata, and what an error quotes may be theirs.
MAX_MESSAGE_BYTES = 1200
DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata, as grpcio-status has it
# Seconds after which trying again may help.
RETRY_DELAYS = {grpc.StatusCode.RESOURCE_EXHAUSTED: 1, grpc.StatusCode.UNAVAILABLE: 2}


CODES = {code.value[0]: code for code in grpc.StatusCode}  # by the numbers of the wire


class RpcError(Exception):
    """Raised by what serves a call, it ends that call with its status.

    The text names limit, actual value and remedy; `field` is the path of the field at fault.
    """

    def __init__(self, code: grpc.StatusCode, message: str, field: str = "") -> None:
        super().__init__(message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore"))
        self.code = code
        self.field = field


def invalid(field: str, message: str) -> RpcError:
    """Return the error for a field that cannot be taken as it is."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, field)


def set_status(context: grpc.aio.ServicerContext, error: RpcError) -> None:
    """Choose the status with which the call ends when it ends.

    gRPC's own `abort` keeps its exception with the call, and so the call, its frames and its request refer to each
    other until a garbage collection comes.
    """
    context.set_trailing_metadata(_details(error))
    context.set_details(str(error))
    context.set_code(error.code)


@contextmanager
def ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Serve a call inside the block, which may end it by RpcError or Unreadable, or by cancelling it once its status is
    set."""
    try:
        yield
    except RpcError as error:
        # Without its traceback, whose frames may refer to a request that keeps the error.
        set_status(context, error.with_traceback(None))
    except Unreadable as error:
        set_status(context, RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
    except asyncio.CancelledError:
        if context.code() in (None, 0, grpc.StatusCode.OK):
            raise


def _details(error: RpcError) -> tuple[tuple[str, bytes], ...]:
    """Make the trailing metadata that names the field at fault and says when to try again."""
    if status_pb2 is None:
        return ()
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.code in RETRY_DELAYS:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_DELAYS[error.code])))
    return ((DETAILS_KEY, status.SerializeToString()),)
