"""`/v1/chat/completions` over HTTP: conversations are rendered by the chat template, responses have OpenAI's form."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from testing.scheduler_stack import expected_tokens
from testing.serving.http_server import HttpServer, joined, make_chat_checkpoint, server_of_the_module

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

PATH = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chatty"
    return make_chat_checkpoint(path, short="{{ messages[0].content }}", failing="{{ raise_exception('not so') }}")


async def prompt_of(server: HttpServer, model: Path, messages: Sequence[dict[str, Any]], **fields: Any) -> str:
    """Return the prompt text to which the chat template rendered a conversation."""
    response = await server.post(PATH, messages=messages, max_tokens=1, return_token_ids=True, **fields)
    assert response.status_code == 200, response.text
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return tokenizer.decode(response.json()["prompt_token_ids"], skip_special_tokens=False)


async def test_an_answer_has_the_shape_of_openai(server: HttpServer, model: Path) -> None:
    answer = await server.chat("hello", seed=0, max_tokens=9, n=2, return_token_ids=True, logprobs=True)
    ChatCompletion.model_validate(answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["token_ids"] == expected_tokens(answer["prompt_token_ids"], 9)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 18
    assert await prompt_of(server, model, [QUESTION]) == "<user>hello\n<assistant>"


async def test_streamed_is_as_whole(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.002
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"stop": "e"}):
        asked = {"messages": [QUESTION], "seed": 0, "max_tokens": 30, "n": 2, **more}
        whole = (await server.chat("hello", **asked))["choices"]
        events = await server.events(PATH, **asked)
        for event in events:
            ChatCompletionChunk.model_validate(event)
        for choice in whole:
            first, *parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
            assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            if "logprobs" in more:
                assert joined(part["logprobs"]["content"] for part in parts) == choice["logprobs"]["content"]


async def test_logprobs_have_true_bytes(server: HttpServer) -> None:
    answer = await server.chat("hello", seed=0, max_tokens=30, logprobs=True, top_logprobs=3, return_token_ids=True)
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == 30
    assert bytes(joined(entry["bytes"] for entry in entries)).decode(errors="replace") == choice["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    for entry in entries:
        content = bytes(entry["bytes"])
        text = content.decode() if _is_text(content) else "".join(f"\\x{byte:02x}" for byte in content)
        assert entry["token"] == text
    assert (await server.refusal(PATH, messages=[QUESTION], top_logprobs=3))["param"] == "top_logprobs"


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


async def test_usage_counts_from_nothing(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.002
    both = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": [QUESTION], "max_tokens": 5, "ignore_eos": True, "logprobs": True}
    events = await server.events(PATH, **asked, stream_options=both)
    *counts, last = [event["usage"]["completion_tokens"] for event in events]
    assert (counts[0], counts[-1], last) == (0, 5, 5)
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<user>ab\n"),
        ([QUESTION, {"role": "assistant", "content": None}], "<user>hello\n<assistant>\n"),
        ([QUESTION, {"role": "assistant"}], "<user>hello\n<assistant>\n"),
        ([{"role": "critic", "content": "hello", "name": "x"}], "<critic>hello\n"),
    ],
    ids=str,
)
async def test_messages_as_they_come(
    server: HttpServer, model: Path, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert await prompt_of(server, model, messages) == f"{prompt}<assistant>"


async def test_what_the_template_is_told(server: HttpServer, model: Path) -> None:
    assert await prompt_of(server, model, [QUESTION], add_generation_prompt=False) == "<user>hello\n"
    variables = {"chat_template_kwargs": {"mood": "kind"}}
    assert await prompt_of(server, model, [QUESTION], **variables) == "<user>hello\n<assistant>kind"
    assert await prompt_of(server, model, [QUESTION], chat_template="short") == "hello"
    goes_on = [QUESTION, {"role": "assistant", "content": "once "}]
    assert await prompt_of(server, model, goes_on, continue_final_message=True) == "<user>hello\n<assistant>once "
    for field, asked in {
        "chat_template": {"chat_template": "{{ 1 }}"},
        "messages": {"chat_template": "failing"},
        "continue_final_message": {"continue_final_message": True, "add_generation_prompt": True},
    }.items():
        assert (await server.refusal(PATH, messages=goes_on, **asked))["param"] == field


async def test_a_length_beyond_the_room_is_lowered(server: HttpServer) -> None:
    whole = await server.chat("hello", ignore_eos=True)
    asked = {"ignore_eos": True, "max_completion_tokens": 32_000, "max_tokens": 1, "seed": 0}
    lowered = await server.chat("hello", **asked)
    assert lowered["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert lowered["choices"][0]["finish_reason"] == "length"
    *_, last = await server.events(PATH, messages=[QUESTION | {"content": "hello"}], **asked)
    assert last["choices"][0]["finish_reason"] == "length"
    error = await server.refusal(PATH, messages=[QUESTION], min_tokens=5, max_completion_tokens=4)
    assert error["param"] in ("min_tokens", "max_completion_tokens")


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("messages", {"messages": []}),
        ("messages[0]", {"messages": [{"content": "x"}]}),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
        ("messages[0]", {"messages": ["hello"]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 3000}]}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_tokens", {"max_tokens": 5000}),
        ("max_tokens", {"max_tokens": 0}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("top_k", {"top_k": -2}),
        ("stop[0]", {"stop": [""]}),
        ("max_token", {"max_token": 5}),
    ],
    ids=str,
)
async def test_what_is_refused_names_its_field(server: HttpServer, field: str, asked: dict[str, Any]) -> None:
    for stream in (False, True):
        error = await server.refusal(PATH, **({"messages": [QUESTION], "stream": stream} | asked))
        assert error["param"] == field, error
        assert error["type"] == "invalid_request_error"


async def test_an_answer_goes_on_with_the_last_message(server: HttpServer) -> None:
    goes_on = {"messages": [QUESTION, {"role": "assistant", "content": "once "}], "max_tokens": 5, "seed": 0}
    plain = (await server.chat(**goes_on, continue_final_message=True))["choices"][0]["message"]
    echoed = {**goes_on, "continue_final_message": True, "echo": True}
    assert (await server.chat(**echoed))["choices"][0]["message"]["content"] == "once " + plain["content"]
    events = await server.events(PATH, **echoed)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "once " + plain["content"]
    critic = {"messages": [{"role": "critic", "content": "well"}], "add_generation_prompt": False}
    assert (await server.chat(**critic))["choices"][0]["message"]["role"] == "critic"
    assert not (await server.chat("hello", echo=True))["choices"][0]["message"]["content"].startswith("hello")


async def test_the_client_of_openai(server: HttpServer) -> None:
    create = server.openai.chat.completions.create
    whole = await create(model="chatty", messages=[QUESTION], max_tokens=9, seed=0)
    text = ""
    stream = await create(model="chatty", messages=[QUESTION], max_tokens=9, seed=0, stream=True)
    async for event in stream:
        text += event.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
