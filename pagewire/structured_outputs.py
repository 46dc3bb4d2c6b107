"""What an output must match, with vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What each output of a request must match: exactly one of these is given. The server checks what it says.

    Attributes:
        json: a JSON Schema as a dict or as JSON, or a class that has one, such as a pydantic model.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which the output is.
        grammar: a context-free grammar, in llguidance's variant of Lark or in EBNF.
        json_object: True for any JSON object.
        structural_tag: a structural tag as a dict or as JSON.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured outputs take exactly one of {', '.join(KINDS)}; got {given or 'none'}")
        (kind,) = given
        value = getattr(self, kind)
        is_legal, what = _LEGAL[kind]
        if not is_legal(value):
            raise TypeError(f"{kind} must be {what}, got {value!r:.80}")

    @staticmethod
    def of(given: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """Returns what a dict of the same names says. Raises TypeError, ValueError."""
        if isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"structured_outputs must be StructuredOutputs or a dict, got {given!r:.80}")
        names = {field.name for field in fields(StructuredOutputs)}
        if unknown := [name for name, value in given.items() if name not in names and value]:
            raise ValueError(
                f"structured outputs have no {', '.join(map(repr, unknown))}; they take {', '.join(KINDS)}"
            )
        return StructuredOutputs(**{name: value for name, value in given.items() if name in names})

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def text(self) -> str:
        """Returns the schema, regular expression, grammar or tag as a text, and nothing for the others."""
        value = getattr(self, self.kind)
        if isinstance(value, type):
            value = value.model_json_schema()  # type: ignore[attr-defined]
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
        return value if isinstance(value, str) else ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_document(value: object) -> bool:
    return isinstance(value, str | Mapping)


_LEGAL = {
    "json": (lambda value: _is_document(value) or hasattr(value, "model_json_schema"), "a JSON Schema"),
    "regex": (_is_text, "a text"),
    "choice": (
        lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value)),
        "a list of texts",
    ),
    "grammar": (_is_text, "a text"),
    "json_object": (lambda value: value is True, "True, or left out"),
    "structural_tag": (_is_document, "a structural tag"),
}
