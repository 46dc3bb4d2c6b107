"""Tool schemas that cannot be enforced in full: calls are constrained as far as possible, and a warning says so."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagewire.common.grammars.json_schema import enforceable, for_llguidance, without_unset
from scheduler_service.api.http import prompts
from testing.serving.http_server import HttpServer, serve_http, server_of_the_module
from tests.contract.http.scripted import CALL, WEATHER, Say, make_tool_checkpoint
from tests.growth import check_growth

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
QUESTION = {"role": "user", "content": "hi"}
LENGTH = 1024
CITY = WEATHER["properties"]["city"]  # type: ignore[index]
KIND = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
# Keyed by the keyword that cannot be enforced: a schema with the keyword, and the schema that is enforced.
SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, {"type": "array"}),
    "not": ({**CITY, "not": {"const": "Rome"}}, CITY),
    "if": ({**CITY, "if": {"const": "Rome"}, "then": {"minLength": 2}}, {**CITY, "then": {"minLength": 2}}),
    "pattern": ({"type": "string", "pattern": "^(?!Rome).*$"}, {"type": "string"}),
    **{
        f"pattern{' ' * number}": ({"type": "string", "pattern": text}, {"type": "string"})
        for number, text in enumerate((r"\AOslo\Z", r"\cA", "^[^]+$", "a{,5}"), 1)
    },
    "contains": ({"type": "array", "contains": {"const": 1}}, {"type": "array"}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object"}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object"}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^(?=a)": CITY}, "additionalProperties": False},
        {"type": "object"},
    ),
    "$ref": ({"$ref": "https://example.com/schema.json"}, {}),
    # A reference is resolved from the root of the schema.
    "$ref ": ({"$ref": "#/$defs/a", "$defs": {"a": CITY}}, {"$defs": {"a": CITY}}),
    "required": ({"type": "object", "required": True}, {"type": "object"}),
    "minProperties": (
        {"type": "object", "properties": {"a": CITY}, "minProperties": 1},
        {"type": "object", "properties": {"a": CITY}},
    ),
    "type": ({"type": "any", "maxLength": 4}, {"maxLength": 4}),
    "oneOf ": (
        {"oneOf": [KIND, KIND | {"required": []}], "discriminator": {"propertyName": "kind"}},
        {"anyOf": [KIND, KIND | {"required": []}], "discriminator": {"propertyName": "kind"}},
    ),
    "oneOf": ({"oneOf": [CITY, {"type": "string"}]}, {"anyOf": [CITY, {"type": "string"}]}),
}


def within(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"city": inner}}


def warning(*left_out: str) -> str:
    return f"keywords in tool schemas that are not enforced: {', '.join(left_out)}"


def asked(path: str, schema: dict[str, Any], *, required: bool = False, **tool: Any) -> dict[str, Any]:
    """Return a request with one tool for the given path."""
    named = {"name": "weather"} | tool
    match path:
        case "/v1/messages":
            choice: Any = {"type": "any"} if required else {"type": "auto"}
            given: dict[str, Any] = named | {"input_schema": schema}
            body: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 150}
        case "/v1/responses":
            choice, given = "required" if required else "auto", {"type": "function", **named, "parameters": schema}
            body = {"input": "hi", "store": False}
        case _:
            choice = "required" if required else "auto"
            given = {"type": "function", "function": named | {"parameters": schema}}
            body = {"messages": [QUESTION]}
    return body | {"tools": [given], "tool_choice": choice}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty", max_model_len=LENGTH)


def enforced(server: HttpServer) -> list[Any]:
    """Return the schemas of the tool calls in the last grammar."""
    form = json.loads(server.stack.worker.grammars[-1].text)["format"]
    return [tag["content"]["json_schema"] for tag in form["elements"][0]["tags"]]


# Each tool is enforced as far as possible with these options. The quick test uses one of them for each keyword in turn.
LENIENT = ({}, {"strict": False}, {"strict": True}, {"required": True}, {"required": True, "strict": False})


@pytest.mark.parametrize("step", [len(LENIENT), pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_keyword_that_cannot_be_enforced_is_left_out(
    server: HttpServer, say: Say, caplog: pytest.LogCaptureFixture, path: str, step: int
) -> None:
    say(CALL)
    for number, (keyword, (given, kept)) in enumerate(SCHEMAS.items()):
        for more in LENIENT[number % step :: step]:
            caplog.clear()
            answer = await server.post(path, **asked(path, within(given), **more))
            assert (keyword, answer.status_code) == (keyword, 200), answer.text
            assert answer.headers["warning"] == f'299 - "{warning(keyword.strip())}"'
            assert warning(keyword.strip()) in caplog.text
            assert "Oslo" in answer.text
            assert enforced(server) == [within(kept)]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_strict_tool_that_must_be_called_is_refused_by_name(server: HttpServer, say: Say, path: str) -> None:
    say(CALL)
    for keyword, (given, _) in SCHEMAS.items():
        answer = await server.post(path, **asked(path, within(given), required=True, strict=True))
        error = answer.json()["error"]
        assert answer.status_code == 400
        if keyword.strip() != "oneOf":  # alternatives are checked one by one, and some can be enforced
            assert error["param"] == "tools[0]"
            assert f"the schema of 'weather' has {keyword.strip()}, which cannot be enforced" in error["message"]
    answer = await server.post(path, **asked(path, WEATHER, required=True, strict=True))
    assert (answer.status_code, "warning" in answer.headers) == (200, False)
    assert enforced(server) == [WEATHER]


NULLS = ("properties", "required", "items", "enum", "additionalProperties", "$defs", "anyOf", "oneOf", "allOf", "not")
MORE_NULLS = ("if", "uniqueItems", "pattern", "patternProperties", "propertyNames", "contains", "$ref", "format")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_keyword_that_is_null_is_not_set(
    server: HttpServer, say: Say, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A keyword that is null counts as unset, because some serializers write every keyword.

    In `const` and `default`, null is a value.
    """
    say(CALL)
    nulls = dict.fromkeys((*NULLS, *MORE_NULLS, "minimum", "maxItems", "minLength", "description"))
    given = {**nulls, **WEATHER, "properties": {"city": CITY, "days": {**nulls, "type": "array"}}}
    kept = {**WEATHER, "properties": {"city": CITY, "days": {"type": "array"}}}
    for more in ({}, {"required": True, "strict": False}):
        answer = await server.post(path, **asked(path, given, **more))
        assert (answer.status_code, "warning" in answer.headers) == (200, False), answer.text
        assert enforced(server) == [kept]
    bare = {"type": "object", "properties": None, "required": None, "$defs": None}
    for schema in (bare, given):
        answer = await server.post(path, **asked(path, schema, required=True, strict=True))
        assert answer.status_code == 200, answer.text
    seen: list[Any] = []
    render = prompts.render
    monkeypatch.setattr(
        prompts, "render", lambda *args, **given: seen.append(given["variables"]) or render(*args, **given)
    )
    assert (await server.post(path, **asked(path, given))).status_code == 200
    assert seen[0]["tools"][0]["function"]["parameters"] == kept
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}
    assert (await server.post(CHAT, messages=[QUESTION], max_tokens=2, response_format=form)).status_code == 200


