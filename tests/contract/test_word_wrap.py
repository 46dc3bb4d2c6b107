"""Word wrap, on an emulated terminal."""

import os
import random
import termios
import textwrap
from collections.abc import Iterable, Iterator

import pyte
import pytest

from pagewire.cli.word_wrap import WordWrap, width_of
from testing.seeds import seeded

ROWS = 60


@pytest.fixture
def window() -> Iterator[int]:
    """Return the file descriptor of a terminal that no process reads."""
    leader, follower = os.openpty()
    yield follower
    os.close(leader)
    os.close(follower)


def test_wrapped_text_does_not_depend_on_its_parts(window: int) -> None:
    rng = seeded()
    for _ in range(30):
        columns = rng.randint(20, 200)
        termios.tcsetwinsize(window, (ROWS, columns))
        words = ["x" * rng.randint(1, 12) for _ in range(rng.randint(1, 200))]
        text = "".join(word + rng.choice("    \n") for word in words).strip()
        lines = [row for line in text.split("\n") for row in textwrap.wrap(line, columns)]
        assert show(window, split(rng, text), columns) == lines


def split(rng: random.Random, text: str) -> Iterator[str]:
    while text:
        size = rng.randint(1, 30)
        yield text[:size]
        text = text[size:]


def show(window: int, parts: Iterable[str], columns: int) -> list[str]:
    """Return the rows of a screen that shows the parts of a text, with word wrap at the width of `window`."""
    screen, wrap = pyte.Screen(columns, 300), WordWrap(window)
    for part in parts:
        pyte.Stream(screen).feed(wrap.wrap(part).replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("aaaa bbbb cccc", ["aaaa bbbb", "cccc"]),
        ("aaaaa bbbb  c", ["aaaaa bbbb", "c"]),  # a space at the margin
        ("aaaaa bbbb \nc", ["aaaaa bbbb", "c"]),
        ("a http://long/path b", ["a", "http://lon", "g/path b"]),  # the terminal breaks a long word
        ("abc \u6f22\u5b57\u6f22\u5b57\u6f22 cd", ["abc \u6f22\u5b57\u6f22", "\u5b57\u6f22 cd"]),
        ("\u6f22\u5b57\u6f22abcde", ["\u6f22\u5b57\u6f22", "abcde"]),
        ("aa e\u0301e\u0301e\u0301e\u0301e\u0301 bb", ["aa \u00e9\u00e9\u00e9\u00e9\u00e9", "bb"]),
        ("aaaaaa e\u0301e\u0301ee\u0301", ["aaaaaa", "\u00e9\u00e9e\u00e9"]),
        ("\ta bbbbbbb", ["    a bbbb", "bbb"]),
        ("- aaaa bbbb", ["- aaaa", "bbbb"]),
        ("  * aaa bbbb", ["  * aaa", "bbbb"]),
        ("~~~\naaaa bbbb cccc\n~~~\naaaa bbbb cccc", ["~~~", "aaaa bbbb", "cccc", "~~~", "aaaa bbbb", "cccc"]),
        ("a\x1b[2Jb\r\nc\x9bd", ["a\ufffd[2Jb", "c\ufffdd"]),
    ],
)
def test_wrapped_rows(window: int, text: str, shown: list[str]) -> None:
    termios.tcsetwinsize(window, (ROWS, 10))
    assert show(window, [text], 10) == shown
    assert show(window, text, 10) == shown


@pytest.mark.parametrize(
    ("char", "width"),
    [
        ("a", 1),
        ("\u00e9", 1),
        ("\u0301", 0),
        ("\u200d", 0),
        ("\ufe0f", 0),
        ("\u6f22", 2),
        ("\uff21", 2),
        ("\U0001f600", 2),
    ],
)
def test_widths_of_characters(char: str, width: int) -> None:
    assert width_of(char) == width


def test_vowels_of_hangul_join_the_letter_before() -> None:
    assert [width_of(char) for char in "\u1112\u1161\u11ab"] == [2, 0, 0]


def test_a_narrower_window(window: int) -> None:
    termios.tcsetwinsize(window, (ROWS, 40))
    wrap = WordWrap(window)
    assert wrap.wrap("a" * 30 + " bb") == "a" * 30 + " bb"
    termios.tcsetwinsize(window, (ROWS, 20))  # the terminal continues in its second row, in column 13
    assert wrap.wrap(" cccc") == " cccc"
    assert wrap.wrap(" dddd") == " d\x1b[20G\x1b[K\ndddd"
