"""Chat messages are checked for the types of their fields, and messages that real clients send are accepted."""

from pathlib import Path
from typing import Any

import pytest

from testing.serving.http_server import HttpServer, server_of_the_module
from tests.contract.http.scripted import make_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


def call(**changes: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes


def answer(*calls: Any) -> list[dict[str, Any]]:
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": list(calls)}]


WRONG: dict[str, list[Any]] = {
    "[0].role": [[{"role": role, "content": "x"}] for role in (None, 123, 1.5, True, ["user"], {"a": 1})],
    "[1].role": [[QUESTION, {"role": None}]],
    "[0].content": [
        [message]
        for role in ("user", "system", "developer")
        for message in ({"role": role}, {"role": role, "content": None})
    ],
    "[0].name": [[QUESTION | {"name": name}] for name in (5, ["a"])],
    "[2].tool_call_id": [[*answer(call()), {"role": "tool", "tool_call_id": 5, "content": "x"}]],
    "[1].tool_calls": [[QUESTION, {"role": "assistant", "tool_calls": calls}] for calls in ("abc", 5, {"a": 1})],
    "[1].tool_calls[1]": [answer(call(), given) for given in (1, "a", None, [])],
    "[1].tool_calls[0].id": [answer(call(id=5))],
    "[1].tool_calls[0].function": [answer(call(function="f"))],
    "[1].tool_calls[0].function.name": [answer(call(function={"name": 5, "arguments": "{}"}))],
    "[1].tool_calls[0].function.arguments": [answer(call(function={"name": "f", "arguments": 5}))],
    "": [[QUESTION | {"content": content}] for content in (["text"], ["thinking"], [None], [1], 5, [{"type": "text"}])],
}
RIGHT = [
    [*answer(call()), {"role": "tool", "tool_call_id": "1", "content": "x"}],
    [
        *answer(call(function={"name": "f", "arguments": {"a": 1}})),
        {"role": "tool", "content": [{"type": "text", "text": "x"}]},
    ],
    [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None, "annotations": []},
    ],
    [QUESTION | {"name": None}, {"role": "assistant", "content": "", "tool_calls": []}],
    [
        {"role": "user", "content": [], "name": "x"},
        {"role": "assistant"},
        {"role": "critic"},
        {"role": "user", "content": ""},
    ],
    [{"role": "developer", "content": "x"}, {"role": "system", "content": [{"type": "text", "text": "y"}]}, QUESTION],
]


@pytest.mark.parametrize("place", WRONG)
async def test_a_message_of_wrong_types_is_refused(server: HttpServer, place: str) -> None:
    for messages in WRONG[place]:
        for path in (CHAT, f"{CHAT}/render", "/tokenize"):
            error = await server.refusal(path, messages=messages)
            assert error["param"] == f"messages{place}"
            assert "must be " in error["message"] or not place


async def test_what_clients_send_is_served(server: HttpServer) -> None:
    for messages in RIGHT:
        response = await server.post(f"{CHAT}/render", messages=messages)
        assert response.status_code == 200, (messages, response.text)
