"""What is done around every call of a port: what comes before it is served, and with which status an error ends it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from pagewire.common.transport.interception import Enter, Unreadable
from scheduler_service.rpc.status import RpcError, has_status, set_status

# These services tell nothing of requests, and probes ask them: they answer everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")


def entrance(steps: Sequence[Callable[[grpc.aio.ServicerContext], Awaitable[None]]]) -> Enter:
    """Return what every call goes through before it is served. Each of `steps` may raise RpcError, which ends it."""

    async def enter(method: str, context: grpc.aio.ServicerContext) -> None:
        for step in () if method.startswith(_OPEN_SERVICES) else steps:
            await step(context)

    return enter


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
        if not has_status(context):
            raise
