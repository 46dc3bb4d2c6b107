"""A writer that takes lines from a queue and writes them on a separate thread.

No service then waits for a slow file, pipe or terminal. All writes of lines by services use this class.
"""

import os
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import IO

MAX_WAITING_BYTES = 1024 * 1024
# Writes a whole block, however long that takes. Raises LostError.
Write = Callable[[bytes], None]


class LostError(Exception):
    """A block of lines could not be written completely to its file, pipe or terminal. The error message gives the
    reason. `rest` has the bytes that were not written.
    """

    def __init__(self, rest: bytes, cause: Exception) -> None:
        super().__init__(str(cause))
        self.rest = rest


class QueuedWriter:
    """A queue of lines to write, with a limit in bytes, and a thread that writes the lines. The callers that add lines
    never wait for a slow file, pipe or terminal.

    If the queue is full, new lines are dropped and counted. A notice with the number of dropped lines is written in
    their place.
    """

    def __init__(
        self,
        write: Write,
        dropped_notice: Callable[[int], bytes],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        ends_at_loss: bool = False,
    ) -> None:
        """Create an empty queue of lines, and start the thread that writes them with `write`.

        `dropped_notice` returns the line that reports a number of dropped lines. `ends_at_loss` is for lines that are
        useless without the preceding lines: after the first loss, all further lines are dropped.
        """
        self._write = write
        self._dropped_notice = dropped_notice
        self._max_waiting_bytes = max_waiting_bytes
        self._ends_at_loss = ends_at_loss
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_unsent = 0  # lines that were dropped after the queued lines, not yet reported
        self._is_writing = False
        self._is_closed = False
        self._has_failed = False
        self._has_ended = False  # the thread has ended, so further lines are never written
        self.num_dropped = 0
        self.failure = ""  # the reason of the last failed write, or empty
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    def put(self, lines: bytes) -> None:
        with self._changed:
            is_lost = self._ends_at_loss and self.num_dropped > 0
            if is_lost or (self._num_bytes + len(lines) > self._max_waiting_bytes and self._lines):
                self.num_dropped += _count(lines)
                self._num_unsent += 0 if self._has_failed else _count(lines)
            else:
                self._lines.append(lines)
                self._num_bytes += len(lines)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all queued lines are written. Return whether all lines are written.

        After the writer was closed and its thread has ended, newly queued lines are never written. If there are such
        lines, return False at once.
        """
        with self._changed:
            is_late = self._has_ended and bool(self._lines)
            return not is_late and self._changed.wait_for(
                lambda: not (self._lines or self._num_unsent or self._is_writing), timeout
            )

    def close(self) -> None:
        """Let the writing thread end after it has written the queued lines. Do not wait for the thread."""
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
        """Record that a write has failed, and count the lost lines. A line that was written only in part counts as
        lost. With `ends_at_loss`, drop all queued lines too, and write nothing more.
        """
        with self._changed:
            self.failure = str(error)
            self.num_dropped += _count(error.rest)
            if self._ends_at_loss:
                self.num_dropped += sum(map(_count, self._lines))
                self._lines, self._num_unsent, self._is_writing, self._has_failed = [], 0, False, True
                self._changed.notify_all()

    def _take(self) -> bytes | None:
        """Wait until lines are queued, and remove all of them from the queue. Return them as one block of bytes, or
        None if the writer is closed and all lines are written.
        """
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._num_unsent or self._is_closed)
            lines, num_unreported = self._lines, self._num_unsent
            if not lines and not num_unreported:
                self._has_ended = True
                return None
            self._lines, self._num_bytes, self._num_unsent, self._is_writing = [], 0, 0, True
        if num_unreported:
            lines.append(self._dropped_notice(num_unreported))
        return b"".join(lines)


def descriptor_writer(descriptor: int) -> Write:
    """Return a function that writes a block of bytes to a file descriptor. The caller remains responsible for closing
    the descriptor.
    """
    return partial(_write, descriptor)


def stream_writer(find_stream: Callable[[], IO[str] | None]) -> Write:
    """Return a function that writes a block of bytes to a text stream such as standard output. `find_stream` is called
    for each block, so a replacement of the stream is noticed.
    """

    def write(block: bytes) -> None:
        stream = find_stream()
        try:
            if stream is not None and any(stream is standard for standard in (sys.__stdout__, sys.__stderr__)):
                # Write to the descriptor directly: a process cannot exit while a thread blocks inside Python's buffer.
                _write(stream.fileno(), block)
            else:
                print(block.decode(errors="replace"), end="", file=stream, flush=True)
        except (OSError, ValueError) as error:
            raise LostError(block, error) from None  # the stream is closed

    return write


def _write(descriptor: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            # Another process that shares the pipe has made it non-blocking.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError as error:
            # The reader is gone, or the disk is full. Later lines may succeed.
            raise LostError(bytes(rest), error) from None


def _count(lines: bytes) -> int:
    return max(1, lines.count(b"\n"))
