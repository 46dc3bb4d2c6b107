"""What is done with a call before it is served: its caller is found out, and what its headers say is kept.

The headers name the session that the call's requests are part of, since proxies know headers, not requests, and the
trace that it belongs to, which are those of the W3C.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import grpc.aio

from pagewire.common.transport.interception import Enter

# These services tell nothing of requests, and probes ask them: they answer everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_SESSION_HEADER = "x-session-id"
_TRACE_HEADERS = ("traceparent", "tracestate")

_session_id: ContextVar[str] = ContextVar("session_id", default="")
_trace_context: ContextVar[dict[str, str]] = ContextVar("trace_context")


def entrance(admit: Callable[[grpc.aio.ServicerContext], Awaitable[None]]) -> Enter:
    """Return what every call goes through before it is served. `admit` finds out who calls, and may raise RpcError,
    which ends the call."""

    async def enter(method: str, context: grpc.aio.ServicerContext) -> None:
        if not method.startswith(_OPEN_SERVICES):
            await admit(context)
            headers = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
            _session_id.set(next((value for name, value in headers if name == _SESSION_HEADER), ""))
            _trace_context.set({name: value for name, value in headers if name in _TRACE_HEADERS})

    return enter


def session_of_call() -> str:
    """Return the session's id that came with the call that is being served, empty if none did."""
    return _session_id.get()


def trace_context_of_call() -> dict[str, str]:
    """Return the trace's headers of the call that is being served, none if it belongs to no trace."""
    return _trace_context.get({})


def continue_trace(traceparent: str) -> None:
    """Let what this task does belong to another trace than its call, if one is named."""
    if traceparent:
        _trace_context.set({"traceparent": traceparent})
