"""Lets a service give the memory of large messages and texts back to the system when it has done with them."""

import ctypes

# Of glibc's malloc.h. Once this is set, glibc no longer raises it, and the size that it keeps for itself, to whatever
# was last freed.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 * 1024


def give_back_large() -> None:
    """Lets the system have large blocks of memory as soon as they are freed.

    It is to be called once in a process. With a C library other than glibc it changes nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
