"""The parts of responses and errors from which clients decide what to do next."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from tokenizers import Tokenizer

from pagewire.common import __version__
from pagewire.kernels.sampling import lowest_kept
from scheduler_service.api.http.requests import LEAST_TOP_P
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.core.simulated_worker import SimulatedWorker
from testing.fake_worker import FakeWorker
from testing.serving.http_server import CHAT_TEMPLATE, HttpServer, joined, make_chat_checkpoint, serve_http
from tests.contract.http.scripted import make_tool_checkpoint
from tests.contract.http.shared import CHAT, COMPLETION
from tests.contract.pooling import write_pooling

EMBEDDINGS, MESSAGES, RESPONSES = "/v1/embeddings", "/v1/messages", "/v1/responses"
QUESTION = {"role": "user", "content": "hello"}
LENGTH = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty")
    write_pooling(path, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    return path


# Prompts that are too long by their tokens, and prompts whose tokens the server does not count, because the text is too
# large.
@pytest.mark.parametrize("text", ["x " * 200, "x" * 300_000, "x" * 2_000_000], ids=["counted", "bytes", "prompt"])
async def test_agents_learn_that_a_prompt_is_too_long(server: HttpServer, text: str) -> None:
    question = {"messages": [{"role": "user", "content": text}]}
    for path, asked in {
        CHAT: question,
        COMPLETION: {"prompt": text},
        RESPONSES: {"input": text},
        EMBEDDINGS: {"input": text},
    }.items():
        for is_streamed in (False, True):
            more = {"stream": True} if is_streamed and path not in (EMBEDDINGS, RESPONSES) else {}
            error = await server.refusal(path, **asked, **more)
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"this model's maximum context length is {LENGTH} tokens: ")
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
            await client.messages.create(model="chatty", max_tokens=9, **question)  # type: ignore[call-overload]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("text", ["x " * 200, "x" * 2_000_000], ids=["counted", "bytes"])
async def test_a_streamed_response_to_a_prompt_that_is_too_long_fails_in_an_event(
    server: HttpServer, text: str
) -> None:
    """A prompt that is too long ends a stream with an event, because Codex compacts its conversation then.

    Codex gives up after an error status.
    """
    stream = await server.openai.responses.create(model="chatty", input=text, stream=True)
    created, failed = [event async for event in stream]
    assert (created.type, failed.type) == ("response.created", "response.failed")
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "context_length_exceeded"
    assert failed.response.error.message.startswith(f"this model's maximum context length is {LENGTH} tokens: ")
    assert (await server.stack.loads()).num_prompt_tokens == 0
    other = await server.refusal(RESPONSES, input="x", stream=True, temperature=-1)
    assert other["code"] is None


async def test_the_tokens_that_are_too_many_are_counted(server: HttpServer) -> None:
    error = await server.refusal(COMPLETION, prompt=[5] * 300)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "300 tokens" in error["message"]
    error = await server.refusal(MESSAGES, messages=[{"role": "user", "content": "x " * 200}], max_tokens=1)
    number, _, most = error["message"].partition("prompt is too long: ")[2].partition(" tokens > ")
    assert int(number) > int(most.partition(" ")[0]) == LENGTH - 1
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.completions.create(model="chatty", prompt=[5], max_tokens=LENGTH)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize("asked", [{"max_tokens": 0}, {"prompt": []}, {"truncate_prompt_tokens": -2}], ids=str)
async def test_other_refusals_say_nothing_of_the_context(server: HttpServer, asked: dict[str, Any]) -> None:
    error = await server.refusal(COMPLETION, **{"prompt": "x"} | asked)
    assert error["code"] is None
    assert "context" not in error["message"]


async def test_every_answer_has_an_id_for_its_client(server: HttpServer) -> None:
    chat = await server.openai.chat.completions.create(model="chatty", messages=[QUESTION], max_tokens=1)  # type: ignore[list-item]
    assert (chat._request_id or "").startswith("req_")
    with pytest.raises(openai.NotFoundError) as caught:
        await server.openai.chat.completions.create(model="other", messages=[QUESTION])  # type: ignore[list-item]
    assert (caught.value.request_id or "").startswith("req_")
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "chatty", "messages": [QUESTION], "max_tokens": 1}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = stream.request_id
            await stream.until_done()
    ids = {chat._request_id, caught.value.request_id, message._request_id, streamed}
    for path in ("/version", "/nowhere", "/v1/models"):
        ids.add((await server.client.get(path)).headers["x-request-id"])
    assert len(ids) == 7
    assert None not in ids


async def test_responses_have_a_system_fingerprint(server: HttpServer) -> None:
    """Whole responses and stream events have a `system_fingerprint`, which is the same for every request."""
    asked: dict[str, dict[str, Any]] = {CHAT: {"messages": [QUESTION]}, COMPLETION: {"prompt": "once"}}
    answers = []
    for path, given in asked.items():
        answers.append((await server.post(path, **given, max_tokens=3)).json())
        answers += await server.events(path, **given, max_tokens=3)
    (told,) = {answer["system_fingerprint"] for answer in answers}
    assert told.startswith(f"pagewire-{__version__}-")
    assert {answer["service_tier"] for answer in answers if answer["object"] != "text_completion"} == {"default"}
    message = (await server.post(MESSAGES, messages=[QUESTION], max_tokens=3)).json()
    assert message["usage"]["service_tier"] == "standard"
    assert (await server.post(RESPONSES, input="hello", max_output_tokens=3)).json()["service_tier"] == "default"


async def test_the_fingerprint_is_of_model_and_worker(server: HttpServer, model: Path, tmp_path: Path) -> None:
    async def fingerprint(of: HttpServer) -> str:
        answer: str = (await of.complete(prompt="x", max_tokens=1))["system_fingerprint"]
        return answer

    other = make_chat_checkpoint(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    async with (
        serve_http(other) as second,
        serve_http(model, worker=await FakeWorker.started(model, dtype="bfloat16")) as third,
    ):
        assert len({await fingerprint(each) for each in (server, second, third)}) == 3


async def test_a_chat_without_reasoning_has_null(server: HttpServer) -> None:
    message = (await server.chat("hello", max_tokens=3))["choices"][0]["message"]
    assert message["reasoning"] is message["reasoning_content"] is None


THOUGHT, ANSWER = "<think>\nWhere?\né < </th\n</think>\n\nI <look>.", "I <look>."


@pytest.fixture
async def thinker(tmp_path: Path) -> AsyncIterator[tuple[HttpServer, Tokenizer]]:
    model = make_tool_checkpoint(tmp_path / "thinker")
    async with serve_http(model) as server:
        yield server, Tokenizer.from_file(str(model / "tokenizer.json"))


def write(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, text: str) -> list[int]:
    """Make the model generate a text. Return the token ids, including the end token."""
    script = [*tokenizer.encode(text).ids, 0]

    def next_token(self: SimulatedWorker, row: Any, matcher: object, prefix: int) -> int:
        return script[min(len(row.token_ids) - row.opening.num_prompt_tokens, len(script) - 1)]

    monkeypatch.setattr(SimulatedWorker, "_next_token", next_token)
    return script


async def test_tokens_of_reasoning_are_counted(
    thinker: tuple[HttpServer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reasoning_tokens` counts the tokens between the tags: whole, streamed, cut at any token, and in
    the background.
    """
    server, tokenizer = thinker
    script = write(monkeypatch, tokenizer, THOUGHT)
    begin = len(tokenizer.encode("<think>\n").ids)
    expected = len(tokenizer.encode(THOUGHT.partition("</think>")[0]).ids) - begin
    counted = {}
    for most in (1, begin, begin + 3, begin + expected, len(script)):
        asked: dict[str, Any] = {"messages": [QUESTION], "max_tokens": most, "n": 2}
        whole = (await server.chat(**asked))["usage"]
        events = await server.events(CHAT, **asked, stream_options={"include_usage": True})
        assert events[-1]["usage"] == whole
        counted[most] = whole["completion_tokens_details"]["reasoning_tokens"] / 2
        answer = (await server.post(RESPONSES, input="x", max_output_tokens=most)).json()
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == counted[most]
    assert list(counted.values()) == [0, 0, 3, expected, expected]
    response = await server.openai.responses.create(model="thinker", input="x", background=True)
    while response.status != "completed":
        response = await server.openai.responses.retrieve(response.id)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == expected
    write(monkeypatch, tokenizer, ANSWER)
    assert (await server.chat("x"))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stop", [None, "look"])
