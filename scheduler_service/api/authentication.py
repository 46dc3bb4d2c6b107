"""What a call of gRPC goes through: its caller is found out before it is served, and a refusal becomes its status."""

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
except ImportError:  # a machine with a grpcio of its own may lack googleapis-common-protos: errors then have no details
    error_details_pb2 = status_pb2 = None

# These services tell nothing of requests, and probes ask them: they answer everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_SESSION_HEADER = "x-session-id"
_TRACE_HEADERS = ("traceparent", "tracestate")
# Of a call that a front end passes on, as `tenants_revision` of a submission.
_REVISION_HEADER = "x-tenants-revision"
# Of what a front end passes on: a tracestate need not be longer (W3C), and a session id of so many is refused.
_MAX_HEADER_CHARS = 512
DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata, as grpcio-status has it


class Authenticator:
    def __init__(self, tenants: TenantFile | None) -> None:
        self._tenants = tenants
        self._calls: dict[asyncio.Task[object], tuple[Caller, grpc.aio.ServicerContext]] = {}

    async def enter(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Admit a call, before it is served. Raises RefusedError for a stranger's."""
        if method.startswith(_OPEN_SERVICES):
            return
        caller = self._caller(context)
        caller.check()
        task = asyncio.current_task()
        if task is not None and self._tenants is not None:  # else no caller can become a stranger
            self._calls[task] = caller, context
            task.add_done_callback(self._calls.pop)

    def call(self, context: grpc.aio.ServicerContext) -> Call:
        """Return what is known of a call."""
        # The first of a name counts.
        metadata = reversed(tuple(context.invocation_metadata() or ()))
        headers = {name: value for name, value in metadata if isinstance(value, str)}
        return Call(
            self._caller(context),
            headers.get(_SESSION_HEADER, ""),
            {name: headers[name] for name in _TRACE_HEADERS if name in headers},
            context.time_remaining(),
        )

    def end_strangers(self, removed: frozenset[str]) -> None:
        """End the running calls of callers that are known no more, UNAUTHENTICATED."""
        for task, (caller, context) in list(self._calls.items()):
            try:
                caller.check()
            except RefusedError as refusal:
                set_status(context, refusal)
                task.cancel()

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Return who makes a call. Of a certificate DNS names count alone: an authority that lets a subject choose its
        e-mail address did not mean a host by it."""
        metadata = dict(context.invocation_metadata() or ())
        key = metadata.get("authorization")
        shown = context.auth_context()
        names = tuple(name.decode(errors="replace") for name in shown.get("peer_dns", ()))
        is_local = b"local" in shown.get("transport_security_type", ())  # by a socket that marks its calls
        key = key.decode(errors="replace") if isinstance(key, bytes) else key
        return Caller(self._tenants, key, names, is_local, metadata.get(_REVISION_HEADER))


def passed_on(call: Call, tenants_revision: str) -> Iterable[tuple[str, str]]:
    """Return what tells the scheduler of a call to a front end, beside whose call it is."""
    headers = {_REVISION_HEADER: tenants_revision, _SESSION_HEADER: call.session_id, **call.trace}
    # What came over HTTP may be what gRPC does not take.
    sent = ((name, value[:_MAX_HEADER_CHARS]) for name, value in headers.items())
    return [(name, value) for name, value in sent if value.isascii() and value.isprintable()]


def set_status(context: grpc.aio.ServicerContext, refusal: RefusedError) -> None:
    """Choose the status with which the call ends when it ends.

    gRPC's own `abort` keeps its exception with the call, and so the call, its frames and its request refer to each
    other until a garbage collection comes.
    """
    context.set_trailing_metadata(_details(refusal))
    context.set_details(str(refusal))
    context.set_code(grpc.StatusCode[refusal.reason.name])


def refusal_of(error: grpc.aio.AioRpcError) -> RefusedError:
    """Return the refusal by which another server has ended a call."""
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
    """Serve a call inside the block, which may end it by RefusedError or Unreadable, or by cancelling it once its
    status is set."""
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
    """Make the trailing metadata that names the field at fault and says when to try again."""
    if status_pb2 is None:
        return ()
    status = status_pb2.Status(code=refusal.reason.grpc_code, message=str(refusal))
    if refusal.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=str(refusal))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if delay := refusal.reason.retry_delay_s:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=delay)))
    return ((DETAILS_KEY, status.SerializeToString()),)
