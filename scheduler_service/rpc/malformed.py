"""Requests that are no protobuf message are the client's mistake: gRPC itself calls them UNKNOWN and logs a trace."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
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
    """Answers them INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        decode = _decoder(handler.request_deserializer)
        if handler.request_streaming:
            serve = handler.stream_stream or handler.stream_unary
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.stream_unary_rpc_method_handler
            )
            return make(_reader(serve), decode, handler.response_serializer)
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


def _reader(behave: Callable[..., Any]) -> Callable[..., Any]:
    """For a behavior that iterates over its requests."""

    async def readable(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Malformed):
                await _refuse(request, context)
            yield request

    async def checked(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        return await behave(readable(requests, context), context)

    async def checked_generator(
        requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[Any, None]:
        async for response in behave(readable(requests, context), context):
            yield response

    return checked_generator if inspect.isasyncgenfunction(behave) else checked


async def _refuse(request: _Malformed, context: grpc.aio.ServicerContext) -> None:
    message = f"the request is not a message of this method ({request.reason}); compare the .proto files of both sides"
    await abort(context, RpcError(grpc.StatusCode.INVALID_ARGUMENT, message))
