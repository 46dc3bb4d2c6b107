"""LangChain's standard suites for its chat and embedding models of each API, and the calls of OllamaLLM."""

import re
from pathlib import Path

import pytest

from tests.clients.conftest import Served
from tests.clients.program import PYTHON

SUITES = Path(__file__).with_name("steps") / "langchain_suites.py"
OPTIONS = [
    *("-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "-q", "-rfEs", "-o", "asyncio_mode=auto"),
    # The clients keep their connections, and therefore the event loop, from one test to the next.
    *("-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"),
]


@pytest.mark.parametrize(
    ("suite", "num_passed", "num_skipped"),
    [
        # They skip images, audio and PDFs, which the model does not support, and recordings of HTTP.
        ("TestOpenAIChat", 43, 7),
        ("TestOpenAIResponses", 43, 7),
        ("TestAnthropicMessages", 43, 7),
        ("TestOpenAIEmbeddings", 5, 0),
        ("TestOllamaChat", 42, 8),
        ("TestOllamaEmbeddings", 5, 0),
        ("TestOllamaLLM", 4, 0),
    ],
    ids=str,
)
async def test_standard_suite(served: Served, suite: str, num_passed: int, num_skipped: int) -> None:
    command = [PYTHON / "python", "-m", "pytest", f"{SUITES}::{suite}", *OPTIONS]
    said = await served.program.run(*command, environ={"SERVER": served.url}, statuses=(0, 1))
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)", said)}
    assert counts == {"passed": num_passed} | ({"skipped": num_skipped} if num_skipped else {}), said[-20_000:]
