"""Requests with one invalid field, drawn for every field of a request type, and a check of the error's text."""

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

MAX_DEPTH = 6  # of objects in objects
MAX_TEXT_BYTES = 1200
# Values that no conversion of other APIs' formats accepts, by the type of JSON values.
WRONG: Mapping[str, tuple[Any, ...]] = {
    "string": ("wrong", "x" * 5000, "two\nlines"),
    "number": (-7.25, 123456.5),
    "boolean": (True,),
    "array": (["odd"], [[1], {"a": 2}] * 500),
    "object": ({"odd": 1}, {str(key): "y" * 50 for key in range(90)}),
}
KEYS = {"prompt_cache_options": ("mode", "ttl"), "logit_bias": ("70", "71")}  # of objects that refuse other keys
NOUNS = {"array": "list"}
JARGON = re.compile(
    r"`|[Ee]xpected|\bgot\b|\bint\b|\bstr\b|\bfloat\b|\bbool\b|\barray|NoneType|\bNone\b|\bTrue\b|\bFalse\b|[<>]=?|"
    r"enum|Struct|msgspec|Invalid|Object |required field"
)
Step = str | int
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Broken:
    """A request with one invalid field.

    Attributes:
        path: the path of the field, as the error must name it.
        quoted: a text that must be in the error for the invalid value.
        accepted: texts for the accepted values that must be in the error.
    """

    kind: type[Struct]
    fault: str
    body: Any
    path: str
    quoted: str
    accepted: tuple[str, ...]


class FieldBreaker:
    """Draws invalid requests of one type, for each field at any depth."""

    def __init__(self, kind: type[Struct], rng: random.Random) -> None:
        self._kind = kind
        self._rng = rng
        _, self._schemas = msgspec.json.schema_components([kind], ref_template="{name}")
        self._root = self._schemas[kind.__name__]

    def cases(self) -> Iterator[Broken]:
        """Yield a case for each field and each fault that the field can have."""
        yield Broken(self._kind, "type", ["odd"], "the body", '["odd"]', ("an object",))
        yield from self._of_object(self._root, self._valid(self._root), (), 0)

    def _of_object(
        self, schema: Schema, body: Any, at: tuple[Step, ...], depth: int, *, is_in_union: bool = False
    ) -> Iterator[Broken]:
        """Yield the cases of the object at the path `at` of `body`, and of the fields in it."""
        fields = schema["properties"]
        for name in schema.get("required", ()):
            if name == "type" and not is_in_union:  # a tag that selects nothing may be left out
                continue
            broken = _changed(body, (*at, name), delete=True)
            is_nested = name in (
                "json_schema",
                "allowed_tools",
            )  # another API has the fields of these objects one level up
            words = () if is_nested else self._words(fields[name])
            yield self._case("missing", broken, (*at, name), "missing", words)
        if not schema.get("additionalProperties", True):
            name = self._rng.choice(list(fields))
            slip = name[:-1] + "q" + name[-1:]
            broken = _changed(body, (*at, slip), "wrong")
            is_near = len(name) > 4 and len(fields) == 1
            yield self._case("unknown", broken, (*at, slip), "is not a field", (name,) if is_near else ())
        for name, field in fields.items():
            yield from self._of_field(field, body, (*at, name), depth)

    def _of_field(self, field: Schema, body: Any, at: tuple[Step, ...], depth: int) -> Iterator[Broken]:
        options = list(self._options(field))
        words = self._words(field)
        types = {_type_of(option) for option in options}
        if None in types:  # any JSON
            return
        if "number" in types:
            types.add("integer")
        wrong = [kind for kind in WRONG if kind not in types]
        for kind in wrong:
            value = self._rng.choice(WRONG[kind])
            yield self._case("type", _changed(body, at, value), at, _quoted(value), words)
        for option in options:
            for fault, value in self._out_of_range(option, types):
                yield self._case(fault, _changed(body, at, value), at, _quoted(value), words)
        objects = [option for option in options if "properties" in option]
        if len(objects) > 1 and at[-1] != "type":
            tags = tuple(repr(tag) for each in objects for tag in each["properties"]["type"]["enum"])
            for tag in ("nonsense", 7):
                broken = _changed(body, at, {"type": tag})
                yield self._case("tag", broken, (*at, "type"), _quoted(tag), tags)
        if depth < MAX_DEPTH:
            for each in objects:
                yield from self._of_object(
                    each, _changed(body, at, self._valid(each)), at, depth + 1, is_in_union=len(objects) > 1
                )
            for each in options:
                if each.get("items"):
                    yield from self._of_items(each, body, at, depth)
                if each.get("additionalProperties"):
                    keys = KEYS.get(str(at[-1]), ("a", "b"))
                    if str(at[-1]) in KEYS and len(options) == 2:  # the object, or null
                        yield self._case("key", _changed(body, at, {"odd": 1}), at, "has the key 'odd'", ())
                    entries = dict.fromkeys(keys, self._valid(each["additionalProperties"]))
                    inner = _changed(body, at, entries)
                    yield from self._of_field(each["additionalProperties"], inner, (*at, keys[1]), depth + 1)

    def _of_items(self, schema: Schema, body: Any, at: tuple[Step, ...], depth: int) -> Iterator[Broken]:
        index = self._rng.randrange(3) + schema.get("minItems", 0) // 2
        items = [self._valid(schema["items"]) for _ in range(index + 1)]
        yield from self._of_field(schema["items"], _changed(body, at, items), (*at, index), depth + 1)

    def _out_of_range(self, option: Schema, types: set[str | None]) -> Iterator[tuple[str, Any]]:
        """Yield values that a schema's limits exclude."""
        match option:
            case {"enum": [str(), *_]}:
                yield "enum", "nonsense"
            case {"enum": [bool(only)]} if only:
                yield "enum", False
            case {"enum": [int(), *_]}:
                yield "enum", 12345
            case {"type": "integer" | "number"}:
                low = option.get("minimum", option.get("exclusiveMinimum"))
                if low is not None:
                    yield "low", low - self._rng.randint(1, 9)
                if "exclusiveMinimum" in option:
                    yield "low", low
                if "maximum" in option:
                    yield "high", option["maximum"] + self._rng.randint(1, 9)
            case {"type": "string", "maxLength": most}:
                yield "long", "n" * (most + 1)
            case {"type": "string", "pattern": _}:
                yield "pattern", "nonsense"
            case {"prefixItems": items}:
                yield "long", [self._valid(item) for item in items] * 2
            case {"type": "array", "maxItems": most} if most:
                yield "long", [self._valid(option["items"]) for _ in range(most + 1)]
        match option:
            case {"type": "string", "minLength": 1}:
                yield "short", ""
            case {"type": "array", "minItems": 1} if "null" not in types:
                yield "short", []

    def _valid(self, schema: Schema) -> Any:
        """Return a small value that the schema accepts."""
        option = next(iter(self._options(schema)))
        match option:
            case {"properties": fields}:
                return {name: self._valid(fields[name]) for name in option.get("required", ())}
            case {"enum": [first, *_]}:
                return first
            case {"prefixItems": items}:
                return [self._valid(item) for item in items]
            case {"type": "array", "items": items}:
                return [self._valid(items) for _ in range(option.get("minItems", 0))]
            case {"type": "object"}:
                return {}
            case {"type": "string"}:
                return "web_search_20250305" if "pattern" in option else "text"
            case {"type": "boolean"}:
                return True
            case {"type": "null"}:
                return None
        return int(option.get("minimum", option.get("exclusiveMinimum", 0))) + 1

    def _options(self, schema: Schema) -> Iterator[Schema]:
        if "anyOf" in schema:
            for option in schema["anyOf"]:
                yield from self._options(option)
        else:
            yield self._schemas[schema["$ref"]] if "$ref" in schema else schema

    def _words(self, schema: Schema) -> tuple[str, ...]:
        """Return texts that describe the values that a schema accepts. An error must contain each."""
        words: list[str] = []
        for option in self._options(schema):
            kind = _type_of(option)
            if "enum" in option:
                words += (repr(value) if isinstance(value, str) else json.dumps(value) for value in option["enum"])
            elif kind is not None:
                words.append(NOUNS.get(kind, kind))
            limits = ("minimum", "exclusiveMinimum", "maximum", "maxLength", "maxProperties", "pattern")
            words += (str(option[name]) for name in limits if option.get(name))
        return tuple(words)

    def _case(self, fault: str, body: Any, at: tuple[Step, ...], quoted: str, accepted: tuple[str, ...]) -> Broken:
        texts = [f"[{step}]" if isinstance(step, int) or step.isdecimal() else f".{step}" for step in at]
        path = "".join(texts).removeprefix(".")
        return Broken(self._kind, fault, body, path, quoted, accepted)


