"""The literal texts in a grammar, and a check that a tokenizer has tokens to spell them.

Most tokenizers have a token for each byte, and can spell everything. With other tokenizers a literal may have no
spelling. The library does not report such a literal: it allows no token when an output reaches it.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagewire.common.grammars.json_schema import schemas_within

# Invariant: the search never returns to a character that it has passed. Repetitions are possessive. An unterminated
# text extends to the end of its line. An unterminated regular expression or class extends to the end of the whole text.
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
    """Return the 256 characters with which GPT-2's tokenizer writes bytes. A printable byte is written as the same
    character, and any other byte as a different character.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return frozenset(map(chr, [*shown, *range(0x100, 0x200 - len(shown))]))


# The sets of pieces by which a tokenizer has one piece for each byte.
BYTE_PIECES = (frozenset(f"<0x{byte:02X}>" for byte in range(0x100)), _byte_level_pieces())


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant text in a grammar. The output must contain exactly this text wherever the grammar requires it. With
    `is_any_case`, upper and lower case both match.
    """

    text: str
    is_any_case: bool = False


class Alphabet:
    """The set of characters that the tokens of a tokenizer can produce. The set is used to check that an output can
    contain the literal texts of a grammar.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """Collect the characters that can be spelled from `tokens`, which are the bytes of each token of
        the tokenizer.
        """
        tokens = set(tokens)
        self._bytes = frozenset(token[0] for token in tokens if len(token) == 1)
        self._characters = frozenset("".join(token.decode(errors="ignore") for token in tokens))

    def fault(self, literals: Iterable[Literal], names: Iterable[str]) -> str:
        """Check that the tokenizer can produce every literal text of a grammar. Return an error message for the first
        text with a character that no tokens can spell, or an empty text.

        `names` are the names of special tokens. A name in a text is not checked, because the model can produce the
        special token instead of the characters of its name.
        """
        for literal in literals:
            text = literal.text
            for name in names:
                text = text.replace(name, "")
            if missing := self.missing(Literal(text, literal.is_any_case)):
                return (
                    f"it has the text {literal.text[:80]!r}, but the tokenizer has no tokens for {missing!r}; remove "
                    "or change the text"
                )
        return ""

    def missing(self, literal: Literal) -> str:
        """Return the first character of a literal text that the tokenizer's tokens cannot spell. Return an empty text
        if all characters can be spelled.
        """
        return next((each for each in literal.text if not self._is_spelled(each, literal.is_any_case)), "")

    def _is_spelled(self, character: str, is_any_case: bool) -> bool:
        forms = {character, character.lower(), character.upper()} if is_any_case else {character}
        return any(self._characters.issuperset(form) or self._bytes.issuperset(form.encode()) for form in forms)


def literals_of(lark: str) -> Iterator[Literal]:
    """Yield the literal texts in a grammar that is written in Lark. Texts in the grammar's JSON Schemas and regular
    expressions are included.
    """
    at = 0
    while found := _IN_LARK.search(lark, at):
        at = found.end()
        if found["text"]:
            yield Literal(_unquoted(found["text"]), bool(found["text_flags"]))
        elif found["regex"]:
            yield from _literals_in_regex(found["regex"], found["regex_flags"])
        elif found["embedded"]:
            value, at = _DECODER.raw_decode(lark, at)
            if found["embedded"] == "json":
                yield from _literals_in_schema(value)


def _unquoted(text: str) -> str:
    """Return the content of a quoted text in a grammar, without quotes and escapes. If the text has an escape that JSON
    does not allow, no escape is decoded.
    """
    try:
        return json.loads(text)
    except ValueError:
        return text[1:-1]


def _literals_in_regex(pattern: str, flags: str = "") -> Iterator[Literal]:
    """Yield the literal texts in a regular expression: its longest runs of plain characters, without operators."""
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
    """Return the character that an element of a regular expression matches, such as a letter or an escaped character.
    Return an empty text if the element is an operator or a character class.
    """
    if number := found["x"] or found["u"] or found["U"] or found["hex"]:
        return chr(int(number, 16)) if int(number, 16) <= sys.maxunicode else ""
    return _CONTROLS[found["control"]] if found["control"] else found["text"] or ""


def _literals_in_schema(schema: Any) -> Iterator[Literal]:
    """Yield the texts that an output may have to contain to match a JSON Schema. These are the property names and fixed
    values in the schema, written as JSON, and the literal texts in the schema's patterns.
    """
    if not isinstance(schema, dict):
        return
    values = [schema[name] for name in ("const",) if name in schema]
    for name in ("enum", "required", "properties"):
        if isinstance(schema.get(name), list | dict):
            values += schema[name]
    yield from (Literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)
    for pattern in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
        if isinstance(pattern, str):
            yield from _literals_in_regex(pattern)
    for each in schemas_within(schema):
        yield from _literals_in_schema(each)
