"""Limits on the effect of one tenant's requests on other tenants: order, bytes and memory."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pagewire.common.chat.chat_output import OutputParser
from scheduler_service.api.grpc import request_servicer
from scheduler_service.api.http import answering, call_admission, prompts
from scheduler_service.api.http.responses import response_teller
from scheduler_service.api.http.transport import http_server
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.turns import PIECE_SIZE
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http
from testing.serving.tenants import KEYS
from tests.contract.http.scripted import Say
from tests.contract.http.shared import CHAT, COMPLETION, MIB, chat, of, shared_server
from tests.contract.pooling import write_pooling


async def test_chats_are_rendered_in_turns(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chats one tenant sends, another tenant's chat is served right after those in progress."""
    rendered: list[str] = []
    may_go_on, render = threading.Event(), prompts.render

    def held(template: str, messages: Any, **given: Any) -> str:
        rendered.append(messages[0]["content"])
        assert may_go_on.wait(20)
        return render(template, messages, **given)

    monkeypatch.setattr(prompts, "render", held)
    async with shared_server(model, tmp_path) as server:
        flood = [asyncio.create_task(server.post(CHAT, of("acme"), **chat("flood"))) for _ in range(30)]
        while not rendered:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        small = asyncio.create_task(server.post(CHAT, of("globex"), **chat("small")))
        await server.post("/tokenize", of("globex"), prompt="x")  # queued after it
        may_go_on.set()
        assert (await small).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}
    assert rendered.index("small") <= 6  # at most the number of threads that were busy
    assert rendered.count("flood") == 30


async def test_large_chats_wait_within_a_bound_of_their_tenant(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, render = threading.Event(), threading.Event(), prompts.render

    def held(template: str, messages: Any, **given: Any) -> str:
        begun.set()
        assert len(messages[0]["content"]) < 1000 or may_go_on.wait(20)
        return render(template, messages, **given)

    monkeypatch.setattr(prompts, "render", held)
    large = chat("x " * 50_000)
    limits = {"max_prompt_bytes": 150_000, "max_waiting_text_bytes": 2 * MIB}
    assert TextLimits(150_000, 2 * MIB).max_tenant_waiting == MIB // 2
    async with shared_server(model, tmp_path, **limits) as server:
        flood = [asyncio.create_task(server.post(CHAT, of("acme"), **large)) for _ in range(12)]
        await asyncio.to_thread(begun.wait, 20)
        refused = 0
        for answer in asyncio.as_completed(flood):
            response = await answer
            refused += response.status_code == 429
            if refused == 7:  # five fit
                assert "texts of this tenant" in response.text
                assert int(response.headers["retry-after"]) > 0
                break
        assert (await server.post(CHAT, of("globex"), **chat("small"))).status_code == 200
        may_go_on.set()
        statuses = [(await answer).status_code for answer in flood]
        assert statuses.count(429) == 7
        assert statuses.count(400) == 5  # more tokens than the context length


async def test_bodies_on_their_way_are_bounded_by_tenant(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_admission, "MAX_BODIES_BYTES", 16 * MIB)  # of which one tenant may use 4
    async with shared_server(model, tmp_path) as server:
        host, port = server.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['acme']}\r\n"
            writer.write(f"{head}content-length: {3 * MIB}\r\n\r\n".encode() + b" " * (3 * MIB - 1))
            writers.append(writer)
        asked = {"prompt": "x", "max_tokens": 1, "user": "x" * MIB}
        async with asyncio.timeout(20):
            while (refused := await server.post(COMPLETION, of("acme"), **asked)).status_code != 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "bodies of this tenant" in refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert (await server.post(COMPLETION, of("globex"), **asked)).status_code == 200
        for writer in writers:
            writer.close()


