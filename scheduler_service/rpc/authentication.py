"""Who calls: an interceptor tells it from the API key or the certificate, and whoever serves the call may ask.

Without tenants nobody is told apart: a request's own field names its tenant.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from scheduler_service.rpc.status import RpcError, abort

# What says nothing about anybody's requests, and what probes ask, is answered to everyone.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_BEARER = "bearer "


class Tenant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_operator(self) -> bool:
        """Whether it acts for any tenant, and sees what belongs to all."""


class Tenants(Protocol):
    def by_key(self, key: str) -> Tenant | None: ...

    def by_certificate(self, names: Sequence[str]) -> Tenant | None: ...

    def anonymous(self) -> Tenant | None: ...


@dataclass(frozen=True, slots=True)
class _Caller:
    name: str
    is_operator: bool


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)


def tenant_of_call(named: str) -> str:
    """The tenant of the call that is being served; `named` is what the request itself says. Raises RpcError."""
    caller = _caller.get()
    if caller is None or named == caller.name:
        return named
    if not named:
        return caller.name
    if caller.is_operator:
        return named
    raise RpcError(
        grpc.StatusCode.PERMISSION_DENIED, "the request names another tenant than its sender; leave it unset", "tenant"
    )


def check_operator(what: str) -> None:
    """Raises RpcError unless the caller may see what belongs to all tenants."""
    caller = _caller.get()
    if caller is not None and not caller.is_operator:
        raise RpcError(grpc.StatusCode.PERMISSION_DENIED, f"{what} is of all tenants; only operators may see it")


class Authentication(grpc.aio.ServerInterceptor):
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

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
            await self._enter(context)
            return await serve(request, context)

        async def guarded_generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await self._enter(context)
            async for response in serve(request, context):
                yield response

        return make(guarded_generator if inspect.isasyncgenfunction(serve) else guarded, **settings)

    async def _enter(self, context: grpc.aio.ServicerContext) -> None:
        try:
            tenant = self._identify(dict(context.invocation_metadata() or ()), context.auth_context())
        except RpcError as error:
            await abort(context, error)
        _caller.set(_Caller(tenant.name, tenant.is_operator))

    def _identify(self, metadata: Mapping[str, str | bytes], identity: Mapping[str, Sequence[bytes]]) -> Tenant:
        """Raises RpcError. A key counts before a certificate; a wrong one is never overlooked."""
        authorization = metadata.get("authorization")
        if authorization is not None:
            text = authorization if isinstance(authorization, str) else ""
            key = text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""
            tenant = self._tenants.by_key(key.strip())
        else:
            names = [name.decode(errors="replace") for name in identity.get("x509_subject_alternative_name", ())]
            tenant = self._tenants.by_certificate(names) if names else self._tenants.anonymous()
        if tenant is None:
            raise RpcError(
                grpc.StatusCode.UNAUTHENTICATED,
                "the caller is not known here; send a valid API key as 'authorization: Bearer KEY', or show a "
                "certificate that the server knows",
            )
        return tenant


def _parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Callable[..., Any]]:
    """What makes a handler of this kind, and its behavior."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary
