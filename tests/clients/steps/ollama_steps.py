"""The calls of Ollama's Python client, run in its own environment: each works, or the server refuses it by name."""

import asyncio
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import ollama
from ollama import AsyncClient, Client, Options, ResponseError
from pydantic import BaseModel

HELLO = "Hello, here is a short text of a model that follows a script."
END = "<end>"  # the token that ends a text; it has a log-probability, too
CLIENT = Client()  # of the variable OLLAMA_HOST
HI = [{"role": "user", "content": "hi"}]
ASKED = [{"role": "user", "content": "What is the weather in 'Oslo'?"}]
MODEL = "chatty"
# A value of each option that changes no output of the model. A client may send all of them.
OPTIONS = dict.fromkeys(Options.model_fields, 1) | {
    **{name: True for name, field in Options.model_fields.items() if "bool" in str(field.annotation)},
    **{"num_predict": 100, "num_ctx": 2048, "stop": ["never"], "temperature": 0.5, "top_p": 0.9, "typical_p": 1.0},
    **{"mirostat": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_penalty": 1.0, "tfs_z": 1.0},
    **{"min_p": 0.1, "logits_all": False, "vocab_only": False, "embedding_only": False, "low_vram": False},
}
OPTIONS |= {"penalize_newline": False, "numa": False, "num_keep": 0}


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """Report the weather of a city.

    Args:
        city: name of the city
    """
    return f"sun in {city}"


def attempt(call: Callable[[], Any]) -> Any:
    """Return the answer of a call, or its error."""
    try:
        return call()
    except ResponseError as error:
        return error


def check_refusal(answer: object, name: str) -> None:
    """Check that an answer is an error of one line that contains a name."""
    assert isinstance(answer, ResponseError), f"{name} is not refused: {answer}"
    assert 400 <= answer.status_code < 600, answer
    # Outside of Ollama's routes, errors have the form of OpenAI's API.
    text = answer.error["message"] if isinstance(answer.error, dict) else answer.error
    assert name in text.lower(), (name, answer)
    assert not text.startswith("{"), text
    print(f"refused {name}: {answer}")


def check_last(last: ollama.GenerateResponse | ollama.ChatResponse, reason: str = "stop") -> None:
    assert (last.done, last.done_reason) == (True, reason), last
    assert last.model == MODEL, last
    counts = (last.eval_count, last.prompt_eval_count, last.total_duration, last.eval_duration)
    assert all(number > 0 for number in counts), last
    assert None not in (last.created_at, last.prompt_eval_duration, last.load_duration), last


def generates() -> None:
    for extra in ({}, {"raw": True}, {"system": "Be brief."}, {"options": {"temperature": 0}}, {"keep_alive": "5m"}):
        whole = CLIENT.generate(MODEL, "hi", **extra)
        assert whole.response == HELLO, whole
        check_last(whole)
        *parts, last = CLIENT.generate(MODEL, "hi", stream=True, **extra)
        assert len(parts) > 3
        assert not any(part.done for part in parts), parts
        assert "".join(part.response for part in [*parts, last]) == HELLO
        check_last(last)
        assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def chats() -> None:
    for messages in (
        HI,
        [{"role": "system", "content": "Be brief."}, *HI],
        [ollama.Message(role="user", content="hi")],
    ):
        whole = CLIENT.chat(MODEL, messages)
        assert (whole.message.role, whole.message.content, whole.message.tool_calls) == ("assistant", HELLO, None)
        check_last(whole)
        *parts, last = CLIENT.chat(MODEL, messages, stream=True)
        assert len(parts) > 3
        assert not any(part.done for part in parts), parts
        assert "".join(part.message.content for part in [*parts, last]) == HELLO
        assert {part.message.role for part in [*parts, last]} == {"assistant"}
        check_last(last)
        assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def calls_tools() -> None:
    answer = CLIENT.chat(MODEL, ASKED, tools=[weather])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert not answer.message.content, answer
    results = [{"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}]
    answer = CLIENT.chat(MODEL, [*ASKED, answer.message, *results], tools=[weather])
    assert answer.message.content == "The result is sun in Oslo.", answer
    parts = list(CLIENT.chat(MODEL, ASKED, tools=[weather], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert not any(part.message.content for part in parts), parts
    check_last(parts[-1])


def writes_objects() -> None:
    for kind in (Person.model_json_schema(), "json"):
        for text in (
            CLIENT.generate(MODEL, "hi", format=kind).response,
            CLIENT.chat(MODEL, HI, format=kind).message.content,
            "".join(part.message.content for part in CLIENT.chat(MODEL, HI, format=kind, stream=True)),
        ):
            value = json.loads(text)
            assert isinstance(value, dict), text
            assert kind == "json" or Person.model_validate(value), text
    assert CLIENT.chat(MODEL, HI, format="").message.content == HELLO
    check_refusal(attempt(lambda: CLIENT.chat(MODEL, HI, format={"type": 7})), "format")


def thinks() -> None:
    messages = [{"role": "user", "content": "Think before you answer."}]
    whole = CLIENT.chat(MODEL, messages, think=True)
    assert (whole.message.thinking, whole.message.content) == ("I think.", HELLO), whole
    parts = list(CLIENT.chat(MODEL, messages, think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "I think.", parts
    assert "".join(part.message.content or "" for part in parts) == HELLO, parts
    assert CLIENT.generate(MODEL, "Think.", think=True).thinking == "I think."


def limits_and_stops() -> None:
    for stream in (False, True):
        parts = CLIENT.generate(MODEL, "hi", options={"num_predict": 5}, stream=stream)
        last = list(parts)[-1] if stream else parts
        check_last(last, "length")
        assert last.eval_count == 5, last
        parts = CLIENT.chat(MODEL, HI, options={"stop": ["short"]}, stream=stream)
        texts = [part.message.content for part in parts] if stream else [parts.message.content]
        assert "".join(texts) == "Hello, here is a ", texts


def options() -> None:
    """Each option that the client knows has its effect or none, or is refused by name."""
    for name, value in OPTIONS.items():
        answer = attempt(lambda option={name: value}: CLIENT.generate(MODEL, "hi", options=option))
        if isinstance(answer, ResponseError):
            check_refusal(answer, name)
        else:
            assert answer.response == HELLO, (name, answer)
    check_refusal(attempt(lambda: CLIENT.generate(MODEL, "hi", options={"colour": 1})), "colour")


def logprobs() -> None:
    whole = CLIENT.chat(MODEL, HI, logprobs=True, top_logprobs=2)
    assert "".join(each.token for each in whole.logprobs) == f"{HELLO}{END}", whole.logprobs
    assert all(len(each.top_logprobs) >= 2 for each in whole.logprobs), whole.logprobs
    parts = list(CLIENT.generate(MODEL, "hi", logprobs=True, stream=True))
    assert "".join(each.token for part in parts for each in part.logprobs or []) == f"{HELLO}{END}", parts


def fills_in() -> None:
    whole = CLIENT.generate(MODEL, "def add", suffix="return")
    assert whole.response == HELLO, whole
    parts = list(CLIENT.generate(MODEL, "def add", suffix="return", stream=True))
    assert "".join(part.response for part in parts) == HELLO


def embeds() -> None:
    one = CLIENT.embed(MODEL, "foo").embeddings
    two = CLIENT.embed(MODEL, ["foo", "bar"], truncate=True, keep_alive="5m").embeddings
    assert (len(one), len(two), two[0]) == (1, 2, one[0])
    assert len(CLIENT.embeddings(MODEL, "foo").embedding) == len(one[0])


def lists() -> None:
    listed = CLIENT.list().models
    assert {each.model.removesuffix(":latest") for each in listed} == {"chatty", "other"}, listed
    assert all(each.digest and each.modified_at and each.details for each in listed), listed
    shown = CLIENT.show(listed[0].model)
    assert {"completion", "tools"} <= set(shown.capabilities), shown.capabilities
    assert any(name.endswith(".context_length") for name in shown.modelinfo), shown.modelinfo
    running = CLIENT.ps().models
    assert {each.model for each in running} <= {each.model for each in listed}, running
    assert all(each.context_length for each in running), running
    answer = CLIENT.generate(listed[0].model, "hi")  # by the listed name
    assert answer.response == HELLO


def loads() -> None:
    for call in (lambda **extra: CLIENT.generate(MODEL, **extra), lambda **extra: CLIENT.chat(MODEL, **extra)):
        assert (call().done, call().done_reason) == (True, "load")
        assert call(keep_alive=0).done_reason == "unload"


def refuses() -> None:
    """Calls that change the models of a server, and inputs that the model does not support."""
    with tempfile.NamedTemporaryFile() as blob:
        for name, call in {
            "pushed": lambda: CLIENT.push(MODEL),
            "created": lambda: CLIENT.create("mine", from_=MODEL),
            "copied": lambda: CLIENT.copy(MODEL, "mine"),
            "deleted": lambda: CLIENT.delete(MODEL),
            "uploaded": lambda: CLIENT.create_blob(blob.name),
            "absent": lambda: CLIENT.pull("absent"),
            "images": lambda: CLIENT.generate(MODEL, "hi", images=["aGk="]),
            "messages": lambda: CLIENT.chat(MODEL, [HI[0] | {"images": ["aGk="]}]),
            "template": lambda: CLIENT.generate(MODEL, "hi", template="{{ .Prompt }}"),
            "width": lambda: CLIENT.generate(MODEL, "hi", width=100),
            "dimensions": lambda: CLIENT.embed(MODEL, "hi", dimensions=10**6),
            "systemone": lambda: CLIENT.systemone(MODEL, "state", {}),
            "context": lambda: CLIENT.generate(MODEL, "hi " * 300_000),
        }.items():
            check_refusal(attempt(call), name)
    assert CLIENT.pull(MODEL).status == "success"
    assert list(CLIENT.pull(MODEL, stream=True))[-1].status == "success"
    for call, name in {CLIENT.push: "pushed", CLIENT.create: "created", CLIENT.pull: "absent"}.items():
        check_refusal(attempt(lambda call=call: list(call("absent", stream=True))), name)


def asynchronous() -> None:
    async def run() -> None:
        client = AsyncClient()
        assert (await client.generate(MODEL, "hi")).response == HELLO
        answers = await asyncio.gather(*(client.chat(MODEL, HI) for _ in range(8)))
        assert {answer.message.content for answer in answers} == {HELLO}
        parts = [part async for part in await client.chat(MODEL, HI, stream=True)]
        assert "".join(part.message.content for part in parts) == HELLO
        assert len((await client.embed(MODEL, ["a", "b"])).embeddings) == 2
        assert (await client.list()).models
        assert (await client.ps()).models
        assert (await client.show(MODEL)).details

    asyncio.run(run())


failed = False
for step in (
    *(generates, chats, calls_tools, writes_objects, thinks, limits_and_stops, options, logprobs, fills_in, embeds),
    *(lists, loads, refuses, asynchronous),
):
    try:
        step()
        print(f"passed {step.__name__}")
    except Exception:
        failed = True
        print(f"FAILED {step.__name__}: {traceback.format_exc()}")
sys.exit(failed)
