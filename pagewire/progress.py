"""Progress lines on standard error for lists of requests."""

import time
from collections.abc import Callable
from typing import IO, Any

# The seconds between two updates: on a terminal, where each replaces the previous line, and in a log.
TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0


class Progress:
    """Shows the progress of a list of requests as a line that is updated in place on a terminal. If the output is not a
    terminal, a new line is written every ten seconds."""

    def __init__(
        self, total: int, file: IO[str] | None, now: Callable[[], float] = time.monotonic, title: str = ""
    ) -> None:
        """`total` is the number of requests, and the text `title` precedes the progress line. If `file` is None,
        nothing is shown."""
        self._total = total
        self._title = f"{title}: " if title else ""
        self._file = file
        self._now = now
        self._is_terminal = file is not None and file.isatty()
        self._started_at = self._said_at = now()
        self._num_done = 0
        self._num_tokens = 0

    def add(self, num_tokens: int, has_ended: bool) -> None:
        """Add the new output tokens of a request to the total, and update the progress line if it is due. `has_ended`
        says whether the request has ended."""
        self._num_done += has_ended
        self._num_tokens += num_tokens
        if self._now() - self._said_at >= (TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S):
            self._say()

    def close(self) -> None:
        """On a terminal, write the progress line a last time and end it with a line break."""
        if self._is_terminal and self._total:
            self._say(end="\n")

    def _say(self, end: str = "") -> None:
        if self._file is None:
            return
        self._said_at = self._now()
        elapsed_s = max(self._said_at - self._started_at, 1e-6)
        rate = self._num_tokens / elapsed_s
        done = f"{self._title}{self._num_done}/{self._total} requests, {self._num_tokens} output tokens"
        text = f"{done}, {elapsed_s:.1f} s, {rate:.1f} tokens/s"
        # The escape sequence clears the rest of a longer previous line.
        self._file.write(f"\r{text}\x1b[K{end}" if self._is_terminal else f"{text}\n")
        self._file.flush()


class ForeignProgress:
    """Shows the progress of a list of requests on a progress bar of the caller's class, such as tqdm.

    The bar counts requests. If it supports `set_postfix_str`, the bar also shows the number and rate of output tokens.
    """

    def __init__(self, total: int, make_bar: Callable[..., Any], now: Callable[[], float] = time.monotonic) -> None:
        self._bar = make_bar(total=total, desc="requests")
        self._say = getattr(self._bar, "set_postfix_str", None)
        self._now = now
        self._started_at = self._said_at = now()
        self._num_tokens = 0

    def add(self, num_tokens: int, has_ended: bool) -> None:
        self._num_tokens += num_tokens
        now = self._now()
        if self._say is not None and (has_ended or now - self._said_at >= TERMINAL_INTERVAL_S):
            self._said_at = now
            rate = self._num_tokens / max(now - self._started_at, 1e-6)
            self._say(f"{self._num_tokens} output tokens, {rate:.1f} tokens/s")
        if has_ended:
            self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
