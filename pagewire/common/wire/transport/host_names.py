"""The host names that clients may use for an HTTP server that is reachable only from its own machine."""

import ipaddress
from collections.abc import Sequence
from fnmatch import fnmatchcase

# Reserved names, which no public DNS server can resolve to an address of an attacker. Browsers resolve names under
# .localhost to this machine. Containers reach their host as host.docker.internal.
_RESERVED = ("*.localhost", "*.internal")


class HostNames:
    """The values of the HTTP header Host that a server accepts, as a protection against DNS rebinding.

    In this attack, a web page lets its own name resolve to 127.0.0.1. The browser then lets the page read the answers
    of a server on the same machine, but sends the page's name as Host. A server on another address than loopback
    accepts every name, since its own names are not known, unless the accepted names are configured.
    """

    def __init__(self, host: str, allowed: Sequence[str] = (), flag: str = "") -> None:
        """Determine the accepted names from `host`, the address that the HTTP server listens on. `allowed` are further
        names, in which * matches any text. `flag` is the command line flag for them, for error messages."""
        name = host.strip("[]").lower()
        try:
            is_loopback = name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            is_loopback = False
        own = ("localhost", "127.0.0.1", "::1", name, *_RESERVED, *(each.strip("[]").lower() for each in allowed))
        self._names = own if is_loopback or allowed else ()
        self._remedy = flag and f", or add the name to {flag}"

    def refusal(self, named: str) -> str:
        """Return the reason why an HTTP request with this value of the header Host is refused, or an empty string if
        the request is accepted.
        """
        name, _, port = named.rpartition(":")
        name = (name if port.isdigit() else named).strip("[]").lower()
        if not self._names or any(fnmatchcase(name, each) for each in self._names):
            return ""
        return f"the host {name[:80]!r} is not this machine; use 127.0.0.1 or localhost{self._remedy}"
