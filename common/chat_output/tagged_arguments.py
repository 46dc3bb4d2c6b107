"""Arguments between tags, as Qwen3-Coder and GLM write them: texts, or JSON where a parameter's schema says so."""

import json
from collections.abc import Generator
from typing import Any, NamedTuple

from pagewire.common.chat_output.literals import json_of
from pagewire.common.chat_output.parts import Arguments
from pagewire.common.chat_output.unread import Reading, Unread, held, told

_MAX_DEPTH = 8  # of schemas within schemas, which may refer to themselves
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TEXT = {"string"}
NOTHING = {"type": "const_string", "value": ""}


class ArgumentTags(NamedTuple):
    begin: str
    middle: str  # between a key and its value
    end: str
    end_of_all: str

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends a value: with its line, or without."""
        return tuple(dict.fromkeys((self.end, self.end.lstrip("\n"))))

    def are_ahead(self, unread: Unread) -> Generator[None, None, bool]:
        return bool((yield from unread.ahead(self.begin, self.end_of_all)))

    def tell(self, unread: Unread, schema: Any) -> Reading[bool]:
        """Tell the arguments of a call as JSON. Return whether their end was read; without it, what comes next is no
        part of them. A value that nothing ends goes up to a line that begins with the next tag."""
        key_end, line_end, value = self.middle.partition("\n")
        before = "{"
        marker = yield from unread.begins_with(self.begin, self.end_of_all)
        while marker.endswith(self.begin):
            key, found = yield from held(unread.pieces_until((key_end,)))
            if not found:
                yield Arguments(f'{before}"{_escaped(key)}')
                return False
            yield Arguments(f"{before}{_quoted(key)}: ")
            before = ", "
            if value and not (yield from unread.begins_with(value)) and unread.ends_within(value):
                return False
            if line_end and not value:
                yield from unread.newline()
            marker = yield from self._tell_value(unread, types_of(named_in(schema)[0].get(key), schema))
            if not marker:
                return False
            if marker in self.ends:
                marker = yield from unread.begins_with(self.begin, self.end_of_all)
        if marker or not unread.ends_within(self.begin, self.end_of_all):
            yield Arguments("}" if before == ", " else "{}")
        return bool(marker)

    def _tell_value(self, unread: Unread, types: set[str]) -> Reading[str]:
        """Return what ended it, or nothing."""
        pieces = unread.pieces_until((*self.ends, f"\n{self.begin}", f"\n{self.end_of_all}"))
        if types <= _TEXT:
            yield Arguments('"')
            marker = yield from told(lambda text: Arguments(_escaped(text)), pieces)
            if marker:
                yield Arguments('"')
            return marker
        text, marker = yield from held(pieces)
        yield Arguments(_typed(text, types) if marker else text)
        return marker

    def form(self, parameters: Any) -> dict[str, Any]:
        """Return a structural tag's format of the arguments that a JSON Schema describes, in its order; of any where
        it names none."""
        properties, required = named_in(parameters)
        if not properties and isinstance(parameters, dict) and parameters.get("additionalProperties") is not False:
            return {"type": "any_text"}
        elements: list[dict[str, Any]] = []
        for key, schema in properties.items():
            tag = {
                "type": "tag",
                "begin": f"{self.begin}{key}{self.middle}",
                "content": _form_of_value(schema, parameters),
                "end": f"{self.end}\n",
            }
            elements.append(tag if key in required else {"type": "or", "elements": [tag, NOTHING]})
        return {"type": "sequence", "elements": elements}


def named_in(schema: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the properties that a schema of an object names, and which it requires."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    required = schema.get("required") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Return which types of JSON a schema allows, as far as it says."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set()
    said = schema.get("type")
    types = {name for name in (said if isinstance(said, list) else [said]) if isinstance(name, str)}
    types |= {_JSON_TYPES.get(type(value), "null") for value in values_in(schema)}
    others = [other for key in ("anyOf", "oneOf", "allOf") for other in _listed(schema, key)]
    return types.union(*(types_of(other, root, depth + 1) for other in (*others, *_referred(schema, root))))


def values_in(schema: Any) -> list[Any]:
    """Return the values that a schema allows, if it lists some."""
    if not isinstance(schema, dict):
        return []
    return [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else ())]


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _referred(schema: dict[str, Any], root: Any) -> Generator[Any]:
    path = schema.get("$ref")
    if isinstance(path, str) and path.startswith("#/"):
        found = root
        for name in path[2:].split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        yield found


def _typed(text: str, types: set[str]) -> str:
    """Return as JSON what a text says, or the text as a string of JSON."""
    found = json_of(text)
    if found is None:
        return _quoted(text)
    # What may be a text or something else is a text, unless it reads as the other.
    kind = _JSON_TYPES.get(type(json.loads(found)), "null")
    is_other = kind in types or (kind == "integer" and "number" in types)
    return found if "string" not in types or (is_other and kind != "string") else _quoted(text)


def _form_of_value(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    types = types_of(schema, root)
    if types <= _TEXT:
        forms = [{"type": "const_string", "value": text} for text in values_in(schema)]
        return {"type": "or", "elements": forms} if forms else {"type": "any_text"}
    return with_definitions(schema, root)


def with_definitions(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a value in JSON, whose schema may refer to what the whole one defines."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole = {**schema, **definitions} if isinstance(schema, dict) else schema
    return {"type": "json_schema", "json_schema": whole}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
