"""Reads one output, piece by piece."""

from collections.abc import Callable
from functools import partial

from pagewire.common.chat_output.parts import OutputPart
from pagewire.common.chat_output.unread import Reading, Unread


class OutputParser:
    def __init__(self, read: Callable[[Unread], Reading[None]]) -> None:
        self._unread = Unread()
        self._next = partial(next, read(self._unread), None)

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputPart]:
        """Return the parts that are known now, one after another. Nothing can follow what is last."""
        self._unread.add(text)
        if is_last:
            self._unread.end()
        return list(iter(self._next, None))
