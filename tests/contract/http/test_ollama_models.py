"""Ollama's API apart from generated text: descriptions of the model, names, embeddings, and all calls of its client."""

import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.api.http.ollama.models import REFUSED_CALLS
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http, server_of_the_module
from testing.serving.tenants import KEYS
from tests.contract.http.scripted import make_tool_checkpoint
from tests.contract.http.shared import of, shared_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

QUESTION = {"role": "user", "content": "hi"}
DIGEST = f"sha256:{hashlib.sha256(b'x').hexdigest()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


async def test_the_server_says_that_it_runs(server: HttpServer) -> None:
    for method in ("GET", "HEAD"):
        response = await server.client.request(method, "/")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert response.text == ("Pagewire is running" if method == "GET" else "")
    versions = [(await server.client.get(path)).json() for path in ("/version", "/api/version")]
    assert versions[0] == versions[1]


async def test_the_model_is_described(server: HttpServer, model: Path) -> None:
    shown = (await server.post("/api/show", model="chatty:latest")).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert shown["template"] == (model / "chat_template.jinja").read_text()
    assert shown["model_info"]["general.basename"] == "chatty"
    assert shown["model_info"]["general.context_length"] == 256
    assert datetime.fromisoformat(shown["modified_at"]) <= datetime.now(UTC)
    size = sum(file.stat().st_size for file in model.iterdir() if file.is_file())  # noqa: ASYNC240
    for path in ("/api/tags", "/api/ps"):
        [listed] = (await server.client.get(path)).json()["models"]
        assert listed["name"] == listed["model"] == "chatty:latest"
        assert listed["size"] == size
        assert len(bytes.fromhex(listed["digest"])) == 32
        assert listed["details"] == shown["details"]
        assert listed["context_length"] == 256
        assert datetime.fromisoformat(listed["expires_at"]).year == 9999


async def test_the_models_own_options_are_shown(tmp_path: Path) -> None:
    folder = make_chat_checkpoint(tmp_path / "chatty")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}')
    async with serve_http(folder) as server:
        shown = (await server.post("/api/show", model="chatty")).json()
    assert {tuple(line.split()) for line in shown["parameters"].splitlines()} == {
        ("temperature", "0.25"),
        ("top_k", "7"),
        ("repeat_penalty", "1.5"),
    }
    assert shown["capabilities"] == ["completion", "embedding"]


async def test_no_model_is_loaded_without_a_worker(model: Path) -> None:
    async with serve_http(model, worker_timeout=0.1) as server:
        assert (await server.client.get("/api/ps")).json()["models"]
        await server.stack.worker.kill()
        await server.front.until_ready(False)
        assert (await server.client.get("/api/ps")).json() == {"models": []}
        assert (await server.client.get("/api/tags")).json()["models"]


async def test_names_may_have_the_tag_latest(model: Path) -> None:
    async with serve_http(model, served_model_name="chatty,second,third:latest") as server:
        listed = (await server.client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in listed] == ["chatty:latest", "second:latest", "third:latest"]
        for name in ("chatty", "chatty:latest", "second", "second:latest", "third", "third:latest"):
            short: dict[str, Any] = {"model": name, "max_tokens": 1}
            assert (await server.post("/v1/completions", prompt="x", **short)).status_code == 200
            assert (await server.post("/v1/messages", messages=[QUESTION], **short)).status_code == 200
            assert (await server.client.get(f"/v1/models/{name}")).status_code == 200
            asked = {"model": name, "prompt": "x", "stream": False, "options": {"num_predict": 1}}
            assert (await server.post("/api/generate", **asked)).json()["model"] == name
        for other in ("chatty:latest:latest", "second:8b", "latest", ":latest"):
            refused = await server.post("/api/chat", model=other, messages=[QUESTION])
            assert refused.status_code == 404
            assert "is not served here" in refused.json()["error"]


async def test_embeddings_equal_those_of_openai(server: HttpServer) -> None:
    texts = ["once", "upon a time"]
    answer = (await server.post("/api/embed", model="chatty", input=texts)).json()
    expected = (await server.post("/v1/embeddings", input=texts, encoding_format="float")).json()
    assert answer["embeddings"] == [each["embedding"] for each in expected["data"]]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["total_duration"] > 0
    one = (await server.post("/api/embed", model="chatty", input=texts[0])).json()
    assert one["embeddings"] == answer["embeddings"][:1]
    old = (await server.post("/api/embeddings", model="chatty", prompt=texts[0])).json()
    assert old == {"embedding": answer["embeddings"][0]}
    for path, empty, expected_answer in (
        ("/api/embed", {"input": ""}, []),
        ("/api/embed", {"input": []}, []),
        ("/api/embed", {}, []),
        ("/api/embeddings", {"prompt": ""}, []),
    ):
        answer = (await server.post(path, **empty)).json()
        assert answer.get("embeddings", answer.get("embedding")) == expected_answer
    [short] = (await server.post("/api/embed", input=texts[0], dimensions=1)).json()["embeddings"]
    assert math.hypot(*short) == pytest.approx(1)
    refused = await server.post("/api/embed", input="once " * 300, truncate=False)
    assert refused.json()["error"].startswith("this model's maximum context length is 256 tokens")
    cut = (await server.post("/api/embed", input="once " * 300)).json()
    assert cut["prompt_eval_count"] == 255
    refused = await server.post("/api/embeddings", prompt="once " * 300)
    assert refused.status_code == 400


