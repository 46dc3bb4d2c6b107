"""Addresses as people write them: HOST:PORT, or unix:PATH of a Unix socket. Loads nothing of gRPC."""

from urllib.parse import quote

UNIX_SCHEME = "unix:"
# What the address of a Unix socket holds on Linux.
MAX_SOCKET_PATH_BYTES = 107


def join(host: str, port: int) -> str:
    """Write HOST:PORT, with brackets where the host is an address of IPv6."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target(address: str) -> str:
    """Write the address as gRPC takes it, which reads the path of a socket as that of a URL."""
    if not address.startswith(UNIX_SCHEME):
        return address
    return UNIX_SCHEME + quote(address.removeprefix(UNIX_SCHEME))
