"""`/api/chat` and `/api/generate` of Ollama's API: streamed and whole answers are equal, and equal to OpenAI's API."""

import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from scheduler_service.api.http.ollama.conversation import chat_of
from scheduler_service.api.http.ollama.requests import OllamaCall, OllamaChatRequest, OllamaFunction, OllamaMessage
from scheduler_service.api.http.transport import event_stream
from testing.seeds import seeded
from testing.serving.http_server import (
    HttpServer,
    make_chat_checkpoint,
    noting_requests,
    serve_http,
    server_of_the_module,
)
from tests.contract.http.scripted import CALL, SECOND, WEATHER, Say, make_tool_checkpoint
from tests.growth import check_growth
from tests.thorough import thorough

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

CHAT, GENERATE = "/api/chat", "/api/generate"
QUESTION = {"role": "user", "content": "hi"}
PLAIN = {CHAT: {"messages": [QUESTION]}, GENERATE: {"prompt": "hi"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
NUM_REQUESTS = 3
WORDS = ("once", "upon", "a", "time", "é", "😀", "\n", "hello")
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpServer]:
    """A server of a model whose template has neither tools nor reasoning."""
    async with serve_http(make_chat_checkpoint(tmp_path_factory.mktemp("models") / "plain")) as server:
        yield server


async def lines_of(server: HttpServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """Send a request for a streamed answer, and return the objects of the answer."""
    response = await server.post(path, **body)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson"), response.text
    *lines, rest = response.text.split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


def joined_lines(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the objects of a streamed answer to the whole answer."""
    *_, last = lines
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all("done_reason" not in line for line in lines[:-1])
    messages = [line.get("message", line) for line in lines]
    found: dict[str, Any] = {}
    for name in ("content", "response", "thinking"):
        if text := "".join(message.get(name, "") for message in messages):
            found[name] = text
    calls = list(itertools.chain.from_iterable(message.get("tool_calls", ()) for message in messages))
    logprobs = list(itertools.chain.from_iterable(line.get("logprobs", ()) for line in lines))
    counts = {name: last[name] for name in ("model", "done_reason", "prompt_eval_count", "eval_count")}
    return found | counts | {"tool_calls": [call["function"] for call in calls], "logprobs": logprobs}


async def both(server: HttpServer, path: str, **body: Any) -> dict[str, Any]:
    """Send a request for a streamed and for a whole answer. Check that they are equal, and return the answer."""
    body = PLAIN[path] | {"model": "chatty"} | body
    lines = await lines_of(server, path, **body)
    response = await server.post(path, stream=False, **body)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json"), response.text
    whole = response.json()
    assert joined_lines(lines) == joined_lines([whole])
    for ended in (lines[-1], whole):
        assert all(ended[name] >= 0 for name in TIMES)
        total, *parts = (ended[name] for name in TIMES)
        assert sum(parts) == total > 0
        assert ended["created_at"].endswith("Z")
    assert all(line.get("message", {"role": "assistant"})["role"] == "assistant" for line in lines)
    return joined_lines([whole])


def drawn_options(rng: random.Random) -> dict[str, Any]:
    """Return random options, with the names that they have in Ollama's API."""
    options = {"seed": rng.getrandbits(31), "num_predict": rng.choice((1, rng.randint(2, 60), -1, -2))}
    chances: dict[str, Any] = {
        "temperature": rng.choice((0, 0.7, 1.5)),
        "top_k": rng.randint(1, 50),
        "top_p": rng.uniform(0.1, 1),
        "min_p": 0.05,
        "repeat_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "stop": rng.choice((["o"], ["\n", "never there"], [])),
        "num_ctx": 4096,
        "mirostat": 0,
        "tfs_z": 1.0,
    }
    return options | {name: value for name, value in chances.items() if rng.random() < 0.3}


def openai_options(options: dict[str, Any]) -> dict[str, Any]:
    inert = ("num_ctx", "mirostat", "tfs_z", "num_predict", "repeat_penalty")
    same = {name: value for name, value in options.items() if name not in inert}
    return same | ({"repetition_penalty": options["repeat_penalty"]} if "repeat_penalty" in options else {})


@pytest.mark.parametrize("seed", [0, *thorough(1)])
async def test_answers_equal_those_of_openai(server: HttpServer, seed: int) -> None:
    rng = seeded(seed)
    for _ in range(NUM_REQUESTS):
        text, options = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))), drawn_options(rng)
        limit = options["num_predict"]
        asked: dict[str, Any] = {"options": options}
        same: dict[str, Any] = openai_options(options) | {"max_tokens": max(limit, -1)}
        if rng.random() < 0.3:
            number = rng.choice((0, 3))
            asked |= {"logprobs": True, "top_logprobs": number}
            same |= {"logprobs": True, "top_logprobs": number}
        chat = await both(server, CHAT, messages=[{"role": "user", "content": text}], **asked)
        choice = (await server.chat(text, **same))["choices"][0]
        assert chat.get("content", "") == (choice["message"]["content"] or "")
        assert chat.get("thinking") == choice["message"]["reasoning"]
        assert chat["done_reason"] == choice["finish_reason"]
        assert chat["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        asked_once = await both(server, GENERATE, prompt=text, **asked)
        assert asked_once.get("response") == chat.get("content")
        raw = await both(server, GENERATE, prompt=text, raw=True, **asked)
        logprobs = {"logprobs": asked["top_logprobs"] if "logprobs" in asked else None, "top_logprobs": None}
        completion = await server.complete(prompt=text, **{**same, **logprobs, "top_logprobs": None})
        assert raw.get("response", "") == completion["choices"][0]["text"]
        assert raw["eval_count"] == completion["usage"]["completion_tokens"]
        assert len(raw["logprobs"]) == len((completion["choices"][0]["logprobs"] or {"tokens": ()})["tokens"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", {"content": "hello"}),
        (CALL, {"tool_calls": [("weather", {"city": "Oslo"})]}),
        (
            f"I look.\n{CALL}\n{SECOND}",
            {"content": "I look.", "tool_calls": [("weather", {"city": "Oslo"}), ("now", {})]},
        ),
        (f"<think>\nhm\n</think>\n\n{CALL}", {"thinking": "hm", "tool_calls": [("weather", {"city": "Oslo"})]}),
        ("<think>hm</think>hello", {"thinking": "hm", "content": "hello"}),
        ("", {}),
    ],
    ids=str,
)
async def test_text_thinking_and_tool_calls(server: HttpServer, say: Say, text: str, expected: dict[str, Any]) -> None:
    say(text)
    answer = await both(server, CHAT, tools=TOOLS)
    calls = [(call["name"], call["arguments"]) for call in answer.pop("tool_calls")]
    assert {name: answer[name] for name in ("content", "thinking") if name in answer} | (
        {"tool_calls": calls} if calls else {}
    ) == expected
    assert answer["done_reason"] == "stop"
    lines = [line["message"] for line in await lines_of(server, CHAT, messages=[QUESTION], tools=TOOLS)]
    told = [message["tool_calls"] for message in lines if "tool_calls" in message]
    assert len(told) == bool(calls)
    ids = [call["id"] for calls_of_line in told for call in calls_of_line]
    assert len({*ids}) == len(calls)


async def test_thinking_of_generated_answers(server: HttpServer, say: Say) -> None:
    say("<think>hm</think>hello")
    answer = await both(server, GENERATE, think=True)
    assert (answer["thinking"], answer["response"]) == ("hm", "hello")
    raw = await both(server, GENERATE, raw=True)
    assert (raw.get("thinking"), raw["response"]) == (None, "<think>hm</think>hello")


async def test_why_it_ends(server: HttpServer, say: Say) -> None:
    say("once upon a time")
    for path in PLAIN:
        assert (await both(server, path, options={"num_predict": 2}))["done_reason"] == "length"
        answer = await both(server, path, options={"stop": ["upon"]})
        assert (answer["done_reason"], answer.get("content", answer.get("response"))) == ("stop", "once ")
        assert (await both(server, path, options={"num_predict": 100_000}))["done_reason"] == "stop"


@pytest.mark.parametrize("path", PLAIN)
async def test_a_format_constrains_the_output(server: HttpServer, path: str) -> None:
    grammars, options = server.stack.worker.grammars, {"num_predict": 3, "seed": 1}
    for form, text in (("json", ""), ({"type": "object"}, '{"type":"object"}')):
        grammars.clear()
        await both(server, path, format=form, options=options)
        assert [grammar.text for grammar in grammars[:1]] == [text]
    grammars.clear()
    await both(server, path, format="", options=options)
    assert not grammars


async def test_a_conversation_is_the_chat_that_it_means(server: HttpServer, rendered: list[Any]) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    history = [
        {"role": "System", "content": "s", "images": []},
        QUESTION,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call, {"function": {"index": 1, "name": "now"}}]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", **call}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    await server.post(CHAT, messages=history, options={"num_predict": 1}, stream=False)
    [messages] = rendered
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool")
    ]
    first, second = messages[2]["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": "Oslo"}
    assert messages[2]["reasoning_content"] == "hm"
    assert (messages[3]["tool_call_id"], messages[3]["name"]) == (second["id"], "now")
    assert (messages[4]["tool_call_id"], messages[4]["name"]) == (first["id"], "weather")
    assert (messages[5]["tool_calls"][0]["id"], messages[6]["tool_call_id"]) == ("c", "c")


