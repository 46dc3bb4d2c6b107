"""Unusual client behavior on HTTP connections, and the limits and timeouts that apply to it."""

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.api.http import body, call_admission
from scheduler_service.api.http.transport import connection, event_stream, http_server
from testing.serving.certificates import Authority
from testing.serving.http_server import DONE, HttpServer, serve_http, server_of_the_module
from tests.contract.http.sockets import PATH, VERSION, Stream, answer_to, connected, posted, status_of
from tests.thorough import thorough

lasting_server = server_of_the_module("lasting_server")

MIB = 1 << 20
_ASKED = json.dumps({"prompt": "x" * 1_000_000, "return_token_strs": True}).encode()
LARGE = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(_ASKED), _ASKED)


@pytest.fixture
def open_connections(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """The open connections of all servers."""
    held: set[object] = set()
    made, lost = connection.HttpConnection.connection_made, connection.HttpConnection.connection_lost

    def add(self: connection.HttpConnection, transport: Any) -> None:
        held.add(self)
        made(self, transport)

    def remove(self: connection.HttpConnection, exc: Exception | None) -> None:
        lost(self, exc)
        held.remove(self)

    monkeypatch.setattr(connection.HttpConnection, "connection_made", add)
    monkeypatch.setattr(connection.HttpConnection, "connection_lost", remove)
    return held


async def test_a_whole_answer_that_takes_long_is_no_stream(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.05)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.3
        response = await server.post(PATH, prompt="x", max_tokens=3)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json()["choices"]


# Connections


async def is_open(stream: Stream) -> bool:
    """Request the server's version. Return whether the connection is still open."""
    reader, writer = stream
    try:
        writer.write(VERSION)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    return b" 200 " in head


async def test_a_connection_beyond_the_bound_ends_one_without_a_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "max_open_connections", lambda: 8)
    async with serve_http(model) as server:
        address = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(*address) for _ in range(4)]
        assert await is_open(held[0])
        for _ in range(50):
            assert b"200" in await answer_to(server, VERSION.replace(b"1.1", b"1.0"))
        assert [await is_open(connection) for connection in held] == [True, False, True, True], "it had a request"
        for _, writer in held:
            writer.close()


async def test_the_connection_limit_closes_an_idle_connection(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "max_open_connections", lambda: 8)
    async with serve_http(model) as server:
        address = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(*address) for _ in range(4)]
        for number in (1, 0, 2, 3):
            assert await is_open(held[number])
        last = await asyncio.open_connection(*address)
        assert await is_open(last)
        assert [await is_open(connection) for connection in held] == [True, False, True, True], "idle longest"
        for _, writer in (*held, last):
            writer.close()


async def test_no_connection_with_a_request_ends_for_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "max_open_connections", lambda: 8)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.02
        address = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(*address) for _ in range(4)]
        for _, writer in held:
            writer.write(posted(max_tokens=200, ignore_eos=True))
        async with asyncio.timeout(10):
            while await answer_to(server, VERSION.replace(b"1.1", b"1.0")) != b"":  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.01)
        server.stack.worker.step_seconds = 0.0
        for reader, writer in held:
            assert b" 200 " in await reader.readline()
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [posted()[:-1], VERSION + VERSION[:-1], VERSION + posted()[:-1]],
    ids=["body", "head behind a request", "body behind a request"],
)
async def test_unfinished_requests_do_not_block_new_connections(
    model: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "max_open_connections", lambda: 8)
    async with serve_http(model) as server:
        address = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(*address) for _ in range(4)]
        for reader, writer in held:
            writer.write(sent)
            if sent.startswith(VERSION):
                await reader.readuntil(b"}")
        for _ in range(20):
            assert b" 200 " in await answer_to(server, VERSION.replace(b"1.1", b"1.0"))
        assert await held[0][0].read() == b"", "it had what never arrived longest"
        for _, writer in held:
            writer.close()


