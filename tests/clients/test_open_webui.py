"""Open WebUI's connections to Ollama's and OpenAI's API, with the requests that its routers send.

The program itself needs several GiB of packages.
"""

import json
import re
from datetime import datetime

from tests.clients.conftest import Served
from tests.clients.scripts import HELLO
from tests.clients.web_ui_requests import MESSAGES, TOOLS, chat_of, client, lines, post


async def test_ollama_connection_lists_models(strict: Served) -> None:
    async with client(strict.url) as api:
        assert (await api.get("/")).text.endswith(" is running")
        assert (await api.head("/")).status_code == 200
        version = (await api.get("/api/version")).json()["version"]
        assert len([int(part) for part in re.sub(r"^v|-.*", "", version).split(".")]) >= 2
        listed = (await api.get("/api/tags")).json()["models"]
        # It adds ":latest" to a name without a tag, and then looks for that name.
        assert [model["model"] for model in listed] == [model["name"] for model in listed]
        assert [model["model"] for model in listed] == ["chatty:latest", "other:latest"]
        running = (await api.get("/api/ps")).json()["models"]
        assert all(datetime.fromisoformat(model["expires_at"]) for model in running if "expires_at" in model)
        shown = await post(api, "/api/show", model="chatty:latest", name="chatty:latest")
        assert "tools" in shown["capabilities"]
        unloaded = await post(api, "/api/generate", model="chatty:latest", keep_alive=0, prompt="", stream=False)
        assert unloaded["done"] is True


async def test_ollama_connection_chats(strict: Served) -> None:
    body = chat_of("chatty:latest")
    async with client(strict.url) as api:
        parts = await lines(api, "/api/chat", **body)
        assert "".join(part["message"]["content"] for part in parts) == HELLO
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        counts = ("prompt_eval_count", "eval_count", "total_duration", "eval_duration", "prompt_eval_duration")
        assert all(parts[-1][name] > 0 for name in counts), parts[-1]
        whole = await post(api, "/api/chat", **body, stream=False)
        assert whole["message"]["content"] == HELLO
        assert whole["eval_count"] == parts[-1]["eval_count"]
        title = {"role": "user", "content": "Write JSON with 'title'."}
        written = await post(api, "/api/chat", model="chatty:latest", messages=[title], format="json", stream=False)
        assert isinstance(json.loads(written["message"]["content"]), dict)


async def test_ollama_connection_calls_tools(strict: Served) -> None:
    asked = {"role": "user", "content": "What is the weather in 'Oslo'?"}
    async with client(strict.url) as api:
        parts = await lines(api, "/api/chat", model="chatty:latest", messages=[asked], tools=TOOLS)
        (call,) = [call for part in parts for call in part["message"].get("tool_calls", [])]
        assert call["function"]["arguments"] == {"city": "Oslo"}
        # It converts calls from OpenAI's form, and keeps their index and id.
        called = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        history = [
            asked,
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        ]
        answer = await post(api, "/api/chat", model="chatty:latest", messages=history, tools=TOOLS, stream=False)
        assert answer["message"]["content"] == "The result is sun."


async def test_ollama_connection_embeds(strict: Served) -> None:
    async with client(strict.url) as api:
        embedded = await post(api, "/api/embed", model="chatty:latest", input=["foo", "bar"], truncate=True)
        assert len(embedded["embeddings"]) == 2
        assert (await post(api, "/api/embeddings", model="chatty:latest", prompt="foo"))["embedding"]


async def test_openai_connection(strict: Served) -> None:
    async with client(strict.url) as api:
        models = (await api.get("/v1/models")).json()["data"]
        assert {"chatty", "other"} <= {model["id"] for model in models}
        body = {"model": "chatty", "messages": MESSAGES, "stream_options": {"include_usage": True}}
        body |= {
            "temperature": 0.8,
            "top_p": 0.9,
            "max_tokens": 128,
            "seed": 7,
            "frequency_penalty": 0,
            "stop": ["\n\n"],
        }
        response = await api.post("/v1/chat/completions", content=json.dumps(body | {"stream": True}))
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(texts) == HELLO
        assert events[-1]["usage"]["completion_tokens"] > 0
        whole = await post(api, "/v1/chat/completions", **body | {"stream": False, "stream_options": None})
        assert whole["choices"][0]["message"]["content"] == HELLO
        embedded = await post(api, "/v1/embeddings", model="chatty", input=["foo", "bar"])
        assert len(embedded["data"]) == 2
