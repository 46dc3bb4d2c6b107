"""Request bodies of any size that try to cost a server as much as their size allows.

The bodies are generated from the request types. Each field, and each field of a nested object, gets values that are
deep, wide, cyclic, repeated, of one character, or of another type. New routes and fields are covered automatically.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import Struct, inspect

from scheduler_service.api.http.ollama.requests import OllamaChatRequest, OllamaRequest
from scheduler_service.api.http.openapi import TypedRoute
from testing.chat_output.spellings import SPELLINGS

# Returns a JSON value of approximately the given number of bytes.
Make = Callable[[int], str]
Wrap = Callable[[str], str]
# Valid values for required fields whose types allow values that the server refuses.
_SERVED = {
    "messages": '[{"role": "user", "content": "hi"}]',
    "prompt": '"once upon a time"',
    "input": '"once upon a time"',
    "tokens": "[70, 71]",
}
# Fields that would keep a request running for a long time, or store it.
_LEFT_OUT = {"detached", "background", "store", "timeout"}
_PLACE = "` - at `$`"  # how the JSON decoder reports the position of an error


@dataclass(frozen=True, eq=False)
class HostileBody:
    """A generator of request bodies of any size.

    Attributes:
        route: the route to which the body is sent.
        place: the field that is large.
        shape: the name of the large value.
        make: returns a body of approximately the given number of bytes.
    """

    route: TypedRoute
    place: str
    shape: str
    make: Callable[[int], bytes]

    @property
    def name(self) -> str:
        return f"{self.route.method} {self.route.path}: {self.shape} in {self.place or 'the body'}"


@dataclass(frozen=True)
class _Place:
    """A position in a request body: its name, the type of its value, and the JSON around the value."""

    name: str
    kind: inspect.Type
    wrap: Wrap


def repeated(part: str, opening: str = "", closing: str = "") -> Make:
    return lambda size: opening + part * max(1, size // len(part)) + closing


def listed(part: str, opening: str = "[", closing: str = "]") -> Make:
    """Return a maker of a list that repeats one part."""
    return lambda size: opening + ", ".join([part] * max(1, size // (len(part) + 2))) + closing


def numbered(part: str, opening: str, closing: str) -> Make:
    """Return a maker of a list whose parts are numbered: each `#` becomes the part's index."""

    def make(size: int) -> str:
        count = max(1, size // (len(part) + len(str(size)) + 1))
        return opening + ", ".join(part.replace("#", str(number)) for number in range(count)) + closing

    return make


def nested(opening: str, closing: str, inner: str = "") -> Make:
    def make(size: int) -> str:
        depth = max(1, size // len(opening + closing))
        return opening * depth + inner + closing * depth

    return make


def in_text(make: Make) -> Make:
    """Return a maker of a JSON string that contains a JSON value. Escaped quotes make the string longer."""
    return lambda size: json.dumps(make(size // 2))


def _cyclic(size: int) -> str:
    """Return a schema in which each definition refers to all definitions."""
    count = max(2, int((size / 28) ** 0.5))
    others = ", ".join(f'{{"$ref": "#/$defs/{number}"}}' for number in range(count))
    definitions = ", ".join(f'"{number}": {{"anyOf": [{others}]}}' for number in range(count))
    return f'{{"$defs": {{{definitions}}}, "properties": {{"a": {{"$ref": "#/$defs/0"}}}}}}'


def _self_referring(size: int) -> str:
    """Return a schema in which each branch of a property refers to that whole property."""
    branches = ", ".join(['{"$ref": "#/properties/a"}'] * max(2, size // 28))
    return f'{{"properties": {{"a": {{"anyOf": [{branches}]}}}}}}'


def _defined(size: int) -> str:
    """Return a schema that has equally many properties and definitions."""
    count = max(1, size // 60)
    properties = ", ".join(f'"a{number}": {{"type": "integer"}}' for number in range(count))
    definitions = ", ".join(f'"d{number}": {{"const": 1}}' for number in range(count))
    return f'{{"properties": {{{properties}}}, "$defs": {{{definitions}}}}}'


TEXTS: dict[str, Make] = {
    "one character": repeated("a", '"', '"'),
    "newlines": repeated("\\n", '"', '"'),
    "digits and a letter": repeated("0", '"', 'x"'),
    "surrogates": repeated("\\ud800", '"', '"'),
    "places": repeated(_PLACE, '"', '"'),
    "places and a line": repeated(_PLACE, '"', '\\n"'),
    "brackets": repeated("[", '"', '"'),
    "branches": repeated("(a|b)*", '"', '"'),
}
NUMBERS: dict[str, Make] = {"digits": repeated("9"), "an exponent": repeated("0", "1e", "1"), "a text": TEXTS["places"]}
LISTS: dict[str, Make] = {
    "zeros": listed("0"),
    "nulls": listed("null"),
    "lists": listed("[]"),
    "texts": listed('"a"'),
    "deep lists": nested("[", "]"),
}
OBJECTS: dict[str, Make] = {
    "keys": numbered('"k#": 0', "{", "}"),
    "a long key": repeated(_PLACE, '{"', '": 0}'),
    "a long key and a line": repeated(_PLACE, '{"', '\\n": 0}'),
    "a surrogate key": repeated("\\ud800", '{"', '": 0}'),
    "lists within": listed("[]", '{"a": [', "]}"),
    "deep lists within": lambda size: f'{{"a": {LISTS["deep lists"](size)}}}',
    "deep objects": nested('{"a":', "}", "0"),
}
SCHEMAS: dict[str, Make] = {
    "cyclic references": _cyclic,
    "references to itself": _self_referring,
    "properties and definitions": _defined,
    "properties": numbered('"p#": {"type": "string"}', '{"properties": {', "}}"),
    "required": lambda size: (
        f'{{"properties": {{"a": {{}}}}, "required": {numbered(chr(34) + "p#" + chr(34), "[", "]")(size)}}}'
    ),
    "constants": lambda size: f'{{"properties": {{"a": {{"enum": {numbered("#", "[", "]")(size)}}}}}}}',
    "nested schemas": nested('{"properties": {"a": ', "}}", "{}"),
}
_USER = '{"role": "user", "content": "hi"}'
_CALL = '{"id": "c", "type": "function", "function": {"name": "f", "arguments": #}}'
# Conversations whose messages are arbitrary objects.
MESSAGES: dict[str, Make] = {
    "messages": listed(_USER),
    "messages without a content": listed('{"role": "user"}'),
    "null roles": listed('{"role": null, "content": "hi"}'),
    "numbers as roles": listed('{"role": 123, "content": "hi"}'),
    "lists as roles": listed('{"role": ["user"], "content": "hi"}'),
    "a long role": repeated("a", '[{"role": "', '", "content": "hi"}]'),
    "many roles": numbered('{"role": "r#", "content": "hi"}', "[", "]"),
    "numbers as contents": listed('{"role": "user", "content": 1}'),
    "numbers as names": listed('{"role": "tool", "content": "hi", "tool_call_id": 1, "name": 2}'),
    "a long content": repeated("a", '[{"role": "user", "content": "', '"}]'),
    "surrogates": repeated("\\udc00", '[{"role": "user", "content": "', '"}]'),
    "parts": listed('{"type": "text", "text": "a"}', '[{"role": "user", "content": [', "]}]"),
    "parts of no type": listed('{"type": "` - at `$`"}', '[{"role": "user", "content": [', "]}]"),
    "calls": listed(_CALL.replace("#", '"{}"'), f'[{_USER}, {{"role": "assistant", "tool_calls": [', "]}]"),
    "keys": lambda size: f"[{_USER[:-1]}, {OBJECTS['keys'](size)[1:]}]",
    **{
        f"arguments of {shape}": (
            lambda size, make=make: (
                f'[{_USER}, {{"role": "assistant", "tool_calls": [{_CALL.replace("#", in_text(make)(size))}]}}]'
            )
        )
        for shape, make in {
            "deep lists": LISTS["deep lists"],
            "deep objects": OBJECTS["deep objects"],
            "keys": OBJECTS["keys"],
            "surrogates": repeated("\\ud800", '{"a": "', '"}'),
            "digits": repeated("0", '{"a": ', "x}"),
        }.items()
    },
}
ITEMS: dict[str, Make] = {
    "items of a call": listed('{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}'),
    "items of a result": listed('{"type": "function_call_output", "call_id": "c", "output": "a"}'),
    "items of reasoning": listed('{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}'),
    "items of texts": listed(
        '{"type": "input_text", "text": "a"}', '[{"type": "message", "role": "user", "content": [', "]}]"
    ),
    "surrogates in arguments": repeated(
        "\\\\ud800", '[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\\"a\\": \\"', '\\"}"}]'
    ),
}


def bodies_of(route: TypedRoute) -> Iterator[HostileBody]:
    """Yield the hostile bodies for a POST route."""
    kind = inspect.type_info(route.request)
    for place in _places("", kind, lambda text: text):
        for shape, make in _shapes(place.kind).items():
            yield HostileBody(route, place.name, shape, _body(place.wrap, make))


def _body(wrap: Wrap, make: Make) -> Callable[[int], bytes]:
    return lambda size: wrap(make(size)).encode()


def format_bodies_of(route: TypedRoute) -> Iterator[HostileBody]:
    """Yield bodies whose tools have hostile schemas, one for each template's tool call format.

    Yields nothing if the route has no chat template or no tool calls. The server's templates are named as in
    `SPELLINGS`.
    """
    if not {"chat_template", "tool_choice"} <= {*route.request.__struct_fields__}:
        return
    for template in SPELLINGS:
        for shape, make in SCHEMAS.items():
            yield HostileBody(route, f"tools of {template}", shape, _body(_tool(route.request, template), make))


def _tool(kind: type[Struct], template: str) -> Wrap:
    def wrap(text: str) -> str:
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {text}}}}}'
        return _object(kind, "tools", f'[{tool}], "chat_template": "{template}"')

    return wrap


def _places(name: str, kind: inspect.Type, wrap: Wrap) -> Iterator[_Place]:
    """Yield all positions within a type, including the position of the type itself."""
    if isinstance(kind, inspect.Metadata):
        yield from _places(name, kind.type, wrap)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _places(name, each, wrap)
    elif isinstance(kind, inspect.StructType):
        yield _Place(name, kind, wrap)
        for field in kind.fields:
            if field.name not in _LEFT_OUT:
                inner = f"{name}.{field.encode_name}".strip(".")
                yield from _places(inner, field.type, _around(kind.cls, field.encode_name, wrap))
    elif not isinstance(kind, inspect.NoneType):
        yield _Place(name, kind, wrap)
        if isinstance(kind, inspect.ListType):
            yield from _places(f"{name}[0]", kind.item_type, lambda text: wrap(f"[{text}]"))


def _around(kind: type[Struct], name: str, wrap: Wrap) -> Wrap:
    return lambda text: wrap(_object(kind, name, text))


def _object(kind: type[Struct], name: str, text: str) -> str:
    """Return an object of a type in which the field `name` has the value `text` and required fields
    have valid values.
    """
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    needed = {field.encode_name: _example(field) for field in info.fields if field.required}
    if "prompt" in kind.__struct_fields__ and not needed and name != "messages":
        needed["prompt"] = _SERVED["prompt"]  # /tokenize accepts one of two fields
    for limit in ("max_tokens", "max_output_tokens"):
        if limit in kind.__struct_fields__:
            needed[limit] = "1"
    if issubclass(kind, OllamaRequest):
        needed["options"] = '{"num_predict": 1}'
        needed |= {"messages": _SERVED["messages"]} if kind is OllamaChatRequest else {}
    if info.tag is not None:
        needed[str(info.tag_field)] = json.dumps(info.tag)
    return "{" + ", ".join(f'"{key}": {value}' for key, value in (needed | {name: text}).items()) + "}"


def _example(field: inspect.Field) -> str:
    return _SERVED.get(field.encode_name) or _valid(field.type)


def _valid(kind: inspect.Type) -> str:
    """Return a small valid value of a type."""
    match kind:
        case inspect.Metadata():
            return _valid(kind.type)
        case inspect.UnionType():
            return _valid(kind.types[0])
        case inspect.StructType():
            inner = [f'"{field.encode_name}": {_valid(field.type)}' for field in kind.fields if field.required]
            tag = [] if kind.tag is None else [f'"{kind.tag_field}": {json.dumps(kind.tag)}']
            return "{" + ", ".join((*tag, *inner)) + "}"
        case inspect.LiteralType():
            return json.dumps(kind.values[0])
        case inspect.ListType():
            return "[]" if not kind.min_length else f"[{_valid(kind.item_type)}]"
        case inspect.IntType() | inspect.FloatType():
            return str(kind.ge or 1)
        case inspect.StrType():
            return '"f"'
        case inspect.BoolType():
            return "true"
        case _:
            return "{}"


def _shapes(kind: inspect.Type) -> dict[str, Make]:
    """Return the hostile values for a type by name. Some of them are of another type."""
    match kind:
        case inspect.StrType():
            return TEXTS | {"numbers": LISTS["zeros"]}
        case inspect.ListType(item_type=inspect.DictType() | inspect.AnyType()):
            return LISTS | MESSAGES | ITEMS
        case inspect.ListType():
            return LISTS | {"its own": listed(_valid(kind.item_type))}
        case inspect.DictType(key_type=inspect.IntType()):
            return OBJECTS | {"tokens": numbered('"#": 1', "{", "}"), "one token": listed('"1": 1', "{", "}")}
        case inspect.DictType() | inspect.AnyType() | inspect.RawType():
            return OBJECTS | SCHEMAS | LISTS | {"a text": TEXTS["brackets"], "digits": NUMBERS["digits"]}
        case inspect.StructType():
            return OBJECTS | {"lists": LISTS["lists"]}
        case _:
            return NUMBERS
