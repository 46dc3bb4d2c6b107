"""Random outputs of every format: what is read is what was written, and does not depend on pieces."""

import random
from collections.abc import Iterable

from pagewire.common.chat.chat_output import CallStart, Content, OutputPart, Reasoning
from testing.chat_output.spellings import FUNCTIONS, SPELLINGS, Segment, Spelling, expected
from testing.chat_output.splitting import in_two, parts_of, some_splits

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
    _check_cut(spelling, _read(spelling, [cut]), segments, cut)
    _check_splits(spelling, cut, drawn, every_split=every_split)
    _check_splits(spelling, spelling.draw_broken(drawn), drawn, every_split=every_split)


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


def _check_cut(spelling: Spelling, parts: list[OutputPart], segments: list[Segment], cut: str) -> None:
    """Hold what is read of a text that was cut off against its segments: the last may be another thing than it was to
    be, but not all of it is lost."""
    rest, whole = cut, 0
    while whole < len(segments) and len(segments[whole].text) <= len(rest):
        rest = rest[len(segments[whole].text) :]
        whole += 1
    before = flat(expected(segments[:whole]))
    found = flat(parts)
    assert found[: len(before)] == before, cut
    found = found[len(before) :]
    assert found == [] if not rest else _is_cut(spelling, found, segments[whole], rest), cut


def _is_cut(spelling: Spelling, found: list[tuple[type[OutputPart], str]], segment: Segment, cut: str) -> bool:
    """Tell whether something may be what is read of a segment that was cut off."""
    cut, texts = _without_newlines(cut), _without_newlines("".join(text for _, text in found))
    first = segment.parts[0]
    if spelling.is_in_channels and not isinstance(first, CallStart):
        return cut.endswith(texts)  # headers may be lost
    if isinstance(first, Reasoning):
        return texts in cut and len(cut) < len(texts) + _MOST_TAGS
    if isinstance(first, Content):
        return {kind for kind, _ in found} <= {Content} and texts == cut
    if not found or found[0][0] is not CallStart:
        return texts == cut or (spelling.is_in_channels and not found)
    whole = flat(segment.parts)
    same = next((place for place, (a, b) in enumerate(zip(found, whole, strict=False)) if a != b), len(found))
    return cut.endswith(_without_newlines("".join(text for _, text in found[same:])))


def _without_newlines(text: str) -> str:
    return text.replace("\n", "").replace("\\n", "")
