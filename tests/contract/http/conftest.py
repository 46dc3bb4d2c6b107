from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.http.door import HttpServer, make_chat_checkpoint, serve_http


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[HttpServer]:
    async with serve_http(model) as server:
        yield server
