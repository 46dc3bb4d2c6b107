"""What happens around every call, for all services of a port: what comes before it, and where `status.abort` ends. It
runs in the call's own task, so that whoever serves the call sees the context variables that are set before it."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from scheduler_service.rpc.status import CallEnded, has_status

Enter = Callable[[grpc.aio.ServicerContext], Awaitable[None]]

# What says nothing about anybody's requests, and what probes ask, is answered to everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")


class Interception(grpc.aio.ServerInterceptor):
    def __init__(self, enters: Sequence[Enter]) -> None:
        """Each gets the call; one that aborts it is the last."""
        self._enters = enters

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICES):
            return handler
        return self._guarded(handler)

    def _guarded(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        make, serve = _parts(handler)
        settings = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }

        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                await self._enter(context)
                return await serve(request, context)
            except CallEnded:
                return None
            except asyncio.CancelledError:
                if not has_status(context):
                    raise
                return None

        async def guarded_generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                await self._enter(context)
                async for response in serve(request, context):
                    yield response
            except CallEnded:
                return
            except asyncio.CancelledError:
                if not has_status(context):
                    raise

        return make(guarded_generator if inspect.isasyncgenfunction(serve) else guarded, **settings)

    async def _enter(self, context: grpc.aio.ServicerContext) -> None:
        for enter in self._enters:
            await enter(context)


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """What makes a handler of this kind, and its behavior."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
