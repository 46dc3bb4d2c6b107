from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

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
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
        }


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    assert (INSTALLED / ".ready").exists(), "the clients are not installed: run make test-clients"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def served(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Served]:
    worker = ScriptedWorker(checkpoint, helpful, forced)
    await worker.start()
    home = tmp_path / "home"
    home.mkdir()
    options = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "served_model_name": "chatty,other"}
    async with (
        serve_http(checkpoint, worker=worker, front={"any_model_name": True}, **options) as server,
        programs(home) as program,
    ):
        yield Served(server.url, worker, program)
