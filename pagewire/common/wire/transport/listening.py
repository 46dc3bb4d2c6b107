"""Ports and Unix sockets to listen on, limits on their connections and RPCs, and errors for addresses that
are in use."""

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
from pagewire.common.wire.transport.port_owner import owner_of
from pagewire.common.wire.transport.tls import TlsFiles

# The limits on concurrent RPCs of one connection, and on RPCs of all connections that wait for the event loop. An RPC
# uses about 14 KiB before the event loop accepts it, even if its client has reset it. Further RPCs of a connection wait
# at its client. gRPC counts an RPC until its last object is freed. At the limit, gRPC may therefore refuse an RPC
# although its client counts fewer.
_MAX_CALLS_OF_CONNECTION = 5_000
_MAX_PENDING_CALLS = 6_000
# The options of every server for its port, its clients' pings and their RPCs.
_COMMON_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second server could silently bind the same port
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", _MAX_CALLS_OF_CONNECTION),
    # Between these two limits gRPC cancels RPCs at random.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
)
_MAX_CONNECTIONS = 65_536
# The names in gRPC 1.85 of its pool's threads, and of the thread that starts more of them.
_POOL_THREADS = ("event_engine", "lifeguard")
_POOL_NICE = 10
# File descriptors that are reserved for the service itself: its links, files, metrics and probes.
_MAX_RESERVED = 256
_CONNECT_TIMEOUT_S = 1.0


def create_server(
    *options: tuple[str, int],
    enter: Enter = admit,
    ending: Ending = ending,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int | None = None,
) -> grpc.aio.Server:
    """Create a gRPC server with limits on connections, RPCs and message sizes. All gRPC ports of all services use this
    function.

    `enter` and `ending` are passed to `Interception`. Connections beyond `max_connections` are closed. The default
    leaves enough file descriptors for the service itself.
    """
    connections = ("grpc.max_allowed_incoming_connections", max_connections or max_open_connections())
    size = ("grpc.max_receive_message_length", max_message_bytes + MARGIN_BYTES)
    interception = Interception(max_message_bytes, enter, ending)
    return grpc.aio.server(options=(*_COMMON_OPTIONS, connections, size, *options), interceptors=[interception])


def lower_grpc_pool_priority() -> None:
    """Lower the priority of the threads in gRPC's thread pool, so that the process's own threads run first if CPU cores
    are scarce. Call this once a server has started.

    The pool has work only if RPCs arrive, or are reset, faster than gRPC's polling thread can handle them. Threads that
    the pool starts later have the lower priority too.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or the system has no /proc
            if (thread / "comm").read_text().strip() in _POOL_THREADS:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _POOL_NICE)


def max_open_connections() -> int:
    """Return the number of connections that a port may accept, so that enough file descriptors remain for the service
    itself.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(limit - min(limit // 2, _MAX_RESERVED), _MAX_CONNECTIONS))


def listen(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None, flag: str) -> int:
    """Bind a gRPC server to a port, and return the port's number. Without `tls` the port uses plaintext. `flag` is the
    command line flag for the port, for error messages. Raises OSError, whose message is one line for users, if the port
    cannot be bound.
    """
    # gRPC's core logs the cause itself, and does not pass it to Python.
    check_port(host, port, flag)
    try:
        bound = _add(server, join(passive_host(host), port), None if tls is None else tls.server_credentials())
    except RuntimeError:
        bound = 0
    if bound == 0 and tls is not None:
        check_port(host, port, flag)
        raise OSError(f"cannot listen on {join(host, port)}: gRPC does not support this certificate; use another")
    if bound == 0:
        raise refusal(OSError(errno.EADDRINUSE, "taken since a moment"), host, port, flag)
    return bound


def listen_on_socket(
    server: grpc.aio.Server, path: str, tls: TlsFiles | None, flag: str, *, marks_calls: bool = False
) -> str:
    """Bind a gRPC server to a Unix socket, and return the socket's address. Without `tls` the socket uses plaintext.
    `flag` is the command line flag for the path. With `marks_calls`, RPCs over the socket have the
    `transport_security_type` "local". Raises OSError, whose message is one line for users.
    """
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


def _add(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind a gRPC server to an address, and return the port. If the bind fails, return 0 or raise RuntimeError."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def passive_host(host: str) -> str:
    """Return the host on which a server can listen, without brackets. The host :: means all IPv4 and IPv6 addresses. If
    `host` is :: and the machine has no IPv6, return 0.0.0.0.
    """
    host = host.strip("[]")
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host


def check_port(host: str, port: int, flag: str) -> None:
    """Check that a server can listen on a host and port now. If not, raise OSError, whose message is one line for
    users.
    """
    passive = passive_host(host)
    try:
        found = [
            address
            for each in dict.fromkeys((passive, "0.0.0.0" if passive == "::" else passive))
            for address in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ]
    except (OSError, UnicodeError) as error:
        host_flag = _host_flag(flag)
        raise OSError(
            f"{host_flag} is {host!r}, which is no valid address ({error}); choose another {host_flag}"
        ) from None
    tries = [_try_address(family, kind, address) for family, kind, _, _, address in found]
    errors = [failure for failure in tries if failure is not None]
    # gRPC listens on the addresses that it can bind. A name may have an address of a family that this machine lacks.
    taken = [failure for failure in errors if failure.errno == errno.EADDRINUSE]
    if taken or len(errors) == len(found):
        raise refusal((taken or errors)[0], host, port, flag)


def refusal(error: OSError, host: str, port: int, flag: str) -> OSError:
    """Convert an error of bind to an error whose message says why a server cannot listen, and which command line flag
    to change.
    """
    owner = owner_of(passive_host(host), port) if error.errno == errno.EADDRINUSE else ""
    causes = {
        errno.EADDRINUSE: (f"port {port} is taken{owner and f' by {owner}'}", flag),
        errno.EADDRNOTAVAIL: ("this machine has no such address", _host_flag(flag)),
        errno.EACCES: (f"this user may not use port {port}", flag),
    }
    number = error.errno or 0
    cause, remedy = causes.get(number, (os.strerror(number) if number > 0 else str(error), flag))
    return OSError(
        f"cannot listen on {join(host, port)}: {cause}; {'stop it, or ' if owner else ''}choose another {remedy}"
    )


def _host_flag(flag: str) -> str:
    return flag.removesuffix("port") + "host"


def _try_address(family: int, kind: int, address: tuple[object, ...]) -> OSError | None:
    """Try to bind a temporary socket to an address. Return the error, or None if the address is free."""
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
    """Return the reason why no server can listen on the path of a Unix socket now, or an empty text. The stale socket
    of a killed server is no problem.
    """
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
        return "the path is a file that is no socket"
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
