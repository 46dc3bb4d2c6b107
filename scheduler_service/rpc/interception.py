"""The frame around every call of a port: what is done before it is served, and the status with which an error ends it,
which a request that cannot be read is too.

All of it runs in the call's own task, so that whoever serves the call sees the context variables that are set before.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_service.rpc.status import RpcError, has_status, set_status

Enter = Callable[[grpc.aio.ServicerContext], Awaitable[None]]

# These services tell nothing of anybody's requests, and probes ask them: they answer everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")


class Interception(grpc.aio.ServerInterceptor):
    def __init__(self, enters: Sequence[Enter]) -> None:
        """Each of `enters` gets the call before it is served, and may raise RpcError, which ends it."""
        self._enters = enters

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        is_open = handler_call_details.method.startswith(_OPEN_SERVICES)
        return _guarded(handler, () if is_open else self._enters)


def _guarded(handler: grpc.RpcMethodHandler, enters: Sequence[Enter]) -> grpc.RpcMethodHandler:
    """Return the same handler behind `enters`; an RpcError ends its calls with that error's status."""
    make, serve = _parts(handler)
    readable = _readable_stream if handler.request_streaming else _readable

    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with _ending(context):
            for enter in enters:
                await enter(context)
            return await serve(readable(request), context)

    async def guarded_generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with _ending(context):
            for enter in enters:
                await enter(context)
            async for response in serve(readable(request), context):
                yield response

    behavior = guarded_generator if inspect.isasyncgenfunction(serve) else guarded
    return make(behavior, _decoder(handler.request_deserializer), handler.response_serializer)


def _decoder(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what reads a request. The error stands for one that is no message of its method, until the call is served:
    gRPC itself would call that UNKNOWN and log a trace."""

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error.with_traceback(None)

    return decode


def _readable(request: Any) -> Any:
    """Return the request. Raises RpcError for one that could not be read, which is the client's mistake."""
    if isinstance(request, DecodeError):
        reason = f"the request is not a message of this method ({request})"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"{reason}; compare the .proto files of both sides")
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


@contextmanager
def _ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Serve a call inside the block, which may end it by an RpcError, or by cancelling it once its status is set."""
    try:
        yield
    except RpcError as error:
        # Without its traceback, whose frames may refer to a request that keeps the error.
        set_status(context, error.with_traceback(None))
    except asyncio.CancelledError:
        if not has_status(context):
            raise


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """Return the function that makes a handler of this kind, and the one that serves its calls."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
