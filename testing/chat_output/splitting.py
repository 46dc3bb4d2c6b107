"""Functions that split texts into pieces, and that parse the pieces."""

import random
from collections.abc import Iterable, Iterator

from pagewire.common.chat.chat_output import CallStart, ChatFormat, OutputPart

NUM_RANDOM_SPLITS = 20
Functions = dict[str, dict[str, object]]


def parts_of(chat_format: ChatFormat, functions: Functions, prompt: str, pieces: Iterable[str]) -> list[OutputPart]:
    """Parse an output that arrives in `pieces`. Return its parts, with adjacent texts of the same kind merged."""
    parser = chat_format.parser(prompt, functions)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged([*parts, *parser.feed("", is_last=True)])


def merged(parts: Iterable[OutputPart]) -> list[OutputPart]:
    one_by_one: list[OutputPart] = []
    for part in parts:
        last = one_by_one[-1] if one_by_one else None
        if isinstance(part, CallStart):
            one_by_one.append(part)
        elif last is not None and not isinstance(last, CallStart) and type(last) is type(part):
            one_by_one[-1] = type(part)(last.text + part.text)
        elif part.text:
            one_by_one.append(part)
    return one_by_one


def in_two(text: str) -> Iterator[list[str]]:
    """Return every split of a text in two."""
    return ([text[:at], text[at:]] for at in range(1, len(text)))


def at_random(text: str, drawn: random.Random) -> list[str]:
    places = sorted(drawn.choices(range(len(text) + 1), k=drawn.randint(1, 8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def some_splits(text: str, drawn: random.Random) -> Iterator[list[str]]:
    yield list(text)
    yield from (at_random(text, drawn) for _ in range(NUM_RANDOM_SPLITS))
