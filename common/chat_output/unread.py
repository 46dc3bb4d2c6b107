"""The text of an output that has come and was not read yet, and what reads it.

Its readings are generators that yield None where they need more text.
"""

import json
import math
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple, TypeVar

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
_SCALAR = re.compile(r"[\w.+-]*")


class Unread:
    """The unread text of an output.

    Invariant: a reading that waits for more text leaves at most the beginning of a marker unread. It holds all other
    text that it has looked at. A token therefore costs the same in a long output as in a short one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # up to here it was read
        self._num_added = 0
        self._is_whole = False
        self._kept: list[str] | None = None  # what was read since a tag, until that turns out to be one
        self.reasoning: list[tuple[int, float]] = []  # where in the whole text each piece of it begins and ends

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0
        self._num_added += len(text)

    @property
    def place(self) -> int:
        """Return the number of characters of the whole text that were read."""
        return self._num_added - len(self._text) + self._at

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

    def thoughts(self, reading: Reading[str]) -> Reading[str]:
        """Record the place of the text that a reading tells as reasoning. Return the marker that ends the text."""
        begin = self.place
        self.reasoning.append((begin, math.inf))
        marker = yield from reading
        self.reasoning[-1] = begin, self.place - len(marker)
        return marker

    def pieces_until(self, markers: tuple[str, ...], trimmed: str = "") -> PieceReading[str]:
        """The same in pieces, without some characters right before the marker."""
        self._kept = None
        search = _search_of(markers)
        held: list[str] = []  # trimmed characters, which belong to the text unless a marker follows
        while True:
            found = search.pattern.search(self._text, self._at)
            is_last = found is None and self._is_whole
            end = found.start() if found else len(self._text) if is_last else search.safe_end(self._text, self._at)
            piece = self._take(end)
            text = piece if is_last else piece.rstrip(trimmed)
            if text or (held and is_last):
                yield "".join((*held, text))
                held = []
            if len(text) < len(piece):
                held.append(piece[len(text) :])
            if found:
                self._kept = held
                self._take(found.end())
                return found[0]
            if is_last:
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
        spaces: list[str] = []
        longest = max(map(len, markers))
        while True:
            place = self._past(_SPACES)
            rest = self._text[place : place + longest]
            found = next((marker for marker in markers if rest.startswith(marker)), "")
            if found or self._is_whole or not any(marker.startswith(rest) for marker in markers):
                break
            spaces.append(self._text[self._at : place])
            self._text, self._at = self._text[place:], 0
            yield None
        if spaces:
            self._text, self._at = "".join((*spaces, self._text[self._at :])), 0
        return found

    def ends_within(self, *markers: str) -> bool:
        """Tell whether nothing is left but spaces and the beginning of one of some markers, or not even that."""
        place = self._past(_SPACES)
        rest = self._text[place : place + max(map(len, markers)) + 1]
        return any(marker.startswith(rest) for marker in markers)

    def skip(self, characters: str = _SPACES) -> Generator[None, None, None]:
        """Read past all such characters."""
        while True:
            self._take(self._past(characters))
            if self._at < len(self._text) or self._is_whole:
                return
            yield None

    def newline(self) -> Generator[None, None, None]:
        """Read past one newline, if it comes next."""
        while self._at == len(self._text) and not self._is_whole:
            yield None
        if self._text.startswith("\n", self._at):
            self._take(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> PieceReading[bool]:
        """Read on as far as a pattern matches, which matches whatever a match of it begins with, and nothing. Return
        whether it matched any text."""
        has_read = False
        while True:
            found = pattern.match(self._text, self._at)
            if found and found.end() > self._at:
                has_read = True
                yield self._take(found.end())
            if self._at < len(self._text) or self._is_whole:
                return has_read
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
        return (yield from self.run(_SCALAR))

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

    def _past(self, characters: str) -> int:
        """Return the place after such characters, which stay unread."""
        place = self._at
        while place < len(self._text) and self._text[place] in characters:
            place += 1
        return place


class _Search(NamedTuple):
    """The search for the first of some markers."""

    pattern: re.Pattern[str]
    markers: tuple[str, ...]
    firsts: frozenset[str]  # the first character of each
    longest: int

    def safe_end(self, text: str, at: int) -> int:
        """Return the place in a text without a marker up to which no marker can begin, whatever text follows."""
        for place in range(max(at, len(text) + 1 - self.longest), len(text)):
            if text[place] in self.firsts and any(marker.startswith(text[place:]) for marker in self.markers):
                return place
        return len(text)


@cache
def _search_of(markers: tuple[str, ...]) -> _Search:
    pattern = re.compile("|".join(map(re.escape, markers)))
    return _Search(pattern, markers, frozenset(marker[0] for marker in markers), max(map(len, markers)))


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
