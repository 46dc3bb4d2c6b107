"""JSON Schemas as the library is to read them: without what excludes nothing, and no wider than they say.

The library refuses keywords and formats that it does not know, and where it is not exact it allows more.
"""

import math
from collections.abc import Callable
from typing import Any

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
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_MANY = (1 << 31) - 1  # more than any output has
_LARGEST = (1 << 63) - (1 << 10)  # the largest float64 that the library takes as a bound of integers


def for_library(schema: Any) -> dict[str, Any]:
    """Return a schema that allows what the given one does, or less where the library cannot tell it exactly. Options of
    its own in "x-guidance" are kept. Raises ValueError for one that is neither an object nor true."""
    if schema is False:
        raise ValueError("the JSON Schema false allows no output")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is an object or true")
    own, defaults = schema.get("x-guidance", {}), _OPTIONS
    if not isinstance(own, dict):
        return schema
    if any(name.startswith("whitespace_") for name in own):
        defaults = {name: value for name, value in _OPTIONS.items() if not name.startswith("whitespace_")}
    return {**_read(schema), "x-guidance": defaults | own}


def _read(schema: Any) -> Any:
    """A schema within a schema, which may be true or false, or what is none, of which the library says so."""
    if not isinstance(schema, dict):
        return schema
    schema = {name: _with_schemas(name, value, _read) for name, value in schema.items()}
    schema = {name: value for name, value in schema.items() if not _excludes_nothing(name, value, schema)}
    if _takes_integers_alone(schema.get("type")):
        schema |= {name: _inward(name, schema[name]) for name in _INWARD if name in schema}
    if schema.get("format") not in _PATTERNS:
        return schema
    pattern = _PATTERNS[schema.pop("format")]
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    also = {"pattern": pattern, "type": schema.get("type", "string")}
    return {**schema, "allOf": [*schema.get("allOf", ()), also]}


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
    if name == "components" and isinstance(value, dict) and isinstance(value.get("schemas"), dict):  # OpenAPI's $defs
        return {**value, "schemas": {key: read(item) for key, item in value["schemas"].items()}}
    return value


def _excludes_nothing(name: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether every value that the rest of a schema allows is allowed with this keyword too."""
    match name:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "propertyNames":
            return _allows_all(value) or (isinstance(value, dict) and _allows_texts(value))
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "unevaluatedItems" | "unevaluatedProperties":
            return _allows_all(value)
        case "not":
            return value is False
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains":
            return "contains" not in schema or (value == 0 and "maxContains" not in schema)
        case "maxContains":
            return "contains" not in schema
        case "if":
            return not {"then", "else"} & schema.keys()
        case "then" | "else":
            return "if" not in schema
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value == {}
        case "maxLength" | "maxItems" | "maxProperties":
            return isinstance(value, int) and value >= _MANY
        case "deprecated" | "contentSchema":
            return True
    return False


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _allows_texts(schema: dict[str, Any]) -> bool:
    """Whether a schema of nothing but types allows texts."""
    types = schema.get("type")
    is_in = types == "string" or (isinstance(types, list) and "string" in types)
    return is_in and schema.keys() <= _ANNOTATIONS | {"type"}


def _takes_integers_alone(types: Any) -> bool:
    """Whether the numbers of these types are integers."""
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


_INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}


def _inward(name: str, bound: Any) -> Any:
    """The next bound of integers that the library does not round: itself, if it is below 2**53."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= 1 << 53:
        return bound
    sign = _INWARD[name]
    if sign * bound > _LARGEST:
        return bound  # no integer that the library knows
    bound = int(max(sign * bound, -_LARGEST))
    rounded = int(float(bound))
    return sign * (rounded if rounded >= bound else int(math.nextafter(float(bound), math.inf)))
