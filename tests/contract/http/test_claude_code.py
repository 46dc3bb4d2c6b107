"""`/v1/messages` as Claude Code calls it.

Fields that request no effect are accepted. Fields that request an unsupported effect are refused by name. The first
request equals the first request of Claude Code 2.1.197, with shorter texts.
"""

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message
from tokenizers import Tokenizer

from scheduler_service.api.http.messages.conversation import chat_of
from scheduler_service.api.http.messages.requests import CountTokensRequest
from testing.serving.http_server import Begun, HttpServer, noting_requests, serve_http, server_of_the_module
from tests.contract.http.scripted import CALL, WEATHER, Say, make_tool_checkpoint
from tests.growth import check_growth

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
DIRECT = {"type": "direct"}
TEXT_DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "rain"},
    "title": "report",
    "context": "of today",
}
FOUND = {"type": "search_result", "source": "http://x", "title": "news", "content": [{"type": "text", "text": "sun"}]}
REFERENCE = {"type": "tool_reference", "tool_name": "weather"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
COUNTED = {"messages", "system", "tools", "thinking", "output_config", "context_management"}
TOOL = {"name": "weather", "input_schema": WEATHER}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "file_path": {"description": "A path.", "type": "string"},
        "offset": {"description": "A line.", "type": "integer", "minimum": 0, "maximum": 9007199254740991},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "mode": {"type": "string", "enum": ["replace", "insert"], "default": "replace"},
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
FIRST: dict[str, Any] = {
    "model": "chatty",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "reminder"}, {"type": "text", "text": "hi", **CACHED}]},
        {"role": "system", "content": "skills"},
    ],
    "system": [
        {"type": "text", "text": "be kind"},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "Do tasks.", **CACHED},
    ],
    "tools": [{"name": name, "description": "Works.", "input_schema": SCHEMA} for name in ("Read", "Edit")],
    "metadata": {"user_id": "somebody"},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def said(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*blocks]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


class Prompts:
    """Sends requests and returns the prompts to which they are rendered."""

    def __init__(self, server: HttpServer, tokenizer: Tokenizer, begun: list[Begun]) -> None:
        self._server, self._tokenizer, self._begun = server, tokenizer, begun

    async def of(self, **asked: Any) -> str:
        given = {"messages": [QUESTION]} | asked
        self._begun.clear()
        answered = await self._server.post(MESSAGES, **{"max_tokens": 1} | given)
        assert answered.status_code == 200, answered.text
        token_ids = self._begun[0][2].prompt_token_ids
        counted = await self._server.post(COUNT, **{name: given[name] for name in given.keys() & COUNTED})
        assert counted.json() == {"input_tokens": len(token_ids)}
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.fixture
def prompts(server: HttpServer, model: Path) -> Iterator[Prompts]:
    with noting_requests() as begun:
        yield Prompts(server, Tokenizer.from_file(str(model / "tokenizer.json")), begun)


async def test_the_first_request(client: anthropic.AsyncAnthropic, server: HttpServer, say: Say) -> None:
    say("<think>hm</think>hello")
    response = await server.post(MESSAGES, **FIRST)
    assert response.status_code == 200, response.text
    async with client.beta.messages.stream(**{key: FIRST[key] for key in FIRST.keys() - {"stream"}}) as stream:
        message = await stream.get_final_message()
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [
        ("thinking", None),
        ("text", "hello"),
    ]


MAX_MODEL_LEN = 256
PLAIN = "<user>hi<assistant>"


@pytest.mark.parametrize(
    "asked",
    [
        *({name: value} for name, value in (("cache_control", CACHED["cache_control"]), ("speed", "fast"))),
        {"metadata": {"user_id": "x"}, "service_tier": "standard_only", "user_profile_id": "x", "inference_geo": "x"},
        {"context_management": {"edits": []}, "diagnostics": {"previous_message_id": None}, "fallbacks": []},
        {"output_config": {"effort": None, "format": None, "task_budget": None}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}], **CACHED}]},
    ],
    ids=str,
)
async def test_fields_without_effect_do_not_change_the_prompt(prompts: Prompts, asked: dict[str, Any]) -> None:
    assert await prompts.of(**asked) == PLAIN


