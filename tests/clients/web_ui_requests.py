"""The requests of Open WebUI over both of its connections, as its routers send them."""

import json
from typing import Any

import httpx2 as httpx

from tests.clients.scripts import HELLO

USER = {f"X-OpenWebUI-User-{name}": "anna" for name in ("Name", "Id", "Email", "Role")}
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"} | USER
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
# Advanced parameters of a chat: those that its interface offers for Ollama, with values that change no output.
OPTIONS = {
    **{"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 7, "num_ctx": 2048, "num_batch": 512},
    **{"num_predict": 128, "num_keep": 24, "num_thread": 2, "num_gpu": 0, "use_mmap": True, "use_mlock": False},
    **{"repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ["\n\n"]},
}


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60)


async def post(api: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await api.post(path, content=json.dumps(body))
    assert response.status_code == 200, (path, response.text)
    return response.json()


async def lines(api: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    async with api.stream("POST", path, content=json.dumps(body | {"stream": True})) as response:
        assert response.status_code == 200, (path, await response.aread())
        return [json.loads(line) async for line in response.aiter_lines()]


def chat_of(model: str) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "options": OPTIONS, "keep_alive": "5m"}


async def check_connections(ollama_url: str, openai_url: str) -> None:
    """Check that both connections list a model and chat with it."""
    async with client(ollama_url) as api:
        model, *_ = (await api.get("/api/tags")).json()["models"]
        parts = await lines(api, "/api/chat", **chat_of(model["model"]))
        assert "".join(part["message"]["content"] for part in parts) == HELLO
    async with client(openai_url) as api:
        model, *_ = (await api.get(f"{openai_url}/models")).json()["data"]
        answer = await post(api, f"{openai_url}/chat/completions", model=model["id"], messages=MESSAGES, stream=False)
        assert answer["choices"][0]["message"]["content"] == HELLO
