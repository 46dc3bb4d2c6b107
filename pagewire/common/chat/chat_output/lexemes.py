"""Readers of function names, JSON strings and JSON values in tool calls."""

import json
import re
from collections.abc import Generator

from pagewire.common.chat.chat_output.unread import PieceReading, Unread, held

# The name of a function.
_NAME = re.compile(r"[\w.:/-]*")
_CLOSERS = {"{": "}", "[": "]"}
_STRING_END = re.compile(r'["\\]')
# A character that opens or closes a JSON value outside of strings, or that is invalid there.
_STRUCTURE = re.compile(r"[^\s:,\w.+-]")
_SCALAR = re.compile(r"[\w.+-]*")


def read_name(unread: Unread) -> Generator[None, None, str]:
    """Skip spaces and read a function's name. Return the name, or an empty text."""
    yield from unread.skip()
    return (yield from held(unread.run(_NAME)))[0]


def read_string(unread: Unread) -> Generator[None, None, str | None]:
    """Read a JSON string and return its value, or None if the next text is no complete string."""
    if (yield from unread.next()) != '"':
        return None
    text, is_whole = yield from held(read_value(unread))
    return _decoded(text) if is_whole else None


def read_value(unread: Unread) -> PieceReading[bool]:
    """Read a JSON value and yield its text as it arrives. Return whether the value is complete.

    A value is complete if its brackets and quotes close; nothing else is checked. Reading stops where the text can no
    longer be JSON.
    """
    first = yield from unread.next()
    if first in ("{", "[", '"'):
        return (yield from _nested_value(unread))
    return (yield from unread.run(_SCALAR))


def _nested_value(unread: Unread) -> PieceReading[bool]:
    nesting = _Nesting()
    while True:
        if piece := unread.take(nesting.end_of_value(unread.text, unread.at)):
            yield piece
        if nesting.is_closed or nesting.is_broken or unread.is_whole:
            return nesting.is_closed
        yield None


class _Nesting:
    """The state of a scan through a value in brackets or quotes."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False  # the text so far is not JSON
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    def end_of_value(self, text: str, at: int) -> int:
        """Continue the scan at `at`. Return the position after the value, or the length of the text if the value goes
        on."""
        while at < len(text) and not (self.is_closed or self.is_broken):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_STRING_END if self._is_in_string else _STRUCTURE).search(text, at)
            if found is None:
                return len(text)
            if not self._goes_on(found[0]):
                return found.start()
            at = found.end()
        return at

    def _goes_on(self, character: str) -> bool:
        if self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = self._is_escaped
        elif character == '"':
            self._is_in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif not self._closers or self._closers.pop() != character:
            self.is_broken = True
        self.is_closed = not (self._closers or self._is_in_string or self.is_broken)
        return not self.is_broken


def _decoded(text: str) -> str | None:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return None