async def test_reasoning_that_is_left_out_is_in_no_list_of_tokens(
    thinker: tuple[HttpServer, Tokenizer], monkeypatch: pytest.MonkeyPatch, stop: str | None
) -> None:
    """Omitted reasoning has no token ids and no logprobs, even if a stop text holds tokens back.

    The tags and the final answer keep their tokens.
    """
    server, tokenizer = thinker
    script = write(monkeypatch, tokenizer, THOUGHT)
    asked: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 200, "logprobs": True, "return_token_ids": True}
    asked |= {"stop": stop}
    [whole] = (await server.chat(**asked))["choices"]
    assert whole["token_ids"] == script[: len(whole["token_ids"])]
    [told] = (await server.chat(**asked, include_reasoning=False))["choices"]
    text = tokenizer.decode(told["token_ids"])
    assert text == f"<think>\n</think>\n\n{ANSWER}"[: len(text)]
    assert told["message"]["reasoning"] is None
    num_hidden = len(whole["token_ids"]) - len(told["token_ids"])
    assert told["logprobs"]["content"][-9:] == whole["logprobs"]["content"][-9:]
    assert len(told["logprobs"]["content"]) == len(whole["logprobs"]["content"]) - num_hidden
    events = await server.events(CHAT, **asked, include_reasoning=False)
    choices = [choice for event in events for choice in event["choices"]]
    assert joined(choice.get("token_ids") or [] for choice in choices) == told["token_ids"]
    logprobs = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert joined(logprobs) == told["logprobs"]["content"]


