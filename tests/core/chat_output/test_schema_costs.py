"""The cost of a call's schemas before a separate process reads them: proportional to their length, and bounded."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pagewire.common.chat.chat_output import Parameters
from pagewire.common.chat.schema_budget import MAX_CHARS, MAX_VALUES, SchemaBudget, SchemaBudgetError
from pagewire.common.grammars.structural_tag import structural_tag_to_lark
from testing.chat_output.spellings import SPELLINGS, Call
from testing.chat_output.splitting import Functions, parts_of
from tests.growth import check_costs, check_growth

FORMATS = ("hermes", "qwen-coder", "pythonic")  # arguments in JSON, between tags, and in Python syntax


def referring(num: int, targets: Callable[[int], list[int]]) -> dict[str, Any]:
    """Return a schema with `num` definitions; definition i is an `anyOf` over the definitions `targets(i)`."""
    definitions = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{j}"} for j in targets(i)]} for i in range(num)}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": definitions}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return {"properties": {"a": schema}}


SCHEMAS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "wide": (100, lambda n: {"properties": {f"p{i}": {"type": ["string", "null"]} for i in range(n)}}),
    "required": (
        200,
        lambda n: {"properties": {f"p{i}": True for i in range(n)}, "required": [f"q{i}" for i in range(n)]},
    ),
    "deep": (100, nested),
    "listed": (750, lambda n: {"properties": {"a": {"enum": [f"v{i}" for i in range(n)]}}}),
    "long": (25_000, lambda n: {"properties": {"a": {"type": "integer", "description": "x" * n}}}),
    # n references each, to few definitions
    "cyclic": (100, lambda n: referring(3, lambda _: list(range(3)) * (n // 9))),
    "branching": (100, lambda n: referring(8, lambda i: [i + 1] * (n // 8))),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_schema_cost_grows_linearly(kind: str, name: str) -> None:
    size, make = SCHEMAS[kind]
    tag = SPELLINGS[name].chat_format.structural_tag
    check_growth(kind, lambda n: partial(tag, {"f": make(n)}, ""), size)


OVERSIZED: dict[str, dict[str, Any]] = {
    "values": {"properties": {"a": {"default": [0] * MAX_VALUES}}},
    "texts": {"description": "x" * (MAX_CHARS + 1)},
    "names": {"properties": {"x" * (MAX_CHARS + 1): True}},
    "references": referring(150, lambda _: list(range(150))),
    "one definition of many": {
        "properties": {f"p{i}": {"$ref": "#/$defs/x"} for i in range(500)},
        "$defs": {"x": {"anyOf": [{}] * 500}},
    },
}


@pytest.mark.parametrize("kind", OVERSIZED)
def test_oversized_schemas_are_refused(kind: str) -> None:
    with pytest.raises(SchemaBudgetError, match=rf"^more than ({MAX_VALUES} values|{MAX_CHARS} characters)$"):
        Parameters(OVERSIZED[kind], SchemaBudget())


def test_functions_share_a_budget() -> None:
    functions: Functions = {name: {"default": [0] * (MAX_VALUES // 2)} for name in ("f", "g")}
    chat_format = SPELLINGS["hermes"].chat_format
    chat_format.structural_tag({"f": functions["f"]}, "")
    for call in (chat_format.structural_tag, lambda functions, prompt: chat_format.parser(prompt, functions)):
        with pytest.raises(SchemaBudgetError):
            call(functions, "")


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "pythonic", "lfm"])
def test_definitions_are_counted_before_they_are_copied(name: str) -> None:
    properties: dict[str, object] = {f"p{i}": {"type": "integer"} for i in range(1000)}
    functions: Functions = {"f": {"properties": properties, "$defs": {"a": {"description": "x" * 100_000}}}}
    tracemalloc.start()
    try:
        with pytest.raises(SchemaBudgetError, match=f"{MAX_CHARS} characters"):
            json.dumps(SPELLINGS[name].chat_format.structural_tag(functions, ""))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_CHARS
    properties = {key: properties[key] for key in ("p0", "p1")}
    tag = SPELLINGS[name].chat_format.structural_tag({"f": functions["f"] | {"properties": properties}}, "")
    assert json.dumps(tag).count("x" * 100_000) % 2 == 0


@pytest.mark.parametrize("name", ["qwen-coder", "glm"])
def test_types_are_found_once_an_output(name: str) -> None:
    def read(num_types: int) -> object:
        spelling = SPELLINGS[name]
        functions: Functions = {"f": {"properties": {"text": {"anyOf": [{"type": "string"}] * num_types}}}}
        pieces = [spelling.spell([Call("f", {"text": "x"})])] * 500
        return parts_of(spelling.chat_format, functions, "", pieces)

    check_costs("types", lambda: partial(read, 1), lambda: partial(read, 3000), 6)


def test_tags_in_order_say_of_each_whether_it_is_required() -> None:
    tag = {"begin": "a", "content": {"type": "any_text"}, "end": "b"}
    for required, reason in (
        ([True, False], "has 1 tags, but required has 2 entries"),
        ("x", "as required, which must be a list of true or false"),
        (None, "no 'required'"),
    ):
        form = {"type": "tags_in_order", "tags": [tag]} | ({} if required is None else {"required": required})
        with pytest.raises(ValueError, match=reason):
            structural_tag_to_lark(json.dumps({"type": "structural_tag", "format": form}), {}, ())