async def test_accepting_connections_yields_to_the_event_loop() -> None:
    listener = connection.Listener(socket.create_server(("127.0.0.1", 0), backlog=200), 200)
    address = listener.getsockname()
    async with await asyncio.start_server(lambda reader, writer: None, sock=listener, backlog=200):
        clients = [socket.create_connection(address) for _ in range(100)]  # while the event loop is blocked
        most = 0
        async with asyncio.timeout(10):
            while (before := listener.num_open) < len(clients):
                await asyncio.sleep(0)
                most = max(most, listener.num_open - before)
        for client in clients:
            client.close()
    assert 0 < most < 20


async def test_connections_count_from_their_handshake_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "max_open_connections", lambda: 4)
    authority = Authority("ours")
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    trusted = ssl.create_default_context(cafile=authority.write(tmp_path))
    async with serve_http(model, front={"tls_cert": cert, "tls_key": key}) as server:
        address = server.url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(2)]
        trusted_stream = await asyncio.open_connection(*address, ssl=trusted)
        async with asyncio.timeout(10):
            assert await silent[0][0].read() == b"", "it ended for the third"
        assert await is_open(trusted_stream)
        assert not silent[1][0].at_eof()
        for _, writer in (*silent, trusted_stream):
            writer.close()


async def test_an_idle_connection_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle timeout also applies to blank lines between requests, and to the unread body of an answered request."""
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with serve_http(model) as server:
        unfinished = VERSION.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\nbody")
        for sent in (VERSION, unfinished):
            async with connected(server) as (reader, writer):
                writer.write(sent)
                await reader.readuntil(b"}")
                writer.write(b"\r\n" if sent == VERSION else b"b")
                assert await reader.read() == b""


async def test_a_client_that_goes_with_requests_ahead(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.02
    async with connected(server) as (_, writer):
        writer.write(posted(max_tokens=200, ignore_eos=True, stream=True) + posted(max_tokens=200))
        await server.stack.until(lambda loads: loads.num_running == 1)
    await server.stack.until_idle()
    assert server.stack.worker.step_seconds * 200 > 3  # or the request might have ended by itself


async def test_errors_are_not_written_into_another_response(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.02
    async with connected(server) as (reader, writer):
        writer.write(posted(max_tokens=200, ignore_eos=True, stream=True))
        await reader.readuntil(b"data: {")
        writer.write(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1" not in await reader.read()
    await server.stack.until_idle()


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
async def test_a_client_that_reads_nothing_loses_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch, open_connections: set[object], is_streamed: bool
) -> None:
    monkeypatch.setattr(connection, "UNREAD_TIMEOUT_S", 0.3)
    streamed = posted(max_tokens=240, n=4, logprobs=20, ignore_eos=True, stream=True)
    async with serve_http(model) as server, connected(server, num_ahead=4096) as (reader, writer):
        writer.write(streamed * 17 if is_streamed else LARGE)  # more than the buffers of both sockets can hold
        await reader.readline()
        while open_connections:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
        await server.stack.until_idle()


@pytest.mark.parametrize("has_tls", [False, *thorough(True)], ids=["plain", "tls"])
async def test_answers_that_are_not_read_have_a_bound_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_connections: set[object], has_tls: bool
) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 24 * MIB)
    authority = Authority("ours")
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    trusted = ssl.create_default_context(cafile=authority.write(tmp_path)) if has_tls else None
    async with serve_http(model, front={"tls_cert": cert, "tls_key": key} if has_tls else None) as server:
        readers = []
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as clients:
            for _ in range(5):  # three of them fit
                reader, writer = await clients.enter_async_context(connected(server, trusted, num_ahead=4096))
                writer.write(LARGE)
                readers.append(reader)
                await reader.readuntil(b"content-length: ")
            while len(open_connections) > 3:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*(_all_of(reader) for reader in readers))
        assert [len(answer) == max(map(len, answers)) for answer in answers] == [False] * 2 + [True] * 3


async def test_a_client_that_reads_slowly_gets_its_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read timeout applies to each pause of a slow client, not to the whole response."""
    monkeypatch.setattr(connection, "UNREAD_TIMEOUT_S", 1.0)
    async with serve_http(model) as server, connected(server, num_ahead=4096) as (reader, writer):
        writer.write(LARGE)
        await reader.readuntil(b"content-length: ")
        num_left = int(await reader.readuntil(b"\r\n"))
        await reader.readuntil(b"\r\n\r\n")
        began = asyncio.get_running_loop().time()
        while num_left:
            num_left -= len(await reader.readexactly(min(num_left, MIB // 4)))
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began > 2 * connection.UNREAD_TIMEOUT_S


async def test_events_of_several_prompts_are_whole() -> None:
    """Events of several prompts are written one after the other, even if each is sent in pieces to a slow reader."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(bytes(message.get("body", b"")))
        await asyncio.sleep(0)

    scope = {"abort": lambda: None, "state": {}}
    stream = event_stream.EventStream(partial(connection.UnreadAnswers().send, send, scope))
    events = [letter * MIB for letter in (b"a", b"b")]
    await asyncio.gather(*map(stream.send_event, events))
    assert b"".join(sent) == b"".join(b"data: %b\n\n" % event for event in events)
    assert max(map(len, sent)) < MIB


async def test_a_message_that_is_cut_ends_its_connection() -> None:
    """A truncated message closes its connection.

    Otherwise the client would read the following bytes as a part of the message.
    """
    sending, never, num_aborts = asyncio.Event(), asyncio.Event(), itertools.count()

    async def send(message: Any) -> None:
        sending.set()
        await never.wait()

    message = {"type": "http.response.body", "body": bytes(MIB), "more_body": True}
    scope = {"abort": lambda: next(num_aborts), "state": {}}
    call = asyncio.create_task(connection.UnreadAnswers().send(send, scope, message))
    await sending.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert next(num_aborts) == 1


async def test_unread_answers_end_those_of_their_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 4 * MIB)
    never, unread, ended = asyncio.Event(), connection.UnreadAnswers(), []

    async def send(message: Any) -> None:
        await never.wait()

    calls = []
    for name, tenant, size in (("small", "b", 1), ("old", "a", 1), ("new", "a", 1), ("newest", "a", 2)):
        scope = {"abort": lambda name=name: ended.append(name), "state": {"tenant": tenant}}
        message = {"type": "http.response.body", "body": bytes(size * MIB)}
        calls.append(asyncio.create_task(unread.send(send, scope, message)))
        await asyncio.sleep(0)
    assert ended == ["old"]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not unread._unread
    assert not unread._num_bytes


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """Return the remaining bytes of a response, or the part that arrived before the connection closed."""
    num_bytes, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
    try:
        return await reader.readexactly(int(num_bytes))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return getattr(error, "partial", b"")


# Heads, bodies


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n"),
        (400, b"GET /v1/\xff HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (400, b"GET /version HTTP/9.9\r\nhost: localhost\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: localhost\r\nx\x00y: z\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (404, b"GET * HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (404, b"GET /%ff%00%0a HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (405, b"CONNECT /version HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (405, b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (405, b"HEAD /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (200, b"HEAD /version HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (200, b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"),
        (413, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999999\r\n\r\n"),
        (415, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-encoding: br\r\ncontent-length: 1\r\n\r\n1"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_odd_requests_have_their_status(lasting_server: HttpServer, status: int, sent: bytes) -> None:
    assert await status_of(lasting_server, sent.replace(b"host: x", b"host: localhost")) == status


@pytest.mark.parametrize("name", ["n" * 100_000, "n" * 100_000 + ".m", "t" * 50_000 + "emperature"])
async def test_a_long_name_is_not_said_again(server: HttpServer, name: str) -> None:
    for asked in ({name: 1}, {"stream_options": {name: 1}}, {"model": name}):
        response = await server.post(PATH, prompt="x", **asked)
        assert response.status_code == (404 if "model" in asked else 400)
        assert len(response.content) < 600


@pytest.mark.parametrize(
    ("begun", "endless"),
    [
        (b"GET /version HTTP/1.1\r\nx: ", b"y"),
        (b"GET /version HTTP/1.1\r\n", b"y"),
        (b"GET /", b"y"),
        (b"", b"\r\n"),
        (b"%(post)s5;", b"y"),
        (b"%(post)s1\r\n{\r\n0\r\nx: ", b"y"),
        (b"%(post)s1\r\n{\r\n0\r\n", b"x: y\r\n"),
    ],
    ids=["header", "name", "path", "lines", "extension", "trailer", "trailers"],
)
async def test_endless_requests_are_not_buffered(server: HttpServer, begun: bytes, endless: bytes) -> None:
    post = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    num_sent, piece = 0, endless * (4096 // len(endless))
    async with connected(server) as (_, writer):
        writer.write(begun.replace(b"%(post)s", post))
        while num_sent < 64 * MIB:
            writer.write(piece)
            try:
                await writer.drain()
            except ConnectionError:
                break
            num_sent += len(piece)
    assert num_sent < 16 * MIB  # including the bytes in the socket buffers
    assert (await server.client.get("/version")).status_code == 200


async def test_chunked_trailers_are_not_headers(server: HttpServer) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    content = '{"prompt": "x", "max_tokens": 2}'
    sent = f"{head}{len(content):x}\r\n{content}\r\n0\r\ncontent-encoding: gzip\r\n\r\n"
    assert await status_of(server, sent.encode()) == 200


async def test_a_chunked_body_has_the_bounds_of_others(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.3)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with serve_http(model) as server:
        assert await status_of(server, head + b"1\r\n{\r\n") == 408
        too_much = b"100000\r\n" + b" " * MIB + b"\r\n"
        assert await status_of(server, head + too_much * 17) == 413


async def test_bodies_on_their_way_have_a_bound_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_admission, "MAX_BODIES_BYTES", 2 * MIB)
    async with serve_http(model) as server:
        await _check_bodies_on_their_way(server)


async def _check_bodies_on_their_way(server: HttpServer) -> None:
    begun = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {2 * MIB}\r\n\r\n".encode()
    async with connected(server) as (_, first), connected(server) as (reader, second):
        for writer in (first, second):
            writer.write(begun + b" " * (MIB + MIB // 2))
        reading = asyncio.create_task(reader.readline())
        refused = await status_of(server, begun + b" " * MIB)
        assert refused == 429
        assert (await server.post(PATH, prompt="small", max_tokens=2)).status_code == 200
        reading.cancel()
    async with asyncio.timeout(10):
        while await status_of(server, posted(user="x" * MIB)) == 429:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)


async def test_expect_100_continue(server: HttpServer) -> None:
    whole = posted("expect: 100-continue\r\n", max_tokens=2)
    head, _, content = whole.partition(b"\r\n\r\n")
    async with connected(server) as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        assert b"200 OK" in await reader.readline()
    assert await status_of(server, head.replace(b"localhost", b"evil.example") + b"\r\n\r\n") == 403


async def test_a_connection_outlives_errors(server: HttpServer) -> None:
    async with connected(server) as (reader, writer):
        for sent, status in (
            (posted(n=0), 400),
            (posted().replace(b"{", b"["), 400),
            (posted().replace(b"localhost", b"evil.example"), 403),
            (VERSION.replace(b"version", b"nothing"), 404),
            (posted("content-encoding: gzip\r\n"), 415),
            (posted(max_tokens=2), 200),
        ):
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split()[1]))


async def test_a_stream_is_whole_where_the_connection_closes(server: HttpServer) -> None:
    for sent in (posted("connection: close\r\n", stream=True), posted(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")):
        assert DONE.encode() in await answer_to(server, sent)


# The log


async def test_client_errors_are_not_logged(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    """A failed request has one log line in the scheduler. A client error is reported in its response alone."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    server.stack.worker.step_seconds = 0.02
    await server.complete(prompt="x", max_tokens=2)
    await server.refusal(PATH, prompt="x", n=0)
    await status_of(server, b"nonsense\r\n\r\n")
    await status_of(server, VERSION.replace(b"host", b"upgrade: websocket\r\nconnection: upgrade\r\nhost"))
    call = asyncio.create_task(server.post(PATH, prompt="x", max_tokens=200, ignore_eos=True, stream=True))
    await server.stack.until(lambda loads: loads.num_running == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await server.stack.until_idle()
    logged = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert len(logged) <= 1, logged  # the line about the cancelled request
