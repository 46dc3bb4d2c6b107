"""Writes a line to standard error that says how far a list of requests has come."""

import time
from collections.abc import Callable
from typing import IO, Any

# Between two lines: on a terminal, where each replaces the one before, and in a log.
TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0


class Progress:
    """Shows one line that changes on a terminal. Elsewhere it writes a line every ten seconds."""

    def __init__(
        self, total: int, file: IO[str] | None, now: Callable[[], float] = time.monotonic, title: str = ""
    ) -> None:
        """`total` counts the requests, of what the `title` names. Without a file nothing is shown."""
        self._total = total
        self._title = f"{title}: " if title else ""
        self._file = file
        self._now = now
        self._is_terminal = file is not None and file.isatty()
        self._started_at = self._said_at = now()
        self._num_done = 0
        self._num_tokens = 0

    def add(self, num_tokens: int, has_ended: bool) -> None:
        """So many more output tokens have come, and a request may have ended with them."""
        self._num_done += has_ended
        self._num_tokens += num_tokens
        if self._now() - self._said_at >= (TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S):
            self._say()

    def close(self) -> None:
        """Ends the line on a terminal, where it stays."""
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
        # The rest of a longer line before it is cleared.
        self._file.write(f"\r{text}\x1b[K{end}" if self._is_terminal else f"{text}\n")
        self._file.flush()


class ForeignProgress:
    """Shows progress on a bar that the caller's class makes, such as tqdm's: requests, and tokens behind them if the
    bar can show more."""

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
