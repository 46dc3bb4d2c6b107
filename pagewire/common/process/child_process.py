"""The protocol between a service's process and its parent: lines on standard output, exit codes and variables."""

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
# A child prints this prefix and the reason before it exits with `EXIT_REFUSED`.
REFUSAL_PREFIX = "cannot start: "
# A child prints this prefix and its demand before it allocates much memory. If the system kills the child for its
# memory use, this line is all that the parent knows about the cause.
MEMORY_PREFIX = "takes memory: "
EXIT_ERROR = 1
# The code for errors that a retry cannot fix: EX_CONFIG of sysexits.h. systemd can be set not to restart on it.
EXIT_REFUSED = 78
# The variable that names the process that the child must not outlive.
EXIT_WITH_PARENT = "PAGEWIRE_EXIT_WITH_PARENT"
# The variable with a word that a child prints in front of each announcement to its supervisor. Other output of the
# child may come from its clients, and is no announcement.
ANNOUNCING_WORD = "PAGEWIRE_ANNOUNCING_WORD"
_PR_SET_PDEATHSIG = 1
_FLUSH_TIMEOUT_S = 2.0  # the time for the parent to read an announcement


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this project with the same Python interpreter. The option `-P`
    keeps the working directory off `sys.path`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def announce_ready(url: str) -> None:
    """Write a line to standard output that tells the parent process that the service at `url` accepts requests."""
    _announce(f"{READY_PREFIX}{url}")


def announce_refusal(reason: str) -> None:
    """Write a line to standard output that tells the parent process why this process can never start. The process exits
    afterwards.
    """
    _announce(f"{REFUSAL_PREFIX}{reason}", _FLUSH_TIMEOUT_S)


def announce_memory(demand: str) -> None:
    """If this process is a child, write a line to standard output that tells the parent how much memory the process is
    about to allocate, and how much is available.
    """
    if is_child():
        _announce(f"{MEMORY_PREFIX}{demand}", _FLUSH_TIMEOUT_S)


def _announce(line: str, timeout_s: float = 0.0) -> None:
    """Write a line for the parent process to standard output. Wait up to `timeout_s` seconds until the
    line is written.
    """
    _output().put(f"{os.environ.get(ANNOUNCING_WORD, '')}{line}\n".encode(errors="backslashreplace"))
    _output().flush(timeout_s)


@cache
def _output() -> QueuedWriter:
    """Return the writer of standard output, which does not block this process if no reader reads the output. There is
    one writer per process.
    """
    writer = QueuedWriter(stream_writer(lambda: sys.stdout), lambda num_dropped: b"")
    atexit.register(writer.flush, _FLUSH_TIMEOUT_S)
    return writer


def is_child() -> bool:
    """Return whether another process of this project started this process as its child."""
    return bool(os.environ.get(EXIT_WITH_PARENT))


def exit_with_parent() -> None:
    """If this process is a child, tell the kernel to kill the process when its parent process ends for any reason. This
    works on Linux only; elsewhere a warning is logged. Raises OSError if the system call fails.
    """
    if not is_child():
        return
    if sys.platform != "linux":
        logger.warning("%s works on Linux only: this process may outlive its parent", EXIT_WITH_PARENT)
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(os.environ[EXIT_WITH_PARENT]):  # the parent ended before prctl
        os._exit(1)
