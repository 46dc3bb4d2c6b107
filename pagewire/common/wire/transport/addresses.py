"""Addresses as users write them: HOST:PORT, or unix:PATH for a Unix socket. This module does not import gRPC."""

from urllib.parse import quote

UNIX_SCHEME = "unix:"
# The longest path of a Unix socket on Linux.
MAX_SOCKET_PATH_BYTES = 107


def join(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target(address: str) -> str:
    """Return the gRPC target of an address. The path of a socket is URL-encoded, because gRPC decodes it."""
    if not address.startswith(UNIX_SCHEME):
        return address
    return UNIX_SCHEME + quote(address.removeprefix(UNIX_SCHEME))
