"""The recipes in docs/clients.md, run as they are on the page, except for the server's address.

Configuration files are given to their program, or their requests are sent to the addresses in them.
"""

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.clients.conftest import Served, serving_clients
from tests.clients.editor_requests import CODE, EXTRA, FILLS, VIM, ollama_fill, post, streamed_chat
from tests.clients.program import AIDER, AIDER_OPTIONS, INSTALLED, NPM, PYTHON, ROOT, prepare_aider
from tests.clients.scripts import HELLO
from tests.clients.web_ui_requests import check_connections

PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
# The code blocks under each heading, as (language, text).
RECIPES = {
    section.partition("\n")[0]: re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for section in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]
}


@pytest.fixture
async def named(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Served]:
    """Serve the scripted model under the names that the page uses."""
    async with serving_clients(checkpoint, tmp_path, "storyteller,coder") as server:
        yield server


def recipe(heading: str, url: str) -> str:
    """Return the code of a section, with the server's address."""
    ((_, text),) = RECIPES[heading]
    assert ADDRESS in text, text
    return text.replace(ADDRESS, url)


def test_every_recipe_has_a_test() -> None:
    tested = {*RUN, "Vercel AI SDK", "aider", "Open WebUI", "Continue", "Vim", "VS Code"}
    commands = {heading for heading, blocks in RECIPES.items() if not blocks or "pagewire serve" in blocks[0][1]}
    assert {heading for heading in RECIPES if heading not in commands} == tested


RUN = ["Ollama in Python", "Ollama in JavaScript", "LangChain", "LiteLLM", "llm", "OpenAI's Python client"]


@pytest.mark.parametrize("heading", [*RUN, "Vercel AI SDK"])
async def test_program(named: Served, heading: str) -> None:
    ((language, _),) = RECIPES[heading]
    command = {
        "python": (PYTHON / "python", "-"),
        "js": ("node", "--input-type=module", "-"),
        "sh": ("sh", "-e"),
    }
    environ = {"PATH": f"{PYTHON}:{os.environ['PATH']}"}
    given = recipe(heading, named.url)
    said = await named.program.run(*command[language], cwd=INSTALLED, given=given, environ=environ)
    assert said.strip() == HELLO


async def test_aider(named: Served, tmp_path: Path) -> None:
    """The page's command opens a chat; this test asks one question instead."""
    command = recipe("aider", named.url).rstrip("\n")
    command += f" {' '.join(AIDER_OPTIONS)} --message hi\n"
    prepare_aider(named.program.home)
    environ = {"PATH": f"{AIDER.parent}:{os.environ['PATH']}"}
    said = await named.program.run("sh", "-e", cwd=tmp_path, given=command, environ=environ)
    assert HELLO in said


async def test_open_webui(named: Served) -> None:
    given = dict(re.findall(r"-e (\w+)=(\S+)", recipe("Open WebUI", named.url)))
    assert set(given) == {"OLLAMA_BASE_URL", "OPENAI_API_BASE_URL", "OPENAI_API_KEY"}
    await check_connections(given["OLLAMA_BASE_URL"], given["OPENAI_API_BASE_URL"])


async def test_continue(named: Served, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(recipe("Continue", named.url))
    said = await named.program.run(NPM / "cn", "--config", config, "-p", "hi", cwd=tmp_path)
    assert said.strip() == HELLO
    _, model = yaml.safe_load(config.read_text())["models"]
    assert (model["provider"], model["roles"]) == ("ollama", ["autocomplete", "embed"])
    for fill in FILLS:
        assert await ollama_fill(model["apiBase"], model["model"], fill) == HELLO
    embedded = await post(f"{model['apiBase']}/api/embed", {"model": model["model"], "input": ["a", "b"]})
    assert len(embedded.json()["embeddings"]) == 2


async def test_vim(named: Served) -> None:
    endpoints = dict(re.findall(r"'(\w+)': '(.*?)'", recipe("Vim", named.url)))
    assert set(endpoints) == {"endpoint_fim"}
    assert (await post(endpoints["endpoint_fim"], VIM | {"input_extra": EXTRA})).json()["content"] == HELLO


async def test_vs_code(named: Served) -> None:
    settings = json.loads(recipe("VS Code", named.url))
    names = [f"llama-vscode.endpoint{part}" for part in ("", "_chat", "_tools", "_embeddings")]
    assert list(settings) == names
    fill, *chats, embeddings = settings.values()
    assert (await post(f"{fill}/infill", CODE | {"input_extra": EXTRA})).json()["content"] == HELLO
    for chat in chats:
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.8}
        assert await streamed_chat(f"{chat}/v1/chat/completions", body) == HELLO
    assert (await post(f"{embeddings}/v1/embeddings", {"input": "hi"})).json()["data"]
