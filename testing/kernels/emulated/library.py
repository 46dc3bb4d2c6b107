"""A library for another processor architecture, called through qemu with the interface of a cffi library."""

import functools
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewire.kernels.cpu.abi import POINTER, ffi

# These values equal the constants of `guest.c`.
_PAGE, _CHANGED, _DONE = range(3)
_PAGE_SIZE, _NUM_INTEGERS, _NUM_REALS = 4096, 16, 8
# Invariant: the two processes never use the same addresses. A page that the guest requests must not be in qemu's own
# memory. Neither process grows by more than this distance. Stacks are placed within 16 GiB.
_DISTANCE = 1 << 30
_ATTEMPTS = 50


class EmulatedLibrary:
    """The functions of abi.h, executed by a guest process."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the guest process. `command` runs `guest.c` with the library as its argument.

        Raises RuntimeError if the guest's memory overlaps this process's memory after all attempts.
        """
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        for _ in range(_ATTEMPTS):
            self._guest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.variant()
            if _are_apart(self._guest.pid):
                return
            self.close()
        raise RuntimeError(f"{command[0]}: after {_ATTEMPTS} starts its memory is still too near this process's memory")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def variant(self) -> Any:
        return ffi.new("char[]", self._request("variant", True, [], []))

    def close(self) -> None:
        """End the guest process. The guest ends when its input is closed."""
        assert self._guest.stdin is not None
        self._guest.stdin.close()
        self._guest.wait()

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function that returns int64_t. All its floating-point parameters must be float."""
        reals = [struct.pack("<f4x", argument) for argument in arguments if isinstance(argument, float)]
        rest = [argument for argument in arguments if not isinstance(argument, float)]
        return self._request(name, False, [_word(argument) for argument in rest], reals)

    def _request(self, name: str, is_text: bool, integers: Sequence[int], reals: Sequence[bytes]) -> Any:
        assert self._guest.stdin is not None
        padded = [*integers, *[0] * (_NUM_INTEGERS - len(integers))]
        padded_reals = b"".join(reals).ljust(8 * _NUM_REALS, b"\0")
        request = struct.pack("<qq", is_text, len(name)) + name.encode()
        self._guest.stdin.write(request + struct.pack(f"<{_NUM_INTEGERS}q", *padded) + padded_reals)
        self._guest.stdin.flush()
        while True:
            kind, number = struct.unpack("<qq", self._read(16))
            if kind == _DONE:
                return self._read(number) if is_text else number
            if kind == _PAGE:
                self._send_page(number)
            else:
                (length,) = struct.unpack("<q", self._read(8))
                os.pwrite(self._memory, self._read(length), number)

    def _send_page(self, address: int) -> None:
        assert self._guest.stdin is not None
        try:
            page = os.pread(self._memory, _PAGE_SIZE, address)
        except (OSError, OverflowError):
            page = b""
        self._guest.stdin.write(struct.pack("<q", bool(page)) + page)
        self._guest.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._guest.stdout is not None
        found = self._guest.stdout.read(size)
        if len(found) < size:
            raise RuntimeError(f"the guest process ended with exit status {self._guest.wait()}")
        return found


def _word(argument: Any) -> int:
    return argument if isinstance(argument, int) else int(ffi.cast("intptr_t", ffi.cast(POINTER, argument)))


def _are_apart(pid: int) -> bool:
    """Return whether this process and another one use disjoint addresses, so that an address has only one meaning."""
    ours, theirs = _ranges("self"), _ranges(str(pid))
    return all(end + _DISTANCE <= first or last + _DISTANCE <= start for start, end in ours for first, last in theirs)


def _ranges(process: str) -> list[tuple[int, int]]:
    """Return the ranges of addresses that a process uses, without the ranges of the kernel."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines if "[v" not in line]
    return [(start, end) for start, end in ranges]
