"""The errors for requests that do not match their type. An error names the path of the field as the client wrote it,
quotes the value, and lists the accepted values."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct, structs

from pagewire.common.chat.template_forms import refused_medium
from scheduler_service.api.http.openapi import accepted_values, alternatives, item_schema, note
from scheduler_service.serving.refusal import RefusedError, invalid

SHOWN_CHARS = 60
_PLACE = " - at `"  # separates the reason from the path in a decoder's error
_OF_KEY = "key` in `"
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_TOO_LARGE = ("Integer value out of range", "Number out of range")
_STEP = re.compile(r"\.([^.\[`]+)|\[([^]]+)\]")
_ENTRY = "..."  # the step of a decoder's path into an object with arbitrary keys
# The first words of descriptions of values, by their article.
_AN, _A = ("integer", "object", "empty"), ("string", "number", "boolean", "list")
_MAX_LISTED_CHARS = 200  # of the fields of an object in an error
_Schema = Mapping[str, Any]
# A step of a path: the name of a field or the index of an item.
_PathStep = str | int


def field_error(text: str, given: Any, read: Any, kind: type[Struct]) -> RefusedError:
    """Return the error for a request that does not match its type.

    Args:
        text: The message of msgspec's decoder.
        given: The JSON value of the request as the client sent it, or UNSET if it could not be decoded.
        read: The JSON value that was decoded as `kind`: `given` after the conversion of other APIs' formats.
        kind: The type of the request.
    """
    reason, place = text.rsplit(_PLACE, 1) if _PLACE in text else (text, "")
    steps = [name or (int(index) if index.isdecimal() else index) for name, index in _STEP.findall(place)]
    if reason.startswith((_UNKNOWN, _MISSING)):
        steps.append(reason.split("`", 2)[1][:SHOWN_CHARS])  # the name may consist of backticks
    elif place.startswith(_OF_KEY):
        key, accepted = _faulty_entry(kind, steps, read)
        path, _ = _locate(given, steps, UNSET)
        return invalid(path, f"{path} has the key {shown(key)}, but each key must be {accepted}")
    elif steps[-1:] == [_ENTRY] and reason not in _TOO_LARGE:
        steps[-1], _ = _faulty_entry(kind, steps[:-1], read)
    names, schemas, value = _reach(kind, read, steps)
    path, value = _locate(given, steps, value)
    if reason.startswith(_UNKNOWN):
        return invalid(path, f"{path} is not a field of this request; {_advice(str(steps[-1]), names)}")
    if reason.startswith(_MISSING):
        return invalid(path, f"{path} is missing; send {_listed(schemas)}")
    if reason in _TOO_LARGE:
        return invalid(path, f"{path} is a number beyond 1.8e308 or with more than 4300 digits; send a smaller number")
    if steps[-1:] == ["type"] and (medium := refused_medium(path, value)):
        return invalid(path, medium)
    is_value = "" if value is UNSET else f" is {shown(value)}, but"
    return invalid(path, f"{path or 'the body'}{is_value} must be {_listed(schemas)}{_why(schemas)}")


def shown(value: Any) -> str:
    """Return a short description of a JSON value for an error message. A long text is cut; for a long list or object,
    only its size is given."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]!r}… ({len(value)} characters)"
    text = msgspec.json.encode(value).decode()
    if len(text) <= SHOWN_CHARS:
        return text
    if isinstance(value, list | dict):
        return f"a list of {len(value)} entries" if isinstance(value, list) else f"an object with {len(value)} fields"
    return f"{text[:SHOWN_CHARS]}…"


def _locate(given: Any, steps: Sequence[_PathStep], read: Any) -> tuple[str, Any]:
    """Return the path of a field in the request as the client wrote it, and the field's value there.

    `steps` is the path after the conversion of other APIs' formats, and `read` is the value there. The conversion may
    have moved the field into or out of a nested object.
    """
    path, value = "", given
    for index, step in enumerate(steps):
        if isinstance(value, dict) and step not in value:
            if any(following in value for following in steps[index + 1 : index + 2]):
                continue
            moved = [name for name, inner in value.items() if isinstance(inner, dict) and inner.get(step) == read]
            for holder in moved[:1]:
                path, value = f"{path}.{holder}", value[holder]
        name = str(step)[:SHOWN_CHARS]
        path += f"[{name}]" if name.isdecimal() or step == _ENTRY else f".{name if name.isprintable() else repr(name)}"
        value = _child(value, step)
    return path.removeprefix("."), read if value is UNSET else value


