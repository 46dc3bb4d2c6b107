"""Writes log lines from a queue on a thread of its own, so that no service waits for whoever reads them."""

import os
import select
import threading
from collections.abc import Callable

MAX_WAITING_BYTES = 1024 * 1024


class LogWriter:
    """A queue of lines that is bounded in bytes, and the thread that writes them.

    Lines that come while the queue is full are dropped and counted. Where they would have stood, a line tells their
    number.
    """

    def __init__(self, descriptor: int, dropped_notice: Callable[[int], bytes]) -> None:
        """Begins to write to `descriptor`, a file, a pipe or a terminal that belongs to the caller. `dropped_notice`
        makes the line that tells how many were dropped."""
        self._descriptor = descriptor
        self._dropped_notice = dropped_notice
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_untold = 0  # lines that were dropped behind those that wait
        self._is_writing = False
        self._is_closed = False
        self.num_dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: bytes) -> None:
        with self._changed:
            if self._num_bytes + len(line) > MAX_WAITING_BYTES and self._lines:
                self.num_dropped += 1
                self._num_untold += 1
            else:
                self._lines.append(line)
                self._num_bytes += len(line)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until everything is written, but no longer than `timeout` seconds. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._num_untold or self._is_writing), timeout)

    def close(self) -> None:
        """Lets the thread end when it has written the lines that wait. Does not wait for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (block := self._take()) is not None:
            self._write(block)

    def _take(self) -> bytes | None:
        """Waits for lines and returns all that there are, in order. Returns None when no more will come."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._num_untold or self._is_closed)
            lines, num_untold = self._lines, self._num_untold
            if not lines and not num_untold:
                return None
            self._lines, self._num_bytes, self._num_untold = [], 0, 0
            self._is_writing = True
        if num_untold:
            lines.append(self._dropped_notice(num_untold))
        return b"".join(lines)

    def _write(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                # Another process has made it so: the pipe is shared.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                with self._changed:
                    self.num_dropped += bytes(rest).count(b"\n")
                return  # its reader has gone for good, or the disk is full: later lines may fare better
