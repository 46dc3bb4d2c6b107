"""The text of an output that has come and was not read yet, and what reads it.

Its readings are generators that yield None where they need more text.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from pagewire.common.chat_output.parts import Content, OutputPart

_Result = TypeVar("_Result")
# What reads something, tells parts of it, and returns the rest.
Reading = Generator[OutputPart | None, None, _Result]
PieceReading = Generator[str | None, None, _Result]
Tell = Callable[[str], OutputPart]
_NEWLINES = "\n"
# Of the names of functions.
_NAME = re.compile(r"[\w.:/-]*")
_SPACES = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_STRING_END = re.compile(r'["\\]')
# What opens or closes something between the strings of JSON, or cannot stand there.
_STRUCTURE = re.compile(r"[^\s:,\w.+-]")
_SCALAR_END = re.compile(r"[^\w.+-]")


class Unread:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # up to here it was read
        self._is_whole = False
        self._kept: list[str] | None = None  # what was read since a tag, until that turns out to be one

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Say that no text is to come."""
        self._is_whole = True

    def kept(self) -> str:
        """Return what was read since the last tag, that included, with the newlines before it."""
        return "".join(self._kept or ())

    def keep(self) -> None:
        """Keep what is read from here on, as if a tag were here."""
        self._kept = []

    def forget(self) -> None:
        """Keep no longer what was read since the last tag."""
        self._kept = None

    def until(self, markers: tuple[str, ...], tell: Tell) -> Reading[str]:
        """Tell the text before the first of some markers, without the newlines right before it, and read past it.
        Return the marker, or nothing if the text ends without one. None of them may be the beginning of another."""
        return (yield from told(tell, self.pieces_until(markers, _NEWLINES)))

    def pieces_until(self, markers: tuple[str, ...], trimmed: str = "") -> PieceReading[str]:
        """The same in pieces, without some characters right before the marker."""
        self._kept = None
        while True:
            found = min(
                ((place, marker) for marker in markers if (place := self._text.find(marker, self._at)) >= 0),
                default=None,
            )
            if found:
                end = self._end_of_text(found[0], trimmed)
            else:
                end = len(self._text) if self._is_whole else self._safe_end(markers, trimmed)
            if end > self._at:
                yield self._take(end)
            if found:
                self._kept = []
                self._take(found[0] + len(found[1]))
                return found[1]
            if self._is_whole:
                return ""
            yield None

    def rest(self) -> Reading[None]:
        """Tell all that is left as content."""
        while True:
            if self._at < len(self._text):
                yield Content(self._take(len(self._text)))
            if self._is_whole:
                return
            yield None

    def begins_with(self, *markers: str) -> Generator[None, None, str]:
        """Read past one of some markers if the text begins with it, after spaces or newlines. Return it, or nothing."""
        marker = yield from self.ahead(*markers)
        if marker:
            self._take(self._text.index(marker, self._at) + len(marker))
        return marker

    def ahead(self, *markers: str) -> Generator[None, None, str]:
        """Return with which of some markers the text goes on behind spaces, which stay unread, or nothing."""
        while True:
            text = self._text[self._at :].lstrip(_SPACES)
            found = next((marker for marker in markers if text.startswith(marker)), "")
            if found or self._is_whole or not any(marker.startswith(text) for marker in markers):
                return found
            yield None

    def ends_within(self, *markers: str) -> bool:
        """Tell whether nothing is left but spaces and the beginning of one of some markers, or not even that."""
        text = self._text[self._at :].lstrip(_SPACES)
        return any(marker.startswith(text) for marker in markers)

    def skip(self, characters: str = _SPACES) -> Generator[None, None, None]:
        """Read past all such characters."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in characters:
                self._take(self._at + 1)
            if self._at < len(self._text) or self._is_whole:
                return
            yield None

    def newline(self) -> Generator[None, None, None]:
        """Read past one newline, if it comes next."""
        while self._at == len(self._text) and not self._is_whole:
            yield None
        if self._text.startswith("\n", self._at):
            self._take(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> PieceReading[None]:
        """Read on as far as a pattern matches, which matches whatever a match of it begins with, and nothing."""
        while True:
            found = pattern.match(self._text, self._at)
            if found and found.end() > self._at:
                yield self._take(found.end())
            if self._at < len(self._text) or self._is_whole:
                return
            yield None

    def word(self) -> Generator[None, None, str]:
        """Read the name of a function behind spaces, or nothing."""
        yield from self.skip()
        return (yield from held(self.run(_NAME)))[0]

    def character(self) -> Generator[None, None, str]:
        """Read one character, or nothing at the end."""
        while self._at == len(self._text) and not self._is_whole:
            yield None
        return self._take(min(self._at + 1, len(self._text)))

    def accept(self, character: str) -> Generator[None, None, bool]:
        """Read past a character if it is the next one behind spaces, and tell whether it was."""
        is_next = (yield from self.next()) == character
        if is_next:
            self._take(self._at + 1)
        return is_next

    def next(self) -> Generator[None, None, str]:
        """Return the next character behind spaces, which stays unread, or nothing at the end."""
        yield from self.skip()
        return self._text[self._at : self._at + 1]

    def string(self) -> Generator[None, None, str | None]:
        """Read a string of JSON. None: there is none, or no whole one."""
        if (yield from self.next()) != '"':
            return None
        text, is_whole = yield from held(self.value())
        return _decoded(text) if is_whole else None

    def value(self) -> PieceReading[bool]:
        """Read a value of JSON, and yield its text as it comes. Return whether it is whole: its brackets and quotes
        close, and more is not asked. It ends where JSON can't go on."""
        first = yield from self.next()
        if first in ("{", "[", '"'):
            return (yield from self._nested_value())
        while True:
            found = _SCALAR_END.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end < len(self._text) or self._is_whole:
                is_one = end > self._at
                yield self._take(end)
                return is_one
            yield None

    def _nested_value(self) -> PieceReading[bool]:
        nesting = _Nesting()
        while True:
            end = nesting.end_of_value(self._text, self._at)
            if end > self._at:
                yield self._take(end)
            if nesting.is_closed or nesting.is_broken or self._is_whole:
                return nesting.is_closed
            yield None

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _end_of_text(self, end: int, trimmed: str) -> int:
        """Return where the text before a place ends, without some characters there."""
        while end > self._at and self._text[end - 1] in trimmed:
            end -= 1
        return end

    def _safe_end(self, markers: tuple[str, ...], trimmed: str) -> int:
        """Return up to where the text belongs to none of some markers, whatever comes."""
        end = len(self._text)
        firsts = {marker[0] for marker in markers}
        for place in range(max(self._at, end + 1 - max(map(len, markers))), end):
            if self._text[place] in firsts and any(marker.startswith(self._text[place:]) for marker in markers):
                end = place
                break
        return self._end_of_text(end, trimmed)


class _Nesting:
    """How far a value in brackets or quotes has come."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False  # JSON cannot go on like this
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    def end_of_value(self, text: str, at: int) -> int:
        """Go on from a place in a text. Return where the value ends, or the text."""
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


def told(tell: Tell, reading: PieceReading[_Result]) -> Reading[_Result]:
    """Tell the pieces of a reading as they come."""
    while True:
        try:
            piece = next(reading)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield None if piece is None else tell(piece)


def held(reading: PieceReading[_Result]) -> Generator[None, None, tuple[str, _Result]]:
    """Return the text of a reading once it has ended, and what it returns."""
    pieces: list[str] = []
    while True:
        try:
            piece = next(reading)
        except StopIteration as end:
            return "".join(pieces), end.value
        if piece is None:
            yield None
        else:
            pieces.append(piece)


def _decoded(text: str) -> str | None:
    try:
        decoded: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return decoded