async def test_many_results_of_tools_without_calls_cost_linear_time() -> None:
    def prepare(size: int) -> Callable[[], object]:
        calls = [OllamaCall(OllamaFunction("weather"))] * size
        results = [OllamaMessage("tool", tool_name="now")] * size
        return partial(chat_of, OllamaChatRequest(messages=[OllamaMessage("assistant", tool_calls=calls), *results]))

    check_growth("calls and results of another tool", prepare, 500)


async def test_an_unfinished_answer_is_continued(server: HttpServer) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "once upon"}]
    answer = await both(server, CHAT, messages=messages, options={"seed": 3, "num_predict": 9})
    chat = await server.chat(
        messages=messages, seed=3, max_tokens=9, continue_final_message=True, add_generation_prompt=False
    )
    assert answer.get("content", "") == chat["choices"][0]["message"]["content"]


async def test_a_request_without_a_question_loads_nothing(server: HttpServer) -> None:
    for path, empty in ((CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""}), (GENERATE, {})):
        for keep_alive, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
            response = await server.post(path, model="chatty", **empty, keep_alive=keep_alive)
            answer = response.json()
            assert (answer["done"], answer["done_reason"], answer["model"]) == (True, reason, "chatty")
            assert answer["message" if path == CHAT else "response"] in ("", {"role": "assistant", "content": ""})
    await both(server, CHAT, options={"num_predict": 1, "seed": 1})


