"""The resource limits of the operating system: raise them where allowed, or report them where they are too low.

gRPC aborts a process in which it cannot start a thread, and its log lines do not name the limit.
"""

import contextlib
import os
import resource
import threading

NUM_DESCRIPTORS = 65_536
# The number of threads that gRPC starts before its first RPC on a small machine, plus a few for the command itself.
# `make first-hour ARGS=threads` counts them.
NUM_THREADS = 8
# With less address space, threads may or may not start, depending on the C library's memory layout. `make first-hour
# ARGS="address.space"` tries a client with this limit and with half of it.
LEAST_ADDRESS_SPACE = 640 << 20


def raise_descriptor_limit() -> None:
    """Raise the process's soft limit on open file descriptors, because each connection uses one. If the operating
    system denies this, keep the current limit.

    The usual soft limit of 1,024 exists for programs that call select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # if denied, keep the current limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def obstacle(*, loads_libraries: bool = False) -> str:
    """Check that the operating system lets this process start the threads that it needs. Return one line that describes
    the obstacle, or an empty text.

    With `loads_libraries`, a missing working directory is an obstacle too, because torch could not find its libraries
    by their paths.
    """
    if loads_libraries:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was removed: change to one that exists"
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < LEAST_ADDRESS_SPACE:
        return f"{LEAST_ADDRESS_SPACE >> 20} MiB of address space are needed{describe_address_space()}"
    are_tried = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(NUM_THREADS):
            thread = threading.Thread(target=are_tried.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        limits = "of processes (ulimit -u), or a container's (pids.max) or a service's (TasksMax)"
        return f"only {len(started)} of {NUM_THREADS} threads can be started; raise the limit {limits}"
    finally:
        are_tried.set()
        for thread in started:
            thread.join()
    return ""


def describe_address_space() -> str:
    """Return a suffix for an error message that names the process's limit on its address space. Return an empty text if
    there is no limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; the address space is limited to {soft >> 20} MiB (ulimit -v)"