async def test_strict_is_no_part_of_a_prompt(server: HttpServer, say: Say) -> None:
    say("hello")
    rendered = [
        (await server.post(path, **asked(path, WEATHER, **more), **shown)).json()
        for path in (f"{CHAT}/render",)
        for more in ({}, {"strict": True}, {"strict": False})
        for shown in ({"request_id": "same"},)
    ]
    assert rendered[0] == rendered[1] == rendered[2]


async def test_schemas_that_are_not_enforced_cause_no_warning(model: Path, say: Say) -> None:
    say(CALL)
    async with serve_http(model, front={"strict_tools": False}) as server:
        given, _ = SCHEMAS["not"]
        answer = await server.post(CHAT, **asked(CHAT, within(given), required=False), max_tokens=100)
        assert (answer.status_code, "warning" in answer.headers) == (200, False)


async def test_128_tools_of_239_kb(server: HttpServer, say: Say) -> None:
    say(CALL)
    properties = {"city": CITY | {"description": "c" * 600}, "day": {"type": "string", "description": "d" * 600}}
    schema = WEATHER | {"properties": properties}
    tools = [
        {"type": "function", "function": {"name": name, "description": "e" * 500, "parameters": schema}}
        for name in ("weather", *(f"t{index}" for index in range(127)))
    ]
    assert len(json.dumps(tools)) > 239_000
    answer = await server.post(CHAT, messages=[QUESTION], tools=tools, max_tokens=100)
    assert (answer.status_code, "warning" in answer.headers) == (200, False), answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Oslo"}')
    assert enforced(server) == [WEATHER | {"properties": {"city": CITY, "day": {"type": "string"}}}] * 128


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_schemas_as_other_languages_and_apis_write_them(server: HttpServer, say: Say, path: str) -> None:
    """Schemas of other APIs and languages are accepted.

    Gemini's types are in capitals, and Lua, Go's maps and protobuf have no integers.
    """
    say(CALL)
    city = {"type": "STRING", "enum": ["Oslo"], "minLength": 1.0, "maxLength": 9.0}
    given = {"type": "OBJECT", "properties": {"city": city}, "required": ["city"], "minProperties": 1.0}
    kept = given | {"type": "object", "properties": {"city": city | {"type": "string"}}}
    for more in ({}, {"required": True, "strict": False}):
        answer = await server.post(path, **asked(path, given, **more))
        assert (answer.status_code, "warning" in answer.headers) == (200, False), answer.text
        assert enforced(server) == [kept]
    assert for_llguidance({"minLength": 1.0, "maxItems": 2.5}).items() >= {"minLength": 1, "maxItems": 2.5}.items()