async def test_a_model_that_no_worker_has_loaded(model: Path) -> None:
    async with serve_http(model) as server:
        server.stack.stop_now.set()
        server.stack.stop.set()
        await server.front.until_ready(False)
        for asked in ({}, PLAIN[CHAT]):
            response = await server.post(CHAT, **asked)
            assert response.status_code == 503
            assert response.json().keys() == {"error"}


async def test_penalties_apply_to_all_tokens_or_none(server: HttpServer) -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    for options, expected in (
        (penalties, (1.5, 0.5, 0.25)),
        (penalties | {"repeat_last_n": -1}, (1.5, 0.5, 0.25)),
        (penalties | {"repeat_last_n": 0}, (1, 0, 0)),
        ({"repeat_last_n": 64}, (1, 0, 0)),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, (1, 0, 0)),
    ):
        for path in PLAIN:
            with noting_requests() as begun:
                await server.post(path, **PLAIN[path], options=options | {"num_predict": 1})
            [(_, _, request)] = begun
            found = request.sampling
            assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == expected


async def test_unset_options_have_the_models_own_values(tmp_path: Path) -> None:
    folder = make_chat_checkpoint(tmp_path / "chatty")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    async with serve_http(folder) as server:
        for path in PLAIN:
            with noting_requests() as begun:
                await server.post(path, **PLAIN[path], options={"num_predict": 1, "seed": -1})
                await server.post(path, **PLAIN[path], options={"num_predict": 1, "seed": -1})
            assert {(each.sampling.temperature, each.sampling.top_k) for _, _, each in begun} == {(0.25, 7)}
            assert len({each.seed for _, _, each in begun}) == 2


