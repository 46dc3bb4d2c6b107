"""Log lines about what is tried again and again, such as a link: told at first, then once a minute."""

import logging
import re
import time
from collections.abc import Callable

_REPEAT_AFTER = 60.0  # seconds before what was told is told again
_MAX_KINDS = 50  # told in that time: the words may be those of whoever dials
_DIGITS = re.compile(r"\d+")


class Repetition:
    """What was told lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._told: dict[str, float] = {}  # when, by what without its numbers

    def is_news(self, text: str) -> bool:
        """Whether to tell a text, which then counts as told: it was not lately, and not too many others were."""
        kind, now = _DIGITS.sub("", text), self._clock()
        self._told = {told: at for told, at in self._told.items() if now - at < _REPEAT_AFTER}
        if kind in self._told or len(self._told) >= _MAX_KINDS:
            return False
        self._told[kind] = now
        return True

    def tell(self, logger: logging.Logger, level: int, text: str) -> None:
        """Log a text that is news."""
        if self.is_news(text):
            logger.log(level, "%s", text)

    def forget(self) -> None:
        """Have everything be news again."""
        self._told.clear()
