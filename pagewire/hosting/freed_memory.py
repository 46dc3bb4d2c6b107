"""Lets a service give memory back to the system when it has done with it, and use it again meanwhile."""

import ctypes

# Of glibc's malloc.h. Once this is set, glibc no longer raises it, and the size that it keeps for itself, to whatever
# was last freed.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 256 * 1024


def give_back_large() -> None:
    """Lets the system have large blocks of memory as soon as they are freed.

    It is to be called once in a process. With a C library other than glibc it changes nothing.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def share_small() -> None:
    """Lets all threads of this process use the same memory again that one has freed.

    gRPC's threads make and free calls on each other's behalf: with memory of its own for each thread, a service under a
    flood of calls takes twice as much. With a C library other than glibc it changes nothing.
    """
    _mallopt(_M_ARENA_MAX, 1)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
