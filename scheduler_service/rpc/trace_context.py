"""The trace that a call belongs to is named by the W3C headers that came with it."""

from contextvars import ContextVar

import grpc.aio

_HEADERS = ("traceparent", "tracestate")

_trace_context: ContextVar[dict[str, str] | None] = ContextVar("trace_context", default=None)


async def note_trace_context(context: grpc.aio.ServicerContext) -> None:
    """Keep the headers of a call, before it is served."""
    metadata = context.invocation_metadata() or ()
    _trace_context.set({name: value for name, value in metadata if name in _HEADERS and isinstance(value, str)})


def continue_trace(traceparent: str) -> None:
    """Let what this task does belong to another trace than its call, if one is named."""
    if traceparent:
        _trace_context.set({"traceparent": traceparent})


def trace_context_of_call() -> dict[str, str]:
    """Return the headers of the call that is being served, none if it belongs to no trace."""
    return _trace_context.get() or {}
