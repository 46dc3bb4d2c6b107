"""JSON Schemas as the library is to read them."""

from typing import Any

# Between the parts of JSON stands one space, one end of a line, or nothing: with as much as JSON allows, a model may go
# on with spaces for ever.
_FEW_SPACES = {"whitespace_pattern": r"[ \n]?"}


def with_few_spaces(schema: Any) -> dict[str, Any]:
    """Return a schema that says in "x-guidance" what stands between the parts, as given if it says so itself. Raises
    ValueError for one that is neither an object nor true."""
    if schema is False:
        raise ValueError("the JSON Schema false allows no output")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is an object or true")
    options = schema.get("x-guidance", {})
    if isinstance(options, dict) and not any(name.startswith("whitespace_") for name in options):
        return {**schema, "x-guidance": _FEW_SPACES | options}
    return schema
