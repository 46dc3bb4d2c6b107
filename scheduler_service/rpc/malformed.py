"""Requests that are no protobuf message are the client's mistake: gRPC itself calls them UNKNOWN and logs a trace."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_service.rpc.status import RpcError, abort


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that cannot be read."""

    reason: str


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Answers them INVALID_ARGUMENT, for methods that take one request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        decode = _decoder(handler.request_deserializer)
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), decode, handler.response_serializer)
        behave = handler.unary_stream
        behave = _generator(behave) if inspect.isasyncgenfunction(behave) else _unary(behave)
        return grpc.unary_stream_rpc_method_handler(behave, decode, handler.response_serializer)


def _decoder(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return decode


def _unary(behave: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def checked(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(request, context)
        return await behave(request, context)

    return checked


def _generator(behave: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    async def checked(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        if isinstance(request, _Malformed):
            await _refuse(request, context)
        async for response in behave(request, context):
            yield response

    return checked


async def _refuse(request: _Malformed, context: grpc.aio.ServicerContext) -> None:
    message = f"the request is not a message of this method ({request.reason}); compare the .proto files of both sides"
    await abort(context, RpcError(grpc.StatusCode.INVALID_ARGUMENT, message))
