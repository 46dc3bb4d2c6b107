"""What clients do to a connection of the HTTP API at its edges, and what it keeps of its promises then."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_service.doors.http import event_stream
from tests.contract.http_door import HttpServer, make_chat_checkpoint, serve_http

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[HttpServer]:
    async with serve_http(model) as server:
        yield server


async def test_a_whole_answer_that_takes_long_is_no_stream(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.05)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.3
        response = await server.post(PATH, prompt="x", max_tokens=3)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json()["choices"]
