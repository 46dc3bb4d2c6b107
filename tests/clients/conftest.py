from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.serving.http_server import serve_http
from tests.clients.program import INSTALLED, Program, programs
from tests.clients.scripted_model import ScriptedWorker, make_scripted_checkpoint
from tests.clients.scripts import forced, helpful


@dataclass
class Served:
    """A server with a scripted model, and its client programs."""

    url: str
    worker: ScriptedWorker
    program: Program

    def environ(self) -> dict[str, str]:
        """Return the variables by which most clients find a server."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": "none",
            "OLLAMA_API_BASE": self.url,
            "OLLAMA_HOST": self.url,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
        }


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    assert (INSTALLED / ".ready").exists(), "the clients are not installed: run make test-clients"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@asynccontextmanager
async def serving_clients(checkpoint: Path, tmp_path: Path, names: str, **front: Any) -> AsyncIterator[Served]:
    """Serve the helpful scripted model under the given names."""
    worker = ScriptedWorker(checkpoint, helpful, forced)
    await worker.start()
    home = tmp_path / "home"
    home.mkdir()
    options = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "served_model_name": names}
    async with serve_http(checkpoint, worker=worker, front=front, **options) as server, programs(home) as program:
        yield Served(server.url, worker, program)


@pytest.fixture
async def served(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving_clients(checkpoint, tmp_path, "chatty,other", any_model_name=True) as server:
        yield server


@pytest.fixture
async def strict(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Served]:
    """Return a server that refuses other names of models."""
    async with serving_clients(checkpoint, tmp_path, "chatty,other") as server:
        yield server
