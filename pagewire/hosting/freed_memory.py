"""Settings of the C library's allocator that let a service return or reuse freed memory."""

import ctypes

# Constants of glibc's malloc.h. Setting the threshold also stops glibc from raising it, and the memory that glibc
# retains, to the size of the last freed block.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 256 * 1024


def give_back_large() -> None:
    """Configure the C allocator to return large blocks of memory to the system as soon as they are freed.

    Call this function once in a process. With a C library other than glibc, it has no effect.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def share_small() -> None:
    """Configure the C allocator so that all threads of this process reuse memory that any thread has freed.

    gRPC's threads allocate and free calls on each other's behalf. With one arena for each thread, a service under many
    calls uses twice the memory. With a C library other than glibc, this function has no effect.
    """
    _mallopt(_M_ARENA_MAX, 1)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
