"""JSON Schemas as the library is to read them: without what excludes nothing, and no wider than they say.

The library refuses keywords and formats that it does not know, and where it is not exact it allows more.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any
from urllib.parse import unquote

# Between the parts of JSON stands one space, one end of a line, or nothing: with as much as JSON allows, a model may go
# on with spaces for ever. Without escapes by number a name is spelt in one way, so that it is known where it stands.
_OPTIONS = {"whitespace_pattern": r"[ \n]?", "json_allowed_escapes": 'nrbtf\\"'}

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# In place of the library's, by which every year has a 29 February, and every minute a leap second.
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
# Those that the library reads. All others are annotations, as the standard has it.
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri", "uuid", *_PATTERNS})

_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
# Where schemas stand in a schema: one, a list of them, or several by name.
_SINGLE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "components",  # of OpenAPI, whose "schemas" are like $defs
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties", "schemas"})
# What may keep a text from a schema; all else says nothing of texts.
_OF_TEXTS = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum"),
        *("format", "pattern", "minLength", "maxLength"),
    }
)
# Keywords that the library does not read.
_UNENFORCED = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# What a pattern may look at besides the characters that it matches: what is around them, or matched before. Also what
# other languages' patterns have, and the library's do not.
_LOOKS = re.compile(r"\\[1-9bBcGkKRXZ]|\(\?(?:[=!>]|<[=!])|\[\^?\]|\{,")
_MAX_REFERENCES = 16  # from one to the next: they may go round in a circle
_MAX_DIGITS = 10  # of a place in a list
_MANY = (1 << 31) - 1  # more than any output has
_LARGEST = (1 << 63) - (1 << 10)  # the largest float64 that the library takes as a bound
_LEAST = 1e-30  # above 0, and of few enough digits


def for_library(schema: Any) -> dict[str, Any]:
    """Return a schema that allows what the given one does, or less where the library cannot tell it exactly. Options of
    its own in "x-guidance" are kept. Raises ValueError for one that is neither an object nor true."""
    read = _read(schema, {} if schema is True else schema)
    if read is False:
        raise ValueError("the JSON Schema false allows no output")
    if not isinstance(read, dict):
        raise ValueError("a JSON Schema is an object or true")
    own, defaults = read.get("x-guidance", {}), _OPTIONS
    if not isinstance(own, dict):
        raise ValueError("x-guidance of a JSON Schema is an object")
    if any(name.startswith("whitespace_") for name in own):
        defaults = {name: value for name, value in _OPTIONS.items() if not name.startswith("whitespace_")}
    return {**read, "x-guidance": defaults | own}


def enforceable(root: Any, schema: Any, left_out: set[str]) -> Any:
    """Return a schema, or one within the schema `root`, without annotations and without the keywords that the library
    cannot enforce. Add the names of the latter to `left_out`. One of them is oneOf, which is read as anyOf, because its
    schemas may overlap."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in _ANNOTATIONS or _is_unset(name, value):
            continue
        inner = _with_schemas(name, value, lambda each: enforceable(root, each, left_out))
        if name == "type" and isinstance(value, str):
            value = inner = value.lower()  # as Gemini's API has capitals
        if _is_enforced(name, value, schema, root) or _excludes_nothing(name, value, schema, root):
            kept[name] = inner
        else:
            left_out.add(name)
            if name == "oneOf":
                kept.setdefault("anyOf", inner)
    if schema.get("patternProperties") is not None and "patternProperties" not in kept:
        kept.pop("additionalProperties", None)  # which would exclude the properties of the patterns
    return kept


def without_unset(schema: Any) -> Any:
    """Return a schema without the keywords that are null, which serializers write for keywords that are not set."""
    if not isinstance(schema, dict):
        return schema
    given = {name: value for name, value in schema.items() if not _is_unset(name, value)}
    return {name: _with_schemas(name, value, without_unset) for name, value in given.items()}


def _is_unset(name: str, value: Any) -> bool:
    return value is None and name not in ("const", "default")


def _is_enforced(name: str, value: Any, schema: dict[str, Any], root: Any) -> bool:
    match name:
        case "pattern":
            return not _LOOKS.search(str(value))
        case "patternProperties":
            return not _LOOKS.search(" ".join(value) if isinstance(value, dict) else "")
        case "$ref":
            return str(value).startswith("#") and _referred(root, value) is not None
        case "minProperties" | "maxProperties":  # where the number of properties is not fixed
            return _texts(schema.get("properties")) <= _texts(schema.get("required"))
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return all(kind in _TYPES or not isinstance(kind, str) for kind in kinds)  # the library refuses others
        case "not":
            return _allows_all(value)  # nothing is allowed
        case "oneOf":
            return _is_discriminated(value, schema, root)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return name not in _UNENFORCED


def _is_discriminated(schemas: Any, schema: dict[str, Any], root: Any) -> bool:
    """Return whether at most one of the schemas of a oneOf allows a value: each requires the property that the
    discriminator names."""
    match schema.get("discriminator"), schemas:
        case {"propertyName": str(name)}, [_, _, *_]:
            objects = [each for each in schemas if isinstance(each, dict)]
            found = [_referred(root, each["$ref"]) if "$ref" in each else each for each in objects]
            distinct = {id(each): each for each in found if isinstance(each, dict)}  # one may be referred to many times
            return all(name in _texts(each.get("required")) for each in distinct.values())
    return "discriminator" in schema


