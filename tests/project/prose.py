"""Counts turns of phrase that are hard to read. `python -m tests.project.prose [PATH ...]` lists them.

It reads comments, docstrings, string literals with at least four words (help texts, log lines and error messages), and
pages. A match is a place to look at; the limit in `test_prose.py` leaves room for the few that are right.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from testing.sources import ROOT
from tests.project.documents import TRACKED

TURNS = {
    "a clause that begins with 'What'": r"(?:^|[.:;] )What (?!is\b.*\?|are\b.*\?|does\b|happens when)[a-z]",
    "'what' as a noun": r"\b(?:of|with|by|from|for|as|than|to|in|on|at|and|or) what (?!is the|are the)[a-z]+",
    "'that of' instead of the noun": r"\b(?:that of|those of)\b",
    "'so many' as a number": r"\b(?:so many|so much|as many as fit|so long)\b",
    "'behind' for 'after'": r"\bbehind (?:the|it|them|its|their|an?|each|which|that|those|what)\b",
    "'none' as a predicate": r"\b(?:is|are|was|were|be) (?:none|no one|nobody)\b|, none[,.;]|: none\b",
    "'who' for a thing": r"\b(?:whoever|whom|whosoever)\b|\bwho (?:has|have|waits?|asks?|gets?|reads?)\b",
    "'tell' for 'report'": r"\b(?:tells|told|telling)\b",
    "'taken' for 'accepted'": r"\b(?:is|are|be|was|were|been) taken\b",
    "'there is' at the end": r"\b(?:there is|there are|there was|there were)[.;]",
    "'its kin', 'goes by'": r"\b(?:its kin|their kin|and kin|its like|goes by|go by)\b",
    "'nobody', 'somebody'": r"\b(?:nobody|somebody|anybody)\b",
    "'makes of', 'becomes of'": r"\b(?:makes? of|becomes? of|came of|comes of)\b",
}
READ = (".py", ".md", ".c", ".h", ".proto")
# The strings of story_grammar.py are parts of children's stories.
NOT_READ = ("tests/", "pagewire/protos/gen/", "models/story_grammar.py")
MIN_STRING_WORDS = 4
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose.

    Attributes:
        line: The number of its first line in the file.
        kind: "docstring", "comment", "string" or "page".
    """

    line: int
    kind: str
    text: str


def paths() -> list[str]:
    """Return the tracked files that are read, relative to the root."""
    return [
        name for name in TRACKED if name.endswith(READ) and not name.startswith(NOT_READ) and (ROOT / name).exists()
    ]


def package(path: str) -> str:
    """Return the top folder of a path, and "pages" for the pages at the root."""
    return path.partition("/")[0] if "/" in path else "pages"


@cache
def texts(path: str) -> tuple[Text, ...]:
    """Return the prose of a file."""
    return tuple(_texts(path))


def _texts(path: str) -> Iterator[Text]:
    source = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        yield from _python(source)
    elif path.endswith(".md"):
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code:
                yield Text(number, "page", line)
    else:
        for comment in re.finditer(r"//[^\n]*|/\*.*?\*/", source, re.DOTALL):
            line = source.count("\n", 0, comment.start()) + 1
            yield Text(line, "comment", " ".join(comment.group().strip("/* ").split()))


def _python(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], "comment", token.string[1:].strip())
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            docstrings.add(node.body[0])
            yield Text(node.body[0].lineno, "docstring", " ".join(docstring.split()))
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            is_text = isinstance(child, ast.Constant) and isinstance(child.value, str) and node not in docstrings
            if is_text and len(child.value.split()) >= MIN_STRING_WORDS:  # an f-string is read in its parts
                yield Text(child.lineno, "string", " ".join(child.value.split()))


def turns(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each turn in a text, and the words that match it."""
    for name, pattern in TURNS.items():
        yield from ((name, match.group()) for match in re.finditer(pattern, text))


def per_thousand_words() -> dict[str, float]:
    """Return the number of turns in a thousand words of each package."""
    num_words, num_turns = Counter[str](), Counter[str]()
    for path in paths():
        for text in texts(path):
            num_words[package(path)] += len(text.text.split())
            num_turns[package(path)] += len(list(turns(text.text)))
    return {name: 1000 * num_turns[name] / count for name, count in sorted(num_words.items()) if count}


def median_sentence_words() -> float:
    """Return the median number of words of a sentence in docstrings."""
    docstrings = (text.text for path in paths() for text in texts(path) if text.kind == "docstring")
    sentences = (sentence for docstring in docstrings for sentence in re.split(r"(?<=[.:;!?])\s+", docstring))
    return median(len(sentence.split()) for sentence in sentences)


def main(given: list[str]) -> None:
    for path in given or paths():
        for text in texts(str(Path(path))):
            for name, words in turns(text.text):
                print(f"{path}:{text.line}: {name}: {words!r} in a {text.kind}")
    for name, rate in per_thousand_words().items():
        print(f"{rate:6.1f} in a thousand words of {name}")
    print(f"{median_sentence_words():6} words in the median sentence of a docstring")


if __name__ == "__main__":
    main(sys.argv[1:])