def _child(value: Any, step: _PathStep) -> Any:
    try:
        return value[step]
    except (LookupError, TypeError):
        return UNSET


def _reach(kind: type[Struct], read: Any, steps: Sequence[_PathStep]) -> tuple[Iterable[str], list[_Schema], Any]:
    """Follow a path into the JSON value of a request, and into the schema of its type.

    Returns the names that the path's last step may have, the JSON Schemas of the field, and its value or UNSET. There
    are several schemas if the tag of an object selects no type of a union.
    """
    names: Iterable[str] = ()
    schemas: list[_Schema] = [{"$ref": kind.__name__}]
    for step in steps:
        description = next(filter(None, map(note, schemas)), "")
        options = [option for schema in schemas for option in _options(schema, components(kind))]
        objects = [option["properties"] for option in options if "properties" in option]
        tag = _child(read, "type")
        objects = [fields for fields in objects if tag in fields.get("type", {}).get("enum", ())] or objects
        names = [name for fields in objects for name in fields]
        schemas = [fields[step] for fields in objects if step in fields]
        entries = item_schema if isinstance(step, int) else lambda option: option.get("additionalProperties")
        schemas += [{"description": description} | entry for entry in map(entries, options) if entry]
        read = _child(read, step)
    return names, schemas, read


@functools.cache
def components(kind: type[Struct]) -> Mapping[str, _Schema]:
    """Return the JSON Schemas of a request type and of the types of its nested objects, keyed by type name."""
    return msgspec.json.schema_components([kind], ref_template="{name}")[1]


def _why(schemas: Iterable[_Schema]) -> str:
    return next((f" ({text})" for text in map(note, schemas) if text), "")


def _options(schema: _Schema, by_name: Mapping[str, _Schema]) -> Iterator[_Schema]:
    """Yield the JSON Schemas of a union's members, or the schema itself if it is no union."""
    for option in schema.get("anyOf", ()):
        yield from _options(option, by_name)
    if "anyOf" not in schema:
        yield by_name[schema["$ref"]] if "$ref" in schema else schema


def _faulty_entry(kind: type[Struct], steps: Sequence[_PathStep], read: Any) -> tuple[str, str]:
    """Find the first entry with an invalid key or value in the object with arbitrary keys at the path `steps` of a
    request. Return the entry's key, and a phrase for the keys that the object accepts."""
    hint: Any = kind
    for name in map(str, steps):
        hint = next((fields[name] for each in structs_in(hint) if name in (fields := fields_of(each))), hint)
    mapping = next(part for part in _parts_of(hint) if get_origin(part) is dict)
    _, _, entries = _reach(kind, read, steps)
    key = _ENTRY
    for key, value in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert({key: value}, mapping, str_keys=True)
        except msgspec.ValidationError:
            break
    return key, _listed([msgspec.json.schema(get_args(mapping)[0])])


@functools.cache
def fields_of(kind: type[Struct]) -> Mapping[str, Any]:
    """Return the type hints of a msgspec struct's fields, keyed by the names of the fields in JSON."""
    return {each.encode_name: each.type for each in structs.fields(kind)}


def structs_in(hint: Any) -> Iterator[type[Struct]]:
    """Yield the msgspec struct types that occur in a type hint, such as a union of structs."""
    return (part for part in _parts_of(hint) if isinstance(part, type) and issubclass(part, Struct))


def _parts_of(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts_of(part)


def _advice(name: str, names: Iterable[str]) -> str:
    """Return the advice for a client that sent an unknown field. `names` are the fields that the object may have."""
    if near := difflib.get_close_matches(name, names, 1):
        return f"did you mean {near[0]}?"
    listed = ", ".join(dict.fromkeys(names))
    return f"remove it; the known fields are {listed}" if 0 < len(listed) <= _MAX_LISTED_CHARS else "remove it"


def _listed(schemas: Iterable[_Schema]) -> str:
    """Return a phrase that lists the values that one of the JSON Schemas accepts, such as "an integer or null"."""
    values = (each for schema in schemas for each in accepted_values(schema, lambda _: "object"))
    return alternatives(f"{'an ' * each.startswith(_AN)}{'a ' * each.startswith(_A)}{each}" for each in values)
