from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scheduler_service.api.http import prompts
from testing.core.simulated_worker import SimulatedWorker
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http
from tests.contract.http.scripted import Say


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[HttpServer]:
    async with serve_http(model) as server:
        yield server


@pytest.fixture
def say(model: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return a function that makes the model generate a given text, whatever the prompt is."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def say(text: str) -> None:
        script = [*tokenizer.encode(text).ids, 0]

        def next_token(self: SimulatedWorker, row: Any, matcher: object, prefix: int) -> int:
            return script[min(len(row.token_ids) - row.opening.num_prompt_tokens, len(script) - 1)]

        monkeypatch.setattr(SimulatedWorker, "_next_token", next_token)

    return say


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The list of messages of each chat that is rendered."""
    seen: list[Any] = []
    render = prompts.render

    def noted(template: str, messages: Any, **options: Any) -> str:
        seen.append(messages)
        return render(template, messages, **options)

    monkeypatch.setattr(prompts, "render", noted)
    return seen
