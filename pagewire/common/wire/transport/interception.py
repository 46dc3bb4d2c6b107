"""The frame around every call of a server. A message that is none of the call's method, or larger than the port takes,
ends the call as an invalid argument, whatever the service.

All of it runs in the call's own task, so that what serves the call sees the context variables that are set before.
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
    """Raised where a message is read that the call cannot take. It is made where that is decoded: an error there gRPC
    itself would call UNKNOWN, and log a trace."""


async def admit(method: str, context: grpc.aio.ServicerContext) -> None:
    """Do nothing before a call."""


@contextmanager
def ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Serve a call inside the block, which may end it by Unreadable."""
    try:
        yield
    except Unreadable as error:
        context.set_details(str(error))
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT)


class Interception(grpc.aio.ServerInterceptor):
    def __init__(self, max_message_bytes: int, enter: Enter, ending: Ending) -> None:
        """`enter` gets the method's name and the call before that is served. Both are done inside what `ending` makes
        of the call, which turns an error into a status."""
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
        """Return what makes a message of bytes, or the error that stands for it until the call is served."""

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
    """Return the request. Raises Unreadable."""
    if isinstance(request, Unreadable):
        raise request
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """Return the function that makes a handler of this kind, and the one that serves its calls."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
