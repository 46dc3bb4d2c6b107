"""Finds out who calls, by the API key or the certificate, before a call is served, and says so to what serves it.

Without tenants callers are not told apart: a request's own field names its tenant. A call whose caller was not found
out is refused.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

import grpc
import grpc.aio

from scheduler_service.rpc.status import RpcError, invalid, set_status
from scheduler_service.rpc.tenants.tenant_file import Tenant, TenantFile

_BEARER = "bearer "


class Caller(Protocol):
    """The caller of a call."""

    def tenant(self, named: str) -> str:
        """Return the tenant of a request that itself names `named`. Raises RpcError."""

    def is_operator(self) -> bool:
        """Say whether the caller may see what belongs to all tenants. Raises RpcError for a stranger."""

    def check_forwarded(self, tenant: str, revision: str) -> None:
        """Raises RpcError unless the caller may say that it has authenticated this tenant, by a file so revised."""


_caller: ContextVar[Caller] = ContextVar("caller")


def tenant_of_call(named: str) -> str:
    """Return the tenant of the call that is being served; `named` is what the request itself says. Raises RpcError."""
    return caller_of_call().tenant(named)


def check_operator(what: str) -> None:
    """Raises RpcError unless the caller may see what belongs to all tenants."""
    if not caller_of_call().is_operator():
        raise RpcError(grpc.StatusCode.PERMISSION_DENIED, f"{what} is of all tenants; only operators may see it")


def caller_of_call() -> Caller:
    """Return who calls. Raises RpcError where nothing has told that: no caller is trusted by default."""
    caller = _caller.get(None)
    if caller is None:
        raise RpcError(grpc.StatusCode.UNAUTHENTICATED, "the server has not told who calls; this is a defect of it")
    return caller


class AnyCaller:
    """Callers of a server without tenants: a request names its tenant, and everything may be seen."""

    async def enter(self, context: grpc.aio.ServicerContext) -> None:
        """Admit a call, before it is served. Raises RpcError for a key that would not be looked at: its sender relies
        on it."""
        if "authorization" in dict(context.invocation_metadata() or ()):
            raise RpcError(
                grpc.StatusCode.UNAUTHENTICATED,
                "this server knows no tenants, and would ignore the API key; start it with --tenants, or send none",
            )
        _caller.set(self)

    def tenant(self, named: str) -> str:
        return named

    def is_operator(self) -> bool:
        return True

    def check_forwarded(self, tenant: str, revision: str) -> None:
        raise invalid(
            "submit.tenants_revision",
            "this server knows no tenants, and the front end does; start both with the same --tenants",
        )


class Authentication:
    """Callers of a server with tenants."""

    def __init__(self, tenants: TenantFile) -> None:
        self._tenants = tenants
        self._calls: dict[asyncio.Task[object], tuple[_IdentifiedCaller, grpc.aio.ServicerContext]] = {}
        tenants.listeners.append(self._end_strangers)

    async def enter(self, context: grpc.aio.ServicerContext) -> None:
        """Admit a call, before it is served. Raises RpcError for a stranger's."""
        caller = _IdentifiedCaller(self._tenants, context)
        caller.identify()
        _caller.set(caller)
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = caller, context
        task.add_done_callback(self._calls.pop)

    def _end_strangers(self, removed: frozenset[str]) -> None:
        """End the running calls of those who are no tenants any more, UNAUTHENTICATED."""
        for task, (caller, context) in list(self._calls.items()):
            try:
                caller.identify()
            except RpcError as error:
                set_status(context, error)
                task.cancel()


class _IdentifiedCaller:
    """A caller by what its call shows, which is looked up whenever it matters: a call may outlive its caller's being a
    tenant."""

    def __init__(self, tenants: TenantFile, context: grpc.aio.ServicerContext) -> None:
        metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
        identity: Mapping[str, Sequence[bytes]] = context.auth_context()
        self._tenants = tenants
        self._authorization = metadata.get("authorization")
        # DNS names alone: an authority that lets a subject choose its e-mail address did not mean a host by it.
        self._certificate_names = tuple(name.decode(errors="replace") for name in identity.get("peer_dns", ()))

    def identify(self) -> Tenant:
        """Return the tenant. A key counts before a certificate, and a wrong one is never overlooked. Raises
        RpcError."""
        if self._authorization is not None:
            text = self._authorization if isinstance(self._authorization, str) else ""
            key = text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""
            tenant = self._tenants.by_key(key.strip())
        elif self._certificate_names:
            tenant = self._tenants.by_certificate(self._certificate_names)
        else:
            tenant = self._tenants.anonymous()
        if tenant is None:
            raise RpcError(
                grpc.StatusCode.UNAUTHENTICATED,
                "the caller is not known here; send a valid API key as 'authorization: Bearer KEY', or show a "
                "certificate that the server knows",
            )
        return tenant

    def tenant(self, named: str) -> str:
        caller = self.identify()
        if not named or named == caller.name:
            return caller.name
        if caller.is_operator:
            return named
        raise RpcError(
            grpc.StatusCode.PERMISSION_DENIED,
            "the request names another tenant than its sender; leave it unset",
            "tenant",
        )

    def is_operator(self) -> bool:
        return self.identify().is_operator

    def check_forwarded(self, tenant: str, revision: str) -> None:
        """Refuse a tenant that only the front end's file has: it may be one that was revoked here. Raises RpcError."""
        check_operator("what a front end forwards")
        if tenant not in self._tenants.current():
            is_same = revision == self._tenants.revision
            why = "" if is_same else "; the front end's file of tenants is another than the scheduler's"
            raise RpcError(grpc.StatusCode.UNAUTHENTICATED, f"tenant {tenant!r} is not known to the scheduler{why}")
