"""A streaming parser for one output."""

from collections.abc import Callable, Iterator
from functools import partial

from pagewire.common.chat.chat_output.parts import Arguments, OutputPart
from pagewire.common.chat.chat_output.unread import Reading, Unread
from pagewire.common.surrogates import HalfEscapes, without_halves


class OutputParser:
    def __init__(self, read: Callable[[Unread], Reading[None]], *, has_reasoning: bool = False) -> None:
        """Create a parser for one output of a chat model. `read` parses the format of the output and yields the parts
        (content, reasoning, tool calls). Set `has_reasoning` if the format has tags or channels for reasoning.
        """
        self.has_reasoning = has_reasoning
        self._unread = Unread()
        self._next = partial(next, read(self._unread), None)
        self._escapes: HalfEscapes | None = None  # of the arguments that are read

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputPart]:
        """Parse the next piece of the model's output. Return the parts (content, reasoning, tool calls) that are now
        known, in order. `is_last` marks the last piece; the parser must not be used after this call.
        """
        self._unread.add(text, is_last=is_last)
        parts = [whole for part in iter(self._next, None) for whole in self._whole(part)]
        return [*parts, *self._end_arguments()] if is_last else parts

    def is_reasoning(self, place: int) -> bool | None:
        """Return whether the character at the position `place` in the model's output belongs to reasoning. Return None
        while the answer depends on text that has not arrived yet. Callers must ask for positions in ascending order.
        """
        if place >= self._unread.place:
            return None
        spans = self._unread.reasoning
        while spans and spans[0][1] <= place:
            del spans[0]
        return bool(spans) and spans[0][0] <= place

    def _whole(self, part: OutputPart) -> Iterator[OutputPart]:
        """Yield an output part in which U+FFFD replaces unpaired surrogates. In the arguments of tool calls, U+FFFD
        also replaces JSON escapes of unpaired surrogates.

        UTF-8 cannot encode an unpaired surrogate, and some clients cannot read the JSON escape of an unpaired
        surrogate.
        """
        text = without_halves(part[0])
        if isinstance(part, Arguments):
            self._escapes = self._escapes or HalfEscapes()
            text = self._escapes.feed(text)
        else:
            yield from self._end_arguments()
        if text or not part[0]:
            yield type(part)(text)

    def _end_arguments(self) -> Iterator[OutputPart]:
        if self._escapes is not None and (held := self._escapes.feed("", is_last=True)):
            yield Arguments(held)
        self._escapes = None
