"""Writes lines from a queue on a thread of its own, so that no service waits for what takes or reads them: a file, a
pipe, a terminal. Every such write of a service goes through one."""

import os
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import IO

MAX_WAITING_BYTES = 1024 * 1024
# Writes all of a block, however long that takes. Raises LostError.
Write = Callable[[bytes], None]


class LostError(Exception):
    """What is left of a block cannot be written; the text says why."""

    def __init__(self, rest: bytes, cause: Exception) -> None:
        super().__init__(str(cause))
        self.rest = rest


class QueuedWriter:
    """A queue of lines that is bounded in bytes, and the thread that writes them.

    Lines that come while the queue is full are dropped and counted. Where they would have stood, a line tells their
    number.
    """

    def __init__(
        self,
        write: Write,
        dropped_notice: Callable[[int], bytes],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        ends_at_loss: bool = False,
    ) -> None:
        """Begins to write. `dropped_notice` makes the line that tells how many were dropped. `ends_at_loss` is for
        lines that are of no use without those before them: once one is lost, all that come are."""
        self._write = write
        self._dropped_notice = dropped_notice
        self._max_waiting_bytes = max_waiting_bytes
        self._ends_at_loss = ends_at_loss
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_untold = 0  # lines that were dropped behind those that wait
        self._is_writing = False
        self._is_closed = False
        self._has_failed = False
        self._has_ended = False  # nothing writes the lines that still come
        self.num_dropped = 0
        self.failure = ""  # why writing failed the last time, if it has
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    def put(self, lines: bytes) -> None:
        with self._changed:
            is_lost = self._ends_at_loss and self.num_dropped > 0
            if is_lost or (self._num_bytes + len(lines) > self._max_waiting_bytes and self._lines):
                self.num_dropped += _count(lines)
                self._num_untold += 0 if self._has_failed else _count(lines)
            else:
                self._lines.append(lines)
                self._num_bytes += len(lines)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until everything is written, but no longer than `timeout` seconds. Returns whether it is. What came
        after the end of a closed writer never will be, and is not waited for."""
        with self._changed:
            is_late = self._has_ended and bool(self._lines)
            return not is_late and self._changed.wait_for(
                lambda: not (self._lines or self._num_untold or self._is_writing), timeout
            )

    def close(self) -> None:
        """Lets the thread end when it has written the lines that wait. Does not wait for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._has_failed and (block := self._take()) is not None:
            try:
                self._write(block)
            except LostError as error:
                self._lose(error)

    def _lose(self, error: LostError) -> None:
        """Count what could not be written. It may begin within a line, so that nothing can stand behind it if all that
        follows is of no use."""
        with self._changed:
            self.failure = str(error)
            self.num_dropped += _count(error.rest)
            if self._ends_at_loss:
                self.num_dropped += sum(map(_count, self._lines))
                self._lines, self._num_untold, self._is_writing, self._has_failed = [], 0, False, True
                self._changed.notify_all()

    def _take(self) -> bytes | None:
        """Waits for lines and returns all that there are, in order. Returns None when no more will come."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._num_untold or self._is_closed)
            lines, num_untold = self._lines, self._num_untold
            if not lines and not num_untold:
                self._has_ended = True
                return None
            self._lines, self._num_bytes, self._num_untold, self._is_writing = [], 0, 0, True
        if num_untold:
            lines.append(self._dropped_notice(num_untold))
        return b"".join(lines)


def descriptor_writer(descriptor: int) -> Write:
    """Makes the function that writes to a file, a pipe or a terminal, which belongs to the caller."""
    return partial(_write, descriptor)


def stream_writer(find_stream: Callable[[], IO[str] | None]) -> Write:
    """Makes the function that writes to a standard stream as it is at that time, or to what stands for it."""

    def write(block: bytes) -> None:
        stream = find_stream()
        try:
            if stream is not None and any(stream is standard for standard in (sys.__stdout__, sys.__stderr__)):
                # Not by way of Python's buffer: a process cannot end while a thread waits inside of one.
                _write(stream.fileno(), block)
            else:
                print(block.decode(errors="replace"), end="", file=stream, flush=True)
        except (OSError, ValueError) as error:
            raise LostError(block, error) from None  # it is closed

    return write


def _write(descriptor: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            # Another process has made it so: the pipe is shared.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError as error:
            # Its reader has gone for good, or the disk is full: later lines may fare better.
            raise LostError(bytes(rest), error) from None


def _count(lines: bytes) -> int:
    return max(1, lines.count(b"\n"))