def test_null_is_a_value_where_it_may_be_one() -> None:
    for schema in ({"const": None}, {"enum": [None]}, {"properties": {"a": {"const": None}}}):
        assert schema == enforceable(schema, schema, set()) == without_unset(schema)
        assert schema.items() <= for_llguidance(schema).items()
    assert without_unset({"default": None, "enum": None}) == {"default": None}


def test_what_can_be_enforced_is_kept() -> None:
    for schema in (
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"const": {"not": 1}}}},
        {"type": "object", "properties": {"never": {"not": {}}}},
        {"type": "array", "items": {"pattern": r"^\d(?:a|b)$"}, "uniqueItems": False},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"properties": {"a": {"$ref": "#/$defs/a~1b%20c/anyOf/1"}}, "$defs": {"a/b c": {"anyOf": [{}, {"const": 1}]}}},
        {"properties": {"a": {"$ref": "#"}}},
        {"oneOf": [{"type": "string"}], "discriminator": {"propertyName": "kind"}},
        {
            "oneOf": [KIND, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"b": KIND | {"properties": {"kind": {"const": "b"}}}},
        },
    ):
        left_out: set[str] = set()
        assert enforceable(schema, schema, left_out) == schema
        assert not left_out
    assert enforceable({}, {"title": "a", "properties": {"title": {"description": "b"}}}, set()) == {
        "properties": {"title": {}}
    }


def test_schemas_of_any_form_are_read() -> None:
    """Invalid schemas are read without an error here, because the grammar library refuses them."""
    keywords = (*NULLS, *MORE_NULLS, "type", "minProperties", "maxLength", "discriminator", "dependentRequired")
    odd: list[Any] = [None, True, 5, 1.5, "#/x", "(", [], [[]], [{}, {}], [5, 5], ["a", 5, {}], {}, {"a": 5}]
    odd += [{"propertyName": name} for name in ("a", 5)] + [[{"required": 5}, {"$ref": 5}], {"a": {"required": {}}}]
    for first, second in itertools.product(keywords, repeat=2):
        for one, other in itertools.product(odd, repeat=2):
            schema = {first: one, second: other}
            enforceable(schema, schema, set())
            without_unset(schema)


def test_references_to_one_large_schema_are_read_in_linear_time() -> None:
    def read(number: int) -> None:
        large = {"required": [*map(str, range(number)), "kind"]}
        chosen = {"oneOf": [{"$ref": "#/$defs/a"}] * number, "discriminator": {"propertyName": "kind"}}
        left_out: set[str] = set()
        enforceable(root := chosen | {"$defs": {"a": large}}, root, left_out)
        assert not left_out

    check_growth("references to one schema", partial(partial, read), 5000)
