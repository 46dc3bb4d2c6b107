"""Admission to the HTTP API. Checks the caller, the origin and the model of each call, and limits the bytes that all
calls hold."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from starlette.types import Message, Receive, Scope

from pagewire.common.wire.transport.host_names import HostNames
from scheduler_service.api.http.body import MAX_BODY_BYTES, read_body
from scheduler_service.api.http.refusals import HttpRefusal
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from scheduler_service.serving.tenants.tenant_file import TenantFile
from scheduler_service.serving.turns import PIECE_SIZE, TenantBytes

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_SESSION_HEADER = b"x-session-id"
_TRACE_HEADERS = (b"traceparent", b"tracestate")
# Limit of all bodies larger than PIECE_SIZE that are being received. A tenant may use a quarter of it.
MAX_BODIES_BYTES = 64 << 20
# Limit of all requests decoded from such bodies, in bytes of their bodies. A request counts until its call ends.
MAX_REQUESTS_BYTES = 1 << 30


# The origins of pages that an application on this machine shows, not a web site: desktop applications, extensions of
# editors, and web servers on this machine. A web site cannot have these origins: browsers resolve localhost to this
# machine, and send the origin null for files and for frames without an origin.
_LOCAL_ORIGINS = (
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
    *("http://tauri.localhost", "https://tauri.localhost"),
    *(f"{scheme}://{host}{port}" for scheme in ("http", "https") for host in _LOOPBACK for port in ("", ":*")),
)


class Origins:
    """The origins whose pages may call the HTTP API from a browser: applications on this machine, and the configured
    origins."""

    def __init__(self, allowed: Sequence[str], flag: str) -> None:
        """Allow the given origins too, in which * matches any text. A single * allows every origin. `flag` is their
        command line flag, for error messages."""
        patterns = [
            re.escape(each).replace(r":\*", ":[0-9]+").replace(r"\*", "[^/]*") for each in (*_LOCAL_ORIGINS, *allowed)
        ]
        self.pattern = re.compile(".*" if "*" in allowed else f"(?i){'|'.join(patterns)}")  # (?i): ignores case
        self.flag = flag


class CallAdmission:
    """The admission control of the HTTP API. It refuses an HTTP call if its API key, origin or model name is not
    accepted. It also limits the memory that request bodies and decoded requests use, for each tenant and for all
    tenants."""

    def __init__(
        self,
        hosts: HostNames,
        origins: "Origins",
        tenants: TenantFile | None,
        intake: Intake,
        model_names: Callable[[], Sequence[str]],
        *,
        accepts_any_model_name: bool,
    ) -> None:
        """Create the admission control of an HTTP server.

        Args:
            hosts: The allowed values of the Host header.
            origins: The origins whose pages may call the API.
            tenants: The tenants and their API keys, or None if no tenants are configured.
            intake: Gives the reason for the error if the name of the served model is not known yet.
            model_names: Returns the names of the served model that requests may use. Answers contain the first name.
            accepts_any_model_name: Whether requests may use any other name too.
        """
        self.origins = origins
        self.model_names = model_names
        self._tenants = tenants
        self._intake = intake
        self._takes_any_model_name = accepts_any_model_name
        self._hosts = hosts
        self._bodies = TenantBytes("bodies", MAX_BODIES_BYTES, max(MAX_BODY_BYTES, MAX_BODIES_BYTES // 4))
        self._requests = TenantBytes("requests", MAX_REQUESTS_BYTES, MAX_REQUESTS_BYTES // 4)

    def check_origin(self, scope: Scope) -> None:
        """Refuse an HTTP call for another host's name, or that a web page of another origin has made, unless the origin
        is allowed. Raises HttpRefusal. GET and HEAD are allowed to all origins. The server must check other methods
        itself: a browser hides the answer from the page, but still sends the call."""
        headers = scope["header_values"]
        host, origin = headers.get(b"host", "localhost"), headers.get(b"origin")
        if why := self._hosts.refusal(host):
            raise HttpRefusal(403, why)
        is_open = origin is None or scope["method"] in ("GET", "HEAD") or origin.partition("://")[2] == host
        if origin is not None and not is_open and not self.origins.pattern.fullmatch(origin):
            raise HttpRefusal(
                403, f"web pages of the origin {origin[:80]!r} may not call; add it to {self.origins.flag}"
            )

    def call(self, scope: Scope) -> Call:
        """Authenticate an HTTP call by its API key or its client certificate. Return the caller, the session id and the
        trace headers of the call as a `Call`. Raises RefusedError if the caller is unknown.

        If no tenants are configured, the API key is ignored, because OpenAI's clients always send a key.
        """
        headers = scope["header_values"]
        key = None
        if self._tenants is not None:
            # Clients of the Messages API send the key in the header x-api-key.
            alone = headers.get(b"x-api-key")
            key = headers.get(b"authorization", f"Bearer {alone}" if alone else None)
        caller = Caller(self._tenants, key, scope["certificate_names"])
        caller.check()
        scope["state"]["tenant"] = caller.tenant("")
        trace = {name.decode(): headers[name] for name in _TRACE_HEADERS if name in headers}
        return Call(caller, headers.get(_SESSION_HEADER, ""), trace)

    async def read_body(self, scope: Scope, receive: Receive, tenant: str) -> bytes:
        """Receive the body of an HTTP call and return it. While a body larger than PIECE_SIZE arrives, its bytes count
        against the limits of the tenant and of all tenants. Raises RefusedError if a limit is exceeded. Raises
        HttpRefusal for the reasons in `body.read_body`."""
        num_bytes = num_counted = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes, num_counted
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > PIECE_SIZE:
                self._bodies.add(tenant, num_bytes - num_counted)
                num_counted = num_bytes
            return message

        try:
            return await read_body(scope, receive_counted)
        finally:
            self._bodies.remove(tenant, num_counted)

    def count_request(self, tenant: str, size: int) -> AbstractContextManager[None]:
        """Return a context manager that counts the `size` of a decoded request against the memory limits during its
        `with` block. A request of at most PIECE_SIZE bytes counts as 0. On entry, it raises RefusedError if the
        requests of the tenant or of all tenants would exceed their limit."""
        return self._requests.held(tenant, size if size > PIECE_SIZE else 0)

    def model_name(self) -> str:
        """Return the name of the served model that answers contain. Raises RefusedError if the name is not known yet.
        This happens in a front end (a process that serves only the APIs) before it has connected to its scheduler."""
        if name := self.model_names()[0]:
            return name
        raise RefusedError(Reason.UNAVAILABLE, self._intake.engine.availability.refusal())

    def check_model(self, name: str | None) -> None:
        """Check the field `model` of a request. Raises RefusedError if `name` is not a name of the served model, or if
        the server does not know these names yet. `name` is None if the request does not set the field; this is
        accepted. The tag `:latest` is accepted after every name, as in Ollama."""
        served = self.model_name()
        names = map(_without_tag, self.model_names())
        if name is not None and not self._takes_any_model_name and _without_tag(name) not in names:
            raise RefusedError(
                Reason.NOT_FOUND,
                f"the model {name[:80]!r} is not served here; send {served!r}, or leave model unset "
                "(--any-model-name accepts any name)",
                "model",
            )


def _without_tag(name: str) -> str:
    return name.removesuffix(":latest")
