"""Who calls, by what a call shows: an API key or a certificate, whatever door it came by.

Without tenants callers are not told apart: a request's own field names its tenant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.tenant_file import Quota, Tenant, TenantFile

_LOCAL = Tenant("", Quota(), (), frozenset(), is_operator=True, is_anonymous=False)
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call, who is looked up whenever it matters: a call may outlive its caller's being a tenant. All
    methods raise RefusedError for a stranger."""

    tenants: TenantFile | None  # None: callers are not told apart, and everything may be seen
    authorization: str | None = None  # the header
    certificate_names: tuple[str, ...] = ()  # the DNS names of a certificate
    is_local: bool = False  # it came by the scheduler's own socket, which operators alone can open
    # Of a call that a front end passes on: what it knows tenants by, or nothing if it knows none.
    tenants_revision: str | None = None

    def check(self) -> None:
        """Return if the caller is known. A key that would not be looked at is refused: its sender relies on it."""
        if self.tenants is not None:
            self._identify(self.tenants)
        elif self.authorization is not None:
            raise RefusedError(
                Reason.UNAUTHENTICATED,
                "this server knows no tenants, and would ignore the API key; start it with --tenants, or send none",
            )

    def tenant(self, named: str) -> str:
        """Return the tenant of a request that itself names `named`. Raises RefusedError."""
        if self.tenants_revision is not None:
            self.check_forwarded(named, self.tenants_revision)
            return named
        if self.tenants is None:
            return named
        caller = self._identify(self.tenants)
        if not named or named == caller.name:
            return caller.name
        if caller.is_operator:
            return named
        raise RefusedError(
            Reason.PERMISSION_DENIED,
            "the request names another tenant than its sender; leave it unset",
            "tenant",
        )

    def is_operator(self) -> bool:
        """Say whether the caller may see what belongs to all tenants."""
        return self.tenants is None or self._identify(self.tenants).is_operator

    def check_operator(self, what: str) -> None:
        """Raises RefusedError unless the caller may see what belongs to all tenants."""
        if not self.is_operator():
            raise RefusedError(Reason.PERMISSION_DENIED, f"{what} is of all tenants; only operators may see it")

    def check_forwarded(self, tenant: str, revision: str) -> None:
        """Refuse a tenant that only the front end's file has, which was revised so: it may be one that was revoked
        here. Raises RefusedError, also unless the caller may say whom it has authenticated."""
        if self.tenants is None:
            if not revision:
                return
            raise invalid(
                "submit.tenants_revision",
                "this server knows no tenants, and the front end does; start both with the same --tenants",
            )
        self.check_operator("what a front end forwards")
        if not revision or tenant not in self.tenants.current():
            is_same = revision == self.tenants.revision
            why = "" if is_same else "; the front end's file of tenants is another than the scheduler's"
            raise RefusedError(Reason.UNAUTHENTICATED, f"tenant {tenant!r} is not known to the scheduler{why}")

    def _identify(self, tenants: TenantFile) -> Tenant:
        """Return the tenant. A key counts before the rest, and a wrong one is never overlooked."""
        text = self.authorization
        if text is not None:
            key = text[len(_BEARER) :] if text.lower().startswith(_BEARER) else ""
            tenant = tenants.by_key(key.strip())
        elif self.is_local:
            tenant = _LOCAL
        elif self.certificate_names:
            tenant = tenants.by_certificate(self.certificate_names)
        else:
            tenant = tenants.anonymous()
        if tenant is None:
            raise RefusedError(
                Reason.UNAUTHENTICATED,
                "the caller is not known here; send a valid API key as 'authorization: Bearer KEY', or show a "
                "certificate that the server knows",
            )
        return tenant


@dataclass(frozen=True, slots=True)
class Call:
    """A call as its door tells of it: who makes it, and what was said beside its request."""

    caller: Caller
    session_id: str = ""  # of its requests that name none: proxies know headers, not requests
    trace: Mapping[str, str] = field(default_factory=dict)  # the headers of the W3C's that tell the trace it is part of
    time_remaining: float | None = None  # seconds after which its client waits no more
    size: int = 0  # bytes of its body, or its JSON values if these are more
