"""The texts that stand in a grammar as they are, and whether a tokenizer has tokens for them.

Most tokenizers have a token for each byte, and spell everything. Of others a text may ask what no tokens spell. The
library says nothing of that: it allows no token when an output has come there.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagewire.common.grammars.json_schema import schemas_within

# Invariant: the search never returns to a character that it has passed. Repetitions are possessive. A text without an
# end extends to the end of its line, a regular expression or a class to the end of all.
_IN_LARK = re.compile(
    r"""(?:\#|//)[^\n]*|<[^<>\s]*+>                         # a comment, or a token by its name
    |"(?:\\.|[^"\\\n])*+"\s*+\.\.\s*+"(?:\\.|[^"\\\n])*+"   # a range of characters
    |(?P<text>"(?:\\.|[^"\\\n])*+")(?P<text_flags>i?)
    |/(?P<regex>(?:\\.|[^/\\])++)/(?P<regex_flags>[imslux]*)
    |"(?:\\.|[^"\\\n])*+|/(?:\\.|[^/\\])*+                  # no end
    |%(?P<embedded>json|regex|llguidance)\s*+(?=\{)""",
    re.VERBOSE,
)
_IN_REGEX = re.compile(
    r"""\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|[xuU]\{(?P<hex>[0-9A-Fa-f]{1,8})\})
    |\\(?P<control>[afnrtv])
    |\\(?:[pP](?:\{[^}]*+\}?|.)|[0-9A-Za-z<>])                                    # a class, or a place
    |\[\^?+\]?+(?:\\.|\[[^\]]*+\]|[^\]\\\[])*+(?:\]|.*)                            # a class
    |\((?:\?(?:P?<\w+>|[A-Za-z-]*[:)]))?                                          # the head of a group
    |\{\d*+,?\d*+\}|[.^$|)*+?]
    |\\?(?P<text>.)""",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_DECODER = json.JSONDecoder()


def _byte_level_pieces() -> frozenset[str]:
    """GPT-2's characters for bytes: those that can be seen for themselves, and others for the rest, in order."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return frozenset(map(chr, [*shown, *range(0x100, 0x200 - len(shown))]))


# The pieces of tokenizers that have one for each byte.
BYTE_PIECES = (frozenset(f"<0x{byte:02X}>" for byte in range(0x100)), _byte_level_pieces())


@dataclass(frozen=True, slots=True)
class Literal:
    """A text in a grammar, in any case if `is_any_case`."""

    text: str
    is_any_case: bool = False


class Alphabet:
    """Which characters some tokens spell."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """`tokens`: what each of them stands for in a text."""
        tokens = set(tokens)
        self._bytes = frozenset(token[0] for token in tokens if len(token) == 1)
        self._characters = frozenset("".join(token.decode(errors="ignore") for token in tokens))

    def fault(self, literals: Iterable[Literal], names: Iterable[str]) -> str:
        """Return which of the texts no tokens spell, the first, or nothing. `names`: of tokens that may stand for them
        in it."""
        for literal in literals:
            text = literal.text
            for name in names:
                text = text.replace(name, "")
            if missing := self.missing(Literal(text, literal.is_any_case)):
                return (
                    f"it has the text {literal.text[:80]!r}, but the tokenizer has no tokens for {missing!r}; leave it "
                    "out, or write it otherwise"
                )
        return ""

    def missing(self, literal: Literal) -> str:
        """Return the first character of a text that no tokens spell, or nothing."""
        return next((each for each in literal.text if not self._is_spelled(each, literal.is_any_case)), "")

    def _is_spelled(self, character: str, is_any_case: bool) -> bool:
        forms = {character, character.lower(), character.upper()} if is_any_case else {character}
        return any(self._characters.issuperset(form) or self._bytes.issuperset(form.encode()) for form in forms)


def literals_of(lark: str) -> Iterator[Literal]:
    """Return the texts of a grammar that the library reads, of its schemas and its regular expressions too."""
    at = 0
    while found := _IN_LARK.search(lark, at):
        at = found.end()
        if found["text"]:
            yield Literal(_unquoted(found["text"]), bool(found["text_flags"]))
        elif found["regex"]:
            yield from _of_regex(found["regex"], found["regex_flags"])
        elif found["embedded"]:
            value, at = _DECODER.raw_decode(lark, at)
            if found["embedded"] == "json":
                yield from _of_schema(value)


def _unquoted(text: str) -> str:
    """The text between quotes; as it stands where it has escapes that JSON does not have."""
    try:
        return json.loads(text)
    except ValueError:
        return text[1:-1]


def _of_regex(pattern: str, flags: str = "") -> Iterator[Literal]:
    """The longest texts without anything that is not a character."""
    is_any_case = "i" in flags or re.search(r"\(\?[a-zA-Z]*i", pattern) is not None
    text = ""
    for found in _IN_REGEX.finditer(pattern):
        character = _character(found)
        text += character
        if text and not character:
            yield Literal(text, is_any_case)
            text = ""
    if text:
        yield Literal(text, is_any_case)


def _character(found: re.Match[str]) -> str:
    """The character that a part of a regular expression is, or nothing."""
    if number := found["x"] or found["u"] or found["U"] or found["hex"]:
        return chr(int(number, 16)) if int(number, 16) <= sys.maxunicode else ""
    return _CONTROLS[found["control"]] if found["control"] else found["text"] or ""


def _of_schema(schema: Any) -> Iterator[Literal]:
    """Names and values that stand in a schema, as JSON, and what stands in its patterns."""
    if not isinstance(schema, dict):
        return
    values = [schema[name] for name in ("const",) if name in schema]
    for name in ("enum", "required", "properties"):
        if isinstance(schema.get(name), list | dict):
            values += schema[name]
    yield from (Literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)
    for pattern in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
        if isinstance(pattern, str):
            yield from _of_regex(pattern)
    for each in schemas_within(schema):
        yield from _of_schema(each)
