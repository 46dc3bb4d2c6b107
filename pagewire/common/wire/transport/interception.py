"""A server interceptor that wraps every RPC.

A request that is no message of the RPC's method, or that is too large, ends the RPC with INVALID_ARGUMENT in every
service. The wrapper runs in the RPC's own task, so the handler sees the context variables that `enter` sets.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pagewire.common.wire.transport.message_size import too_large

Enter = Callable[[str, grpc.aio.ServicerContext], Awaitable[None]]
Ending = Callable[[grpc.aio.ServicerContext], AbstractContextManager[None]]


class Unreadable(Exception):
    """A request that the RPC cannot accept.

    The decoder returns it as a value, and it is raised where the handler reads the message. If the decoder raised it,
    gRPC would end the RPC with UNKNOWN and log a traceback.
    """


async def admit(method: str, context: grpc.aio.ServicerContext) -> None:
    """Do nothing before an RPC is handled."""


@contextmanager
def ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Handle an RPC inside the block, and convert Unreadable to the status INVALID_ARGUMENT."""
    try:
        yield
    except Unreadable as error:
        context.set_details(str(error))
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT)


class Interception(grpc.aio.ServerInterceptor):
    def __init__(self, max_message_bytes: int, enter: Enter, ending: Ending) -> None:
        """Create an interceptor. `enter` gets the method's name and the RPC's context before the handler runs.

        Both run inside the context manager that `ending` returns, which converts errors to a status.
        """
        self._max_message_bytes = max_message_bytes
        self._enter = enter
        self._ending = ending

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        return handler if handler is None else self._framed(handler, handler_call_details.method)

    def _framed(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        make, serve = _parts(handler)
        readable = _readable_stream if handler.request_streaming else _readable

        async def framed(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._ending(context):
                await self._enter(method, context)
                return await serve(readable(request), context)

        async def framed_generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._ending(context):
                await self._enter(method, context)
                async for response in serve(readable(request), context):
                    yield response

        behavior = framed_generator if inspect.isasyncgenfunction(serve) else framed
        return make(behavior, self._decoder(handler.request_deserializer), handler.response_serializer)

    def _decoder(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Return a decoder that returns the message, or an `Unreadable` to raise when the handler reads the message."""

        def decode(data: bytes) -> Any:
            if len(data) > self._max_message_bytes:
                return Unreadable(too_large(len(data), self._max_message_bytes))
            try:
                return deserialize(data)
            except DecodeError as error:
                return Unreadable(
                    f"the request is not a message of this method ({error}); compare the .proto files of both sides"
                )

        return decode


def _readable(request: Any) -> Any:
    """Return the request. Raises Unreadable if decoding failed."""
    if isinstance(request, Unreadable):
        raise request
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """Return the gRPC function that creates a handler of this kind, and the function that handles its RPCs."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
