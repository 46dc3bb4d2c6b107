"""What an output must match, with vLLM's names."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from pagewire.compatibility import STRUCTURED_OUTPUTS_FIELDS, judge, suggestion

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What each output of a request must match: exactly one of these is given.

    Here types are checked alone (TypeError), and that there is one (ValueError). The server checks what it says.

    Attributes:
        json: A JSON Schema as a dict or as JSON, or a class with `model_json_schema()`, such as a pydantic model.
        regex: A regular expression that the whole output matches.
        choice: Texts, one of which the output is.
        grammar: A context-free grammar, in llguidance's variant of Lark or in EBNF.
        json_object: True for any JSON object.
        structural_tag: A structural tag as a dict or as JSON.

    Of vLLM's fields those that Pagewire does not have are taken too: ignored with a warning or refused (ValueError),
    as `pagewire.compatibility` lists them.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_fallback: InitVar[object] = None
    disable_any_whitespace: InitVar[object] = None
    disable_additional_properties: InitVar[object] = None
    whitespace_pattern: InitVar[object] = None

    def __post_init__(self, *foreign: object) -> None:
        for name, value in zip(STRUCTURED_OUTPUTS_FIELDS, foreign, strict=True):
            judge(STRUCTURED_OUTPUTS_FIELDS, name, value, stacklevel=3)
        if callable(make_schema := getattr(self.json, "model_json_schema", None)):
            object.__setattr__(self, "json", make_schema())
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
            )
        is_legal, what = _LEGAL[self.kind]
        if not is_legal(self._value):
            raise TypeError(f"{self.kind} must be {what}, got {self._value!r:.80}")
        self.text  # noqa: B018  # raises what JSON cannot write at the call, not when the request is sent

    @staticmethod
    def of(given: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """Returns what a dict of the same names says. Raises TypeError, ValueError."""
        if isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"structured_outputs must be StructuredOutputs or a dict or None, got {given!r:.80}")
        names = (*KINDS, *STRUCTURED_OUTPUTS_FIELDS)
        for name in given:
            if name not in names:
                hint = suggestion(str(name), names) or f"; there are {', '.join(KINDS)}"
                raise TypeError(f"structured_outputs have no {name!r}{hint}")
        return StructuredOutputs(**given)

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str | None:
        """The schema, regular expression, grammar or tag as a text; None for a choice and for any JSON object.

        Raises TypeError, ValueError.
        """
        if isinstance(self._value, Mapping):
            try:
                return json.dumps(self._value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.kind} cannot be written as JSON: {error}") from None
        return self._value if isinstance(self._value, str) else None

    @property
    def _value(self) -> Any:
        return getattr(self, self.kind)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_json(value: object) -> bool:
    return isinstance(value, str | Mapping)


def _is_choice(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


_LEGAL: dict[str, tuple[Callable[[object], bool], str]] = {
    "json": (_is_json, "a JSON Schema: a dict, JSON, or a class with model_json_schema()"),
    "regex": (_is_text, "a text"),
    "choice": (_is_choice, "a list of texts, at least one"),
    "grammar": (_is_text, "a text"),
    "json_object": (lambda value: value is True, "True, or left out"),
    "structural_tag": (_is_json, "a dict or JSON"),
}
