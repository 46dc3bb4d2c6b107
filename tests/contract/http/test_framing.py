"""HTTP message framing after RFC 9112: where a request ends, and when its response and connection end."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.api.http.transport import connection
from testing.seeds import seeded
from testing.serving.http_server import DONE, HttpServer, serve_http, server_of_the_module
from tests.contract.http.sockets import PATH, VERSION, Stream, answer_to, connected, posted, status_of

lasting_server = server_of_the_module("lasting_server")

POST = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n".encode()
CONTENT = json.dumps({"prompt": "x", "seed": 0, "max_tokens": 2}).encode()
CHUNKED = b"transfer-encoding: chunked\r\n"
# Java's HttpClient sends these headers with each request until a server has declined HTTP/2.
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "several": b"upgrade: h2c, websocket\r\nconnection: keep-alive, upgrade\r\nupgrade: TLS/1.0\r\n",
}
OLD_STREAM = posted(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")


class Arrivals:
    """Counts the bytes that servers receive, and the largest amounts of unparsed bytes and waiting requests."""

    def __init__(self) -> None:
        self.num_bytes = self.most_unparsed = self.most_waiting = 0
        self._changed = asyncio.Event()

    def count(self, served: connection.HttpConnection, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.most_unparsed = max(self.most_unparsed, len(served._received))
        self.most_waiting = max(self.most_waiting, len(served.pipeline))
        self._changed.set()

    async def until(self, num_bytes: int) -> None:
        while self.num_bytes < num_bytes:
            self._changed.clear()
            await self._changed.wait()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    arrivals, receive = Arrivals(), connection.HttpConnection.data_received

    def data_received(self: connection.HttpConnection, data: bytes) -> None:
        receive(self, data)
        arrivals.count(self, len(data))

    monkeypatch.setattr(connection.HttpConnection, "data_received", data_received)
    return arrivals


async def send_in_pieces(stream: Stream, arrivals: Arrivals, sent: bytes, cuts: list[int]) -> None:
    """Send bytes in pieces that end at the offsets `cuts`. Wait until the server has received each piece."""
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        stream[1].write(sent[start:end])
        await arrivals.until(arrivals.num_bytes + end - start)


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read a response that has a content-length. Return its status and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), head
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


def chunked(content: bytes, draw: random.Random) -> bytes:
    cut = draw.randrange(1, len(content))
    parts = (content[:cut], content[cut:])
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


# Upgrades


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offered_upgrade_is_ignored(
    server: HttpServer, arrivals: Arrivals, offer: bytes, is_chunked: bool
) -> None:
    """The body of a request with an upgrade offer is read correctly wherever it is cut, and the next request is
    answered.
    """
    draw = seeded()
    framing = CHUNKED if is_chunked else b"content-length: %d\r\n" % len(CONTENT)
    head = POST + offer + framing + b"\r\n"
    sent = head + (chunked(CONTENT, draw) if is_chunked else CONTENT)
    async with connected(server) as stream:
        for cuts in ([], [len(head)], *(sorted(draw.sample(range(1, len(sent)), 3)) for _ in range(8))):
            await send_in_pieces(stream, arrivals, sent + VERSION, cuts)
            status, answer = await next_answer(stream[0])
            assert (status, len(json.loads(answer)["choices"])) == (200, 1), cuts
            assert (await next_answer(stream[0]))[0] == 200, cuts


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_a_body_after_an_upgrade_offer_is_not_a_request(
    server: HttpServer, arrivals: Arrivals, offer: bytes
) -> None:
    server.stack.worker.step_seconds = 0.02
    begun = await server.complete(prompt="x", max_tokens=200, ignore_eos=True, detached=True)
    hidden = f"DELETE /v1/requests/{begun['request_id']} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    head = POST + offer + b"content-length: %d\r\n\r\n" % len(hidden)
    async with connected(server) as stream:
        await send_in_pieces(stream, arrivals, head + hidden + VERSION, [len(head), len(head) + len(hidden)])
        assert [(await next_answer(stream[0]))[0] for _ in range(2)] == [400, 200]
    assert (await server.stack.loads()).num_running == 1
    assert (await server.client.delete(f"/v1/requests/{begun['request_id']}")).status_code == 200


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_offer_on_a_connection_that_closes_is_ignored(
    server: HttpServer, offer: bytes, version: bytes
) -> None:
    closing = b"" if version == b"1.0" else b"connection: close\r\n"
    head = POST.replace(b"1.1", version) + offer + closing + b"content-length: %d\r\n\r\n" % len(CONTENT)
    answer = await answer_to(server, head + CONTENT)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]) == 1


async def test_many_offers_come_at_once(server: HttpServer) -> None:
    async with connected(server) as (reader, writer):
        writer.write(VERSION.replace(b"host:", OFFERS["h2c"] + b"host:") * 40)
        for _ in range(40):
            assert (await next_answer(reader))[0] == 200


async def test_nothing_behind_connect_is_served(server: HttpServer, arrivals: Arrivals) -> None:
    sent = b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with connected(server) as stream:
        stream[1].write(sent + VERSION)
        answer = await stream[0].read()
    assert (answer.split()[1], answer.count(b"HTTP/1.1")) == (b"405", 1)


# Heads


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, b"GET /version HTTP/1.1\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: y\r\nHost: evil.example\r\n\r\n"),
        (400, b"GET /version HTTP/1.0\r\nhost: localhost\r\nhost: localhost\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: localhost, evil.example\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: me@localhost\r\n\r\n"),
        (400, b"GET /version HTTP/1.1\r\nhost: localhost/version\r\n\r\n"),
        (200, b"GET /version HTTP/1.0\r\n\r\n"),
        (200, b"GET /version HTTP/1.1\r\nhost: [::1]:80\r\n\r\n"),
        (501, POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (501, POST + b"transfer-encoding: gzip\r\n" + CHUNKED + b"\r\n0\r\n\r\n"),
        (400, POST + CHUNKED + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n"),
        (400, POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n"),
        (505, b"GET /version HTTP/0.9\r\nhost: localhost\r\n\r\n"),
        (505, b"GET /version HTTP/2.0\r\nhost: localhost\r\n\r\n"),
        (200, b"GET http://localhost/version HTTP/1.1\r\nhost: evil.example\r\n\r\n"),
        (403, b"GET http://evil.example/version HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (200, b"GET http://localhost?x=/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (400, b"GET http://me@localhost/version HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (400, b"GET ftp://localhost/version HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        (400, POST + CHUNKED + b"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, b"GET /version#it HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    ],
    ids=lambda value: str(value)[:80],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_heads_that_rfc_9112_names_have_their_status(
    lasting_server: HttpServer, status: int, sent: bytes
) -> None:
    """A malformed request head closes the connection, and requests after it are not served."""
    assert await status_of(lasting_server, sent) == status
    if status not in (200, 403, 404):
        answer = await answer_to(lasting_server, sent + VERSION)
        assert (len(re.findall(rb"HTTP/1.1 \d", answer)), b"connection: close" in answer) == (1, True)


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", POST + CHUNKED + b"\r\n-1\r\n"])
async def test_a_bad_request_does_not_discard_earlier_responses(
    model: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes
) -> None:
    """Responses to earlier requests are sent, however long they take."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.05
        answers = await answer_to(server, VERSION + posted(max_tokens=10) + bad + VERSION)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200"]


