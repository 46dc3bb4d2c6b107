"""The Vercel AI SDK, with its providers for OpenAI, Anthropic, Ollama and compatible servers."""

from pathlib import Path

from tests.clients.conftest import Served
from tests.clients.program import INSTALLED

STEPS = Path(__file__).with_name("ai_sdk.mjs")
NUM_STEPS = 4 * 7 + 6 + 2 * 3


async def test_ai_sdk(served: Served) -> None:
    """Each provider generates and streams texts, tool calls and objects."""
    command, environ = ("node", "--input-type=module", "-"), {"SERVER": served.url}
    said = await served.program.run(*command, cwd=INSTALLED, environ=environ, given=STEPS.read_text())
    assert said.count("passed ") == NUM_STEPS, said
