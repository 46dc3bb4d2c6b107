"""Shows how far a run is: on a terminal in one line, elsewhere in a line every ten seconds."""

import time
from collections.abc import Callable
from typing import TextIO

TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0


class ProgressLine:
    """Counts requests and tokens of a run. Where the file is no terminal it says nothing in the first ten seconds."""

    def __init__(
        self, name: str, num_requests: int, file: TextIO | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins to count. Without a file, nothing is shown."""
        self._name = name
        self._num_requests = num_requests
        self._file = file
        self._clock = clock
        self._is_terminal = file is not None and file.isatty()
        self._interval = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._started_at = self._written_at = clock()
        self._num_ended = 0
        self._num_tokens = 0

    def tokens_came(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._write_now_and_then()

    def request_ended(self) -> None:
        self._num_ended += 1
        self._write_now_and_then()

    def close(self) -> None:
        """Leaves the terminal's line empty for what follows."""
        if self._file is not None and self._is_terminal:
            self._file.write("\r\033[K")
            self._file.flush()

    def _write_now_and_then(self) -> None:
        now = self._clock()
        if self._file is None or now - self._written_at < self._interval:
            return
        self._written_at = now
        seconds = now - self._started_at
        rate = self._num_tokens / seconds
        text = f"{self._name}: {self._num_ended} of {self._num_requests} requests, {rate:.1f} tok/s, {seconds:.0f} s"
        self._file.write(f"\r\033[K{text}" if self._is_terminal else f"{text}\n")
        self._file.flush()
