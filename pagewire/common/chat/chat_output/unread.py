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
ToPart = Callable[[str], OutputPart]
_NEWLINES = "\n"
_SPACES = " \t\r\n"
_ALL_TEXT = re.compile(".*", re.DOTALL)


class Unread:
    """The text of a model's output that has arrived but is not parsed yet. The text arrives in pieces, so a parser may
    have to wait in the middle of a tag.

    Invariant: while a parser waits for more text, it leaves at most the beginning of a marker (a tag that it searches
    for) unread. All other text that it has examined is marked as read. The cost of a token thus does not grow with the
    length of the output.
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
        """The position of the parser in the model's output: the number of characters that were read so far."""
        return self._num_added - len(self.text) + self.at

    def kept(self) -> str:
        """Return the text that was recorded since the last tag or call of `keep`, including the tag and the newlines in
        front of it. If the text turns out not to be a tool call, the caller yields it as content.
        """
        return "".join(self._kept or ())

    def keep(self) -> None:
        """Start to record the text that is read from this position on. If the text turns out not to be a tool call, the
        caller gets the recorded text from `kept` and yields it as content.
        """
        self._kept = []

    def forget(self) -> None:
        """Stop recording the text that is read, and delete the recorded text. Called when the text is known to be a
        tool call.
        """
        self._kept = None

    def until(self, markers: tuple[str, ...], to_part: ToPart) -> Reading[str]:
        """Read the model's output up to and including the first marker (a tag from `markers`). Yield the text in front
        of the marker as output parts, which `to_part` creates.

        Newlines directly in front of the marker are dropped. Return the marker, or an empty text if the output ends
        without one. Invariant: no marker is a prefix of another.
        """
        return (yield from as_parts(to_part, self.pieces_until(markers, _NEWLINES)))

    def thoughts(self, reading: Reading[str]) -> Reading[str]:
        """Run `reading`, which parses reasoning, and record the positions of this reasoning in the model's output.
        Return the tag that ends the reasoning, or an empty text if the output ends first.
        """
        begin = self.place
        self.reasoning.append((begin, math.inf))
        marker = yield from reading
        self.reasoning[-1] = begin, self.place - len(marker)
        return marker

    def pieces_until(self, markers: tuple[str, ...], trimmed: str = "") -> PieceReading[str]:
        """Read the model's output up to and including the first marker (a tag from `markers`). Yield the text in front
        of the marker in pieces.

        Characters in `trimmed` that directly precede the marker are dropped. Return the marker, or an empty text if the
        output ends without one.
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
        """If the unread output begins with one of `markers` (tags), after optional whitespace, read this marker. Return
        the marker, or an empty text if the output begins with none of them.
        """
        marker = yield from self.ahead(*markers)
        if marker:
            self.take(self.text.index(marker, self.at) + len(marker))
        return marker

    def ahead(self, *markers: str) -> Generator[None, None, str]:
        """Return the marker (a tag from `markers`) with which the unread output begins, after optional whitespace, or
        an empty text. No text is marked as read.
        """
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
        """Return whether the unread text could still become whitespace followed by one of `markers` (tags).

        The text then consists of whitespace and a prefix of a marker. The prefix may be empty or the whole marker.
        """
        place = self._past(_SPACES)
        rest = self.text[place : place + max(map(len, markers)) + 1]
        return any(marker.startswith(rest) for marker in markers)

    def skip(self, characters: str = _SPACES) -> Generator[None, None, None]:
        """Read past all of the given characters (by default whitespace) at the beginning of the unread output."""
        while True:
            self.take(self._past(characters))
            if self.at < len(self.text) or self.is_whole:
                return
            yield None

    def newline(self) -> Generator[None, None, None]:
        """Read past one newline, if a newline is the next character of the model's output."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        if self.text.startswith("\n", self.at):
            self.take(self.at + 1)

    def run(self, pattern: re.Pattern[str]) -> PieceReading[bool]:
        """Read the model's output as long as it matches `pattern`, and yield the text as it arrives. Return whether any
        text matched. The pattern must match the empty text and every prefix of a match.
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
        """Read one character of the model's output. Return the character, or an empty text at the end of the output."""
        while self.at == len(self.text) and not self.is_whole:
            yield None
        return self.take(min(self.at + 1, len(self.text)))

    def accept(self, character: str) -> Generator[None, None, bool]:
        """Skip whitespace in the model's output, and read the next character if it equals `character`. Return whether
        the character was read.
        """
        is_next = (yield from self.next()) == character
        if is_next:
            self.take(self.at + 1)
        return is_next

    def next(self) -> Generator[None, None, str]:
        """Skip whitespace in the model's output. Return the next character without reading it, or an empty text at the
        end.
        """
        yield from self.skip()
        return self.text[self.at : self.at + 1]

    def take(self, end: int) -> str:
        """Mark the text up to the position `end` of `self.text` as read, and return it."""
        text = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _past(self, characters: str) -> int:
        """Return the position of the first unread character that is not in `characters`. No text is marked as read."""
        place = self.at
        while place < len(self.text) and self.text[place] in characters:
            place += 1
        return place


class _Search(NamedTuple):
    """A compiled search for the first occurrence of any of several markers (tags) in a model's output. The text arrives
    in pieces, so a marker may be split between two pieces.
    """

    pattern: re.Pattern[str]
    markers: tuple[str, ...]
    firsts: frozenset[str]  # the first character of each marker
    longest: int

    def safe_end(self, text: str, at: int) -> int:
        """Return the position up to which the parser can yield the text now. A marker (tag) may begin at this position
        and continue in text that has not arrived yet; no marker can begin earlier. `text` must not contain a whole
        marker.
        """
        for place in range(max(at, len(text) + 1 - self.longest), len(text)):
            if text[place] in self.firsts and any(marker.startswith(text[place:]) for marker in self.markers):
                return place
        return len(text)


@cache
def _search_of(markers: tuple[str, ...]) -> _Search:
    pattern = re.compile("|".join(map(re.escape, markers)))
    return _Search(pattern, markers, frozenset(marker[0] for marker in markers), max(map(len, markers)))


def as_parts(to_part: ToPart, reading: PieceReading[_Result]) -> Reading[_Result]:
    """Convert each text that a parser yields to an output part, such as `Content`, by calling `to_part`. Yield the
    parts and return the parser's result. Yield None while the parser waits for more text.
    """
    while True:
        try:
            piece = next(reading)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield None if piece is None else to_part(piece)


def read_content(unread: Unread) -> Reading[None]:
    """Read the rest of the model's output, and yield all of it as content."""
    yield from as_parts(Content, unread.run(_ALL_TEXT))


def collected(reading: PieceReading[_Result]) -> Generator[None, None, tuple[str, _Result]]:
    """Run a parser to its end, and join the texts that it yields. Yield None while the parser waits for more text.
    Return the joined text and the parser's result.
    """
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
