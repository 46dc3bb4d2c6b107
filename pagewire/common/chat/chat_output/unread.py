"""The text of an output that has come and was not read yet, and what reads it.

Its readings are generators that yield None where they need more text.
"""

import math
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple, TypeVar

from pagewire.common.chat.chat_output.parts import Content, OutputPart

_Result = TypeVar("_Result")
# What reads something, tells parts of it, and returns the rest.
Reading = Generator[OutputPart | None, None, _Result]
PieceReading = Generator[str | None, None, _Result]
Tell = Callable[[str], OutputPart]
_NEWLINES = "\n"
_SPACES = " \t\r\n"
_ALL_TEXT = re.compile(".*", re.DOTALL)


class Unread:
    """The unread text of an output.

    Invariant: a reading that waits for more text leaves at most the beginning of a marker unread. It holds all other
    text that it has looked at. A token therefore costs the same in a long output as in a short one.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # up to here it was read
        self.is_whole = False  # no text is to come
        self._num_added = 0
        self._kept: list[str] | None = None  # what was read since a tag, until that turns out to be one
        self.reasoning: list[tuple[int, float]] = []  # where in the whole text each piece of it begins and ends

    def add(self, text: str, *, is_last: bool) -> None:
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0
        self._num_added += len(text)
        self.is_whole = is_last

    @property
    def place(self) -> int:
        """Return the number of characters of the whole text that were read."""
        return self._num_added - len(self.text) + self.at

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
            found = search.pattern.search(self.text, self.at)
            is_last = found is None and self.is_whole
            end = found.start() if found else len(self.text) if is_last else search.safe_end(self.text, self.at)
            piece = self.take(end)
            text = piece if is_last else piece.rstrip(trimmed)
            if text or (held and is_last):
                yield "".join((*held, text))
                held = []
            if len(text) < len(piece):
                held.append(piece[len(text) :])
            if found:
                self._kept = held
                self.take(found.end())
                return found[0]
            if is_last:
                return ""
            yield None

    def begins_with(self, *markers: str) -> Generator[None, None, str]:
        """Read past one of some markers if the text begins with it, after spaces or newlines. Return it, or nothing."""
        marker = yield from self.ahead(*markers)
        if marker:
            self.take(self.text.index(marker, self.at) + len(marker))
        return marker

    def ahead(self, *markers: str) -> Generator[None, None, str]:
        """Return with which of some markers the text goes on behind spaces, which stay unread, or nothing."""
        spaces: list[str] = []
        longest = max(map(len, markers))
        while True:
            place = self._past(_SPACES)
            rest = self.text[place : place + longest]
            found = next((marker for marker in markers if rest.startswith(marker)), "")
            if found or self.is_whole or not any(marker.startswith(rest) for marker in markers):
                break
            spaces.append(self.text[self.at : place])
            self.text, self.at = self.text[place:], 0
            yield None
        if spaces:
            self.text, self.at = "".join((*spaces, self.text[self.at :])), 0
        return found

    def ends_within(self, *markers: str) -> bool:
        """Tell whether nothing is left but spaces and the beginning of one of some markers, or not even that."""
        place = self._past(_SPACES)
        rest = self.text[place : place + max(map(len, markers)) + 1]
        return any(marker.startswith(rest) for marker in markers)

    def skip(self, characters: str = _SPACES) -> Generator[None, None, None]:
        """Read past all such characters."""
        while True:
            self.take(self._past(characters))
            if self.at < len(self.text) or self.is_whole:
                return
            yield None

    def newline(self) -> Generator[None, None, None]:
        """Read past one newline, if it comes next."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        if self.text.startswith("\n", self.at):
            self.take(self.at + 1)

    def run(self, pattern: re.Pattern[str]) -> PieceReading[bool]:
        """Read on as far as a pattern matches, which matches whatever a match of it begins with, and nothing. Return
        whether it matched any text."""
        has_read = False
        while True:
            found = pattern.match(self.text, self.at)
            if found and found.end() > self.at:
                has_read = True
                yield self.take(found.end())
            if self.at < len(self.text) or self.is_whole:
                return has_read
            yield None

    def character(self) -> Generator[None, None, str]:
        """Read one character, or nothing at the end."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        return self.take(min(self.at + 1, len(self.text)))

    def accept(self, character: str) -> Generator[None, None, bool]:
        """Read past a character if it is the next one behind spaces, and tell whether it was."""
        is_next = (yield from self.next()) == character
        if is_next:
            self.take(self.at + 1)
        return is_next

    def next(self) -> Generator[None, None, str]:
        """Return the next character behind spaces, which stays unread, or nothing at the end."""
        yield from self.skip()
        return self.text[self.at : self.at + 1]

    def take(self, end: int) -> str:
        """Read up to a place of the text, and return what was read."""
        text = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _past(self, characters: str) -> int:
        """Return the place after such characters, which stay unread."""
        place = self.at
        while place < len(self.text) and self.text[place] in characters:
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


def told(tell: Tell, reading: PieceReading[_Result]) -> Reading[_Result]:
    """Tell the pieces of a reading as they come."""
    while True:
        try:
            piece = next(reading)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield None if piece is None else tell(piece)


def read_content(unread: Unread) -> Reading[None]:
    """Tell all that is left as content."""
    yield from told(Content, unread.run(_ALL_TEXT))


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
