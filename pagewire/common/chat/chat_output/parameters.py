"""The parameters of functions: the parts of their JSON Schemas that the tool call formats need."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagewire.common.chat.schema_budget import SchemaBudget

_VALUES_EACH = 4  # the charge for the format of a function and of each property, beyond the values of its schema
_LISTED_PER_VALUE = 8  # that many types and enumerated values cost as much time as one schema
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Parameters:
    """The parameters of one function that a model may call, as described by a JSON Schema.

    Attributes:
        schema: the JSON Schema of the parameters.
        properties: the schemas of the properties that the schema names.
        required: the names of the required properties.
        types: the JSON types that each property allows, as far as the schema specifies them.
    """

    def __init__(self, schema: Any, budget: SchemaBudget) -> None:
        """Read the JSON Schema of one function's parameters. All functions of a request share `budget`, which limits
        the size of their schemas. Raises SchemaBudgetError if the budget is exceeded.
        """
        budget.take_tree(schema)
        named: dict[str, Any] = schema if isinstance(schema, dict) else {}
        properties = named.get("properties")
        self.schema = schema
        self.properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        budget.take(_VALUES_EACH * (1 + len(self.properties)))
        self.required = frozenset(name for name in _listed(named, "required") if isinstance(name, str))
        self.types = {key: _types_of(value, schema, budget) for key, value in self.properties.items()}
        self._definitions = {key: named[key] for key in ("$defs", "definitions") if key in named}
        self._budget = budget

    def json_form(self, key: str) -> dict[str, Any]:
        """Return the structural tag format (a grammar in JSON) for the value of one property of a function's
        parameters. The property's schema may refer to definitions in the whole schema, so these definitions are copied
        into the format. Raises SchemaBudgetError if the copies exceed the budget.
        """
        value = self.properties[key]
        if self._definitions and isinstance(value, dict):
            self._budget.take_tree(self._definitions)
            value = {**value, **self._definitions}
        return {"type": "json_schema", "json_schema": value}


def read_functions(functions: Mapping[str, Any]) -> dict[str, Parameters]:
    """Return a mapping from the name of each function that a request allows the model to call to the function's
    parameters. The given values are `Parameters` or JSON Schemas. Raises SchemaBudgetError if the schemas are too
    large.
    """
    budget = SchemaBudget()
    return {
        name: given if isinstance(given, Parameters) else Parameters(given, budget) for name, given in functions.items()
    }


def values_in(schema: Any) -> list[Any]:
    """Return the values that a JSON Schema lists in `enum` or `const`, or an empty list."""
    if not isinstance(schema, dict):
        return []
    return [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else ())]


def json_type(value: Any) -> str:
    """Return the name of the JSON type of a Python value, such as "string" or "array"."""
    return _JSON_TYPES.get(type(value), "null")


def _types_of(schema: Any, root: Any, budget: SchemaBudget) -> frozenset[str]:
    """Return the names of the JSON types that a JSON Schema allows, as far as the schema specifies them. Nested schemas
    and references are followed, and each nested schema is visited once.
    """
    types: set[str] = set()
    waiting, visited = [schema], {id(schema)}
    for each in waiting:
        if not isinstance(each, dict):
            continue
        said = each.get("type")
        names, values = said if isinstance(said, list) else [said], values_in(each)
        others = [other for key in ("anyOf", "oneOf", "allOf") for other in _listed(each, key)]
        budget.take(1 + len(others) + (len(names) + len(values)) // _LISTED_PER_VALUE)
        types.update(name for name in names if isinstance(name, str))
        types.update(map(json_type, values))
        for other in (*others, *_referred(each, root, budget)):
            if id(other) not in visited:
                visited.add(id(other))
                waiting.append(other)
    return frozenset(types)


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _referred(schema: dict[str, Any], root: Any, budget: SchemaBudget) -> Iterator[Any]:
    path = schema.get("$ref")
    if isinstance(path, str) and path.startswith("#/"):
        budget.take(path.count("/"), len(path))
        found = root
        for name in path[2:].split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        yield found
