"""Run the tests of real clients without a network: `python -m tests.clients [pytest's arguments]`.

If the kernel permits a network namespace, only the loopback interface exists. Otherwise a proxy keeps the clients on
this machine: it refuses every request, and a test fails if its programs ask for anything.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from tests.clients.program import ISOLATED

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    why_not = leave_the_network()
    os.environ[ISOLATED] = "" if why_not else "1"
    if why_not:
        print(f"clients are held back by a proxy alone: no network namespace here ({why_not})", flush=True)
    folder = str(Path(__file__).parent)
    os.execv(
        sys.executable,
        [sys.executable, "-m", "pytest", "-n", "2", "--timeout=900", "--durations=30", folder, *sys.argv[1:]],
    )


def leave_the_network() -> str:
    """Move this process to a network namespace of its own. Return the error if that fails, or an empty text."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return ""


if __name__ == "__main__":
    main()