async def test_many_inputs_are_embedded(server: HttpServer) -> None:
    """An embeddings request may have up to 2048 inputs, as in OpenAI's API."""
    answer = (await server.post(EMBEDDINGS, input=[[token_id % 250 + 1] for token_id in range(2048)])).json()
    assert [each["index"] for each in answer["data"]] == list(range(2048))
    error = await server.refusal(EMBEDDINGS, input=[[1]] * 2049)
    assert (error["param"], "at most 2048" in error["message"]) == ("input", True)


async def test_a_conversation_is_embedded(server: HttpServer) -> None:
    """A conversation is embedded as its chat template renders it, without the generation prompt."""
    [of_chat] = (await server.post(EMBEDDINGS, messages=[QUESTION])).json()["data"]
    [of_text] = (await server.post(EMBEDDINGS, input="<user>hello\n")).json()["data"]
    assert of_chat["embedding"] == of_text["embedding"]
    for asked in ({}, {"input": "x", "messages": [QUESTION]}):
        assert (await server.refusal(EMBEDDINGS, **asked))["param"] == "input"
    error = await server.refusal(EMBEDDINGS, messages=[{"role": "user", "content": "x " * 300}])
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_reasoning_may_stay_in_the_content(
    thinker: tuple[HttpServer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`separate_reasoning: false`, as in SGLang, leaves the reasoning with its tags in the content."""
    server, tokenizer = thinker
    write(monkeypatch, tokenizer, THOUGHT)
    answer = await server.chat("x", separate_reasoning=False, max_tokens=200)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (THOUGHT, None)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    events = await server.events(CHAT, messages=[QUESTION], separate_reasoning=False, max_tokens=200)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == THOUGHT
    assert (await server.chat("x", separate_reasoning=True, max_tokens=200))["choices"][0]["message"]["reasoning"]


async def test_reasoning_in_a_channel_may_be_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning may stay in the content even if it has no tags, as in the channels of gpt-oss."""
    model = make_chat_checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{# <|channel|> <|message|> #}")
    written = (("analysis", "hm"), ("final", "sun"), ("analysis", "oh"))
    text = "<|start|>".join(f"<|channel|>{channel}<|message|>{said}<|end|>" for channel, said in written)
    write(monkeypatch, Tokenizer.from_file(str(model / "tokenizer.json")), text)
    expected = "hm\nsun\n\noh"
    async with serve_http(model) as server:
        asked: dict[str, Any] = {"messages": [QUESTION], "separate_reasoning": False, "max_tokens": 200}
        message = (await server.chat("x", **asked))["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (expected, None)
        deltas = [event["choices"][0]["delta"] for event in await server.events(CHAT, **asked)]
        assert "".join(delta.get("content", "") for delta in deltas) == expected
        assert not any("reasoning" in delta for delta in deltas)
        hidden = await server.chat("x", **asked, include_reasoning=False)
        assert hidden["choices"][0]["message"]["content"] == "sun"
        apart = (await server.chat("x", **asked | {"separate_reasoning": True}))["choices"][0]["message"]
        assert (apart["content"], apart["reasoning"]) == ("sun", "hm\noh")


async def test_verbosity_is_a_variable_of_the_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Codex requests low verbosity for model names of OpenAI.

    If the template does not read the variable, the response and the log contain a warning.
    """
    model = make_chat_checkpoint(tmp_path / "model", wordy=CHAT_TEMPLATE + "<{{ verbosity }}>")
    warning = "verbosity is ignored: the chat template of the model does not read it"
    async with serve_http(model) as server:
        for asked, told in (("low", warning), ("high", warning), ("medium", None), (None, None)):
            caplog.clear()
            chat = {"messages": [QUESTION], "verbosity": asked, "max_tokens": 2}
            response = {"input": "hello", "text": {"verbosity": asked}, "max_output_tokens": 2}
            for path, body in ((CHAT, chat), ("/v1/responses", response)):
                for is_streamed in (False, True):
                    answer = await server.post(path, **body, stream=is_streamed)
                    assert answer.status_code == 200, answer.text
                    assert answer.headers.get("warning") == (told and f'299 - "{told}"')
            assert (warning in caplog.text) is (told is not None)
            named = {"verbosity": asked or "medium", "format": {"type": "text"}}
            assert (await server.post("/v1/responses", **response)).json()["text"] == named
            read = await server.post(CHAT, **chat, chat_template="wordy", return_token_ids=True)
            assert "warning" not in read.headers
            prompt = await server.post("/detokenize", tokens=read.json()["prompt_token_ids"])
            assert f"<{asked or ''}>" in prompt.json()["prompt"]
        assert (await server.refusal(CHAT, messages=[QUESTION], verbosity="loud"))["param"] == "verbosity"


@pytest.mark.parametrize(
    ("path", "given"),
    [(COMPLETION, {"prompt": "once"}), (CHAT, {"messages": [QUESTION]}), (MESSAGES, {"messages": [QUESTION]})],
    ids=str,
)
async def test_top_p_of_0_is_the_most_likely_token(server: HttpServer, path: str, given: dict[str, Any]) -> None:
    greedy = {"top_p": 0, "max_tokens": 3}
    assert (await server.post(path, **given, **greedy)).status_code == 200
    assert (await server.refusal(path, **given, **greedy | {"top_p": -0.1}))["param"] == "top_p"


def test_the_least_top_p_leaves_one_token() -> None:
    scaled = torch.randn(512, generator=torch.Generator().manual_seed(1))
    assert lowest_kept(scaled, 0, LEAST_TOP_P, torch.tensor(0.0)) == scaled.max()


@pytest.mark.parametrize("stop", ["", []], ids=str)
async def test_an_empty_stop_text_stops_nothing(server: HttpServer, stop: Any) -> None:
    asked = {"max_tokens": 20, "ignore_eos": True, "seed": 0}
    without = (await server.complete(prompt="x", **asked))["choices"]
    assert (await server.complete(prompt="x", **asked, stop=stop))["choices"] == without
    chat = await server.chat("x", **asked, stop=stop)
    assert chat["choices"] == (await server.chat("x", **asked))["choices"]


async def test_a_length_of_minus_1_is_as_many_as_fit(server: HttpServer) -> None:
    asked = {"ignore_eos": True, "seed": 0}
    for answer in (
        await server.complete(prompt=[5] * 6, max_tokens=-1, **asked),
        await server.chat("x", max_tokens=-1, **asked),
        await server.chat("x", max_completion_tokens=-1, **asked),
    ):
        assert answer["usage"]["total_tokens"] == LENGTH
        assert answer["choices"][0]["finish_reason"] == "length"
    for path, given in ((CHAT, {"messages": [QUESTION]}), (COMPLETION, {"prompt": "x"})):
        for number in (0, -2):
            error = await server.refusal(path, **given, max_tokens=number)
            assert error["param"] == "max_tokens"


async def test_a_schema_may_be_a_value(server: HttpServer) -> None:
    """Accept the form of TGI and huggingface_hub's `InferenceClient`: `{"type": "json", "value": schema}`."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await server.chat("x", response_format={"type": "json", "value": schema}, max_tokens=5)
    assert json.loads(server.stack.worker.grammars[-1].text) == schema


async def test_evaluations_learn_of_the_tokenizer(server: HttpServer, model: Path) -> None:
    told = (await server.client.get("/tokenizer_info")).json()
    assert told["chat_template"] == CHAT_TEMPLATE
    assert told["model_max_length"] == LENGTH
    named = {name: text for name, text in told.items() if name.endswith("_token")}
    assert named == dict(read_model_info(str(model)).special_tokens)
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_class_of_a_tokenizer_is_that_of_its_files(model: Path, tmp_path: Path) -> None:
    for files, expected in (
        ({}, "PreTrainedTokenizerFast"),
        ({"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}}, "Qwen2Tokenizer"),
        ({"config.json": {"tokenizer_class": "GPT2Tokenizer"}}, "GPT2Tokenizer"),
    ):
        path = shutil.copytree(model, tmp_path / expected, dirs_exist_ok=True)
        for name, given in files.items():
            file = path / name
            file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | given))
        assert read_model_info(str(path)).tokenizer_class == expected
    (path / "tokenizer.json").unlink()
    assert read_model_info(str(path)).tokenizer_class == ""
