"""Ports to listen on, how many connections they take, and what to say of one that cannot be had.

Each service has this module, word for word: they share no code.
"""

import errno
import os
import resource
import socket

import grpc
import grpc.aio

# Of a port that answers probes alone.
MAX_PROBES = 16
_MAX_CONNECTIONS = 65_536
# File descriptors that are kept for the service itself: its links, its files, metrics, probes.
_MAX_RESERVED = 256


def connections_option(max_connections: int | None = None) -> tuple[str, int]:
    """The option of a gRPC server that closes connections beyond so many at once. By default, beyond what this process
    may open, so that whoever connects never takes the descriptors that the service needs."""
    return ("grpc.max_allowed_incoming_connections", max_connections or _max_connections())


def _max_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(limit - min(limit // 2, _MAX_RESERVED), _MAX_CONNECTIONS))


def listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, flag: str) -> int:
    """The port that was bound; `flag` is the one that chooses it. Raises OSError, one line for people."""
    # gRPC's core would log the cause itself, and tell Python nothing of it.
    check_port(host, port, flag)
    try:
        if credentials is None:
            bound = server.add_insecure_port(join(host, port))
        else:
            bound = server.add_secure_port(join(host, port), credentials)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise refusal(OSError(errno.EADDRINUSE, "taken since a moment"), host, port, flag)
    return bound


def check_port(host: str, port: int, flag: str) -> None:
    """Raises OSError, one line for people, if nobody can listen there now."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        host_flag = _host_flag(flag)
        raise OSError(f"{host_flag} is {host!r}, which is no address ({error}); choose another {host_flag}") from None
    tries = [_try(family, kind, address) for family, kind, _, _, address in found]
    errors = [failure for failure in tries if failure is not None]
    # gRPC listens on what it can get: a name may have an address of a kind that this machine lacks.
    taken = [failure for failure in errors if failure.errno == errno.EADDRINUSE]
    if taken or len(errors) == len(found):
        raise refusal((taken or errors)[0], host, port, flag)


def refusal(error: OSError, host: str, port: int, flag: str) -> OSError:
    """What to raise for an error of bind."""
    causes = {
        errno.EADDRINUSE: (f"port {port} is taken", flag),
        errno.EADDRNOTAVAIL: ("that is no address of this machine", _host_flag(flag)),
        errno.EACCES: (f"this user may not take port {port}", flag),
    }
    number = error.errno or 0
    cause, remedy = causes.get(number, (os.strerror(number) if number > 0 else str(error), flag))
    return OSError(f"cannot listen on {join(host, port)}: {cause}; choose another {remedy}")


def join(host: str, port: int) -> str:
    """HOST:PORT, in brackets where the host is an address of IPv6."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_flag(flag: str) -> str:
    return flag.removesuffix("port") + "host"


def _try(family: int, kind: int, address: tuple[object, ...]) -> OSError | None:
    """Why an address cannot be bound."""
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
