"""HTTP and gRPC return equal results for a request, whole and streamed.

The tests compare tokens, text, logprobs, finish reason and usage. Requests are random, from a printed seed. Stop texts
and stop tokens are parts of the output that the request has without them.
"""

import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio

from pagewire import AsyncClient, SamplingParams, Session
from pagewire.client.completion import Output
from pagewire.client.errors import PagewireError
from testing.scheduler_stack import VOCAB_SIZE
from testing.seeds import seeded
from testing.serving.http_server import HttpServer, joined, serve_http
from testing.serving.over_http import COMPLETIONS, as_over_http, body_of, id_of, outputs_over_http
from testing.serving.received import Received
from tests.thorough import thorough

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEEDS = [0, *thorough(1)]
NUM_REQUESTS = 40
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WORDS = ("once", "upon", "a", "time", "é", "😀", "\n", "hello")
GRAMMARS = ({"json": {"type": "object"}}, {"choice": ["once", "é"]}, {"regex": "[a-z]+"}, {"regex": "[a-z"})
# Options that the scheduler refuses.
ILLEGAL = (
    {"logit_bias": {VOCAB_SIZE: 1.0}},
    {"stop_token_ids": [VOCAB_SIZE]},
    {"max_tokens": 400},
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(model: Path) -> AsyncIterator[HttpServer]:
    async with serve_http(model) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(server: HttpServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.stack.url) as client:
        yield client


def drawn_options(rng: random.Random, **chances: Any) -> dict[str, Any]:
    """Return a random subset of options. Each value of `chances` is a function that draws the option's value."""
    return {name: draw() for name, draw in chances.items() if rng.random() < 0.3}


def draw_request(rng: random.Random) -> dict[str, Any]:
    """Return random arguments for `AsyncClient.stream`."""
    drawn: dict[str, Any] = drawn_options(
        rng, priority=lambda: rng.randint(-2, 2), cache_salt=lambda: "salt", tenant=lambda: "somebody"
    )
    if rng.random() < 0.5:
        drawn["prompt"] = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    else:
        drawn["prompt_token_ids"] = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randint(1, 30))]
    if rng.random() < 0.2:
        drawn["session"] = Session(rng.choice(("", "talk")), rng.choice((None, True)), rng.choice((None, 5)))
    return drawn | {"sampling": _draw_sampling(rng)}


def _draw_sampling(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.choice((1, rng.randint(2, 60))), "n": rng.choice((1, 1, 2, 3))}
    options |= drawn_options(
        rng,
        ignore_eos=lambda: True,
        skip_special_tokens=lambda: False,
        include_stop_str_in_output=lambda: True,
        repetition_penalty=lambda: 1.5,
        presence_penalty=lambda: -1.0,
        frequency_penalty=lambda: 0.5,
    )
    if rng.random() < 0.2:
        width = rng.randint(options["n"], 4)
        return SamplingParams(**options, beam_width=width, length_penalty=rng.choice((1.0, 0.5, -1.0)))
    options |= {"seed": rng.getrandbits(64)}
    options |= drawn_options(
        rng,
        temperature=lambda: rng.choice((0, 0.7)),
        top_k=lambda: rng.randint(0, 50),
        top_p=lambda: rng.uniform(0.1, 1),
        min_p=lambda: 0.05,
        min_tokens=lambda: min(options["max_tokens"], 3),
        logprobs=lambda: rng.choice((0, 1, 5)),
        prompt_logprobs=lambda: rng.choice((0, 3)),
        logit_bias=lambda: {rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5)},
        structured_outputs=lambda: rng.choice(GRAMMARS),
    )
    if rng.random() < 0.1:
        options |= rng.choice(ILLEGAL)
    return SamplingParams(**options)