TOO_LONG = {"messages": [{"role": "user", "content": "x " * 200}]}


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (CHAT, {"messages": [{**QUESTION, "images": ["aGk="]}]}, "messages[0].images is"),
        (GENERATE, {"images": ["aGk="]}, "the model reads text only"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is"),
        (GENERATE, {"context": [1]}, "use /api/chat, and send the conversation"),
        (GENERATE, {"suffix": "x"}, "leave suffix unset"),
        (GENERATE, {"raw": True, "system": "s"}, "system is set, but no chat template renders the prompt"),
        (GENERATE, {"raw": True, "think": True}, "think is set, but no chat template renders the prompt"),
        (CHAT, {"think": "much"}, "think is"),
        (CHAT, {"format": "yaml"}, "format is"),
        (CHAT, {"truncate": True}, "a prompt that is too long is refused"),
        (CHAT, {"shift": True}, "outputs end at the maximum sequence length"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs is set, but logprobs is not true"),
        (GENERATE, {"top_logprobs": 3}, "top_logprobs is set, but logprobs is not true"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21"),
        (CHAT, {"options": {"num_predict": 0}}, "options.num_predict is 0; send at least 1"),
        (GENERATE, {"raw": True, "options": {"num_predict": 0}}, "options.num_predict is 0; send at least 1"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat is not a field"),
        (CHAT, {"options": {"typical_p": 0.5}}, "options.typical_p is not a field"),
        (CHAT, {"options": {"temprature": 1}}, "did you mean temperature?"),
        (CHAT, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n is 64"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature is -1"),
        (CHAT, {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (CHAT, {"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name is 'weather', the name of an earlier tool"),
        (CHAT, TOO_LONG, "this model's maximum context length is 256 tokens"),
        (GENERATE, {"prompt": "x " * 200}, "this model's maximum context length is 256 tokens"),
    ],
    ids=str,
)
async def test_what_is_refused(server: HttpServer, path: str, asked: dict[str, Any], told: str) -> None:
    for stream in (None, False):
        response = await server.post(path, **PLAIN[path] | asked, stream=stream)
        assert (response.status_code, response.headers["content-type"]) == (400, "application/json"), response.text
        answer = response.json()
        assert answer.keys() == {"error"}
        assert told in answer["error"]
        assert "\n" not in answer["error"]


async def test_a_model_without_reasoning_or_tools(plain: HttpServer) -> None:
    for path in PLAIN:
        for level in (True, "low"):
            response = await plain.post(path, model="plain:latest", **PLAIN[path], think=level)
            assert response.status_code == 400
            assert response.json()["error"] == '"plain:latest" does not support thinking; leave think unset'
        without = await both(plain, path, model="plain", options={"seed": 1, "num_predict": 4})
        assert await both(plain, path, model="plain", think=False, options={"seed": 1, "num_predict": 4}) == without
    response = await plain.post(CHAT, messages=[QUESTION], tools=TOOLS)
    assert "the model's format of tool calls is unknown" in response.json()["error"]


async def test_a_failure_within_a_stream_is_its_last_line(model: Path) -> None:
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.02
        asked = PLAIN[CHAT] | {"options": {"seed": 0}}
        async with server.client.stream("POST", CHAT, json=asked) as stream:
            lines = stream.aiter_lines()
            assert json.loads(await anext(lines))["done"] is False
            server.stack.stop_now.set()
            server.stack.stop.set()
            *told, last = [json.loads(line) async for line in lines]
    assert all(line["done"] is False for line in told)
    assert last.keys() == {"error"}


async def test_a_silent_stream_has_no_comments(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.02)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.1
        assert len(await lines_of(server, CHAT, **PLAIN[CHAT], options={"num_predict": 3, "seed": 1})) > 1


async def test_text_in_front_of_a_suffix(tmp_path: Path) -> None:
    folder = make_chat_checkpoint(tmp_path / "coder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    asked = {"prompt": "once", "suffix": " time"}
    async with serve_http(folder) as server:
        answer = await both(server, GENERATE, model="coder", **asked, options={"seed": 2, "num_predict": 9})
        completion = await server.complete(**asked, seed=2, max_tokens=9)
        shown = await server.post("/api/show", model="coder")
    assert answer["response"] == completion["choices"][0]["text"]
    assert answer["prompt_eval_count"] == completion["usage"]["prompt_tokens"]
    assert "insert" in shown.json()["capabilities"]
