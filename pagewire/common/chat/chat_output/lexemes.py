"""Readers of function names, JSON strings and JSON values in tool calls."""

import json
import re
from collections.abc import Generator

from pagewire.common.chat.chat_output.unread import PieceReading, Unread, collected

# The name of a function.
_NAME = re.compile(r"[\w.:/-]*")
_CLOSERS = {"{": "}", "[": "]"}
_STRING_END = re.compile(r'["\\]')
# A character that opens or closes a JSON value outside of strings, or that is invalid there.
_STRUCTURE = re.compile(r"[^\s:,\w.+-]")
_SCALAR = re.compile(r"[\w.+-]*")


def read_name(unread: Unread) -> Generator[None, None, str]:
    """Skip whitespace in the model's output, and read the name of a called function. Return the name, or an empty text
    if there is none.
    """
    yield from unread.skip()
    return (yield from collected(unread.run(_NAME)))[0]


def read_string(unread: Unread) -> Generator[None, None, str | None]:
    """Read a JSON string from the model's output. Return the string's value, or None if the next text is no complete
    JSON string.
    """
    if (yield from unread.next()) != '"':
        return None
    text, is_whole = yield from collected(read_value(unread))
    return _decoded(text) if is_whole else None


def read_value(unread: Unread) -> PieceReading[bool]:
    """Read a JSON value from the model's output, and yield its text as it arrives. Return whether the value is
    complete.

    A value is complete when all of its brackets and quotes are closed. Other errors in the value are not detected.
    Reading stops at the first character that cannot belong to JSON.
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
    """The open brackets and quotes in a scan through a JSON value, whose text arrives in pieces. The scan finds the end
    of the value.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False  # the text so far is not JSON
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    def end_of_value(self, text: str, at: int) -> int:
        """Continue the scan through a JSON value at the position `at` of `text`. Return the position after the value,
        the position where the text stops being JSON, or the length of the text if the value is still open.
        """
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