async def with_stops(client: AsyncClient, arguments: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the request, sometimes with a stop text or stop token that occurs in its output."""
    sampling = arguments["sampling"]
    if sampling.beam_width or sampling.structured_outputs or rng.random() < 0.4:
        return arguments
    received = await receive(outputs_of(client, arguments))
    if received.error is not None:
        return arguments
    sample = rng.choice(list(received.samples.values()))
    if rng.random() < 0.5 and sample.text:
        start = rng.randrange(len(sample.text))
        stop = sample.text[start : start + rng.randint(1, 3)]
        return arguments | {"sampling": replace(sampling, stop=[stop, "never there"], min_tokens=0)}
    return arguments | {"sampling": replace(sampling, stop_token_ids=[rng.choice(sample.token_ids)])}


async def outputs_of(client: AsyncClient, arguments: dict[str, Any]) -> AsyncGenerator[Output, None]:
    async with contextlib.aclosing(client.stream(**arguments)) as outputs:
        async for output in outputs:
            yield output


async def receive(outputs: AsyncGenerator[Output, None]) -> Received:
    received = Received()
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                received.add(output)
    except PagewireError as error:
        received.error = (type(error).__name__, "")
    return received


@pytest.mark.parametrize("seed", SEEDS)
async def test_completions_are_equal(server: HttpServer, client: AsyncClient, seed: int) -> None:
    rng = seeded(seed)
    reasons = set()
    async with AsyncClient(f"grpc://{server.front.url}") as front:
        for _ in range(NUM_REQUESTS):
            arguments = await with_stops(client, draw_request(rng), rng)
            expected = await receive(outputs_of(client, arguments))
            assert await receive(outputs_of(front, arguments)) == expected, arguments
            shown = as_over_http(expected, arguments)
            for is_streamed in (False, True):
                found = await receive(outputs_over_http(server.client, arguments, is_streamed=is_streamed))
                assert found == shown, f"{arguments}, streamed: {is_streamed}"
            reasons |= {sample.end and sample.end[:2] for sample in shown.samples.values()} or {shown.error}
    assert {("length", None), ("InvalidRequest", "")} < reasons
    assert {type(stop) for reason, stop in reasons if reason == "stop"} >= {str, int}


@pytest.mark.parametrize("seed", SEEDS)
async def test_usage_is_equal(server: HttpServer, client: AsyncClient, seed: int) -> None:
    """Cached tokens are not compared, because they depend on earlier requests."""
    print(f"seed {seed}")
    rng = random.Random(f"usage {seed}")
    for _ in range(NUM_REQUESTS // 2):
        arguments = await with_stops(client, draw_request(rng), rng)
        try:
            counted = await usage_of(client, arguments)
        except PagewireError:
            continue
        body = body_of(arguments)
        whole = await server.complete(**body)
        *_, last = await server.events(COMPLETIONS, **body, stream_options={"include_usage": True})
        for usage in (whole["usage"], last["usage"]):
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == counted, arguments
            assert usage["total_tokens"] == sum(counted)


async def usage_of(client: AsyncClient, arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the number of prompt tokens, and the number of output tokens of all samples. Raises PagewireError."""
    usages = [output.usage async for output in outputs_of(client, arguments) if output.usage is not None]
    (num_prompt_tokens,) = {usage.prompt_tokens for usage in usages}
    return num_prompt_tokens, sum(usage.completion_tokens for usage in usages)


@dataclass(frozen=True)
class MessageParts:
    """The text, finish reason and usage of an output, as any of the chat APIs reports them."""

    text: str
    reason: str
    usage: tuple[int, int]


async def told_by_chat(server: HttpServer, body: dict[str, Any], limit: int) -> tuple[MessageParts, MessageParts]:
    """Return the output as a whole response reports it, and as a stream reports it."""
    whole = await server.chat(max_tokens=limit, **body)
    events = await server.events(CHAT, **body, max_tokens=limit, stream_options={"include_usage": True})
    (choice,) = whole["choices"]
    parts = [part for event in events for part in event["choices"]]
    told = choice["message"]["content"], "".join(part["delta"].get("content") or "" for part in parts)
    reasons = choice["finish_reason"], parts[-1]["finish_reason"]
    usages = ((each["prompt_tokens"], each["completion_tokens"]) for each in (whole["usage"], events[-1]["usage"]))
    first, second = (MessageParts(*each) for each in zip(told, reasons, usages, strict=True))
    return first, second


async def told_by_messages(server: HttpServer, body: dict[str, Any], limit: int) -> tuple[MessageParts, MessageParts]:
    body = {"stop_sequences" if name == "stop" else name: value for name, value in body.items()} | {"max_tokens": limit}
    whole = (await server.post(MESSAGES, **body)).json()
    events = named_events(await server.post(MESSAGES, **body, stream=True))
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    (end,) = (event for event in events if event["type"] == "message_delta")
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
    begun = events[0]["message"]["usage"]
    return (
        MessageParts(
            "".join(block["text"] for block in whole["content"]),
            reasons[whole["stop_reason"]],
            (_input_tokens(whole["usage"]), whole["usage"]["output_tokens"]),
        ),
        MessageParts(text, reasons[end["delta"]["stop_reason"]], (_input_tokens(begun), end["usage"]["output_tokens"])),
    )


def _input_tokens(usage: dict[str, Any]) -> int:
    """Return the number of prompt tokens, including cached tokens, which the API counts separately."""
    return usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)


