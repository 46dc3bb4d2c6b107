"""The received but unread text of an output, and the primitives that read it.

The primitives are generators that yield None while they need more text.
"""

import math
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple, TypeVar

from pagewire.common.chat.chat_output.parts import Content, OutputPart

_Result = TypeVar("_Result")
# A generator that reads a construct, yields the parts found so far, and returns a result.
Reading = Generator[OutputPart | None, None, _Result]
PieceReading = Generator[str | None, None, _Result]
Tell = Callable[[str], OutputPart]
_NEWLINES = "\n"
_SPACES = " \t\r\n"
_ALL_TEXT = re.compile(".*", re.DOTALL)


class Unread:
    """The unread text of an output.

    Invariant: a reader that waits for more text leaves at most the beginning of a marker unread. The reader keeps all
    other text that it has examined. A token therefore costs the same in a long output as in a short one.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # the text before this position was read
        self.is_whole = False  # no more text will arrive
        self._num_added = 0
        self._kept: list[str] | None = None  # the text read since a tag, until that turns out to be one
        self.reasoning: list[tuple[int, float]] = []  # begin and end of each piece, as positions in the whole text

    def add(self, text: str, *, is_last: bool) -> None:
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0
        self._num_added += len(text)
        self.is_whole = is_last

    @property
    def place(self) -> int:
        """The number of characters of the whole output that were read."""
        return self._num_added - len(self.text) + self.at

    def kept(self) -> str:
        """Return the text that was read since the last tag, including the tag and the newlines in front of it."""
        return "".join(self._kept or ())

    def keep(self) -> None:
        """Start to keep the text that is read from this position, as if a tag were here."""
        self._kept = []

    def forget(self) -> None:
        """Stop keeping the text that was read since the last tag."""
        self._kept = None

    def until(self, markers: tuple[str, ...], tell: Tell) -> Reading[str]:
        """Read up to and past the first of some markers, and yield the text in front of the marker as parts.

        Newlines directly in front of the marker are dropped. Return the marker, or an empty text if the text ends
        without one. Invariant: no marker is a prefix of another.
        """
        return (yield from told(tell, self.pieces_until(markers, _NEWLINES)))

    def thoughts(self, reading: Reading[str]) -> Reading[str]:
        """Record the text that `reading` reads as reasoning. Return the marker that ends the text."""
        begin = self.place
        self.reasoning.append((begin, math.inf))
        marker = yield from reading
        self.reasoning[-1] = begin, self.place - len(marker)
        return marker

    def pieces_until(self, markers: tuple[str, ...], trimmed: str = "") -> PieceReading[str]:
        """Read up to and past the first of some markers, and yield the text in front of the marker in pieces.

        Characters in `trimmed` that directly precede the marker are dropped. Return the marker, or an empty text if the
        text ends without one.
        """
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
        """Read past one of some markers if the text begins with it, after whitespace. Return the marker, or an empty
        text."""
        marker = yield from self.ahead(*markers)
        if marker:
            self.take(self.text.index(marker, self.at) + len(marker))
        return marker

    def ahead(self, *markers: str) -> Generator[None, None, str]:
        """Return the marker with which the text begins, after whitespace, or an empty text. The text stays unread."""
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
        """Return whether the unread text is only whitespace, optionally followed by the beginning of one of some
        markers."""
        place = self._past(_SPACES)
        rest = self.text[place : place + max(map(len, markers)) + 1]
        return any(marker.startswith(rest) for marker in markers)

    def skip(self, characters: str = _SPACES) -> Generator[None, None, None]:
        """Read past all of the given characters."""
        while True:
            self.take(self._past(characters))
            if self.at < len(self.text) or self.is_whole:
                return
            yield None

    def newline(self) -> Generator[None, None, None]:
        """Read past one newline, if it is the next character."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        if self.text.startswith("\n", self.at):
            self.take(self.at + 1)

    def run(self, pattern: re.Pattern[str]) -> PieceReading[bool]:
        """Read on as long as `pattern` matches. Return whether any text matched.

        The pattern must match the empty text and every prefix of a match.
        """
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
        """Read one character and return it, or an empty text at the end."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        return self.take(min(self.at + 1, len(self.text)))

    def accept(self, character: str) -> Generator[None, None, bool]:
        """Skip whitespace, and read the next character if it equals `character`. Return whether it did."""
        is_next = (yield from self.next()) == character
        if is_next:
            self.take(self.at + 1)
        return is_next

    def next(self) -> Generator[None, None, str]:
        """Skip whitespace and return the next character, which stays unread, or an empty text at the end."""
        yield from self.skip()
        return self.text[self.at : self.at + 1]

    def take(self, end: int) -> str:
        """Read up to the position `end` and return the text that was read."""
        text = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _past(self, characters: str) -> int:
        """Return the first position that has none of the given characters. The text stays unread."""
        place = self.at
        while place < len(self.text) and self.text[place] in characters:
            place += 1
        return place


class _Search(NamedTuple):
    """A search for the first of some markers."""

    pattern: re.Pattern[str]
    markers: tuple[str, ...]
    firsts: frozenset[str]  # the first character of each marker
    longest: int

    def safe_end(self, text: str, at: int) -> int:
        """Return the position up to which no marker can begin, whatever text follows. The text contains no whole
        marker."""
        for place in range(max(at, len(text) + 1 - self.longest), len(text)):
            if text[place] in self.firsts and any(marker.startswith(text[place:]) for marker in self.markers):
                return place
        return len(text)


@cache
def _search_of(markers: tuple[str, ...]) -> _Search:
    pattern = re.compile("|".join(map(re.escape, markers)))
    return _Search(pattern, markers, frozenset(marker[0] for marker in markers), max(map(len, markers)))


def told(tell: Tell, reading: PieceReading[_Result]) -> Reading[_Result]:
    """Yield the pieces of a reading as output parts, built with `tell`. Return the result of the reading."""
    while True:
        try:
            piece = next(reading)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield None if piece is None else tell(piece)


def read_content(unread: Unread) -> Reading[None]:
    """Yield all remaining text as content."""
    yield from told(Content, unread.run(_ALL_TEXT))


def held(reading: PieceReading[_Result]) -> Generator[None, None, tuple[str, _Result]]:
    """Run a reading to its end. Return its whole text and its result."""
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