async def test_a_connection_that_a_trailer_ends_is_closed(server: HttpServer) -> None:
    """The parser reads no further request after `connection: close` in a trailer."""
    content = b"%x\r\n%b\r\n0\r\nconnection: close\r\n\r\n" % (len(CONTENT), CONTENT)
    answer = await answer_to(server, POST + CHUNKED + b"\r\n" + content + VERSION)
    assert (answer.count(b"200 OK"), b"connection: close" in answer) == (1, True)


async def test_a_refused_expect_100_closes_the_connection(server: HttpServer) -> None:
    """A refused request with `expect: 100-continue` closes the connection.

    The server cannot know whether the next bytes are the body or another request.
    """
    refused = POST.replace(b"localhost", b"evil.example")
    sent = refused + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(VERSION)
    async with connected(server) as (reader, writer):
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert (head.split()[1], b"connection: close" in head) == (b"403", True)
        writer.write(VERSION)
        assert b"HTTP/1.1" not in await reader.read()


async def test_http_1_0_clients_get_no_100_continue(server: HttpServer, arrivals: Arrivals) -> None:
    whole = posted("expect: 100-continue\r\n", max_tokens=2).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with connected(server) as stream:
        await send_in_pieces(stream, arrivals, whole, [whole.index(b"{")])
        assert b"200 OK" in await stream[0].readline()


async def test_an_early_answer_arrives_while_the_client_sends(server: HttpServer) -> None:
    """An early response arrives while the client sends, even if the connection closes after it.

    A reset would discard it.
    """
    size = 24 << 20
    sent = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size
    async with connected(server) as (reader, writer):
        writer.write(sent + b" " * size)
        await writer.drain()
        answer = await reader.read()
    assert answer.split()[1] == b"413"


