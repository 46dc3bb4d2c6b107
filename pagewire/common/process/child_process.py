"""Tells a service's process and the one that started it of each other, by lines, exit codes and a variable."""

import atexit
import ctypes
import logging
import os
import signal
import sys
from functools import cache

from pagewire.common.process.queued_writer import QueuedWriter, stream_writer

logger = logging.getLogger(__name__)

READY_PREFIX = "ready on "
# What a child prints before it ends with `EXIT_REFUSED`, and the reason behind it.
REFUSAL_PREFIX = "cannot start: "
# What a child prints before it takes much memory, and what of: all that is known of one that the system kills for it.
MEMORY_PREFIX = "takes memory: "
EXIT_ERROR = 1
# Trying again will not help: EX_CONFIG of sysexits.h, by which systemd too may be told not to restart.
EXIT_REFUSED = 78
# The variable by which a child learns the process that it must not outlive.
EXIT_WITH_PARENT = "PAGEWIRE_EXIT_WITH_PARENT"
# The variable with the word that a child says before what it announces to its supervisor. All else that it prints may
# be of its clients' making, and announces nothing.
ANNOUNCING_WORD = "PAGEWIRE_ANNOUNCING_WORD"
_PR_SET_PDEATHSIG = 1
_FLUSH_TIMEOUT_S = 2.0  # for announcements to be read


def python_command(module: str, *arguments: str) -> list[str]:
    """Make the command of a child that runs a module of ours in this Python, and no file of the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def announce_ready(url: str) -> None:
    """Tell on standard output that the service at `url` can be called."""
    _announce(f"{READY_PREFIX}{url}")


def announce_refusal(reason: str) -> None:
    """Tell a parent on standard output why this process, which ends now, will never be able to start."""
    _announce(f"{REFUSAL_PREFIX}{reason}", _FLUSH_TIMEOUT_S)


def announce_memory(demand: str) -> None:
    """Tell a parent on standard output what memory this process is about to take, and what there is."""
    if is_child():
        _announce(f"{MEMORY_PREFIX}{demand}", _FLUSH_TIMEOUT_S)


def _announce(line: str, timeout_s: float = 0.0) -> None:
    """Write a line, and wait so long for it to be read."""
    _output().put(f"{os.environ.get(ANNOUNCING_WORD, '')}{line}\n".encode(errors="backslashreplace"))
    _output().flush(timeout_s)


@cache
def _output() -> QueuedWriter:
    """What writes to standard output: that may not be read, or not any more."""
    writer = QueuedWriter(stream_writer(lambda: sys.stdout), lambda num_dropped: b"")
    atexit.register(writer.flush, _FLUSH_TIMEOUT_S)
    return writer


def is_child() -> bool:
    """Whether another process has started this one for itself alone."""
    return bool(os.environ.get(EXIT_WITH_PARENT))


def exit_with_parent() -> None:
    """Let the kernel kill a process that is a child when its parent ends, however that ends. Linux only."""
    if not is_child():
        return
    if sys.platform != "linux":
        logger.warning("%s works on Linux only: this process may outlive its parent", EXIT_WITH_PARENT)
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(os.environ[EXIT_WITH_PARENT]):  # it ended before
        os._exit(1)
