"""`/v1/responses` over HTTP, through OpenAI's client: streamed and whole responses are equal."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response
from tokenizers import Tokenizer

from scheduler_service.api.http.responses.conversation import items_of, to_chat_request
from scheduler_service.api.http.responses.requests import ResponsesRequest
from testing.serving.http_server import HttpServer, serve_http, server_of_the_module
from tests.contract.http.response_items import PATH, TOOLS, items
from tests.contract.http.scripted import CALL, SECOND, TEMPLATE, Say, make_tool_checkpoint
from tests.contract.http.shared import CHAT

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

USED = ("function_call", "weather", '{"city": "Oslo"}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


async def both(server: HttpServer, **asked: Any) -> Response:
    """Create a response whole and streamed, check that both are equal, and return it."""
    asked = {"model": "chatty", "input": "hi", "max_output_tokens": 150} | asked
    whole = await server.openai.responses.create(**asked)
    Response.model_validate(whole.model_dump(warnings="error"))
    events = [event async for event in await server.openai.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    streamed = events[-1].response
    assert items(streamed) == items(whole)
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    assert _told(events) == items(whole)
    return whole


def _told(events: list[Any]) -> list[tuple[Any, ...]]:
    """Return the output items that the deltas of a stream add up to."""
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(added)))
    texts = ["" for _ in added]
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == added[event.output_index].item.id
            texts[event.output_index] += event.delta
    names = [(event.item.name,) if event.item.type == "function_call" else () for event in added]
    return [(event.item.type, *name, text) for event, name, text in zip(added, names, texts, strict=True)]


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    "more", [{"include": [LOGPROBS]}, {"top_logprobs": 2}, {"include": [LOGPROBS], "top_logprobs": 3}]
)
async def test_logprobs_are_those_of_a_chat_without_its_reasoning(
    server: HttpServer, say: Say, more: dict[str, Any]
) -> None:
    say("<think>\nhm\n</think>\n\nhello there")
    asked = {"model": "chatty", "input": "hi", "tools": TOOLS, "tool_choice": "none", **more}
    whole = await server.openai.responses.create(**asked)
    (part,) = whole.output[-1].content
    num = more.get("top_logprobs", 0)
    assert whole.top_logprobs == num
    question = {"messages": [{"role": "user", "content": "hi"}]}
    chat = await server.post(CHAT, **question, include_reasoning=False, logprobs=True, top_logprobs=num)
    assert [entry.model_dump() for entry in part.logprobs] == chat.json()["choices"][0]["logprobs"]["content"]
    text = "".join(entry.token for entry in part.logprobs)
    assert "hello there" in text
    assert "hm" not in text
    events = [event async for event in await server.openai.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert events[-1].response.output[-1].content[0].logprobs == part.logprobs
    told = [entry.model_dump() for event in deltas for entry in event.logprobs]
    whole_list = [entry.model_dump() for entry in done.logprobs]
    assert told == whole_list[: len(told)], "behind the last text only its end comes"
    assert len(whole_list) - len(told) <= 1
    field = "top_logprobs" if num else "include"
    assert (await server.refusal(PATH, input="hi", tools=TOOLS, **more))["param"] == field


async def test_each_message_has_the_logprobs_of_its_own_tokens(model: Path, say: Say) -> None:
    (model / "chat_template.jinja").write_text(f"{{# <|channel|> <|message|> #}}{TEMPLATE}")
    say(
        "<|channel|>commentary<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>two"
    )
    async with serve_http(model) as server:
        asked = {"model": "chatty", "input": "hi", "include": [LOGPROBS], "stream": True}
        events = [event async for event in await server.openai.responses.create(**asked)]
    (model / "chat_template.jinja").write_text(TEMPLATE)
    first, reasoning, second = events[-1].response.output
    assert reasoning.type == "reasoning"
    texts = ["".join(entry.token for entry in message.content[0].logprobs) for message in (first, second)]
    assert ["one" in text for text in texts] == [True, False]
    assert ["two" in text for text in texts] == [False, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [("message", "hello")]),
        (CALL, [USED]),
        (f"I look.\n{CALL}\n{SECOND}", [("message", "I look."), USED, ("function_call", "now", "{}")]),
        (f"<think>\nhm\n</think>\n\n{CALL}", [("reasoning", "hm"), USED]),
        ("<think>\nhm\n</think>\n\nhello", [("reasoning", "hm"), ("message", "hello")]),
        ("", []),
    ],
    ids=str,
)
async def test_output_items(server: HttpServer, say: Say, text: str, expected: list[tuple[Any, ...]]) -> None:
    say(text)
    response = await both(server, tools=TOOLS)
    assert (items(response), response.status) == (expected, "completed")
    assert all(item.status == "completed" for item in response.output)


async def test_a_response_that_is_cut(server: HttpServer, model: Path, say: Say) -> None:
    say(CALL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cut = len(tokenizer.encode(CALL.partition("slo")[0]).ids)
    response = await both(server, tools=TOOLS, max_output_tokens=cut)
    assert items(response) == [("function_call", "weather", '{"city": "O')]
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("thought", ["hm", "", "What is asked for is a greeting, " * 3])
async def test_usage(server: HttpServer, model: Path, say: Say, thought: str) -> None:
    say(f"<think>{thought}</think>hello")
    usage = (await both(server)).usage
    assert usage is not None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    of_reasoning = tokenizer.encode(thought, add_special_tokens=False).ids
    assert usage.output_tokens_details.reasoning_tokens == len(of_reasoning)
    assert usage.output_tokens > len(of_reasoning)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("background", [False, True])
async def test_an_answer_says_what_was_used(model: Path, tmp_path: Path, say: Say, background: bool) -> None:
    """A response reports the options that were used.

    Open Responses requires each of them, and sampling options must not be null.
    """
    own = tmp_path / "chatty"
    shutil.copytree(model, own)
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 0.25}))
    asked: dict[str, Any] = {"temperature": 0.75, "presence_penalty": 0.5, "max_tool_calls": 3}
    asked |= {
        "prompt_cache_key": "key",
        "safety_identifier": "me",
        "user": "me",
        "metadata": {"a": "b"},
    }
    say("hello")
    async with serve_http(own) as server:
        for given in ({}, asked):
            extra = {"frequency_penalty": 0.25} if given else {}
            begun = await server.post(PATH, input="hi", background=background, **given, **extra)
            answer = begun.json()
            while answer["status"] in ("queued", "in_progress"):
                answer = (await server.client.get(f"{PATH}/{answer['id']}")).json()
            Response.model_validate(answer, strict=True)
            used = {"temperature": 0.5, "top_p": 0.25, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            used |= {"max_tool_calls": None, "prompt_cache_key": None, "safety_identifier": None, "top_logprobs": 0}
            used |= {"user": None, "metadata": {}}
            used |= {"service_tier": "default", "truncation": "disabled"}
            used |= given | extra
            assert {name: answer[name] for name in used} == used
            assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
            completed_at = answer["completed_at"]
            assert completed_at is None if background else answer["created_at"] <= completed_at


async def test_only_completed_responses_have_a_completion_time(server: HttpServer, say: Say) -> None:
    say("hello, hello, hello")
    events = await server.openai.responses.create(model="chatty", input="hi", max_output_tokens=2, stream=True)
    async for event in events:
        if hasattr(event, "response"):
            assert event.response.completed_at is None


async def test_input_tokens_are_counted(server: HttpServer, say: Say) -> None:
    say("hello")
    asked: dict[str, Any] = {"input": "hi", "instructions": "be kind", "tools": TOOLS}
    first = await server.openai.responses.create(model="chatty", **asked)
    assert first.usage is not None
    count = server.openai.responses.input_tokens.count
    counted = await count(model="chatty", **asked, truncation="auto", parallel_tool_calls=True)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    asked |= {"input": "and?", "previous_response_id": first.id}
    second = await server.openai.responses.create(model="chatty", **asked)
    assert second.usage is not None
    assert (await count(model="chatty", **asked)).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        await count(model="chatty", input="hi", previous_response_id="resp_never")
    assert caught.value.code == "previous_response_not_found"
    assert (await server.refusal(f"{PATH}/input_tokens", input=[]))["param"] == "input"


async def test_a_conversation_is_the_chat_that_it_means() -> None:
    given = {
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "c"}]},
            {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "message", "role": "assistant", "content": "e"},
        ],
    }
    calls = [
        [{"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}]
        for number, name in (("1", "f"), ("2", "g"))
    ]
    request = msgspec.convert(given, ResponsesRequest)
    assert list(to_chat_request(request, items_of(request)).messages) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls[0]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "assistant", "content": "", "tool_calls": calls[1]},
        {"role": "assistant", "content": "e"},
    ]


async def test_no_two_items_have_one_id(server: HttpServer, say: Say) -> None:
    """Item ids are unique in a conversation. Otherwise paging through the items after a given id would never end."""
    say("hello")
    given = [{"role": "user", "content": text, "id": "same"} for text in "abc"]
    first = await server.openai.responses.create(model="chatty", input=given)
    again = [*(item.model_dump() for item in first.output), *given]
    second = await server.openai.responses.create(model="chatty", input=again, previous_response_id=first.id)
    for response, texts in ((first, "abc"), (second, [*"abc", "hello", "hello", *"abc"])):
        pages = server.openai.responses.input_items.list(response.id, limit=1, order="asc")
        listed = [item async for item in pages]
        assert [item.content[0].text for item in listed] == [*texts]
        assert (listed[0].id, len({item.id for item in listed})) == ("same", len(texts))


@pytest.mark.parametrize(("mode", "kind"), [("auto", "triggered_tags"), ("required", "tags_with_separator")])
async def test_some_tools_may_be_allowed(server: HttpServer, say: Say, mode: str, kind: str) -> None:
    say(CALL)
    whole = dict(next(tool for tool in TOOLS if tool["name"] == "weather"))  # only its name matters
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [whole]}
    response = await server.openai.responses.create(model="chatty", input="hi", tools=TOOLS, tool_choice=choice)
    assert items(response) == [USED]
    [calls, _] = msgspec.json.decode(server.stack.worker.grammars[-1].text)["format"]["elements"]
    assert (calls["type"], len(calls["tags"])) == (kind, 1)
    choice["tools"][0]["name"] = "other"
    assert (await server.refusal(PATH, input="hi", tools=TOOLS, tool_choice=choice))["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("input", {"input": []}),
        ("input[0].role", {"input": [{"role": "robot", "content": "x"}]}),
        ("input", {"input": [{"type": "item_reference", "id": "1"}]}),
        ("max_output_tokens", {"max_output_tokens": 100_000}),
        ("background", {"background": True, "store": False}),
        ("tools[0].type", {"tools": [{"type": "computer"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}),
    ],
    ids=str,
)
async def test_what_is_refused(server: HttpServer, param: str, asked: dict[str, Any]) -> None:
    assert (await server.refusal(PATH, **{"input": "hi"} | asked))["param"] == param