def faults_of(text: str, case: Broken) -> list[str]:
    """Return the rules that the text of an error breaks: one line that names the field, quotes the value and lists the
    accepted values, in the client's words."""
    rules = {
        "one line": "\n" not in text,
        "short": len(text.encode()) < MAX_TEXT_BYTES,
        "no jargon": not JARGON.search(re.sub("'[^']*'", "", text)),
        "path first": re.match(rf"{re.escape(case.path)}{'[ .]' if case.fault == 'missing' else ' '}", text)
        is not None,
        "value": case.quoted in text,
        "accepted": all(word in text for word in case.accepted),
        "remedy": re.search("must be|send|did you mean|remove it", text) is not None,
    }
    return [rule for rule, holds in rules.items() if not holds]


def _changed(body: Any, at: tuple[Step, ...], value: Any = None, *, delete: bool = False) -> Any:
    """Return a copy of `body` with the value at the path `at` replaced or deleted."""
    body = copy.deepcopy(body)
    inner = body
    for step in at[:-1]:
        inner = inner[step]
    if delete:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return body


def _quoted(value: Any) -> str:
    """Return the beginning of the value as an error quotes it, or the size of a large value."""
    if isinstance(value, str):
        return repr(value[:40])[:-1] if len(value) <= 60 else f"({len(value)} characters)"
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 60 else str(len(value))


def _type_of(option: Schema) -> str | None:
    """Return the type of JSON values that a schema accepts, or None for any value."""
    if "enum" in option:
        first = option["enum"][0]
        return {str: "string", bool: "boolean", int: "integer"}[type(first)]
    kind: str | None = option.get("type")
    return kind
