"""Addresses as users write them: HOST:PORT, or unix:PATH for a Unix socket. This module does not import gRPC."""

from urllib.parse import quote

UNIX_SCHEME = "unix:"
# The longest path of a Unix socket on Linux.
MAX_SOCKET_PATH_BYTES = 107


def join(host: str, port: int) -> str:
    """Return the address HOST:PORT of a server, with brackets around an IPv6 address."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target(address: str) -> str:
    """Return the gRPC target for an address as users write it. The path of a Unix socket is URL-encoded, because gRPC
    decodes the path.
    """
    if not address.startswith(UNIX_SCHEME):
        return address
    return UNIX_SCHEME + quote(address.removeprefix(UNIX_SCHEME))