def _texts(value: Any) -> set[str]:
    """Return the texts of a list, or the names of an object."""
    return {each for each in value if isinstance(each, str)} if isinstance(value, list | dict) else set()


def _referred(root: Any, reference: Any) -> Any:
    """Return the schema that a reference like "#/$defs/name" leads to, or None."""
    return reduce(_member, unquote(str(reference)).split("/")[1:], root)


def _member(value: Any, name: str) -> Any:
    """Return what is in an object or a list under a name of a JSON Pointer, or None."""
    match value:
        case dict():
            return value.get(name.replace("~1", "/").replace("~0", "~"))
        case list() if name.isdecimal() and len(name) < _MAX_DIGITS and int(name) < len(value):
            return value[int(name)]
    return None


def _read(root: Any, schema: Any) -> Any:
    """A schema within a schema, which may be true or false, or what is none, of which the library says so."""
    if not isinstance(schema, dict):
        return schema
    schema = {name: _with_schemas(name, value, partial(_read, root)) for name, value in schema.items()}
    schema = {name: value for name, value in schema.items() if not _excludes_nothing(name, value, schema, root)}
    if _allows_all(schema.get("not")):
        return False
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and name in schema:  # as the standard had it once
            schema[exclusive] = schema.pop(name)
    schema |= {name: _inward(name, schema[name]) for name in _INWARD if name in schema}
    counts = {name: schema[name] for name in _COUNTS if isinstance(schema.get(name), float)}
    schema |= {name: int(count) for name, count in counts.items() if count.is_integer()}
    if values := [schema[name] for name in ("const", "enum") if name in schema]:
        json.loads(json.dumps(values), parse_int=_told, parse_float=_told)
    form, parts = schema.get("format"), schema.get("allOf", [])
    if isinstance(form, str) and form in _PATTERNS and isinstance(parts, list):
        schema["allOf"] = [*parts, {"pattern": _PATTERNS[schema.pop("format")]}]
    return schema


def schemas_within(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas that stand in a schema, not those within them."""
    found: list[Any] = []
    for name, value in schema.items():
        _with_schemas(name, value, found.append)
    return found


def _with_schemas(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with what `read` makes of the schemas in it."""
    if name in _LISTED and isinstance(value, list):
        return [read(item) for item in value]
    if name in _SINGLE:
        return read(value)
    if name in _NAMED and isinstance(value, dict):
        return {key: read(item) for key, item in value.items()}
    return value


def _excludes_nothing(name: str, value: Any, schema: dict[str, Any], root: Any) -> bool:
    """Whether every value that the rest of a schema allows is allowed with this keyword too."""
    if _is_unset(name, value):
        return True
    match name:
        case "$schema":
            return "json-schema.org/draft" not in str(value)  # the library has none of others, and reads no other way
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "propertyNames":
            return _allows_texts(value, root)
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "unevaluatedItems" | "unevaluatedProperties":
            return _allows_all(value)
        case "not":
            return value is False
        case "contains" | "minContains" | "maxContains":
            return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)
        case "if" | "then" | "else":
            return "if" not in schema or not {"then", "else"} & schema.keys()
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(needed == [] or _allows_all(needed) for needed in value.values())
        case "minLength" | "minItems" | "minProperties":
            return value == 0 and value is not False
        case "maxLength" | "maxItems" | "maxProperties":
            return isinstance(value, int) and value >= _MANY
    return False


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _allows_texts(schema: Any, root: Any, num_references: int = 0) -> bool:
    """Whether a schema, or that to which it refers, allows every text."""
    kinds = schema.get("type", "string") if isinstance(schema, dict) else None
    if not isinstance(kinds, str | list) or "string" not in kinds:
        return schema is True
    asks = {name for name in schema.keys() & _OF_TEXTS if not _excludes_nothing(name, schema[name], schema, root)}
    reference = str(schema.get("$ref"))
    if asks != {"$ref"} or not reference.startswith("#/") or num_references == _MAX_REFERENCES:
        return not asks
    return _allows_texts(_referred(root, reference), root, num_references + 1)


_INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}


def _inward(name: str, bound: Any) -> Any:
    """The next bound that the library does not round. An exclusive one that is whole is moved where the library takes
    it for an inclusive one: where it is the one nearer to 0, and the other within 1 of it."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > sys.float_info.max:
        return bound
    inner = float(low := max(_INWARD[name] * bound, -_LARGEST))
    is_whole_end = name.startswith("exclusive") and inner.is_integer()
    if inner < low or (is_whole_end and not -(1 << 53) <= inner < 0):
        inner = inner + 4 * math.ulp(inner) if inner else _LEAST  # it may read a fraction as its neighbour
    return _INWARD[name] * (int(inner) if inner.is_integer() else inner)


def _told(text: str) -> None:
    """Raises ValueError for a number that the library reads as another one."""
    if abs(float(text)) > _LARGEST or (text.lstrip("-").isdecimal() and int(text) != float(text)):
        raise ValueError(f"const or enum has the number {text:.40}, which is not told from others; make it a text")
