"""Authentication of gRPC calls, and the translation of refusals to and from gRPC statuses."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from pagewire.common.wire.transport.interception import Unreadable
from scheduler_service.serving.refusal import REASONS, Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from scheduler_service.serving.tenants.tenant_file import TenantFile

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a separately installed grpcio may lack googleapis-common-protos; errors then carry no details
    error_details_pb2 = status_pb2 = None

# These services reveal nothing about requests, and health probes use them, so they need no authentication.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_SESSION_HEADER = "x-session-id"
_TRACE_HEADERS = ("traceparent", "tracestate")
# Sent with the calls that a front end forwards; the same value as `tenants_revision` in a Submission.
_REVISION_HEADER = "x-tenants-revision"
# The limit for a header that a front end forwards. W3C requires no longer tracestate, and a session id of this length
# is refused.
_MAX_HEADER_CHARS = 512
DETAILS_KEY = "grpc-status-details-bin"  # the key in the trailing metadata, as in grpcio-status


class Authenticator:
    """The authentication of gRPC calls. It identifies the caller of each RPC, and ends the running RPCs of removed
    tenants."""

    def __init__(self, tenants: TenantFile | None) -> None:
        self._tenants = tenants
        self._calls: dict[asyncio.Task[object], tuple[Caller, grpc.aio.ServicerContext]] = {}

    async def enter(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Authenticate the caller of an RPC before the RPC is handled. Raise RefusedError if the caller's credentials
        belong to no tenant.

        Health checks and reflection need no credentials.
        """
        if method.startswith(_OPEN_SERVICES):
            return
        caller = self._caller(context)
        caller.check()
        task = asyncio.current_task()
        if task is not None and self._tenants is not None:  # without tenants, no caller can become unknown
            self._calls[task] = caller, context
            task.add_done_callback(self._calls.pop)

    def call(self, context: grpc.aio.ServicerContext) -> Call:
        """Return the context of an RPC, apart from its message: the caller, session id, trace headers and remaining
        time."""
        # If a header is repeated, its first value counts.
        metadata = reversed(tuple(context.invocation_metadata() or ()))
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        return Call(
            self._caller(context),
            headers.get(_SESSION_HEADER, ""),
            {name: headers[name] for name in _TRACE_HEADERS if name in headers},
            context.time_remaining(),
        )

    def end_unknown_callers(self, removed: frozenset[str]) -> None:
        """End the running RPCs of callers that no longer belong to a tenant, with the status UNAUTHENTICATED. This
        method is called after tenants were removed from the file of tenants."""
        for task, (caller, context) in list(self._calls.items()):
            try:
                caller.check()
            except RefusedError as refusal:
                set_status(context, refusal)
                task.cancel()

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return the caller of an RPC with the credentials that it sent: an API key, a client certificate, or access to
        the operators' Unix socket.

        Only the DNS names in a certificate are used. A certificate authority may let an owner choose any e-mail
        address, so an e-mail address does not prove a host name.
        """
        metadata = dict(context.invocation_metadata() or ())
        key = metadata.get("authorization")
        shown = context.auth_context()
        names = tuple(name.decode(errors="replace") for name in shown.get("peer_dns", ()))
        is_local = b"local" in shown.get("transport_security_type", ())  # the call came through a Unix socket
        key = key.decode(errors="replace") if isinstance(key, bytes) else key
        return Caller(self._tenants, key, names, is_local, metadata.get(_REVISION_HEADER))


def forwarded_metadata(call: Call, tenants_revision: str) -> Iterable[tuple[str, str]]:
    """Return the gRPC metadata that a front end adds to an RPC that it forwards to the scheduler.

    The metadata contain the session id, the trace headers and the digest of the front end's file of tenants, but no
    credentials.
    """
    headers = {_REVISION_HEADER: tenants_revision, _SESSION_HEADER: call.session_id, **call.trace}
    # gRPC metadata allow only printable ASCII; HTTP headers may contain other characters.
    sent = ((name, value[:_MAX_HEADER_CHARS]) for name, value in headers.items())
    return [(name, value) for name, value in sent if value.isascii() and value.isprintable()]


def set_status(context: grpc.aio.ServicerContext, refusal: RefusedError) -> None:
    """Set the final gRPC status of an RPC whose request was refused.

    The function replaces gRPC's own `abort`, which stores its exception in the call object. The call, its frames and
    its request then form a reference cycle that only a garbage collection frees.
    """
    context.set_trailing_metadata(_details(refusal))
    context.set_details(str(refusal))
    context.set_code(grpc.StatusCode[refusal.reason.name])


def refusal_of(error: grpc.aio.AioRpcError) -> RefusedError:
    """Convert the gRPC error with which another server ended an RPC to a RefusedError."""
    field = ""
    packed = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if packed is not None and status_pb2 is not None:
        for detail in status_pb2.Status.FromString(packed).details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request):
                field = bad_request.field_violations[0].field
    return RefusedError(REASONS.get(error.code().value[0], Reason.INTERNAL), error.details() or "", field)


@contextmanager
def ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """A context manager for the block that runs an RPC. It converts an exception of the block to the gRPC status of the
    RPC.

    RefusedError and Unreadable (a message that cannot be parsed) end the RPC with their own status. A cancellation is
    suppressed if the RPC already has a status other than OK.
    """
    try:
        yield
    except RefusedError as refusal:
        set_status(context, refusal)
    except Unreadable as error:
        set_status(context, RefusedError(Reason.INVALID_ARGUMENT, str(error)))
    except asyncio.CancelledError:
        if context.code() in (None, 0, grpc.StatusCode.OK):
            raise


def _details(refusal: RefusedError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing gRPC metadata of a refusal, which contain the invalid field and the delay before a retry.
    Return an empty tuple if the package for these details is not installed."""
    if status_pb2 is None:
        return ()
    status = status_pb2.Status(code=refusal.reason.grpc_code, message=str(refusal))
    if refusal.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=str(refusal))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if delay := refusal.reason.retry_delay_s:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=delay)))
    return ((DETAILS_KEY, status.SerializeToString()),)
