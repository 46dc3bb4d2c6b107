"""Two ways to send a request to the gateway: the client of PyPI's `openai`, and plain HTTP."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import openai

from testing.gateway import Stream, post
from tests.system.openai_api.field import Body
from tests.system.openai_api.reply import Reply


class Sender(Protocol):
    def send(self, path: str, body: Body) -> Reply: ...


class HttpSender:
    def __init__(self, port: int) -> None:
        self._port = port

    def send(self, path: str, body: Body) -> Reply:
        if not body.get("stream"):
            answer = post(self._port, path, body)
            return Reply(answer.status, answer.body)
        stream = Stream(self._port, path, body)
        assert stream.status == 200, "what is wrong with a request is told before its stream"
        return Reply(200, events=list(stream))


class OpenAiSender:
    """Only for the routes that OpenAI has. Fields that its client does not know go as `extra_body`."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._creators: dict[str, Callable[..., Any]] = {
            "/v1/completions": client.completions.create,
            "/v1/chat/completions": client.chat.completions.create,
            "/v1/responses": client.responses.create,
            "/v1/conversations": client.conversations.create,
        }

    def send(self, path: str, body: Body) -> Reply:
        create = self._creators[path]
        known = set(inspect.signature(create).parameters) - {"extra_body", "extra_headers", "extra_query", "timeout"}
        own = {name: value for name, value in body.items() if name in known}
        try:
            answer = create(**own, extra_body={name: value for name, value in body.items() if name not in known})
        except openai.APIStatusError as refusal:
            if refusal.request.headers["x-stainless-retry-count"] != "0":
                raise AssertionError("the client tried again what is never served") from refusal
            return Reply(refusal.status_code, refusal.response.json())
        if body.get("stream"):
            return Reply(200, events=[event.model_dump() for event in answer])
        return Reply(200, answer.model_dump(exclude_unset=True, warnings=False))
