"""Requests and outputs with deep nesting: values that are nested too deeply are refused without a server error."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pagewire.common.strict_json import MAX_DEPTH, from_json
from scheduler_service.api.http.messages.answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageUsage,
    Stop,
    ToolUsePart,
)
from scheduler_service.api.http.messages.messages import join_events
from testing.seeds import seeded
from testing.serving.http_server import HttpServer, server_of_the_module
from tests.contract.http.scripted import make_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = '"messages": [{"role": "user", "content": "hi"}]'
TOOLS = '"tools": [{"type": "function", "function": {"name": "now"}}]'
DEEPEST = 1200  # deeper than Python's recursion limit


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def schema(depth: int) -> str:
    """Return a JSON Schema in which the value that the grammar library compiles is nested to the given depth."""
    return f'{{"const": {nested(depth - 1)}}}'


def tag(depth: int) -> str:
    form = '{"type": "any_text"}'
    for _ in range(depth // 2):
        form = f'{{"type": "sequence", "elements": [{form}]}}'
    return json.dumps(f'{{"type": "structural_tag", "format": {form}}}')


def called(arguments: str) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return json.dumps(
        [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "tool_call_id": "1"}]
    )


PLACES: dict[str, tuple[str, Callable[[int], str]]] = {
    "body": (CHAT, lambda depth: nested(depth)),
    "parameters": (CHAT, lambda depth: f'{{{ASKED}, {TOOLS[:-3]}, "parameters": {schema(depth)}}}}}]}}'),
    "schema": (
        CHAT,
        lambda depth: (
            f'{{{ASKED}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema(depth)}}}}}}}'
        ),
    ),
    "json": (
        CHAT,
        lambda depth: f'{{{ASKED}, {TOOLS}, "structured_outputs": {{"json": {json.dumps(schema(depth))}}}}}',
    ),
    "tag": (CHAT, lambda depth: f'{{{ASKED}, {TOOLS}, "structured_outputs": {{"structural_tag": {tag(depth)}}}}}'),
    "budget": (
        CHAT,
        lambda depth: (
            f'{{{ASKED}, "thinking_token_budget": 2, "structured_outputs": {{"structural_tag": {tag(depth)}}}}}'
        ),
    ),
    "arguments": (CHAT, lambda depth: f'{{"messages": {called(nested(depth))}}}'),
    "variables": (CHAT, lambda depth: f'{{{ASKED}, "chat_template_kwargs": {{"mood": {nested(depth)}}}}}'),
    "input_schema": (
        MESSAGES,
        lambda depth: f'{{"max_tokens": 2, {ASKED}, "tools": [{{"name": "now", "input_schema": {schema(depth)}}}]}}',
    ),
    "counted": (
        f"{MESSAGES}/count_tokens",
        lambda depth: f'{{{ASKED}, "tools": [{{"name": "now", "input_schema": {schema(depth)}}}]}}',
    ),
    "responses": (
        RESPONSES,
        lambda depth: (
            f'{{"input": "hi", "tools": [{{"type": "function", "name": "a", "parameters": {schema(depth)}}}]}}'
        ),
    ),
}


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Disable garbage collection.

    Otherwise a collection may run close to the recursion limit, where finalizers and their error reports fail.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


async def status(server: HttpServer, place: str, depth: int) -> int:
    path, make = PLACES[place]
    response = await server.client.post(path, content=make(depth), headers={"content-type": "application/json"})
    return response.status_code


@pytest.mark.parametrize("place", PLACES)
async def test_a_request_is_served_or_refused_at_any_depth(server: HttpServer, place: str) -> None:
    draw = seeded()
    near_python_s = range(880, 1000, 3)  # decodable values that may fail in later code
    for depth in (MAX_DEPTH, DEEPEST, 100_000, *draw.sample(range(2, DEEPEST), 5), *draw.sample(near_python_s, 12)):
        assert await status(server, place, depth) in (200, 400), depth


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("body", "arguments")])
async def test_what_is_nested_less_is_served(server: HttpServer, place: str) -> None:
    assert await status(server, place, 20) == 200


@pytest.mark.parametrize("container", ["[%s]", '{"a": %s}', '[1, {"a": %s}]'])
async def test_json_is_read_up_to_a_depth(container: str) -> None:
    text = "1"
    while (depth := text.count("[") + text.count("{")) <= MAX_DEPTH:
        assert from_json(text) == json.loads(text)
        text = container % text
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} levels deep"):
        from_json(text)
    assert depth > MAX_DEPTH


@pytest.mark.parametrize("text", [nested(depth) for depth in (MAX_DEPTH + 1, 960, 5000)] + ["[" * 5000], ids=len)
async def test_arguments_that_are_nested_too_deeply_stand_as_text(text: str) -> None:
    head = MessageAnswer("msg_1", "message", "assistant", "chatty", [], None, None, MessageUsage(1, 0, 0))
    call = ToolUsePart("toolu_1", "now", {})
    message = join_events(
        [
            MessageStart(head),
            BlockStart(0, call),
            BlockDelta(0, InputDelta(f'{{"a": {text}}}')),
            BlockStop(0),
            MessageDelta(Stop("tool_use", None), MessageUsage(1, 2, 0)),
        ]
    )
    [told] = msgspec.json.decode(msgspec.json.encode(message))["content"]
    assert list(told["input"].values()) == [f'{{"a": {text}}}']
