"""The limits that the system sets a process: raised where that is allowed, or told where they are in the way.

gRPC ends a process in which it can start no thread, with lines of its own that name no limit.
"""

import contextlib
import os
import resource
import threading

NUM_DESCRIPTORS = 65_536
# As many threads as gRPC starts before its first call on a small machine, and a few for the command itself:
# `make first-hour ARGS=threads` counts them.
NUM_THREADS = 8
# With less, whether those can be started depends on where the C library's memory happens to lie:
# `make first-hour ARGS="address.space"` tries a client with this and with half of it.
LEAST_ADDRESS_SPACE = 640 << 20


def raise_descriptor_limit() -> None:
    """Raises the limit of file descriptors, of which each connection takes one. The usual soft limit of 1,024 is for
    programs that call select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # where that is denied, what there is must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def obstacle(*, loads_libraries: bool = False) -> str:
    """Returns a line on what keeps this process from starting the threads that it needs, or from finding the libraries
    that torch loads by their paths; or ""."""
    if loads_libraries:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory was removed: change to one that is there"
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
    """Returns what to add to the error of a library that cannot be loaded where the address space is limited; or ""."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; the address space is limited to {soft >> 20} MiB (ulimit -v)"
