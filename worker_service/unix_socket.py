"""A Unix socket to listen on, and what to say of one that cannot be had."""

import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote

import grpc
import grpc.aio

SCHEME = "unix:"
_CONNECT_TIMEOUT_S = 1.0


def listen_on_socket(server: grpc.aio.Server, path: str, credentials: grpc.ServerCredentials | None, flag: str) -> str:
    """The address by which clients reach it; `flag` is the one that chooses it. Raises OSError, one line for people."""
    # gRPC would take the path from a server that listens there.
    trouble = _trouble(path)
    if trouble:
        raise OSError(f"cannot listen on {SCHEME}{path}: {trouble}; choose another {flag}")
    try:
        if credentials is None:
            server.add_insecure_port(SCHEME + quote(path))
        else:
            server.add_secure_port(SCHEME + quote(path), credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {SCHEME}{path}: {error}; choose another {flag}") from None
    return SCHEME + path


def _trouble(path: str) -> str:
    """Why nobody can listen there now, or nothing. What a server that was killed has left behind is no trouble."""
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