async def test_an_ended_response_is_read_without_its_template(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = (await server.post("/v1/responses", input="hello", background=True, max_output_tokens=3)).json()
    monkeypatch.setattr(prompts, "render", None)
    path, running = f"/v1/responses/{created['id']}", ("queued", "in_progress")
    async with asyncio.timeout(20):
        while (read := (await server.client.get(path)).json())["status"] in running:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
    assert read["status"] == "incomplete", read


async def test_a_long_list_of_tokens_becomes_text_in_pieces(server: HttpServer, model: Path) -> None:
    """A long list of token ids is decoded in pieces, even if a character's bytes are split between two pieces."""
    text = "日é🐢 " * (PIECE_SIZE // 8)
    token_ids = (await server.post("/tokenize", prompt=text)).json()["tokens"]
    assert len(token_ids) > 2 * PIECE_SIZE // 8
    for start in range(4):
        whole = (await server.post("/detokenize", tokens=token_ids[start:])).json()["prompt"]
        assert whole.endswith(text[10:])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_long_output_is_read_off_the_event_loop(
    path: str, server: HttpServer, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole response is parsed in one piece on another thread. A short output is parsed on the event loop."""
    threads: set[int] = set()
    feed = OutputParser.feed

    def noted(parser: OutputParser, text: str, *, is_last: bool) -> Any:
        threads.add(threading.get_ident())
        return feed(parser, text, is_last=is_last)

    monkeypatch.setattr(OutputParser, "feed", noted)
    for module in (answering, response_teller):
        monkeypatch.setattr(module, "PIECE_SIZE", 10 * answering.CHAR_VALUES)
    name = "input" if path == "/v1/responses" else "messages"
    asked = {name: [{"role": "user", "content": "x"}]} | ({"max_tokens": 99} if path == "/v1/messages" else {})
    say("x")
    assert (await server.post(path, **asked)).status_code == 200
    assert threads == {threading.get_ident()}
    say("once upon a time")
    assert (await server.post(path, **asked)).status_code == 200
    assert len(threads) == 2


async def test_calls_with_many_inputs_refuse_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each HTTP request counts as one pending call, however many inputs it has."""
    monkeypatch.setattr(request_servicer, "_MAX_PENDING_CALLS", 20)
    model = make_chat_checkpoint(tmp_path / "model")
    write_pooling(model, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    async with shared_server(model, tmp_path) as server:
        inputs = ["some text"] * 100
        flood = [asyncio.create_task(server.post("/v1/embeddings", of("acme"), input=inputs)) for _ in range(5)]
        small = [asyncio.create_task(server.post(COMPLETION, of("globex"), prompt="x", max_tokens=1)) for _ in range(5)]
        answers = await asyncio.gather(*flood, *small)
        assert [answer.status_code for answer in answers] == [200] * 10
        assert [len(answer.json()["data"]) for answer in answers[:5]] == [100] * 5


async def test_requests_that_are_served_are_bounded_by_tenant(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running streams keep the request's fields in memory, except fields without an effect."""
    monkeypatch.setattr(call_admission, "MAX_REQUESTS_BYTES", 8 * MIB)  # of which one tenant may use 2
    asked = chat("x") | {"documents": [{"text": "x" * MIB}], "max_tokens": 100, "stream": True, "seed": 0}
    async with shared_server(model, tmp_path) as server:
        server.stack.worker.step_seconds = 0.1
        async with server.client.stream("POST", CHAT, json=asked, headers=of("acme")) as first:
            assert first.status_code == 200
            refused = await server.post(CHAT, of("acme"), **asked)
            assert refused.status_code == 429
            assert "requests of this tenant" in refused.text
            assert (await server.post(CHAT, of("acme"), **chat("small"))).status_code == 200
            assert (await server.post(CHAT, of("globex"), **asked | {"max_tokens": 2})).status_code == 200
        async with asyncio.timeout(20):
            while (await server.post(CHAT, of("acme"), **asked | {"max_tokens": 2})).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_calls_that_wait_for_a_turn_are_refused_when_the_server_stops(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, render = threading.Event(), threading.Event(), prompts.render

    def held(*given: Any, **named: Any) -> str:
        begun.set()
        assert may_go_on.wait(20)
        return render(*given, **named)

    monkeypatch.setattr(prompts, "render", held)
    monkeypatch.setattr(http_server, "_CLOSE_TIMEOUT_S", 0.1)
    async with serve_http(model) as server:
        calls = [asyncio.create_task(server.post(CHAT, **chat("x"))) for _ in range(6)]
        await asyncio.to_thread(begun.wait, 20)
        server.front.stop.set()
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)  # the other requests run on threads
        may_go_on.set()
        await asyncio.wait(calls)
        assert done
        for call in calls:
            answer = call.result()
            assert answer.status_code == 503, answer.text
            assert "the server has shut down" in answer.json()["error"]["message"]