# The calls of version 0.6.3 of Ollama's Python client, each with a body as that client sends it.
CLIENT_CALLS: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/api/generate", {"model": "chatty", "prompt": "hi", "stream": False, "options": {"num_predict": 1}}, 200),
    (
        "POST",
        "/api/chat",
        {"model": "chatty", "stream": True, "messages": [QUESTION], "tools": [], "options": {"num_predict": 1}},
        200,
    ),
    ("POST", "/api/embed", {"model": "chatty", "input": ["hi"]}, 200),
    ("POST", "/api/embeddings", {"model": "chatty", "prompt": "hi"}, 200),
    ("POST", "/api/pull", {"model": "chatty", "insecure": False, "stream": False}, 200),
    ("POST", "/api/pull", {"model": "chatty:latest", "stream": True}, 200),
    ("POST", "/api/pull", {"model": "llama3", "stream": True}, 404),
    ("POST", "/api/push", {"model": "chatty", "insecure": False, "stream": False}, 501),
    ("POST", "/api/create", {"model": "mine", "stream": False, "from": "chatty"}, 501),
    ("POST", f"/api/blobs/{DIGEST}", {}, 501),
    ("GET", "/api/tags", {}, 200),
    ("DELETE", "/api/delete", {"model": "chatty"}, 501),
    ("POST", "/api/copy", {"source": "chatty", "destination": "mine"}, 501),
    ("POST", "/api/show", {"model": "chatty"}, 200),
    # The command-line client also sends fields that are empty.
    (
        "POST",
        "/api/show",
        {"model": "chatty", "system": "", "template": "", "verbose": False, "options": None, "name": ""},
        200,
    ),
    ("POST", "/api/pull", {"model": "chatty", "username": "", "password": "", "name": "", "stream": False}, 200),
    (
        "POST",
        "/api/generate",
        {
            **{"model": "chatty", "prompt": "hi", "suffix": "", "system": "", "template": "", "context": []},
            **{"raw": False, "images": [], "format": "", "keep_alive": "5m0s", "options": {"num_predict": 1}},
        },
        200,
    ),
    ("POST", "/api/chat", {"model": "chatty", "messages": None, "options": None, "keep_alive": "5m0s"}, 200),
    ("GET", "/api/ps", {}, 200),
    ("HEAD", f"/api/blobs/{DIGEST}", {}, 501),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), CLIENT_CALLS)
async def test_calls_of_the_client_work_or_are_refused_by_name(
    server: HttpServer, method: str, path: str, body: dict[str, Any], status: int
) -> None:
    response = await server.client.request(method, path, json=body or None)
    assert response.status_code == status
    if status != 200 and method != "HEAD":
        answer = response.json()
        assert answer.keys() == {"error"}
        assert "one model" in answer["error"] or "is not served here" in answer["error"]
    if path == "/api/pull" and status == 200:
        assert response.json() == {"status": "success"}
        assert response.headers["content-type"].endswith("x-ndjson" if body["stream"] else "/json")


async def test_every_refused_call_is_one_of_the_client() -> None:
    sent = {(method, path.replace(DIGEST, "{digest}")) for method, path, _, _ in CLIENT_CALLS}
    for path, (methods, _) in REFUSED_CALLS.items():
        assert {(method.replace("GET", "HEAD"), path) for method in methods} <= sent


async def test_paths_that_do_not_exist(server: HttpServer) -> None:
    for method, path, status in (("GET", "/api/nothing", 404), ("GET", "/api/chat", 405), ("POST", "/api/me", 404)):
        response = await server.client.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]
    for doubled in ("//api/chat", "///api//show/"):
        response = await server.client.post(f"{server.url}{doubled}", json={"unknown": 1})
        assert response.json()["error"].startswith("unknown is not a field"), doubled


async def test_keys_are_checked(model: Path, tmp_path: Path) -> None:
    async with shared_server(model, tmp_path) as server:
        for path in ("/api/tags", "/api/ps"):
            assert (await server.client.get(path)).status_code == 401
            assert (await server.client.get(path, headers=of(next(iter(KEYS))))).status_code == 200
        refused = await server.post("/api/chat", messages=[QUESTION])
        assert refused.status_code == 401
        assert refused.json().keys() == {"error"}
        assert (await server.client.get("/api/version")).status_code == 200


async def test_the_routes_are_described(server: HttpServer) -> None:
    document = (await server.client.get("/openapi.json")).json()
    for path in ("/api/chat", "/api/generate", "/api/pull"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "application/x-ndjson"}
    assert {*document["paths"]} >= {f"/api/{name}" for name in ("embed", "embeddings", "show", "tags", "ps", "version")}
    content = document["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
    page = (await server.client.get("/docs")).text
    assert "<code>POST /api/chat</code>" in page