async def test_fields_of_tools(prompts: Prompts, server: HttpServer) -> None:
    described = {"name": "weather", "input_schema": WEATHER, "description": "Tells."}
    inert = {"eager_input_streaming": True, "defer_loading": True, "allowed_callers": ["direct", "code_execution"]}
    assert await prompts.of(tools=[described | inert | CACHED]) == f"weather,{PLAIN}"
    examples = described | {"input_examples": [{"city": "Oslo"}, {"city": "Rome"}]}
    chat = chat_of(msgspec.convert({"messages": [QUESTION], "tools": [examples]}, CountTokensRequest))
    (tool,) = chat.tools or ()
    assert tool.function.description == 'Tells.\n\nExamples of inputs:\n{"city": "Oslo"}\n{"city": "Rome"}'
    error = await server.refusal(MESSAGES, messages=[QUESTION], max_tokens=1, tools=[TOOL | {"allowed_callers": ["x"]}])
    assert error["param"] == "tools[0].allowed_callers"


async def test_blocks_of_a_history(prompts: Prompts) -> None:
    history = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "e"}, USE | {"caller": DIRECT}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [FOUND, REFERENCE]}]},
        {"role": "user", "content": [TEXT_DOCUMENT, {"type": "text", "text": "c"}]},
    ]
    found = "<document>\nnews\nhttp://x\nsun\n</document>\n\nTool: weather"
    document = "<document>\nreport\nof today\nrain\n</document>\nc"
    call = '<tool_call>{"city": "Oslo"}</tool_call>'
    assert await prompts.of(messages=history) == (f"<user>hi<assistant>{call}<tool>{found}<user>{document}<assistant>")
    content = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    parts = [{"type": "document", "source": content, "citations": {"enabled": False}}]
    asked = [{"role": "user", "content": parts}]
    assert await prompts.of(messages=asked) == "<user><document>\na\nb\n</document>\n<assistant>"


