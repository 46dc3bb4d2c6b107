"""Conversion of JSON Schemas for llguidance: remove keywords without effect, and tighten inexact ones.

The library refuses keywords and formats that it does not know. Where the library is inexact it allows more values.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any
from urllib.parse import unquote

# One space, one line feed or nothing separates the parts of JSON. With all whitespace that JSON allows, a model might
# produce spaces forever. Without numeric escapes a name has only one spelling, so that it can be recognized.
_OPTIONS = {"whitespace_pattern": r"[ \n]?", "json_allowed_escapes": 'nrbtf\\"'}

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# They replace the library's patterns, which allow 29 February in every year and a leap second in every minute.
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
# The formats that the library enforces. All others are annotations, as in the standard.
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri", "uuid", *_PATTERNS})

_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
# Keywords that contain schemas: one schema, a list of schemas, or several by name.
_SINGLE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "components",  # of OpenAPI; its "schemas" are like $defs
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
# Keywords that can exclude a text. All other keywords do not apply to texts.
_OF_TEXTS = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum"),
        *("format", "pattern", "minLength", "maxLength"),
    }
)
# Keywords that the library does not enforce.
_UNENFORCED = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Parts of a pattern that refer to more than the matched characters (their surroundings, or earlier matches), and syntax
# of other regex dialects that the library does not support.
_LOOKS = re.compile(r"\\[1-9bBcGkKRXZ]|\(\?(?:[=!>]|<[=!])|\[\^?\]|\{,")
_MAX_REFERENCES = 16  # a limit on the length of a chain of references, which may be circular
_MAX_DIGITS = 10  # of an index in a list
_MANY = (1 << 31) - 1  # more than any output can have
_LARGEST = (1 << 63) - (1 << 10)  # the largest float64 that the library accepts as a bound
_LEAST = 1e-30  # above 0, and short enough in digits


def for_llguidance(schema: Any) -> dict[str, Any]:
    """Convert a JSON Schema to a schema that the grammar library llguidance enforces.

    The converted schema allows the same values as the given schema, or fewer values where llguidance cannot enforce the
    schema exactly. Options in the schema's "x-guidance" are kept. Raises ValueError if the schema is neither an object
    nor true, or if it allows no value.
    """
    read = _converted(schema, {} if schema is True else schema)
    if read is False:
        raise ValueError("the JSON Schema is false, which allows no output; send an object or true")
    if not isinstance(read, dict):
        raise ValueError(f"the JSON Schema is {read!r:.80}, but must be an object or true")
    own, defaults = read.get("x-guidance", {}), _OPTIONS
    if not isinstance(own, dict):
        raise ValueError(f"x-guidance of the JSON Schema is {own!r:.80}, but must be an object")
    if any(name.startswith("whitespace_") for name in own):
        defaults = {name: value for name, value in _OPTIONS.items() if not name.startswith("whitespace_")}
    return {**read, "x-guidance": defaults | own}


def enforceable(root: Any, schema: Any, left_out: set[str]) -> Any:
    """Remove the annotations from a JSON Schema, and the keywords that the grammar library cannot enforce. Return the
    reduced schema, and add the names of the unenforceable keywords to `left_out`.

    `schema` is `root` or a schema nested in `root`. A oneOf that cannot be enforced becomes an anyOf.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in _ANNOTATIONS or _is_unset(name, value):
            continue
        inner = _with_schemas(name, value, lambda each: enforceable(root, each, left_out))
        if name == "type" and isinstance(value, str):
            value = inner = value.lower()  # Gemini's API uses upper case
        if _is_enforced(name, value, schema, root) or _excludes_nothing(name, value, schema, root):
            kept[name] = inner
        else:
            left_out.add(name)
            if name == "oneOf":
                kept.setdefault("anyOf", inner)
    if schema.get("patternProperties") is not None and "patternProperties" not in kept:
        kept.pop("additionalProperties", None)  # it would exclude the properties that match the patterns
    return kept


def without_unset(schema: Any) -> Any:
    """Return a JSON Schema without the keywords whose value is null. Serializers write null for keywords that are not
    set.
    """
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
        case "minProperties" | "maxProperties":  # enforced if the number of properties is fixed
            return _texts(schema.get("properties")) <= _texts(schema.get("required"))
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return all(kind in _TYPES or not isinstance(kind, str) for kind in kinds)  # the library refuses other types
        case "not":
            return _allows_all(value)  # then no value is allowed
        case "oneOf":
            return _is_discriminated(value, schema, root)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return name not in _UNENFORCED


def _is_discriminated(schemas: Any, schema: dict[str, Any], root: Any) -> bool:
    """Return whether the schemas of a oneOf in a JSON Schema are mutually exclusive because of a discriminator. Each
    schema must require the property that the discriminator names.
    """
    match schema.get("discriminator"), schemas:
        case {"propertyName": str(name)}, [_, _, *_]:
            objects = [each for each in schemas if isinstance(each, dict)]
            found = [_referred(root, each["$ref"]) if "$ref" in each else each for each in objects]
            distinct = {id(each): each for each in found if isinstance(each, dict)}  # references may share a schema
            return all(name in _texts(each.get("required")) for each in distinct.values())
    return "discriminator" in schema


