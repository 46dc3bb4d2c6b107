"""Arguments between tags, as Qwen3-Coder and GLM write them: plain text, or JSON if the parameter's schema says so."""

import json
from collections.abc import Generator, Set
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output.literals import json_of
from pagewire.common.chat.chat_output.parameters import Parameters, json_type, values_in
from pagewire.common.chat.chat_output.parts import Arguments
from pagewire.common.chat.chat_output.unread import Reading, Unread, as_parts, collected

_TEXT = {"string"}
NOTHING = {"type": "const_string", "value": ""}


class ArgumentTags(NamedTuple):
    begin: str
    middle: str  # between a key and its value
    end: str
    end_of_all: str

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that end an argument's value: the end tag, with and without its leading newline."""
        return tuple(dict.fromkeys((self.end, self.end.lstrip("\n"))))

    def are_ahead(self, unread: Unread) -> Generator[None, None, bool]:
        return bool((yield from unread.ahead(self.begin, self.end_of_all)))

    def read(self, unread: Unread, parameters: Parameters | None) -> Reading[bool]:
        """Parse the tagged arguments of a tool call, and yield them as pieces of a JSON object. Return whether the tag
        that ends all arguments was read. If not, the text that follows does not belong to the arguments.

        If the end tag of a value is missing, the value ends at the first line that begins with the tag of another
        argument, or with the tag that ends all arguments.
        """
        types = parameters.types if parameters else {}
        key_end, line_end, value = self.middle.partition("\n")
        before = "{"
        marker = yield from unread.begins_with(self.begin, self.end_of_all)
        while marker.endswith(self.begin):
            key, found = yield from collected(unread.pieces_until((key_end,)))
            if not found:
                yield Arguments(f'{before}"{_escaped(key)}')
                return False
            yield Arguments(f"{before}{_quoted(key)}: ")
            before = ", "
            if value and not (yield from unread.begins_with(value)) and unread.ends_within(value):
                return False
            if line_end and not value:
                yield from unread.newline()
            marker = yield from self._read_value_text(unread, types.get(key, frozenset()))
            if not marker:
                return False
            if marker in self.ends:
                marker = yield from unread.begins_with(self.begin, self.end_of_all)
        if marker or not unread.ends_within(self.begin, self.end_of_all):
            yield Arguments("}" if before == ", " else "{}")
        return bool(marker)

    def _read_value_text(self, unread: Unread, types: Set[str]) -> Reading[str]:
        """Read the value of one argument of a tool call, and yield the value as JSON. Return the tag that ended the
        value, or an empty text if the output ended first.
        """
        pieces = unread.pieces_until((*self.ends, f"\n{self.begin}", f"\n{self.end_of_all}"))
        if types <= _TEXT:
            yield Arguments('"')
            marker = yield from as_parts(lambda text: Arguments(_escaped(text)), pieces)
            if marker:
                yield Arguments('"')
            return marker
        text, marker = yield from collected(pieces)
        yield Arguments(_typed(text, types) if marker else text)
        return marker

    def form(self, parameters: Parameters) -> dict[str, Any]:
        """Return the structural tag format (a grammar in JSON) that allows the tagged arguments of one tool call. The
        arguments must match the function's JSON Schema and be in the schema's order.

        If the schema lists no properties but does not forbid additional ones, the format allows any text.
        """
        schema = parameters.schema
        if not parameters.properties and isinstance(schema, dict) and schema.get("additionalProperties") is not False:
            return {"type": "any_text"}
        elements: list[dict[str, Any]] = []
        for key in parameters.properties:
            tag = {
                "type": "tag",
                "begin": f"{self.begin}{key}{self.middle}",
                "content": _form_of_value(parameters, key),
                "end": f"{self.end}\n",
            }
            elements.append(tag if key in parameters.required else {"type": "or", "elements": [tag, NOTHING]})
        return {"type": "sequence", "elements": elements}


def _typed(text: str, types: Set[str]) -> str:
    """Convert the text that a model wrote as an argument of a tool call to JSON. `types` are the JSON types that the
    function's schema allows for the argument.

    If the text is a JSON or Python literal, return the literal as JSON. If the schema allows strings, do so only if the
    schema also allows the literal's type, and this type is not string. Return any other text as a JSON string.
    """
    found = json_of(text)
    if found is None:
        return _quoted(text)
    # If the schema allows a string and another type, the text is a string unless it parses as the other type.
    kind = json_type(json.loads(found))
    is_other = kind in types or (kind == "integer" and "number" in types)
    return found if "string" not in types or (is_other and kind != "string") else _quoted(text)


def _form_of_value(parameters: Parameters, key: str) -> dict[str, Any]:
    if parameters.types[key] <= _TEXT:
        forms = [{"type": "const_string", "value": text} for text in values_in(parameters.properties[key])]
        return {"type": "or", "elements": forms} if forms else {"type": "any_text"}
    return parameters.json_form(key)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
