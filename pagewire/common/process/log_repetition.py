"""Rate limits for log lines about repeated attempts, such as connecting a link: log at first, then once a minute."""

import logging
import re
import time
from collections.abc import Callable

_REPEAT_AFTER = 60.0  # seconds before an equal text is logged again
_MAX_KINDS = 50  # the most kinds logged in that time, since a peer may control the text
_DIGITS = re.compile(r"\d+")


class Repetition:
    """A rate limit for log lines about repeated attempts, which records the texts that were logged in the
    last minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a rate limit for log lines without any recorded texts. `clock` returns the time in seconds."""
        self._clock = clock
        self._told: dict[str, float] = {}  # the time of each text, keyed by the text without its digits

    def should_log(self, text: str) -> bool:
        """Return whether a text should be logged now. If so, record the text as logged.

        The result is False if an equal text was logged in the last minute, or if too many different texts were. Texts
        that differ only in digits are equal.
        """
        kind, now = _DIGITS.sub("", text), self._clock()
        self._told = {told: at for told, at in self._told.items() if now - at < _REPEAT_AFTER}
        if kind in self._told or len(self._told) >= _MAX_KINDS:
            return False
        self._told[kind] = now
        return True

    def tell(self, logger: logging.Logger, level: int, text: str) -> None:
        """Log a text, unless an equal text was logged in the last minute."""
        if self.should_log(text):
            logger.log(level, "%s", text)

    def forget(self) -> None:
        """Forget the log texts that were recorded, so that each of them is logged again when it next occurs."""
        self._told.clear()