def _texts(value: Any) -> set[str]:
    """Return the set of strings in a JSON list, or the set of names in a JSON object. Return an empty set for other
    values.
    """
    return {each for each in value if isinstance(each, str)} if isinstance(value, list | dict) else set()


def _referred(root: Any, reference: Any) -> Any:
    """Return the part of a JSON Schema that a reference such as "#/$defs/name" points to. Return None if there is no
    such part.
    """
    return reduce(_member, unquote(str(reference)).split("/")[1:], root)


def _member(value: Any, name: str) -> Any:
    """Return the member of a JSON object or list that a segment of a JSON Pointer names. Return None if there is no
    such member.
    """
    match value:
        case dict():
            return value.get(name.replace("~1", "/").replace("~0", "~"))
        case list() if name.isdecimal() and len(name) < _MAX_DIGITS and int(name) < len(value):
            return value[int(name)]
    return None


def _converted(root: Any, schema: Any) -> Any:
    """Convert `schema`, which is nested in the JSON Schema `root`, to the form that the grammar library llguidance
    enforces.

    The result may be true or false. A value that is no schema is returned unchanged, and llguidance later reports the
    error.
    """
    if not isinstance(schema, dict):
        return schema
    schema = {name: _with_schemas(name, value, partial(_converted, root)) for name, value in schema.items()}
    schema = {name: value for name, value in schema.items() if not _excludes_nothing(name, value, schema, root)}
    if _allows_all(schema.get("not")):
        return False
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and name in schema:  # the syntax of JSON Schema draft 4
            schema[exclusive] = schema.pop(name)
    schema |= {name: _exact_bound(name, schema[name]) for name in _INWARD if name in schema}
    counts = {name: schema[name] for name in _COUNTS if isinstance(schema.get(name), float)}
    schema |= {name: int(count) for name, count in counts.items() if count.is_integer()}
    if values := [schema[name] for name in ("const", "enum") if name in schema]:
        json.loads(json.dumps(values), parse_int=_check_exact, parse_float=_check_exact)
    form, parts = schema.get("format"), schema.get("allOf", [])
    if isinstance(form, str) and form in _PATTERNS and isinstance(parts, list):
        schema["allOf"] = [*parts, {"pattern": _PATTERNS[schema.pop("format")]}]
    return schema


def schemas_within(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas that a JSON Schema contains directly, such as the schemas of its properties. Schemas nested
    deeper are left out.
    """
    found: list[Any] = []
    for name, value in schema.items():
        _with_schemas(name, value, found.append)
    return found


def _with_schemas(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """Return the value of a keyword in a JSON Schema, with `read` applied to each schema that the value contains."""
    if name in _LISTED and isinstance(value, list):
        return [read(item) for item in value]
    if name in _SINGLE:
        return read(value)
    if name in _NAMED and isinstance(value, dict):
        return {key: read(item) for key, item in value.items()}
    return value


def _excludes_nothing(name: str, value: Any, schema: dict[str, Any], root: Any) -> bool:
    """Return whether a keyword of a JSON Schema has no effect. Without such a keyword, the schema allows the same
    values.
    """
    if _is_unset(name, value):
        return True
    match name:
        case "$schema":
            return "json-schema.org/draft" not in str(value)  # the library knows no other dialects and ignores them
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
    """Return whether a JSON Schema allows every string as a value. If the schema only refers to another schema, that
    schema is checked instead, up to `_MAX_REFERENCES` references in a row.
    """
    kinds = schema.get("type", "string") if isinstance(schema, dict) else None
    if not isinstance(kinds, str | list) or "string" not in kinds:
        return schema is True
    asks = {name for name in schema.keys() & _OF_TEXTS if not _excludes_nothing(name, schema[name], schema, root)}
    reference = str(schema.get("$ref"))
    if asks != {"$ref"} or not reference.startswith("#/") or num_references == _MAX_REFERENCES:
        return not asks
    return _allows_texts(_referred(root, reference), root, num_references + 1)


_INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}


def _exact_bound(name: str, bound: Any) -> Any:
    """Return a bound of a number range that the grammar library llguidance represents exactly. If `bound` itself is not
    exact, return a number inside the range instead, so that the range never gets wider.

    llguidance treats some exclusive bounds that are whole numbers as inclusive: the bound nearer to 0 if the other
    bound is within 1 of it. Such a bound is moved inward.
    """
    if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > sys.float_info.max:
        return bound
    inner = float(low := max(_INWARD[name] * bound, -_LARGEST))
    is_whole_end = name.startswith("exclusive") and inner.is_integer()
    if inner < low or (is_whole_end and not -(1 << 53) <= inner < 0):
        inner = inner + 4 * math.ulp(inner) if inner else _LEAST  # the library may read a fraction as its neighbor
    return _INWARD[name] * (int(inner) if inner.is_integer() else inner)


def _check_exact(text: str) -> None:
    """Check that the grammar library llguidance reads a number of a JSON Schema without rounding. Raises ValueError if
    llguidance would read a different number.
    """
    if abs(float(text)) > _LARGEST or (text.lstrip("-").isdecimal() and int(text) != float(text)):
        raise ValueError(f"const or enum has the number {text:.40}, which is read inexactly; use a string")