def turns(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation in which each block is an assistant message. A tool call is followed by its result."""
    told: list[dict[str, Any]] = []
    for block in blocks:
        result = [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]
        told += [QUESTION, {"role": "assistant", "content": [block]}]
        told += [{"role": "user", "content": result}] if block is USE else []
    return [*told, QUESTION]


@pytest.mark.parametrize(
    ("edit", "harmless", "changing"),
    [
        ({"type": "clear_thinking_20251015"}, [THOUGHT], [THOUGHT, THOUGHT]),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            [THOUGHT] * 2,
            [THOUGHT] * 3,
        ),
        ({"type": "clear_thinking_20251015", "keep": {"type": "all"}}, [THOUGHT] * 3, None),
        ({"type": "clear_tool_uses_20250919"}, [USE], None),
        (
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 5},
                "keep": {"type": "tool_uses", "value": 1},
            },
            [USE],
            [USE] * 2,
        ),
        (
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 2},
                "keep": {"type": "tool_uses", "value": 1},
            },
            [USE] * 2,
            [USE] * 3,
        ),
        ({"type": "compact_20260112"}, [USE], None),
        ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 20}}, [], [USE]),
    ],
)
async def test_edits_that_change_nothing(
    prompts: Prompts, server: HttpServer, edit: dict[str, Any], harmless: list[Any], changing: list[Any] | None
) -> None:
    without = {"type": "clear_thinking_20251015", "keep": "all"}
    management = {"edits": [without, edit]}
    plain = await prompts.of(messages=turns(*harmless))
    assert await prompts.of(messages=turns(*harmless), context_management=management) == plain
    if changing is not None:
        for path in (MESSAGES, COUNT):
            asked = {"max_tokens": 1} if path == MESSAGES else {}
            error = await server.refusal(path, messages=turns(*changing), context_management=management, **asked)
            assert error["param"] == "context_management.edits[1]"


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("context_management.edits[0]", {"context_management": {"edits": [{"type": "forget"}]}}),
        ("diagnostics.previous_message_id", {"diagnostics": {"previous_message_id": "msg_1"}}),
        ("fallbacks", {"fallbacks": [{"model": "x"}]}),
        ("output_config.task_budget", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}),
        ("thinking.display", {"thinking": {"type": "adaptive", "display": "x"}}),
        ("messages[0].clear_at", {"messages": [QUESTION | {"clear_at": "next_user_message"}]}),
        (
            "messages[0].content[0].citations.enabled",
            {"messages": said(TEXT_DOCUMENT | {"citations": {"enabled": True}})},
        ),
        (
            "messages[0].content[0].source",
            {"messages": said({"type": "document", "source": {"type": "url", "url": "x"}})},
        ),
        ("messages[0].content[0]", {"messages": said(IMAGE)}),
        ("messages[0].content[0]", {"messages": said(USE)}),
        ("messages[0].content[0]", {"messages": said(THOUGHT)}),
        ("messages[1].content[0]", {"messages": [QUESTION, {"role": "assistant", "content": [TEXT_DOCUMENT]}]}),
    ],
    ids=str,
)
async def test_unsupported_fields_are_refused_by_name(server: HttpServer, param: str, asked: dict[str, Any]) -> None:
    error = await server.refusal(MESSAGES, **{"messages": [QUESTION], "max_tokens": 1} | asked)
    assert error["param"].removesuffix(".type") == param


def given_result(message: Message) -> list[dict[str, Any]]:
    """Return tool results for all tool calls of a message."""
    ids = [block.id for block in message.content if block.type == "tool_use"]
    return said(*({"type": "tool_result", "tool_use_id": call_id, "content": "x"} for call_id in ids))


async def test_thinking_has_a_signature_and_may_be_omitted(
    server: HttpServer, client: anthropic.AsyncAnthropic, say: Say
) -> None:
    say(f"<think>hm</think>{CALL}")
    for display, thinking in ((None, "hm"), ("summarized", "hm"), ("omitted", "")):
        given = {"type": "adaptive"} | ({"display": display} if display else {})
        asked: Any = {"model": "chatty", "messages": [QUESTION], "max_tokens": 150, "thinking": given, "tools": [TOOL]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            deltas = [event.delta.type async for event in stream if event.type == "content_block_delta"]
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thought, called = message.content
            assert thought.type == "thinking"
            assert (thought.thinking, bool(thought.signature)) == (thinking, True)
            assert (called.type, message.stop_reason) == ("tool_use", "tool_use")
        assert deltas.count("signature_delta") == 1
        dumped = [block.model_dump() for block in whole.content]  # with the nulls of all unset fields
        parsed = {"type": "text", "text": "x", "citations": None, "parsed_output": {"a": 1}}
        history = [QUESTION, {"role": "assistant", "content": [parsed, *dumped]}, *given_result(whole)]
        assert (await server.post(MESSAGES, messages=history, max_tokens=1, tools=[TOOL])).json().get("error") is None
        again = await client.messages.create(
            **asked | {"messages": [QUESTION, {"role": "assistant", "content": whole.content}, *given_result(whole)]}
        )
        assert again.stop_reason == "tool_use"


async def test_a_length_beyond_the_room_is_lowered(client: anthropic.AsyncAnthropic, say: Say) -> None:
    say("x" * 1000)
    asked: Any = {"model": "chatty", "messages": [QUESTION]}
    prompt = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=64_000, timeout=60)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == MAX_MODEL_LEN - prompt.input_tokens
    async with client.messages.stream(**asked, max_tokens=64_000) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", message.usage.output_tokens)


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli; cch={};"


def texts(*given: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in given]


async def test_the_billing_line_is_left_out(prompts: Prompts) -> None:
    for line in (BILLING.format("1"), BILLING.format("2").removesuffix(";"), BILLING.format("") + "\n"):
        assert await prompts.of(system=texts(line, "be kind")) == f"<system>be kind{PLAIN}"
        assert await prompts.of(system=texts(line)) == await prompts.of(system=line) == PLAIN


@pytest.mark.parametrize(
    "given",
    [
        ["be kind", BILLING.format("1")],
        [f"{BILLING.format('1')} Be kind."],
        [f"{BILLING.format('1')}\nbe kind"],
        [f" {BILLING.format('1')}"],
        ["x-anthropic-billing-header: what is it?"],
        ["x-anthropic-billing-header:"],
        [BILLING.format("1"), BILLING.format("2")],
    ],
    ids=str,
)
async def test_a_text_like_the_billing_line_stays(prompts: Prompts, given: list[str]) -> None:
    kept = given[1:] if len(given) > 1 and given[0].startswith("x-") else given
    assert await prompts.of(system=texts(*given)) == "<system>" + "\n".join(kept) + PLAIN
    user = [{"role": "user", "content": texts(BILLING.format("1"))}]
    assert await prompts.of(messages=user) == f"<user>{BILLING.format('1')}<assistant>"


async def test_a_very_long_billing_line_is_not_parsed() -> None:
    """A regular expression would hold the GIL until it ends, so the server must reject a long line early."""
    for number, num_messages in ((100, 1), (10_000, 2)):
        asked = {"messages": [QUESTION], "system": "x-anthropic-billing-header:" + " a=b;" * number}
        assert len(chat_of(msgspec.convert(asked, CountTokensRequest)).messages) == num_messages


async def test_a_long_line_is_read_in_linear_time() -> None:
    def read(number: int) -> None:
        for line in ("a=b=" * number, "a=b;" * number, "a=b; " * number + "!", "a=" + " " * number + "!"):
            system = f"x-anthropic-billing-header:{line}"
            chat_of(msgspec.convert({"messages": [QUESTION], "system": system}, CountTokensRequest))

    check_growth("a line", lambda number: partial(read, number), 5000)


async def test_images_in_results_are_said_to_be_left_out(
    prompts: Prompts, server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [{"type": "text", "text": "seen"}, IMAGE | CACHED]
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
    history = [QUESTION, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    prompt = await prompts.of(messages=history)
    assert prompt.endswith("<tool>seen\n[An image was left out here: the model reads text only.]<assistant>")
    warning = "images in the results of tools are left out: the model reads text only"
    for path, more in ((MESSAGES, {"max_tokens": 1}), (MESSAGES, {"max_tokens": 1, "stream": True}), (COUNT, {})):
        caplog.clear()
        response = await server.post(path, messages=history, **more)
        assert response.headers["warning"] == f'299 - "{warning}"'
        assert caplog.text.count(warning) == 1
    assert "warning" not in (await server.post(MESSAGES, messages=[QUESTION], max_tokens=1)).headers


async def test_tools_that_run_at_anthropic_are_left_out(prompts: Prompts, server: HttpServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["x"]}
    tools = [search, TOOL, {"type": "code_execution_20260120", "name": "code_execution"}]
    assert await prompts.of(tools=tools) == f"weather,{PLAIN}"
    response = await server.post(MESSAGES, messages=[QUESTION], max_tokens=1, tools=tools)
    assert response.headers["warning"] == '299 - "tools that run at Anthropic are left out: code_execution, web_search"'
    for param, tool in (
        ("tools[0].type", {"type": "bash_20250124", "name": "bash"}),
        ("tools[0].type", {"type": "web_search_20250305 ", "name": "x"}),
        ("tools[0].input_schema", {"type": "custom", "name": "x"}),
        ("tools[0].max_uses", TOOL | {"max_uses": 1}),
    ):
        error = await server.refusal(MESSAGES, messages=[QUESTION], max_tokens=1, tools=[tool])
        assert error["param"] == param
    choice = {"type": "tool", "name": "web_search"}
    error = await server.refusal(MESSAGES, messages=[QUESTION], max_tokens=1, tools=tools, tool_choice=choice)
    assert error["param"] == "tool_choice"


async def test_a_final_answer_is_continued(prompts: Prompts, client: anthropic.AsyncAnthropic, say: Say) -> None:
    for content in ("It is {", texts("It is", " {"), [THOUGHT, *texts("It is {")]):
        history = [QUESTION, {"role": "assistant", "content": content}]
        assert await prompts.of(messages=history, system="be") == "<system>be<user>hi<assistant>It is {"
    for empty in ("", " ", [THOUGHT]):
        prompt = await prompts.of(messages=[QUESTION, {"role": "assistant", "content": empty}])
        assert prompt.startswith(PLAIN)
        assert prompt.endswith("<assistant>")
    say("sunny}")
    message = await client.messages.create(model="chatty", messages=history, max_tokens=20)  # type: ignore[arg-type]
    assert [block.text for block in message.content if block.type == "text"] == ["sunny}"]


async def test_models_for_clients_of_anthropic(client: anthropic.AsyncAnthropic, server: HttpServer) -> None:
    page = await client.models.list()
    (card,) = page.data
    assert (card.id, card.display_name, card.type, card.lifecycle) == ("chatty", "chatty", "model", "active")
    assert (card.max_input_tokens, card.max_tokens) == (MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert not page.has_next_page()
    assert await client.models.retrieve("chatty") == card
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("other")
    assert (await server.openai.models.list()).data[0].object == "model"


async def test_any_name_of_a_model(model: Path, server: HttpServer, say: Say) -> None:
    say("x")
    asked: Any = {"messages": [QUESTION], "max_tokens": 1, "model": "claude-opus-4-8"}
    error = await server.refusal(MESSAGES, status=404, **asked)
    assert "--any-model-name" in error["message"]
    async with serve_http(model, front={"any_model_name": True}) as lenient:
        for path, prompt in ((MESSAGES, {}), ("/v1/chat/completions", {}), (COUNT, {"max_tokens": None})):
            response = await lenient.post(path, **{key: value for key, value in (asked | prompt).items() if value})
            assert response.status_code == 200, response.text
            assert response.json().get("model", "chatty") == "chatty"


@pytest.mark.parametrize(
    ("particular", "later"),
    [
        ("", "<system>s"),
        ("{% if loop.first or message.role != 'system' %}", "<user>System message:\n\ns"),  # gpt-oss
        (
            "{% if message.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% if true %}",
            "<user>System message:\n\ns",  # Qwen3.5
        ),
    ],
)
async def test_a_system_message_after_a_question_in_every_api(tmp_path: Path, particular: str, later: str) -> None:
    model = make_tool_checkpoint(tmp_path / "particular")
    shown = f"{particular}<{{{{ message.role }}}}>{{{{ message.content }}}}{'{% endif %}' if particular else ''}"
    (model / "chat_template.jinja").write_text(
        f"{{% for message in messages %}}{shown}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
    )
    told = {"role": "system", "content": "s"}
    messages = [{"role": "system", "content": "be"}, QUESTION, told]
    prompt = f"<system>be<user>hi{later}<assistant>"
    num_tokens = len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids)
    async with serve_http(model) as server:
        rendered = await server.post("/v1/chat/completions/render", messages=messages)
        assert len(rendered.json()["token_ids"]) == num_tokens
        counted = await server.post(COUNT, system="be", messages=messages[1:])
        assert counted.json() == {"input_tokens": num_tokens}
        answered = await server.post("/v1/responses", instructions="be", input=messages[1:], max_output_tokens=1)
        assert answered.json()["usage"]["input_tokens"] == num_tokens
