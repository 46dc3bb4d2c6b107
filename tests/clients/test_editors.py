"""The requests of editors' plugins: llama.vim, llama-vscode and Continue, with the bodies that their sources build.

The plugins need an editor, so that these tests repeat their requests. Continue's program `cn` is run itself.
"""

import json
import re
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.clients.conftest import Served
from tests.clients.editor_requests import (
    CODE,
    CODE_WARM_UP,
    EXTRA,
    FILLS,
    OLLAMA_OPTIONS,
    PROMPT,
    TIMES,
    VIM,
    VIM_WARM_UP,
    ollama_fill,
    post,
    streamed_chat,
)
from tests.clients.program import NPM
from tests.clients.scripts import HELLO, loop


def prompt_of(served: Served) -> str:
    """Return the text of the last prompt."""
    return served.worker.conversations[-1].prompt


async def test_llama_vim_fills_in(served: Served) -> None:
    await post(f"{served.url}/infill", VIM_WARM_UP)
    response = await post(f"{served.url}/infill", VIM)
    # The plugin drops a response whose text does not match.
    assert re.search(r'"content"\s*:"', response.text), response.text
    assert "\n" not in response.text.rstrip("\n")
    answer = response.json()
    assert answer["content"] == HELLO
    assert set(answer) == set(VIM["response_fields"]), answer
    assert all(isinstance(answer[f"timings/{name}"], int | float) for name in TIMES), answer
    assert prompt_of(served) == PROMPT
    await post(f"{served.url}/infill", VIM | {"input_extra": EXTRA})
    assert EXTRA[0]["text"] in prompt_of(served)
    assert prompt_of(served).endswith(PROMPT)


async def test_llama_vim_edits(served: Served) -> None:
    """Instructions need fields of llama-server's chat route. Each is supported, or the refusal names it."""
    messages = [{"role": "system", "content": "Edit."}, {"role": "user", "content": "INSTRUCTION: hi"}]
    body = {"id_slot": 0, "messages": messages, "min_p": 0.1, "temperature": 0.1, "cache_prompt": True, "stream": True}
    url = f"{served.url}/v1/chat/completions"
    assert await streamed_chat(url, body) == HELLO
    others = {"samplers": ["min_p", "temperature"], "n_predict": 0, "response_fields": [""]}
    async with httpx.AsyncClient(timeout=60) as api:
        for name, value in others.items():
            response = await api.post(url, json=body | {name: value})
            assert response.status_code == 200 or response.json()["error"]["param"] == name, response.text


@pytest.mark.parametrize("num_completions", [1, 3])
async def test_llama_vscode_fills_in(served: Served, num_completions: int) -> None:
    await post(f"{served.url}/infill", CODE_WARM_UP)
    answer = (await post(f"{served.url}/infill", CODE | {"n_cmpl": num_completions})).json()
    contents = [answer["content"]] if "content" in answer else [each["content"] for each in answer]
    assert contents == [HELLO] * num_completions
    assert prompt_of(served) == PROMPT


async def test_llama_vscode_agent(served: Served) -> None:
    """Its agent counts a prompt's tokens before it asks, with the server's chat template and tokenizer."""
    asked = [{"role": "user", "content": "What is the weather in 'Oslo'?"}]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": parameters}}]
    async with httpx.AsyncClient(base_url=served.url) as api:
        models = (await api.get("/v1/models")).json()["data"]
        props = (await api.get("/props", params={"model": models[0]["id"], "autoload": "false"})).json()
    assert props["default_generation_settings"]["n_ctx"] > 8192
    prompt = (
        await post(f"{served.url}/apply-template", {"messages": asked, "model": "chatty", "tools": tools})
    ).json()["prompt"]
    counted = {"content": prompt, "add_special": False, "parse_special": True}
    num_tokens = len((await post(f"{served.url}/tokenize", counted)).json()["tokens"])
    body = {"messages": asked, "stream": False, "model": "chatty", "tools": tools, "tool_choice": "auto"}
    answer = (await post(f"{served.url}/v1/chat/completions", body | {"max_tokens": 4096})).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert prompt_of(served) == prompt


async def test_continue_with_ollama(served: Served) -> None:
    shown = (await post(f"{served.url}/api/show", {"name": "chatty"})).json()
    assert isinstance(shown["template"], str)
    for line in filter(None, shown.get("parameters", "").split("\n")):
        assert re.fullmatch(r'\S+\s+(".*"|\S+)', line), line
    for fill in FILLS:
        assert await ollama_fill(served.url, "chatty", fill) == HELLO, fill
        assert prompt_of(served) == PROMPT, fill
    chat = {"model": "chatty", "messages": [{"role": "user", "content": "hi"}], "options": OLLAMA_OPTIONS}
    parts = (await post(f"{served.url}/api/chat", chat | {"keep_alive": 1800, "stream": True})).text.splitlines()
    assert "".join(json.loads(part)["message"]["content"] for part in parts) == HELLO


async def test_continue_with_llama_server(served: Served) -> None:
    body = {
        "model": "chatty",
        "prompt": PROMPT,
        "stream": True,
        "n_predict": 256,
        "stop": ["\n\n\n"],
        "temperature": 0.01,
    }
    response = await post(f"{served.url}/completion", body)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["content"] for event in events) == HELLO
    assert prompt_of(served) == PROMPT


CONTINUE_CONFIG = """\
name: local
version: 1.0.0
schema: v1
models:
  - name: chatty
    provider: {provider}
    model: chatty
    apiBase: {url}/v1
    roles: [chat, edit, apply]
"""


@pytest.mark.parametrize("provider", ["ollama", "openai", "llama.cpp"])
async def test_continue_program(served: Served, tmp_path: Path, provider: str) -> None:
    """Continue's program reads a file, writes one and runs a command, with each provider that its config can name."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\n")
    config = tmp_path / "config.yaml"
    config.write_text(CONTINUE_CONFIG.format(provider=provider, url=served.url))
    calls = [
        ("Read", {"filepath": str(folder / "notes.txt")}),
        ("Write", {"filepath": str(folder / "new.py"), "content": "print('one \"two\" 𝄞')\n"}),
        ("Bash", {"command": "python3 new.py"}),
    ]
    served.worker.script = loop(calls, "All of it is done.")
    command = [NPM / "cn", "--config", config, "--auto", "-p", "Do it."]
    said = await served.program.run(*command, cwd=folder)
    assert said.rstrip().endswith("All of it is done."), said
    results = served.worker.conversations[-1].texts_of("tool")
    assert "alpha" in results[0], results
    assert 'one "two" 𝄞' in results[2], results
