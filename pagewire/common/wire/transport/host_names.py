"""The host names that clients may use for an HTTP server that is reachable only from its own machine."""

import ipaddress


class HostNames:
    """The values of the HTTP header Host that a server accepts, as a protection against DNS rebinding.

    In this attack, a web page lets its own name resolve to 127.0.0.1. The browser then lets the page read the answers
    of a server on the same machine, but sends the page's name as Host. A server on another address than loopback
    accepts every name, since its own names are not known.
    """

    def __init__(self, host: str) -> None:
        """Determine the accepted names from `host`, the address that the HTTP server listens on."""
        name = host.strip("[]").lower()
        try:
            is_loopback = name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            is_loopback = False
        self._names = frozenset({"localhost", "127.0.0.1", "::1", name}) if is_loopback else frozenset()

    def refusal(self, named: str) -> str:
        """Return the reason why an HTTP request with this value of the header Host is refused, or an empty string if
        the request is accepted.
        """
        name, _, port = named.rpartition(":")
        name = name if port.isdigit() else named
        if not self._names or name.strip("[]").lower() in self._names:
            return ""
        return f"the host {named[:80]!r} is not this machine; use 127.0.0.1 or localhost"
