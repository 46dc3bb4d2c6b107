"""The session that a call's requests are part of, as its metadata names it: proxies know headers, not requests."""

from contextvars import ContextVar

import grpc.aio

_NAME = "x-session-id"

_session_id: ContextVar[str] = ContextVar("session_id", default="")


async def note_session(context: grpc.aio.ServicerContext) -> None:
    """Keep the session's id of a call, before it is served."""
    metadata = context.invocation_metadata() or ()
    _session_id.set(next((value for name, value in metadata if name == _NAME and isinstance(value, str)), ""))


def session_of_call() -> str:
    """Return the session's id that came with the call that is being served, empty if none did."""
    return _session_id.get()
