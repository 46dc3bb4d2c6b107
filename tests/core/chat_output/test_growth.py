"""The CPU time of parsing an output, in every format.

A token of a long output must cost no more than a token of a short output, whatever text the model repeats. Parsing a
whole output at once must cost time proportional to its length.
"""

import random
import re
from collections.abc import Callable, Iterator

import pytest

from testing.chat_output.spellings import FUNCTIONS, SPELLINGS, Call, Spelling
from tests.growth import check_growth

pytestmark = pytest.mark.thorough

_CALL = Call("f", {"text": "ab", "number": 12, "data": {"k": [1, "a"]}, "list": [True]})
# One character of each class, and pairs of characters.
_UNITS = (
    *("a", "0", "é", " ", "\n", '"', "'", "\\", "{", "[", "(", "}", "]", ")", "<", ",", ":", "="),
    *("\n\n", " \n", '\\"', '""', "[]", "{}", "()", "1,", "0a", "<|", "\n<"),
)
_NUM_TOKENS = 250
_NUM_CHARS = 12_500  # an eighth of the longest output
_NUM_DRAWN = 15
_MOST_UNREAD = 40  # characters; longer than any tag


def _beginnings(spelling: Spelling) -> list[str]:
    """Return all prefixes of an output, after each of which a model may repeat itself forever."""
    spellings = (spelling.spell, spelling.spell_first or spelling.spell)
    wholes = [*(spell([_CALL]) for spell in spellings), "".join(spelling.thinking or ()) + spelling.spell([_CALL])]
    return sorted({whole[:end] for whole in wholes for end in range(len(whole) + 1)})


def _within(spelling: Spelling) -> list[str]:
    """Return prefixes that end within each parsed element: text, reasoning, a name, and arguments of each type."""
    whole = spelling.spell([_CALL])
    ends = [0, len(whole), *(found.end() for found in re.finditer(r'f\b|ab|12|"k": ', whole))]
    return [*((spelling.thinking or ())[:1]), *(whole[:end] for end in sorted(set(ends)))]


def _units(spelling: Spelling) -> list[str]:
    tags = spelling.chat_format.tags(FUNCTIONS)
    cut = [tag[:end] for tag in tags for end in (len(tag) // 2, len(tag) - 1, len(tag))]
    return [*_UNITS, *dict.fromkeys(cut), spelling.spell([_CALL])]


def _reading(
    spelling: Spelling, beginning: str, pieces: Callable[[int], list[str]]
) -> Callable[[int], Callable[[], None]]:
    def prepare(size: int) -> Callable[[], None]:
        parser = spelling.chat_format.parser("", FUNCTIONS)
        tokens = [beginning, *pieces(size)]

        def run() -> None:
            for token in tokens:
                parser.feed(token)
            parser.feed("", is_last=True)

        return run

    return prepare


def _drawn(spelling: Spelling) -> Iterator[tuple[str, str]]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    drawn, beginnings, units = random.Random(seed), _beginnings(spelling), _units(spelling)
    for _ in range(_NUM_DRAWN):
        yield drawn.choice(beginnings), "".join(drawn.choices(units, k=drawn.randint(1, 2)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_token_costs_the_same_in_a_long_output(name: str) -> None:
    spelling = SPELLINGS[name]
    fixed = ((beginning, unit) for beginning in _within(spelling) for unit in _UNITS[:9])
    for beginning, unit in (*fixed, *_drawn(spelling)):
        reading = _reading(spelling, beginning, lambda size, unit=unit: [unit] * size)
        check_growth((beginning, unit), reading, _NUM_TOKENS // len(unit) + 25)


@pytest.mark.parametrize("name", SPELLINGS)
def test_parsing_a_whole_output_takes_linear_time(name: str) -> None:
    spelling = SPELLINGS[name]
    fixed = (("", unit) for unit in _units(spelling))
    for beginning, unit in (*fixed, *_drawn(spelling)):
        reading = _reading(spelling, beginning, lambda size, unit=unit: [unit * size])
        check_growth((beginning, unit), reading, _NUM_CHARS // 8 // len(unit) + 1)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_hundred_thousand_characters_are_read_token_by_token(name: str) -> None:
    """At this length, repeated copying of the unread text would show in the CPU time."""
    spelling, whole = SPELLINGS[name], SPELLINGS[name].spell([_CALL])
    for beginning, unit in (("", "\n"), (whole, " "), (whole[: whole.index("12") + 2], "1")):
        check_growth(
            (beginning, unit), _reading(spelling, beginning, lambda size, unit=unit: [unit] * size), _NUM_CHARS
        )


@pytest.mark.parametrize("name", SPELLINGS)
def test_no_more_than_a_tag_stays_unread(name: str) -> None:
    """The parser appends each new token to its unread text, which is copied."""
    spelling = SPELLINGS[name]
    for beginning in _beginnings(spelling)[::3]:
        for unit in _units(spelling):
            parser = spelling.chat_format.parser("", FUNCTIONS)
            parser.feed(beginning)
            for _ in range(_MOST_UNREAD // len(unit) + 2):
                parser.feed(unit)
            unread = parser._unread
            assert len(unread.text) - unread.at <= _MOST_UNREAD, (beginning, unit)
