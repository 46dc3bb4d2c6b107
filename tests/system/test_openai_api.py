"""Every row of docs/openai_fields.md, sent to a gateway that `pagewire serve --gateway` runs."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from pagewire import Client, PagewireError, SamplingParams
from pagewire.hosting.supervisor import free_port
from testing.gateway import Gateway, wait_until
from testing.services import HOST, Service, children_of
from tests.system import grpcurl
from tests.system.openai_api.chat_completions import FORCED, MESSAGES
from tests.system.openai_api.completions import PROMPT
from tests.system.openai_api.document import OPENAI_ROUTES, ROUTES
from tests.system.openai_api.field import COUNT, Body, Exchange, Field, Route, is_count, merged, without_absent
from tests.system.openai_api.reply import Reply
from tests.system.openai_api.sender import HttpSender, OpenAiSender, Sender

# A chat template that shows what it is given, so that the prompt's length tells.
TEMPLATE = """\
{% for message in messages %}{{ message['content'] }}\
{% if not loop.last and message['role'] != 'user' %}{{ '\n\n' }}{% endif %}{% endfor %}\
{% if tools %} with {{ tools | length }} tools{% endif %}\
{% if mood %} {{ mood }}{% endif %}\
{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}\
{% if documents %} with documents{% endif %}\
{% if enable_thinking is defined or thinking is defined %} thinking{% endif %}\
{% if verbosity is defined %} {{ verbosity }}{% endif %}\
{% if not add_generation_prompt %} and so{% endif %}\
{% if add_generation_prompt and messages[-1]['role'] == 'assistant' %} said the turtle{% endif %}"""

GREETED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}}, "required": ["name"]}
GREET = {"type": "function", "function": {"name": "greet", "parameters": GREETED}}
QUIETLY = ("--metrics-port", 0, "--log-level", "error", "--num-threads", 1, "--num-device-blocks", 1024)


@dataclass(frozen=True)
class Server:
    url: str  # of the scheduler, HOST:PORT
    port: int  # of the gateway


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("models") / "storyteller"
    shutil.copytree(Path("models/storyteller"), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    defaults = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(defaults | {"temperature": 0.001}))
    port = free_port(HOST)
    service = Service("serve", [model, "--port", 0, *QUIETLY, "--gateway", "--gateway-port", port])
    try:
        url = service.wait_until_ready()
        assert service.next_line() == f"ready on http://127.0.0.1:{port}"
        yield Server(url, port)
    finally:
        service.stop()


class Checker:
    """By one sender. Plain requests, which many fields share, are sent once."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._plain: dict[str, Reply] = {}

    def check(self, route: Route, field: Field) -> None:
        def ask(body: Body) -> Reply:
            return self._sender.send(route.path, without_absent(merged(route.plain, body)))

        key = json.dumps([route.path, field.beside])
        if key not in self._plain:
            self._plain[key] = ask(field.beside)
        plain, reply = self._plain[key], ask(merged(field.beside, field.body))
        assert plain.status == 200, plain
        assert reply.status == field.status, reply
        made = Exchange(plain, reply, ask, self._sender.send)
        assert field.proof(made), f"{field.name} is not {field.verdict.value}: {reply}"


@pytest.fixture(scope="module")
def http_checker(server: Server) -> Checker:
    return Checker(HttpSender(server.port))


@pytest.fixture(scope="module")
def openai_checker(server: Server) -> Checker:
    return Checker(OpenAiSender(openai_client(server)))


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")


def rows(routes: tuple[Route, ...]) -> list:
    return [pytest.param(route, field, id=f"{route.path}-{field.name}") for route in routes for field in route.fields]


@pytest.mark.parametrize(("route", "field"), rows(ROUTES))
def test_over_http(http_checker: Checker, route: Route, field: Field) -> None:
    http_checker.check(route, field)


@pytest.mark.parametrize(("route", "field"), rows(OPENAI_ROUTES))
def test_by_the_openai_client(openai_checker: Checker, route: Route, field: Field) -> None:
    openai_checker.check(route, field)


