"""The prose stays easy to read: see `prose.py`, which counts turns of phrase."""

import pytest

from tests.project import prose

MAX_TURNS_PER_THOUSAND_WORDS = 1.0
MAX_MEDIAN_SENTENCE_WORDS = 18


def test_no_package_has_many_hard_turns_of_phrase() -> None:
    rates = prose.per_thousand_words()
    assert {name: rate for name, rate in rates.items() if rate > MAX_TURNS_PER_THOUSAND_WORDS} == {}


def test_sentences_of_docstrings_are_short() -> None:
    assert prose.median_sentence_words() <= MAX_MEDIAN_SENTENCE_WORDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What a row holds", ["a clause that begins with 'What'"]),
        ("What is a block?", []),
        ("the size of what it reads", ["'what' as a noun"]),
        ("the keys are those of the worker", ["'that of' instead of the noun"]),
        ("blocks wait behind the prompt", ["'behind' for 'after'"]),
        ("The worker reports the result.", []),
    ],
)
def test_turns_are_found(text: str, expected: list[str]) -> None:
    assert [name for name, _ in prose.turns(text)] == expected


def test_every_kind_of_text_is_read() -> None:
    kinds = {text.kind for path in prose.paths() for text in prose.texts(path)}
    assert kinds == {"comment", "docstring", "page", "string"}
