"""Checks with random outputs of every format.

The parsed parts must equal the generated parts, and must not depend on how the output is split into pieces.
"""

import random
from collections.abc import Iterable

from pagewire.common.chat.chat_output import CallStart, Content, OutputPart, Reasoning
from testing.chat_output.spellings import FUNCTIONS, SPELLINGS, Segment, Spelling, expected
from testing.chat_output.splitting import in_two, parts_of, some_splits

_MOST_TAGS = 40  # characters of the tags around reasoning


def check(name: str, seed: int, *, every_split: bool) -> None:
    """Generate a random output of the format `name` and compare the parsed parts with the generated parts.

    The check is repeated for a truncated output; a broken output is only checked for independence of its splits.
    """
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
    """Return each character with the type of its part, and each function name of a call as one item.

    Newlines are left out, because parsers drop newlines beside tags.
    """
    return [
        (type(part), text)
        for part in parts
        for text in ([part.name] if isinstance(part, CallStart) else part.text.replace("\n", ""))
    ]


def _check_cut(spelling: Spelling, parts: list[OutputPart], segments: list[Segment], cut: str) -> None:
    """Compare the parts parsed from a truncated output with the segments that were written.

    All whole segments must be parsed as usual. The last, truncated segment may be parsed as another type of part, but
    not all of its text may be lost.
    """
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
    """Return whether `found` is a valid result of parsing a truncated segment."""
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
