"""LiteLLM's first steps, run in its own environment: each API that LiteLLM supports for a self-hosted server."""

import asyncio
import json
import os
from typing import Any

import litellm

litellm.suppress_debug_info = True
SERVER = os.environ["SERVER"]
HELLO = "Hello, here is a short text of a model that follows a script."
OPENAI = {"model": "hosted_vllm/chatty", "api_base": f"{SERVER}/v1", "api_key": "none"}
PROVIDERS = [
    OPENAI,
    OPENAI | {"model": "openai/chatty"},
    {"model": "anthropic/chatty", "api_base": SERVER, "api_key": "none"},
    {"model": "ollama_chat/chatty", "api_base": SERVER},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}}]
HI = [{"role": "user", "content": "hi"}]
ASKED = [{"role": "user", "content": "What is the weather in 'Oslo'?"}]
ANSWER_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]} | {
    "additionalProperties": False
}


def chat(provider: dict[str, str]) -> None:
    answer = litellm.completion(messages=HI, **provider)
    assert answer.choices[0].message.content == HELLO, answer
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **provider))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert len(chunks) > 3
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].finish_reason == "stop", whole


def tools(provider: dict[str, str]) -> None:
    answer = litellm.completion(messages=ASKED, tools=TOOLS, **provider)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answer = litellm.completion(messages=[*ASKED, message.model_dump(), result], tools=TOOLS, **provider)
    assert answer.choices[0].message.content == "The result is sun.", answer
    chunks = list(litellm.completion(messages=ASKED, tools=TOOLS, stream=True, **provider))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})


def objects(provider: dict[str, str]) -> None:
    named = {"name": "answer", "schema": ANSWER_SCHEMA, "strict": True}
    answer = litellm.completion(messages=HI, response_format={"type": "json_schema", "json_schema": named}, **provider)
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int), answer


def other_apis() -> None:
    openai = PROVIDERS[1]
    assert litellm.text_completion(prompt="hi", max_tokens=99, **openai).choices[0].text == HELLO
    assert len(litellm.embedding(input=["foo", "bar"], encoding_format="float", **openai).data) == 2
    ollama = {"model": "ollama/chatty", "api_base": SERVER}
    assert litellm.completion(messages=HI, **ollama).choices[0].message.content == HELLO
    assert len(litellm.embedding(input=["foo", "bar"], **ollama).data) == 2
    answer = litellm.responses(input="hi", **openai)
    assert answer.output[-1].content[0].text == HELLO, answer
    answered = asyncio.run(litellm.anthropic.messages.acreate(messages=HI, max_tokens=100, **PROVIDERS[2]))
    assert answered["content"][0]["text"] == HELLO, answered


def errors() -> None:
    long = [{"role": "user", "content": "a " * 300_000}]
    for provider in PROVIDERS:
        # LiteLLM does not recognize this error of Ollama's API.
        is_ollama = provider["model"].startswith("ollama")
        error = type(failure(messages=long, **provider))
        assert error is (litellm.BadRequestError if is_ollama else litellm.ContextWindowExceededError), error


def failure(**request: Any) -> Exception:
    try:
        answer = litellm.completion(**request)
    except litellm.BadRequestError as error:
        return error
    raise AssertionError(f"{request['model']} takes a prompt of any length: {answer}")


for each in PROVIDERS:
    for step in (chat, tools, objects):
        step(each)
        print(f"passed {each['model']} {step.__name__}")
other_apis()
print("passed other_apis")
errors()
print("passed errors")
