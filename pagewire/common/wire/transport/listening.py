"""Ports and Unix sockets to listen on, how many connections and calls they take, and what to say of one that cannot be
had."""

import contextlib
import errno
import os
import resource
import socket
import stat
from pathlib import Path

import grpc.aio

from pagewire.common.wire.transport.addresses import UNIX_SCHEME, join, target
from pagewire.common.wire.transport.interception import Ending, Enter, Interception, admit, ending
from pagewire.common.wire.transport.message_size import MARGIN_BYTES, MAX_MESSAGE_BYTES
from pagewire.common.wire.transport.tls import TlsFiles

# Calls that one connection may have at once, and calls of all connections that wait for the event loop to take them. A
# call costs about 14 KiB before it is taken, also one that its client has reset. More calls of a connection wait at its
# client. gRPC counts a call until its last object is gone: beyond the limit it refuses some for which a client thinks
# that there is room.
_MAX_CALLS_OF_CONNECTION = 5_000
_MAX_PENDING_CALLS = 6_000
# What every server says of its port, of its clients' pings and of their calls.
_COMMON_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server binds the same port without a word
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", _MAX_CALLS_OF_CONNECTION),
    # Between the two gRPC cancels calls at random.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
)
_MAX_CONNECTIONS = 65_536
# What gRPC 1.85 calls the threads of its pool, and the one that starts more of them.
_POOL_THREADS = ("event_engine", "lifeguard")
_POOL_NICE = 10
# File descriptors that are kept for the service itself: its links, its files, metrics, probes.
_MAX_RESERVED = 256
_CONNECT_TIMEOUT_S = 1.0


def create_server(
    *options: tuple[str, int],
    enter: Enter = admit,
    ending: Ending = ending,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int | None = None,
) -> grpc.aio.Server:
    """Make a gRPC server whose connections, calls and messages are bounded, which every port of a service is.

    `enter` and `ending` are an `Interception`'s. Connections beyond `max_connections` at once are closed. By default
    these are as many as this process may open, so that clients never take the descriptors that the service needs.
    """
    connections = ("grpc.max_allowed_incoming_connections", max_connections or max_open_connections())
    size = ("grpc.max_receive_message_length", max_message_bytes + MARGIN_BYTES)
    interception = Interception(max_message_bytes, enter, ending)
    return grpc.aio.server(options=(*_COMMON_OPTIONS, connections, size, *options), interceptors=[interception])


def give_way() -> None:
    """Lets this process's own threads go first where gRPC's have more to do than there are cores for.

    It is to be called once a server has started. gRPC's pool of threads has work only where calls come, or are reset,
    faster than the thread that polls can take them. Those that it starts later inherit the priority.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or there is no such folder
            if (thread / "comm").read_text().strip() in _POOL_THREADS:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _POOL_NICE)


def max_open_connections() -> int:
    """Return how many connections a port may have without taking what the service itself opens."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(limit - min(limit // 2, _MAX_RESERVED), _MAX_CONNECTIONS))


def listen(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None, flag: str) -> int:
    """Bind a port, which `flag` chooses, and return it; it is plaintext without `tls`. Raises OSError, one line for
    people."""
    # gRPC's core would log the cause itself, and tell Python nothing of it.
    check_port(host, port, flag)
    try:
        bound = _add(server, join(passive_host(host), port), None if tls is None else tls.server_credentials())
    except RuntimeError:
        bound = 0
    if bound == 0 and tls is not None:
        check_port(host, port, flag)
        raise OSError(f"cannot listen on {join(host, port)}: gRPC takes no certificate of this kind; have another made")
    if bound == 0:
        raise refusal(OSError(errno.EADDRINUSE, "taken since a moment"), host, port, flag)
    return bound


def listen_on_socket(
    server: grpc.aio.Server, path: str, tls: TlsFiles | None, flag: str, *, marks_calls: bool = False
) -> str:
    """Bind a Unix socket, which `flag` chooses, and return its address; it is plaintext without `tls`. Calls that came
    by it can be marked, for `is_marked`. Raises OSError, one line for people."""
    # gRPC would take the path from a server that listens there.
    trouble = _socket_trouble(path)
    if trouble:
        raise OSError(f"cannot listen on {UNIX_SCHEME}{path}: {trouble}; choose another {flag}")
    try:
        local = grpc.local_server_credentials(grpc.LocalConnectionType.UDS) if marks_calls else None
        _add(server, target(UNIX_SCHEME + path), local if tls is None else tls.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {UNIX_SCHEME}{path}: {error}; choose another {flag}") from None
    return UNIX_SCHEME + path


def is_marked(context: grpc.aio.ServicerContext) -> bool:
    """Say whether a call came by a socket that marks calls."""
    return b"local" in context.auth_context().get("transport_security_type", ())


def _add(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind an address. The port is 0, or RuntimeError is raised, if that failed."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def passive_host(host: str) -> str:
    """Return the host to listen on without brackets: for ::, which is every address of both kinds, that of IPv4 alone
    where this machine has no IPv6."""
    host = host.strip("[]")
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host


def check_port(host: str, port: int, flag: str) -> None:
    """Raises OSError, one line for people, if no server can listen there now."""
    passive = passive_host(host)
    try:
        found = [
            address
            for each in dict.fromkeys((passive, "0.0.0.0" if passive == "::" else passive))
            for address in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ]
    except (OSError, UnicodeError) as error:
        host_flag = _host_flag(flag)
        raise OSError(f"{host_flag} is {host!r}, which is no address ({error}); choose another {host_flag}") from None
    tries = [_try_address(family, kind, address) for family, kind, _, _, address in found]
    errors = [failure for failure in tries if failure is not None]
    # gRPC listens on what it can get: a name may have an address of a kind that this machine lacks.
    taken = [failure for failure in errors if failure.errno == errno.EADDRINUSE]
    if taken or len(errors) == len(found):
        raise refusal((taken or errors)[0], host, port, flag)


def refusal(error: OSError, host: str, port: int, flag: str) -> OSError:
    """Make the error for people of one that bind has raised."""
    causes = {
        errno.EADDRINUSE: (f"port {port} is taken", flag),
        errno.EADDRNOTAVAIL: ("that is no address of this machine", _host_flag(flag)),
        errno.EACCES: (f"this user may not take port {port}", flag),
    }
    number = error.errno or 0
    cause, remedy = causes.get(number, (os.strerror(number) if number > 0 else str(error), flag))
    return OSError(f"cannot listen on {join(host, port)}: {cause}; choose another {remedy}")


def _host_flag(flag: str) -> str:
    return flag.removesuffix("port") + "host"


def _try_address(family: int, kind: int, address: tuple[object, ...]) -> OSError | None:
    """Try to bind an address, and return the error if that fails."""
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _socket_trouble(path: str) -> str:
    """Why no server can listen there now, or nothing. What a server that was killed has left behind is no trouble."""
    directory = Path(path).parent
    if not directory.is_dir():
        return f"there is no directory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"this user may not write to {directory}"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        return os.strerror(error.errno or 0)
    if not stat.S_ISSOCK(mode):
        return "there is a file which is no socket"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return ""
        except (BlockingIOError, TimeoutError):
            return "another server listens there"
        except OSError as error:
            return os.strerror(error.errno or 0)
    return "another server listens there"
