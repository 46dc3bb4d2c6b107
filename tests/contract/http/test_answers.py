"""The parts of answers and refusals by which clients decide what to do next."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.contract.http.door import HttpServer, make_chat_checkpoint
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


# Too long by their tokens, and so long that their tokens are not counted.
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
            more = {"stream": True} if is_streamed and path != EMBEDDINGS else {}
            error = await server.refusal(path, **asked, **more)
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"this model's maximum context length is {LENGTH} tokens: ")
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
            await client.messages.create(model="chatty", max_tokens=9, **question)  # type: ignore[call-overload]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


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
