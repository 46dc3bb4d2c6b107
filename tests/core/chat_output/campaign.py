"""Random outputs of every format: what is read is what was written, and does not depend on pieces."""

import random
from collections.abc import Iterable

from pagewire.common.chat_output import Arguments, CallStart, Content, OutputPart, Reasoning
from tests.core.chat_output.spellings import FUNCTIONS, SPELLINGS, Segment, Spelling, expected
from tests.core.chat_output.splitting import in_two, parts_of, some_splits

_MOST_TAGS = 40  # characters of the tags of reasoning


def check(name: str, seed: int, *, every_split: bool) -> None:
    """Draw an output of a format, and hold what is read of it against what was drawn."""
    drawn = random.Random(f"{name} {seed}")
    spelling = SPELLINGS[name]
    segments = spelling.draw(drawn)
    text = "".join(segment.text for segment in segments)
    assert flat(_read(spelling, [text])) == flat(expected(segments)), text
    _check_splits(spelling, text, drawn, every_split=every_split)
    cut = text[: drawn.randint(0, len(text))]
    _check_cut(_read(spelling, [cut]), segments, cut)
    _check_splits(spelling, cut, drawn, every_split=every_split)


def _read(spelling: Spelling, pieces: Iterable[str]) -> list[OutputPart]:
    return parts_of(spelling.chat_format, FUNCTIONS, "", pieces)


def _check_splits(spelling: Spelling, text: str, drawn: random.Random, *, every_split: bool) -> None:
    whole = _read(spelling, [text])
    for pieces in (*some_splits(text, drawn), *(in_two(text) if every_split else ())):
        assert _read(spelling, pieces) == whole, pieces


def flat(parts: list[OutputPart]) -> list[tuple[type[OutputPart], str]]:
    """All characters but newlines, which are lost beside tags, each with what it is part of, and names of calls."""
    return [
        (type(part), text)
        for part in parts
        for text in ([part.name] if isinstance(part, CallStart) else part.text.replace("\n", ""))
    ]


def _check_cut(parts: list[OutputPart], segments: list[Segment], cut: str) -> None:
    """Hold what is read of a text that was cut off against its segments: the last may be another thing than it was to
    be, but not all of it is lost."""
    rest, whole = cut, 0
    while whole < len(segments) and len(segments[whole].text) <= len(rest):
        rest = rest[len(segments[whole].text) :]
        whole += 1
    before = flat(expected(segments[:whole]))
    found = flat(parts)
    assert found[: len(before)] == before, cut
    assert found[len(before) :] == [] if not rest else _is_cut(found[len(before) :], segments[whole], rest), cut


def _is_cut(found: list[tuple[type[OutputPart], str]], segment: Segment, cut: str) -> bool:
    """Tell whether something may be what is read of a segment that was cut off."""
    is_of, texts = [kind for kind, _ in found], "".join(text for _, text in found)
    if isinstance(segment.parts[0], Reasoning):
        return (
            set(is_of) <= {Reasoning, Content}
            and texts in cut.replace("\n", "")
            and len(cut.replace("\n", "")) < len(texts) + _MOST_TAGS
        )
    if CallStart not in is_of:
        return set(is_of) <= {Content} and texts == cut.replace("\n", "")
    told = [text for kind, text in found if kind is Arguments]
    behind = "".join(text for kind, text in found if kind is Content)
    start, arguments = segment.parts
    kinds = [CallStart, *[Arguments] * len(told), *[Content] * len(behind)]
    return (
        is_of == kinds
        and flat([start])[0] == found[0]
        and flat([arguments])[: len(told)] == found[1 : 1 + len(told)]
        and cut.endswith(behind)
    )
