"""Unpaired surrogates in the text of clients or models do not break a conversation."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from testing.serving.http_server import HttpServer, serve_http
from tests.contract.http.scripted import Say, make_tool_checkpoint

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
HALVES = {
    "in a value": '{"name": "weather", "arguments": {"city": "\\ud83d"}}',
    "in a key": '{"name": "weather", "arguments": {"\\ude00": "\\ud83d\\ude00"}}',
    "in a name": '{"name": "weather\\ud83d", "arguments": {}}',
    "in a text of JSON": '{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\"}"}',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def free(model: Path) -> AsyncIterator[HttpServer]:
    """A server whose model may write any tool call arguments."""
    async with serve_http(model, front={"strict_tools": False}) as server:
        yield server


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", r'{"prompt": "a\ud83d"}'),
        ("prompt[1]", r'{"prompt": ["\ud83d\ude00", "\uDE00 b"]}'),
        ("metadata.a[0].b", r'{"prompt": "a", "metadata": {"a": [{"b": "\ud83d\ud83d\ude00"}]}}'),
        ("metadata", r'{"metadata": {"\ud83d": 1}, "prompt": "a"}'),
        (None, r'{"prompt": "a", "metadata": "\ud83d'),
        (None, rf'{{"prompt": "\ud83d{"x" * 70_000}"}}'),
        (None, rf'{{"prompt": "\ud83d", "metadata": {"[" * 5000}{"]" * 5000}}}'),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_text_of_a_body_has_whole_characters(server: HttpServer, field: str | None, body: str) -> None:
    headers = {"content-type": "application/json"}
    response = await server.client.post("/v1/completions", content=body.encode(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "an unpaired surrogate, which is not a character; split texts only between characters" in error["message"]


@pytest.mark.parametrize("kind", HALVES)
async def test_chats_continue_after_unpaired_surrogates(free: HttpServer, say: Say, kind: str) -> None:
    say(f"<tool_call>\n{HALVES[kind]}\n</tool_call>")
    asked: dict[str, Any] = {"tools": [FUNCTION], "max_tokens": 100}
    [choice] = (await free.chat("hi", **asked))["choices"]
    [made] = choice["message"]["tool_calls"]
    json.dumps(json.loads(made["function"]["arguments"]), ensure_ascii=False).encode()
    deltas = [event["choices"][0]["delta"] for event in await free.events(CHAT, messages=[QUESTION], **asked)]
    added = [each["function"] for delta in deltas for each in delta.get("tool_calls", ())]
    assert "".join(each["arguments"] for each in added) == made["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": "rain"}
    await free.chat(messages=[QUESTION, choice["message"], result], **asked)


async def test_arguments_of_others_may_have_halves(server: HttpServer) -> None:
    for arguments in ('{"a": "\\ud83d"}', '{"\\uDE00": [1]}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert (await server.post(f"{CHAT}/render", messages=history)).status_code == 200


async def test_responses_continue_after_unpaired_surrogates(free: HttpServer, say: Say) -> None:
    say(f"<tool_call>\n{HALVES['in a value']}\n</tool_call>")
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    asked: dict[str, Any] = {"model": "chatty", "tools": tools, "max_output_tokens": 100}
    first = await free.openai.responses.create(input="hi", **asked)
    [made] = first.output
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    second = await free.openai.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert json.loads(second.output[0].arguments) == {"city": "�"}


async def test_messages_continue_after_unpaired_surrogates(free: HttpServer, say: Say) -> None:
    say(f"<tool_call>\n{HALVES['in a value']}\n</tool_call>")
    asked: dict[str, Any] = {"model": "chatty", "max_tokens": 100}
    asked["tools"] = [{"name": "weather", "input_schema": PARAMETERS}]
    async with anthropic.AsyncAnthropic(base_url=free.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(messages=[QUESTION], **asked)
        async with client.messages.stream(messages=[QUESTION], **asked) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            [block] = message.content
            assert block.input == {"city": "�"}
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            history = [QUESTION, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
            await client.messages.create(messages=history, **asked)
