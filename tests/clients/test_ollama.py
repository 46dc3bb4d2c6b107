"""Ollama's own clients in Python and JavaScript, and the program `llm`, which uses the Python client."""

import json
from pathlib import Path

from tests.clients.conftest import Served
from tests.clients.program import INSTALLED, PYTHON
from tests.clients.scripts import HELLO

STEPS = Path(__file__).with_name("steps") / "ollama_steps.py"
JAVASCRIPT_STEPS = Path(__file__).with_name("ollama.mjs")
NUM_PYTHON_STEPS, NUM_JAVASCRIPT_STEPS = 14, 10


async def test_python_client(strict: Served) -> None:
    said = await strict.program.run(PYTHON / "python", STEPS, environ=strict.environ())
    assert said.count("passed ") == NUM_PYTHON_STEPS, said


async def test_javascript_client(strict: Served) -> None:
    command, environ = ("node", "--input-type=module", "-"), {"SERVER": strict.url}
    said = await strict.program.run(*command, cwd=INSTALLED, environ=environ, given=JAVASCRIPT_STEPS.read_text())
    assert said.count("passed ") == NUM_JAVASCRIPT_STEPS, said


async def test_llm(strict: Served) -> None:
    """The program lists the server's models and capabilities, and writes texts, tool calls, objects and embeddings."""

    async def llm(*arguments: str | Path) -> str:
        return await strict.program.run(PYTHON / "llm", *arguments, environ=strict.environ())

    assert "Ollama: ollama/chatty:latest" in await llm("models")
    for options in ((), ("--no-stream",), ("-o", "temperature", "0", "-o", "num_ctx", "2048")):
        assert await llm("-m", "ollama/chatty:latest", *options, "hi") == f"{HELLO}\n"
    schema = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
    assert isinstance(json.loads(await llm("-m", "ollama/chatty:latest", "--schema", schema, "hi"))["age"], int)
    tool = 'def weather(city: str) -> str:\n    "Weather of a city."\n    return f"sun in {city}"'
    said = await llm("-m", "ollama/chatty:latest", "--functions", tool, "What is the weather in 'Oslo'?")
    assert said == "The result is sun in Oslo.\n"
    assert len(json.loads(await llm("embed", "-m", "ollama/chatty:latest", "-c", "hi"))) == 2
