"""`/v1/messages` over HTTP, through Anthropic's client: streamed and whole messages are equal."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message
from tokenizers import Tokenizer

from scheduler_service.api.http.messages.conversation import chat_of
from scheduler_service.api.http.messages.requests import CountTokensRequest
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http, server_of_the_module
from testing.serving.tenants import KEYS, key_file, write_tenants
from tests.contract.http.scripted import CALL, SECOND, WEATHER, Say, make_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

QUESTION = {"role": "user", "content": "hi"}
TOOLS = [
    {"name": "weather", "description": "Tells.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]
USED = ("tool_use", "weather", {"city": "Oslo"})
LIMIT = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def blocks(message: Message) -> list[tuple[Any, ...]]:
    """Return the content blocks of a message without their ids, as tuples of the block type and its content."""
    told: list[tuple[Any, ...]] = []
    for block in message.content:
        match block.type:
            case "text":
                told.append(("text", block.text))
            case "thinking":
                told.append(("thinking", block.thinking))
            case "tool_use":
                told.append(("tool_use", block.name, block.input))
    return told


async def both(client: anthropic.AsyncAnthropic, **asked: Any) -> Message:
    """Create a message whole and streamed, check that both are equal, and return it."""
    asked = {"model": "chatty", "messages": [QUESTION], "max_tokens": LIMIT} | asked
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        events = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("hello", [("text", "hello")], "end_turn"),
        (CALL, [USED], "tool_use"),
        (f"I look.\n{CALL}\n{SECOND}", [("text", "I look."), USED, ("tool_use", "now", {})], "tool_use"),
        (f"<think>\nhm\n</think>\n\n{CALL}", [("thinking", "hm"), USED], "tool_use"),
        ("", [], "end_turn"),
    ],
    ids=str,
)
async def test_text_thinking_and_tool_use_blocks(
    client: anthropic.AsyncAnthropic, say: Say, text: str, expected: list[tuple[Any, ...]], reason: str
) -> None:
    say(text)
    message = await both(client, tools=TOOLS)
    assert (blocks(message), message.stop_reason) == (expected, reason)


async def test_why_it_ends(client: anthropic.AsyncAnthropic, model: Path, say: Say) -> None:
    say("once upon a time")
    message = await both(client, max_tokens=2)
    assert message.stop_reason == "max_tokens"
    message = await both(client, stop_sequences=["upon"])
    assert (message.stop_reason, message.stop_sequence, blocks(message)) == (
        "stop_sequence",
        "upon",
        [("text", "once ")],
    )
    say(CALL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    num_tokens = len(tokenizer.encode(CALL.partition("slo")[0]).ids)
    asked: Any = {"model": "chatty", "messages": [QUESTION], "tools": TOOLS, "max_tokens": num_tokens}
    whole = await client.messages.create(**asked)
    told = '{"city": "O'
    assert (whole.stop_reason, blocks(whole)) == ("max_tokens", [("tool_use", "weather", {"INVALID_JSON": told})])
    events = await client.messages.create(**asked, stream=True)
    deltas = [event.delta async for event in events if event.type == "content_block_delta"]
    assert "".join(delta.partial_json for delta in deltas) == told


async def test_reasoning_has_a_budget(server: HttpServer, client: anthropic.AsyncAnthropic, say: Say) -> None:
    say("<think>hm</think>hello")
    for kind, has_budget in (("enabled", True), ("disabled", False)):
        message = await both(client, thinking={"type": kind, "budget_tokens": 1024})
        assert blocks(message) == [("thinking", "hm"), ("text", "hello")]
        assert has_budget == any('"max_tokens": 1024' in grammar.text for grammar in server.stack.worker.grammars[-1:])
        server.stack.worker.grammars.clear()


async def test_a_model_without_reasoning_takes_any_budget(tmp_path: Path) -> None:
    asked = {"messages": [QUESTION], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with serve_http(make_chat_checkpoint(tmp_path / "plain")) as server:
        counted = await server.post("/v1/messages/count_tokens", **asked)
        answered = await server.post("/v1/messages", max_tokens=5, **asked)
        assert answered.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]
        assert not server.stack.worker.grammars


async def test_the_tokens_of_a_prompt(client: anthropic.AsyncAnthropic, say: Say) -> None:
    say("x")
    asked = {"model": "chatty", "messages": [QUESTION], "system": "be kind", "tools": TOOLS}
    counted = await client.messages.count_tokens(**asked)  # type: ignore[arg-type]
    async with client.messages.stream(**asked, max_tokens=5) as stream:  # type: ignore[arg-type]
        starts = [event.message async for event in stream if event.type == "message_start"]
    assert starts[0].usage.input_tokens == counted.input_tokens
    final = await client.messages.create(**asked, max_tokens=5)  # type: ignore[call-overload]
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.cache_read_input_tokens > 0


async def test_a_conversation_is_the_chat_that_it_means(server: HttpServer, model: Path) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    asked = {"messages": history, "system": [{"type": "text", "text": "s"}]}
    counted = (await server.post("/v1/messages/count_tokens", **asked)).json()["input_tokens"]
    call = '<tool_call>{"city": "Oslo"}</tool_call>'
    prompt = f"<system>s<user>a<assistant>b{call}<tool>sun<user>c<assistant>"
    assert counted == len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids)
    answer = chat_of(msgspec.convert(asked, CountTokensRequest)).messages[2]
    assert (answer["content"], answer["reasoning_content"]) == ("b", "hm")


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("stop_sequences[0]", {"stop_sequences": [""]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ("top_q", {"top_q": 1}),
    ],
    ids=str,
)
async def test_what_is_refused(server: HttpServer, param: str, asked: dict[str, Any]) -> None:
    response = await server.post("/v1/messages", **{"messages": [QUESTION], "max_tokens": 5} | asked)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert (answer["type"], answer["error"]["param"]) == ("error", param)


async def test_keys_as_the_client_sends_them(model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "tenants.yaml")
    write_tenants(tmp_path / "tenants.yaml")
    front = {"tenants": path, "scheduler_api_key_file": key_file(tmp_path, "root")}
    async with serve_http(model, front=front, tenants=path) as server:
        for key, is_known in ((KEYS["acme"], True), ("other", False)):
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                asked = client.messages.create(model="chatty", messages=[QUESTION], max_tokens=3)  # type: ignore[list-item]
                if is_known:
                    assert (await asked).usage.output_tokens == 3
                else:
                    with pytest.raises(anthropic.AuthenticationError):
                        await asked