async def test_many_chunks_do_not_block_the_event_loop(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks are parsed in several turns of the event loop.

    Each chunk costs a function call, and one packet may contain 43,000 chunks.
    """
    num_parsed, turns = 0, []
    parse, on_body = connection.HttpConnection._parse, connection.HttpConnection.on_body

    def count(self: connection.HttpConnection, body: bytes) -> None:
        nonlocal num_parsed
        num_parsed += 1
        on_body(self, body)

    def take_turn(self: connection.HttpConnection) -> None:
        before = num_parsed
        parse(self)
        turns.append(num_parsed - before)

    monkeypatch.setattr(connection.HttpConnection, "on_body", count)
    monkeypatch.setattr(connection.HttpConnection, "_parse", take_turn)
    content = b"".join(b"1\r\n%c\r\n" % each for each in CONTENT + b" " * 200_000)
    assert await status_of(server, POST + CHUNKED + b"\r\n" + content + b"0\r\n\r\n") == 200
    assert (num_parsed, max(turns) < 3000) == (len(CONTENT) + 200_000, True)


# HTTP/1.0


async def test_an_old_client_gets_no_chunks(server: HttpServer) -> None:
    for sent in (OLD_STREAM, OLD_STREAM.replace(b"host:", b"connection: keep-alive\r\nhost:")):
        head, _, content = (await answer_to(server, sent)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        events = content.decode().split("\n\n")
        assert events[-2:] == [DONE, ""]
        assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])
    head, _, content = (await answer_to(server, OLD_STREAM.replace(b"true", b"null"))).partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in head
    head, _, content = (await answer_to(server, b"HEAD /version HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert (b"200 OK" in head, content) == (True, b"")


# Pipelined requests


async def test_requests_ahead_are_answered_in_order(server: HttpServer, arrivals: Arrivals) -> None:
    """Any number of requests may be pipelined. Beyond a limit, the server stops reading until it can answer them."""
    server.stack.worker.step_seconds = 0.02
    names = [f"/v1/models/{index:03}{'n' * 1000}" for index in range(1000)]
    sent = b"".join(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % name.encode() for name in names)
    async with connected(server) as (reader, writer):
        writer.write(posted(max_tokens=50))
        await server.stack.until(lambda loads: loads.num_running == 1)
        writer.write(sent)
        assert (await next_answer(reader))[0] == 200
        for name in names:
            status, answer = await next_answer(reader)
            assert (status, name[11:].encode()[:60] in answer) == (404, True)
    assert len(sent) > 3 * arrivals.most_unparsed > 3 * connection.MAX_AHEAD_BYTES


async def test_small_requests_ahead_wait_as_bytes(server: HttpServer, arrivals: Arrivals) -> None:
    """Small pipelined requests wait as bytes, because each would need a hundred times the memory as an object."""
    server.stack.worker.step_seconds = 0.02
    small = b"GET / HTTP/1.1\r\nhost:\r\n\r\n"  # one piece that is parsed at once contains 40 of them
    async with connected(server) as (reader, writer):
        writer.write(posted(max_tokens=50) + small * 2000)
        assert (await next_answer(reader))[0] == 200
        for _ in range(2000):
            assert (await next_answer(reader))[0] == 403
    assert 0 < arrivals.most_waiting <= 41


# Half-closed connections


@pytest.mark.parametrize("is_old", [False, True], ids=["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("asked", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_a_half_closed_connection_gets_its_response(
    server: HttpServer, is_old: bool, asked: dict[str, Any]
) -> None:
    server.stack.worker.step_seconds = 0.03
    sent = posted(max_tokens=30, **asked).replace(b"HTTP/1.1", b"HTTP/1.0" if is_old else b"HTTP/1.1")
    async with connected(server) as (reader, writer):
        writer.write(sent)
        await server.stack.until(lambda loads: loads.num_running == 1)
        writer.write_eof()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP") == 1
    assert (DONE.encode() if asked else b'"usage"') in answer


async def test_all_requests_of_a_closed_half_are_answered(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.03
    async with connected(server) as (reader, writer):
        writer.write((posted(max_tokens=10) + VERSION * 20) * 2 + b"GET /ver")
        writer.write_eof()
        answers = await reader.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * 42


@pytest.mark.parametrize("sent", [b"", b"GET /ver", VERSION, posted()[:-1]], ids=["nothing", "head", "all", "body"])
async def test_a_closed_half_without_an_answer_due_is_closed(server: HttpServer, sent: bytes) -> None:
    async with connected(server) as (reader, writer):
        writer.write(sent)
        if sent == VERSION:
            assert (await next_answer(reader))[0] == 200
        writer.write_eof()
        assert await reader.read() == b""
    await server.stack.until_idle()


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "several"])
async def test_a_closed_connection_aborts_its_request(server: HttpServer, asked: dict[str, Any]) -> None:
    """The connection looks half-closed until the server writes to it."""
    server.stack.worker.step_seconds = 0.1  # the request would outlast the test if it were not aborted
    async with connected(server) as (_, writer):
        writer.write(posted(max_tokens=240, ignore_eos=True, **asked))
        await server.stack.until(lambda loads: loads.num_running > 0)
        writer.close()
        await server.stack.until_idle()