def test_streams_match_what_is_asked_for(server: Server) -> None:
    client = openai_client(server)
    ask = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 1000, "seed": 0, "stream": True}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": COUNT, "strict": True}}
    text, calls, end = streamed(client.chat.completions.create(**ask, response_format=schema))
    assert (is_count(text), calls, end) == (True, [], "stop")
    named = {"type": "function", "function": {"name": "count"}}
    assert len(forced_calls(client, seed=0, tools=[FORCED], tool_choice=named)) == 1
    # Which seeds give several calls depends on how this processor rounds.
    several = {"tools": [FORCED, GREET], "tool_choice": "required", "max_tokens": 1000}
    assert any(len(forced_calls(client, seed=seed, **several)) > 1 for seed in range(100))
    as_text = {"format": {"type": "json_schema", "name": "a", "schema": COUNT, "strict": True}}
    events = list(client.responses.create(model="storyteller", input=PROMPT, text=as_text, stream=True))
    assert events[-1].type == "response.completed"
    assert is_count("".join(event.delta for event in events if event.type == "response.output_text.delta"))


def forced_calls(client: openai.OpenAI, **fields: Any) -> list[list[str]]:
    """Streams them with nothing beside them, and sees that they are those of the answer that is no stream."""
    ask = {"model": "storyteller", "messages": MESSAGES, "temperature": 1, **fields}
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls
    text, calls, end = streamed(client.chat.completions.create(**ask, stream=True))
    assert (text, end) == ("", "tool_calls"), fields
    told = [(call.function.name, json.loads(call.function.arguments)) for call in whole]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == told, fields
    assert all(is_count(arguments) for name, arguments in calls if name == "count"), fields
    return calls


def streamed(stream: openai.Stream) -> tuple[str, list[list[str]], str | None]:
    """Returns the text, names and arguments of calls, and why it ended."""
    text, end = "", None
    calls: dict[int, list[str]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            end = choice.finish_reason or end
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, ["", ""])
                call[0] += piece.function.name or ""
                call[1] += piece.function.arguments or ""
    return text, [calls[index] for index in sorted(calls)], end


def test_a_background_response_is_fetched_later(server: Server) -> None:
    client = openai_client(server)
    ask = {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 24}
    asked = client.responses.create(**ask, background=True)
    assert asked.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(asked.id).status not in ("queued", "in_progress"))
    assert client.responses.retrieve(asked.id).output_text == client.responses.create(**ask).output_text != ""


def test_a_client_at_the_gateways_port_hears_what_it_is(server: Server) -> None:
    with Client(f"{HOST}:{server.port}") as client:
        for call in (client.info, lambda: client.complete(PROMPT, timeout=20)):
            with pytest.raises(PagewireError, match=f"^{HOST}:{server.port} answers as a web server, not as gRPC"):
                call()


def test_a_detached_request_is_fetched_by_the_documents_own_lines(server: Server) -> None:
    submit, get_result, attach, abort = grpcurl.lines_of(Path("docs/openai.md"))
    assert grpcurl.run(submit, server.url) == [{"request_id": "turtle-1"}]
    wait_until(lambda: grpcurl.run(get_result, server.url)[0]["state"] == "RESULT_STATE_FINISHED")
    (result,) = grpcurl.run(get_result, server.url)
    with Client(server.url) as client:
        story = client.complete(PROMPT, SamplingParams(temperature=0, max_tokens=24)).outputs[0].text
    assert [output["text"] for output in result["outputs"]] == [story]
    assert "".join(delta.get("text", "") for delta in grpcurl.run(attach, server.url)) == story
    with pytest.raises(grpc.RpcError) as caught:
        grpcurl.run(abort, server.url)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND, "it has ended"


def test_a_stream_that_breaks_says_so() -> None:
    """Scheduler and worker are killed in the middle; the gateway lives on."""
    service = Service("serve", ["models/storyteller", "--port", 0, *QUIETLY])
    gateway = Gateway([service.wait_until_ready()])
    try:
        gateway.wait_until_ready()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none")
        long = {"model": "storyteller", "max_tokens": 1900, "extra_body": {"ignore_eos": True}, "stream": True}
        chat = client.chat.completions.create(messages=MESSAGES, **long)
        completion = client.completions.create(prompt=PROMPT, **long)
        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        generation = iter(gateway.stream("/generate", model="storyteller", text=PROMPT, sampling_params=sampling))
        # No field of this route ignores the end token; a schema holds it back.
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
        form = {"type": "json_schema", "name": "long", "schema": schema}
        response = client.responses.create(model="storyteller", input=PROMPT, text={"format": form}, stream=True)
        for stream in (chat, completion, generation, response):
            next(stream)
        (worker,) = children_of(service.pid)
        os.kill(worker, signal.SIGKILL)
        service.kill()
        for stream in (chat, completion):
            with pytest.raises(openai.APIError, match="Stream error"):
                list(stream)
        assert list(generation)[-1]["error"]["type"] == "stream_error"
        assert list(response)[-1].type == "response.failed"
    finally:
        gateway.stop()
        service.kill()
