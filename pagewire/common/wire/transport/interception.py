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
    """A gRPC request could not be decoded, or is too large.

    The decoder returns this error as a value, and the error is raised later, when the handler reads the request. If the
    decoder raised the error, gRPC would end the RPC with the status UNKNOWN and log a traceback.
    """


async def admit(method: str, context: grpc.aio.ServicerContext) -> None:
    """Let every RPC pass to its handler. This is the default for `enter`, for services that check nothing before an
    RPC.
    """


@contextmanager
def ending(context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Run the handler of an RPC in the body of a `with`. If the handler raises Unreadable, end the RPC with the status
    INVALID_ARGUMENT.
    """
    try:
        yield
    except Unreadable as error:
        context.set_details(str(error))
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT)


class Interception(grpc.aio.ServerInterceptor):
    def __init__(self, max_message_bytes: int, enter: Enter, ending: Ending) -> None:
        """Create an interceptor that wraps every RPC of a gRPC server. For each RPC, `enter` is called with the
        method's name and the RPC's context, and then the handler runs.

        Both run inside the context manager that `ending` returns. This context manager converts their errors to a
        status of the RPC.
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
        """Wrap the deserializer of a gRPC method. If the request cannot be decoded, the wrapper returns an `Unreadable`
        instead of raising it. The error is raised later, when the handler reads the message.
        """

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
    """Return a decoded gRPC request. Raises Unreadable if the request could not be decoded."""
    if isinstance(request, Unreadable):
        raise request
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """Return a tuple of two functions for a gRPC method handler: the gRPC function that creates handlers of this kind
    (unary or streaming), and the function that handles the RPCs.
    """
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
