"""Who calls: told from the API key or the certificate before a call is served, for whoever serves it to ask.

Without tenants nobody is told apart: a request's own field names its tenant.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from scheduler_service.rpc.status import RpcError, abort

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


class Authentication:
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def enter(self, context: grpc.aio.ServicerContext) -> None:
        """To be run before every call. Ends those of strangers."""
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
            # Of DNS names alone: an authority that lets somebody choose an e-mail address did not mean a host by it.
            names = [name.decode(errors="replace") for name in identity.get("peer_dns", ())]
            tenant = self._tenants.by_certificate(names) if names else self._tenants.anonymous()
        if tenant is None:
            raise RpcError(
                grpc.StatusCode.UNAUTHENTICATED,
                "the caller is not known here; send a valid API key as 'authorization: Bearer KEY', or show a "
                "certificate that the server knows",
            )
        return tenant
