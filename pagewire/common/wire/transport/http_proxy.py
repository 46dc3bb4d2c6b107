"""The HTTP proxy that gRPC uses for a client's connection, according to environment variables."""

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

# As in gRPC, the first variable of each list that is set applies.
_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXEMPTIONS = ("no_grpc_proxy", "no_proxy")
_SCHEME = re.compile(r"^(?:grpcs?://|dns:(?://[^/]*/|/*)|ipv[46]:/*)")
_PORT = re.compile(r":[0-9]*/?$")
_NO_NETWORK = ("unix:", "unix-abstract:", "vsock:")


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """The HTTP proxy through which gRPC connects to a host, and the environment variable that names the proxy."""

    variable: str
    url: str  # without user name and password
    host: str

    @property
    def remark(self) -> str:
        """A text for the end of the error message of a failed connection. The text names the HTTP proxy, and the
        setting that avoids the proxy.
        """
        return f", through {self.variable} {self.url}; set no_proxy={self.host} to connect without the proxy"


def http_proxy_of(address: str) -> HttpProxy | None:
    """Return the HTTP proxy that gRPC uses for connections to a server, or None. `address` is the server's address or
    gRPC target. Loopback addresses use no proxy.
    """
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    if variable is None or address.startswith(_NO_NETWORK):
        return None
    try:
        proxy = urlsplit(os.environ[variable])
    except ValueError:  # an invalid URL, which gRPC ignores
        return None
    host = _PORT.sub("", _SCHEME.sub("", address)).strip("[]")
    exempt = next((os.environ[name] for name in _EXEMPTIONS if name in os.environ), "").split(",")
    if proxy.scheme != "http" or not proxy.netloc or _is_here(host) or any(_covers(entry, host) for entry in exempt):
        return None
    return HttpProxy(variable, f"http://{proxy.netloc.rpartition('@')[2]}", host)


def _covers(entry: str, host: str) -> bool:
    """Return whether an entry of the environment variable no_proxy matches a host. An entry is a name, a domain or a
    network.
    """
    entry = entry.strip().lower()
    if entry == "*" or (entry and host.lower().endswith(entry)):
        return True
    address = _ip_address(host)
    try:
        return address is not None and address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _ip_address(name)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # such as 127.1
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address
