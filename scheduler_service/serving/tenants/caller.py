"""The identity of a caller, by an API key or a certificate. It is the same for all APIs.

Without a tenants file callers are not identified, and a field of the request names its tenant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.tenant_file import Quota, Tenant, TenantFile

_LOCAL = Tenant("", Quota(), (), frozenset(), is_operator=True, is_anonymous=False)
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sends an HTTP request or an RPC, with its credentials: an API key, a certificate or access to a
    Unix socket.

    Each method looks up the tenant again, because a tenant may be removed during a long RPC. All methods raise
    RefusedError if the credentials belong to no tenant.
    """

    tenants: TenantFile | None  # None: callers are not identified, and may see all data
    authorization: str | None = None  # the header of this name
    certificate_names: tuple[str, ...] = ()  # DNS names in the client's certificate
    is_local: bool = False  # on the scheduler's Unix socket, which only operators can open
    # The revision of the front end's tenants file if the call is forwarded by a front end; "" if it has no such file.
    tenants_revision: str | None = None

    def check(self) -> None:
        """Raise RefusedError if the caller's credentials belong to no tenant.

        If the server has no file of tenants, also refuse a caller that sends an API key, because it expects the server
        to check the key.
        """
        if self.tenants is not None:
            self._identify(self.tenants)
        elif self.authorization is not None:
            raise RefusedError(
                Reason.UNAUTHENTICATED,
                "this server has no API keys and would ignore the caller's; start it with --api-key or --tenants, or "
                "send no API key",
            )

    def tenant(self, named: str) -> str:
        """Return the tenant to which a request of this caller belongs. `named` is the tenant that the request
        specifies, or an empty string. Raise RefusedError if the caller may not send requests for this tenant."""
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
            "the request specifies another tenant than the tenant of its sender; leave the field unset",
            "tenant",
        )

    def is_operator(self) -> bool:
        """Return whether the caller is an operator, who may see the data of all tenants. Without a file of tenants,
        every caller is an operator."""
        return self.tenants is None or self._identify(self.tenants).is_operator

    def check_operator(self, what: str) -> None:
        """Raise RefusedError unless the caller is an operator, who may see the data of all tenants. `what` is the name
        of the requested data in the error message."""
        if not self.is_operator():
            raise RefusedError(Reason.PERMISSION_DENIED, f"{what} concerns all tenants; only operators have access")

    def check_forwarded(self, tenant: str, revision: str) -> None:
        """Check that a front end may forward a request of this tenant to this scheduler. `revision` is the digest of
        the front end's file of tenants, or an empty string if it has no such file.

        Raise RefusedError if the caller is not an operator, if the tenant is not in the scheduler's own file of tenants
        (it may have been removed), or if only one of the two servers has a file of tenants.
        """
        if self.tenants is None:
            if not revision:
                return
            raise invalid(
                "submit.tenants_revision",
                "this server has no API keys, but the front end has some; start both with the same --tenants or "
                "--api-key",
            )
        self.check_operator("forwarding requests")
        if not revision or not self.tenants.knows(tenant):
            is_same = revision == self.tenants.revision
            advice = (
                "add it to the tenants file"
                if is_same
                else "the front end's --tenants or --api-key must equal the scheduler's"
            )
            raise RefusedError(Reason.UNAUTHENTICATED, f"tenant {tenant!r} is not known to the scheduler; {advice}")

    def _identify(self, tenants: TenantFile) -> Tenant:
        """Return the tenant to which the caller's credentials belong. If the caller sends an API key, only the key is
        checked. Raise RefusedError if the credentials match no tenant."""
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
                "the caller is unknown; send a valid API key as 'authorization: Bearer KEY' (PAGEWIRE_API_KEY of the "
                "pagewire commands), or use a client certificate that the server knows",
            )
        return tenant


@dataclass(frozen=True, slots=True)
class Call:
    """The context of one HTTP request or RPC, apart from its message: the caller, the session id, the trace headers,
    the client's deadline and the size."""

    caller: Caller
    session_id: str = ""  # for requests without one: proxies can only add headers
    trace: Mapping[str, str] = field(default_factory=dict)  # W3C headers of the trace it belongs to
    time_remaining: float | None = None  # until the client's deadline, in seconds
    size: int = 0  # number of bytes or of JSON values in its body, whichever is larger