async def told_by_responses(server: HttpServer, body: dict[str, Any], limit: int) -> tuple[MessageParts, MessageParts]:
    body = {"input" if name == "messages" else name: value for name, value in body.items()}
    body |= {"max_output_tokens": limit, "store": False}
    whole = (await server.post(RESPONSES, **body)).json()
    events = named_events(await server.post(RESPONSES, **body, stream=True))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return _told_by_response(whole), replace(_told_by_response(events[-1]["response"]), text=text)


def _told_by_response(response: dict[str, Any]) -> MessageParts:
    text = "".join(part["text"] for item in response["output"] for part in item["content"])
    usage = response["usage"]
    reason = {"completed": "stop", "incomplete": "length"}[response["status"]]
    return MessageParts(text, reason, (usage["input_tokens"], usage["output_tokens"]))


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = (line for line in response.text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


ToldBy = Callable[[HttpServer, dict[str, Any], int], Awaitable[tuple[MessageParts, MessageParts]]]


@pytest.mark.parametrize("told_by", [told_by_chat, told_by_messages, told_by_responses], ids=lambda each: each.__name__)
@pytest.mark.parametrize("seed", SEEDS)
async def test_conversations_are_equal(server: HttpServer, client: AsyncClient, told_by: ToldBy, seed: int) -> None:
    """A conversation has the same output as the prompt to which it is rendered."""
    print(f"seed {seed}")
    rng = random.Random(f"conversations {seed}")
    for _ in range(NUM_REQUESTS // 2):
        content, limit = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))), rng.randint(1, 40)
        options = {"seed": rng.getrandbits(60)} | drawn_options(
            rng, temperature=lambda: 0.5, top_k=lambda: rng.randint(1, 50), top_p=lambda: 0.5
        )
        arguments = {"prompt": f"<user>{content}\n<assistant>", "sampling": SamplingParams(max_tokens=limit, **options)}
        text = (await receive(outputs_of(client, arguments))).samples[0].text
        if len(text) > 3 and rng.random() < 0.5:
            options["stop"] = [text[2:4]]
            arguments["sampling"] = SamplingParams(max_tokens=limit, **options)
        sample = (await receive(outputs_of(client, arguments))).samples[0]
        expected = MessageParts(sample.text, sample.end[0] if sample.end else "", await usage_of(client, arguments))
        whole, streamed = await told_by(server, {"messages": [{"role": "user", "content": content}]} | options, limit)
        assert (whole, streamed) == (expected, expected), (content, options, limit)


@pytest.mark.parametrize("seed", SEEDS)
async def test_log_probabilities_of_chats_are_equal(server: HttpServer, client: AsyncClient, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(f"chats {seed}")
    for _ in range(NUM_REQUESTS // 4):
        content, limit, num_top = rng.choice(WORDS), rng.randint(1, 30), rng.choice((0, 2, 5, -1))
        listed = rng.choice(([], [], [7, 70, 0]))
        options: dict[str, Any] = {"logprob_token_ids": listed} if listed else {}
        sampling = SamplingParams(max_tokens=limit, seed=rng.getrandbits(60), logprobs=num_top, **options)
        arguments = {"prompt": f"<user>{content}\n<assistant>", "sampling": sampling}
        (sample,) = (await receive(outputs_of(client, arguments))).samples.values()
        expected = [(entry.token_id, entry.logprob, list(entry.top)) for entry in sample.logprobs]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "seed": sampling.seed} | options
        body |= {"max_tokens": limit, "logprobs": True, "top_logprobs": num_top, "return_tokens_as_token_ids": True}
        (choice,) = (await server.chat(**body))["choices"]
        events = await server.events(CHAT, **body)
        parts = [part["logprobs"]["content"] for event in events for part in event["choices"] if part["logprobs"]]
        for found in (choice["logprobs"]["content"], joined(parts)):
            assert [_entry_of(entry) for entry in found] == expected


def _entry_of(entry: dict[str, Any]) -> tuple[int, float, list[tuple[int, float]]]:
    top = [(id_of(each["token"]), each["logprob"]) for each in entry["top_logprobs"]]
    return id_of(entry["token"]), entry["logprob"], top
