"""The process that has a TCP port, for error messages. Linux tells it in /proc, for processes of the same user."""

import glob
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def owner_of(host: str, port: int) -> str:
    """Return the name and the id of the process that has bound a TCP port of `host`, such as "ollama (process 1234)".
    Return an empty text if it is unknown, belongs to another user, or is this process.
    """
    try:
        sockets = {f"socket:[{inode}]" for inode in _inodes(host, port)}
    except (OSError, UnicodeError):  # a system without /proc, or a name that cannot be resolved
        return ""
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        process = Path(path).parents[1]
        try:
            if os.readlink(path) in sockets and process.name != str(os.getpid()):
                return f"{ascii((process / 'comm').read_text().strip())[1:-1]} (process {process.name})"
        except OSError:  # the process has ended, or belongs to another user
            continue
    return ""


def _inodes(host: str, port: int) -> Iterator[str]:
    """Yield the inodes of the TCP sockets of this machine that are bound to a port of `host`."""
    wanted = {ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for table in filter(os.path.exists, _TABLES):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, *_, inode = line.split()[:10]
            words, _, number = local.partition(":")
            # The address is written as words of 4 bytes in the order of the processor.
            packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
            address = ipaddress.ip_address(packed)
            bound = getattr(address, "ipv4_mapped", None) or address  # gRPC binds ::ffff:127.0.0.1 for 127.0.0.1
            is_wanted = bound in wanted or any(each.is_unspecified for each in (bound, *wanted))
            if int(number, 16) == port and is_wanted:
                yield inode
