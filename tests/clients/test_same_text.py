"""The same prompt and seed give the same text through OpenAI's, Ollama's and llama-server's APIs, streamed or whole.

The simulated model's tokens depend on all tokens of the prompt and on the seed.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.parity import STORYTELLER
from testing.seeds import seeded
from testing.services import Service, free_port
from testing.serving.http_server import serve_http
from tests.clients.scripted_model import MAX_MODEL_LEN

NUM_TOKENS = 24
NUM_SEEDS = 10
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}
PROMPTS = ["once upon a time", "def add(a, b):\n    ", "𝄞 <end> „x“ {{ y }}"]
# By kind of request, for each API: the path and the body, from a prompt and a suffix.
REQUESTS = {
    "text": [
        ("/v1/completions", lambda prompt, suffix: {"prompt": prompt}),
        ("/completion", lambda prompt, suffix: {"prompt": prompt}),
        ("/api/generate", lambda prompt, suffix: {"prompt": prompt, "raw": True}),
    ],
    "chat": [
        ("/v1/chat/completions", lambda prompt, suffix: {"messages": [{"role": "user", "content": prompt}]}),
        ("/api/chat", lambda prompt, suffix: {"messages": [{"role": "user", "content": prompt}]}),
        ("/api/generate", lambda prompt, suffix: {"prompt": prompt}),
    ],
    "infill": [
        ("/v1/completions", lambda prompt, suffix: {"prompt": prompt, "suffix": suffix}),
        ("/infill", lambda prompt, suffix: {"input_prefix": prompt, "input_suffix": suffix}),
        ("/api/generate", lambda prompt, suffix: {"prompt": prompt, "suffix": suffix}),
    ],
}


@pytest.fixture
async def simulated(checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    digest = read_model_info(str(checkpoint)).digest
    worker = FakeWorker(digest, max_model_len=MAX_MODEL_LEN)
    await worker.start()
    async with serve_http(checkpoint, worker=worker, served_model_name="chatty") as server:
        yield server.client


@pytest.fixture(scope="module")
def storyteller() -> Iterator[str]:
    port = free_port("127.0.0.1")
    flags = ["--port", 0, "--metrics-port", 0, "--http-port", port, "--num-threads", 1, "--served-model-name", "chatty"]
    service = Service("serve", [STORYTELLER, *flags])
    try:
        service.wait_until_ready()
        yield f"http://127.0.0.1:{port}"
    finally:
        service.stop()


async def text_of(api: httpx.AsyncClient, path: str, body: dict[str, Any], seed: int, stream: bool) -> str:
    """Return the text of a whole or streamed answer of any of the APIs."""
    match path.split("/")[1]:
        case "v1":
            limits = SAMPLING | {"seed": seed, "max_tokens": NUM_TOKENS}
        case "api":
            limits = {"options": SAMPLING | {"seed": seed, "num_predict": NUM_TOKENS, "repeat_penalty": 1.0}}
        case _:
            limits = SAMPLING | {"seed": seed, "n_predict": NUM_TOKENS}
    response = await api.post(path, json={"model": "chatty", "stream": stream} | limits | body)
    assert response.status_code == 200, (path, response.text)
    if not stream:
        return _text(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    return "".join(_text(json.loads(line)) for line in lines)


def _text(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return "".join(_text(choice) for choice in answer["choices"])
    message = answer.get("message") or answer.get("delta") or answer
    for name in ("text", "response", "content"):
        if isinstance(message.get(name), str):
            return message[name]
    return ""


async def check_same(api: httpx.AsyncClient, kind: str, prompt: str, seed: int) -> str:
    texts = {
        (path, stream): await text_of(api, path, build(prompt, "\nend\n"), seed, stream)
        for path, build in REQUESTS[kind]
        for stream in (False, True)
    }
    assert len(set(texts.values())) == 1, texts
    return next(iter(texts.values()))


@pytest.mark.parametrize("kind", REQUESTS)
async def test_simulated_model(simulated: httpx.AsyncClient, kind: str) -> None:
    draws = seeded()
    texts = set()
    for seed in (draws.randrange(1 << 31) for _ in range(NUM_SEEDS)):
        texts |= {await check_same(simulated, kind, prompt, seed) for prompt in PROMPTS}
    assert len(texts) > NUM_SEEDS, texts  # they depend on the seed and the prompt


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_bundled_model(storyteller: str, kind: str) -> None:
    draws = seeded()
    async with httpx.AsyncClient(base_url=storyteller, timeout=60) as api:
        texts = {await check_same(api, kind, PROMPTS[0], draws.randrange(1 << 31)) for _ in range(NUM_SEEDS)}
    assert len(texts) > 1, texts
