"""The connections of the HTTP server, with limits on the resources that clients can use.

There are limits on the number of connections, on the size of a request's head, and on the time that a client may be
silent or not read. Further limits apply to the bytes received ahead of the current request and to the bytes of unread
answers. Requests that RFC 9112 forbids are refused here if the parser accepts them.
"""

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as UvicornConnection
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as Cycle

from scheduler_service.api.http.refusals import HttpRefusal, error_answer

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10  # of the path and all headers, and of other data outside bodies
HEAD_TIMEOUT_S = 30.0  # from connecting to the first request, and from the first to the last byte of a head
KEEP_ALIVE_S = 75.0  # longer than the idle timeout of common clients
UNREAD_TIMEOUT_S = 60.0  # within which a client must read some of the waiting data
# Limit of all answers that wait to be read by their clients. Answers of at most one piece are not counted.
MAX_UNREAD_BYTES = 64 << 20
_PIECE_BYTES = 64 << 10
_ACCEPTED_IN_A_ROW = 16  # asyncio would accept thousands before it runs other tasks
# Limit of the requests that arrive before the previous one is answered. Beyond it, the connection is not read.
MAX_AHEAD_BYTES = 64 << 10
# All requests in a piece become objects at once. Other tasks run after every _PIECES_IN_A_ROW pieces.
_PIECE_PARSED_BYTES = 1 << 10
_PIECES_IN_A_ROW = 16
# The bytes with which each answer begins. They are written one at a time to find out whether a client is gone.
_PROBES = b"HTTP/1.1 "
_PROBE_S = 0.005  # delay before the first probe; each further delay is three times as long
_HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]+)(.*)")


class Use(IntEnum):
    """The state of an HTTP connection. If there are too many connections, the server closes the connections with the
    lowest value first."""

    NEVER = 0
    IDLE = 1  # between requests
    RECEIVING = 2  # the head of a request has arrived, but not its whole body
    SERVING = 3  # a request is being answered; never ended for another connection


class Listener(socket.socket):
    """A listening socket that limits the number of open connections, including connections in their TLS handshake.

    If a new connection exceeds the limit, the listener closes the connection with the lowest `Use`. Among connections
    with the same `Use`, it closes the one that has been in that state for longest. If all other connections are
    SERVING, it closes the new connection.
    """

    def __init__(self, listening: socket.socket, max_connections: int) -> None:
        super().__init__(fileno=listening.detach())
        self.num_open = 0
        self._num_tries = 0
        self._max_connections = max_connections
        self._connections: dict[Use, dict[int, socket.socket]] = {
            use: {} for use in Use
        }  # by descriptor; the longest in this state first

    def accept(self) -> "tuple[_Accepted, Any]":
        """Accept a new connection, as `socket.accept` does, and return its socket and its address. Raises
        ConnectionAbortedError if there are too many connections and the server is answering requests on all others.
        Raises BlockingIOError at every 16th call, so that asyncio stops accepting and runs other tasks."""
        self._num_tries = (self._num_tries + 1) % _ACCEPTED_IN_A_ROW
        if self._num_tries == 0:
            raise BlockingIOError("other tasks run first")
        accepted, address = super().accept()
        connection = _Accepted(accepted, self)
        if self.num_open > self._max_connections and not self._end_one_connection():
            connection.close()
            raise ConnectionAbortedError("there are too many connections")  # asyncio treats it as a disconnect
        self._connections[Use.NEVER][connection.fileno()] = connection
        return connection, address

    def set_use(self, descriptor: int, use: Use) -> None:
        """Record the new state of a connection. Do nothing if the listener has already ended the connection.
        `descriptor` is the file descriptor of the connection's socket."""
        held = self._pop(descriptor)
        if held is not None:
            self._connections[use][descriptor] = held

    def remove(self, descriptor: int) -> None:
        """Record that a connection is closed, so that the listener can accept another one. `descriptor` is the file
        descriptor of the connection's socket."""
        self.num_open -= 1
        self._pop(descriptor)

    def _pop(self, descriptor: int) -> socket.socket | None:
        found = (connections.pop(descriptor, None) for connections in self._connections.values())
        return next((each for each in found if each is not None), None)

    def _end_one_connection(self) -> bool:
        """End an open connection to make room for a new one, and return True. Choose the connection with the lowest
        `Use`; among these, the connection that has been in that state for longest. Its socket is shut down for reading,
        so the server treats it as closed by the client. Return False if all connections are SERVING."""
        for use, connections in self._connections.items():
            if connections and use is not Use.SERVING:
                with suppress(OSError):  # the client has closed it already
                    connections.pop(next(iter(connections))).shutdown(socket.SHUT_RD)
                return True
        return False


class _Accepted(socket.socket):
    def __init__(self, accepted: socket.socket, listener: Listener) -> None:
        super().__init__(fileno=accepted.detach())
        self._listener: Listener | None = listener
        listener.num_open += 1

    def close(self) -> None:
        if self._listener is not None:
            self._listener.remove(self.fileno())
            self._listener = None
        super().close()


class UnreadAnswers:
    """A limit on the memory of HTTP answers that clients have not read yet. If all unread answers exceed
    MAX_UNREAD_BYTES, the server aborts connections of the tenant with the most unread bytes, those with the oldest
    answers first. Connections of other tenants are not affected."""

    def __init__(self) -> None:
        self._unread: dict[Callable[[], None], tuple[str, int]] = {}  # (tenant, bytes); oldest first
        self._num_bytes: Counter[str] = Counter()  # by tenant

    async def send(self, send: Send, scope: Scope, message: Message) -> None:
        """Send an ASGI message, which contains a part of an HTTP answer. A large body is sent in pieces of 64 KiB, and
        each piece waits until the client has read enough of the earlier pieces. Without the pieces, the transport would
        copy the whole body, and a TLS transport would treat the body as read."""
        body = memoryview(message.get("body", b""))
        if len(body) <= _PIECE_BYTES:
            await send(message)
            return
        abort: Callable[[], None] = scope["abort"]
        self._add(abort, scope["state"].get("tenant", ""), len(body))
        try:
            while len(body) > _PIECE_BYTES:
                await send({**message, "body": body[:_PIECE_BYTES], "more_body": True})
                body = body[_PIECE_BYTES:]
            await send({**message, "body": body})
        except asyncio.CancelledError:
            abort()  # nothing can follow an incomplete message
            raise
        finally:
            self._remove(abort)

    def _add(self, abort: Callable[[], None], tenant: str, size: int) -> None:
        self._unread[abort] = tenant, size
        self._num_bytes[tenant] += size
        while self._num_bytes.total() > MAX_UNREAD_BYTES:
            [(most, _)] = self._num_bytes.most_common(1)
            oldest = next(each for each, (whose, _) in self._unread.items() if whose == most)
            self._remove(oldest)
            oldest()

    def _remove(self, abort: Callable[[], None]) -> None:
        tenant, size = self._unread.pop(abort, ("", 0))
        self._num_bytes[tenant] -= size
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


class _Timer:
    """A timer that calls a function once after a delay. Only one delay is active: setting the timer again replaces it,
    and stopping the timer cancels it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, function, *args)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _Flow(FlowControl):
    """The flow control of one HTTP connection. It pauses reading from the socket while too many received bytes wait to
    be parsed. It aborts the connection if the client does not read the answer for UNREAD_TIMEOUT_S seconds."""

    is_full = False
    ignores_input = False  # no more requests are served

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._unread_timer = _Timer(loop)

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer.set(UNREAD_TIMEOUT_S, self._transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_timer.stop()


class _Answer:
    """The HTTP answer to one request.

    An answer to an HTTP/1.0 request is not chunked. It ends when the connection closes.

    If a client has closed its sending half of the connection, the server cannot know whether the client has gone or
    still reads. To find out, the server writes the first bytes of the answer early, one at a time. If the client has
    gone, its host resets the connection, and the next write detects the reset.
    """

    def __init__(self, cycle: Cycle, loop: asyncio.AbstractEventLoop) -> None:
        """Create the answer to one HTTP request. `cycle` is uvicorn's object for this request and its response. `loop`
        runs the timer of the early writes."""
        self.cycle = cycle
        self._num_probes = 0  # number of bytes written early
        self._probe_timer = _Timer(loop)

    @property
    def is_owed(self) -> bool:
        """True if the server has received the whole HTTP request and has not completed its answer yet."""
        return not self.cycle.response_complete and not self.cycle.more_body

    async def serve(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, self._send)

    async def _send(self, message: Any) -> None:
        """Send an ASGI message, which contains a part of the answer. If the answer is complete before the client has
        sent its whole request body, close only the sending half of the connection. A full close would reset the
        connection, and the client might see the reset before it has read the answer."""
        cycle, transport = self.cycle, self.cycle.transport
        is_old = cycle.scope["http_version"] == "1.0"
        if message["type"] == "http.response.start":
            self.stop_probes()
            if is_old:
                cycle.chunked_encoding = False
            if cycle.waiting_for_100_continue:
                cycle.keep_alive = False  # the client may send its next request instead of this one's body
            if num_written := self._num_probes:
                rest = SimpleNamespace(write=lambda data: transport.write(data[num_written:]))
                cycle.transport = rest  # type: ignore[assignment]
            try:
                await cycle.send(message)
            finally:
                cycle.transport = transport
            return
        if is_old:
            cycle.expected_content_length = len(message.get("body", b""))  # otherwise uvicorn calls the body too long
        is_last = not message.get("more_body", False)
        is_early = is_last and cycle.more_body and not cycle.keep_alive and transport.can_write_eof()
        if is_early:
            cycle.flow.ignores_input = cycle.keep_alive = True  # type: ignore[attr-defined]
        await cycle.send(message)
        if is_early:
            transport.write_eof()

    def probe_later(self, seconds: float = _PROBE_S) -> None:
        self._probe_timer.set(seconds, self._probe, 3 * seconds)

    def _probe(self, seconds: float) -> None:
        """Write one more byte of the status line before the answer is ready, to detect whether the client has gone. Do
        nothing if the answer has begun. `seconds` is the delay before the next such byte."""
        if self.cycle.response_started:
            return
        if self.is_owed:
            probe = _PROBES[self._num_probes : self._num_probes + 1]
            self.cycle.transport.write(probe)
            self._num_probes += len(probe)
        self.probe_later(seconds)

    def stop_probes(self) -> None:
        self._probe_timer.stop()


class HttpConnection(UvicornConnection):
    """A connection of the HTTP server. It extends uvicorn's connection with three limits: on the size of a request's
    head, on the time that a client may be silent, and on the bytes that a client sends before its current request is
    answered."""

    flow: _Flow
    _num_body_bytes = 0  # missing bytes of the body, by its Content-Length
    _is_half_closed = False  # the client sends nothing more; it may be gone or still read
    _parses_later = False
    _num_head_bytes = 0
    _num_unused_bytes = 0  # bytes received since the parser last produced something
    _is_in_head = False
    _answer: _Answer | None = None  # to the current or last request; others may be queued

    def __init__(self, *args: Any, listener: Listener, **kwargs: Any) -> None:
        """Create a connection. `listener` is the listening socket that has accepted the connection. The other arguments
        are passed to uvicorn's class."""
        super().__init__(*args, **kwargs)
        self._listener = listener
        self._timer = _Timer(self.loop)  # ends a silent connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        self.flow = _Flow(transport, self.loop)
        self._received = bytearray()  # received, but not parsed yet
        names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        # In the same form as in the gRPC API.
        self._certificate_names = tuple(name for kind, name in names if kind == "DNS")
        self._timer.set(HEAD_TIMEOUT_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self.flow.ignores_input = True
        self._timer.stop()
        if self._answer is not None:
            self._answer.stop_probes()
            self.cycle = self._answer.cycle  # uvicorn reports the disconnect to this cycle only
        super().connection_lost(exc)
        self.pipeline.clear()  # it refers to this connection; the cycle would wait for the garbage collector

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if not self.flow.ignores_input:
            self._received += data
            self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client has closed its sending half of the connection. Return whether the server keeps the
        connection open.

        The server keeps it open while a complete request has no complete answer, or received bytes are not parsed. The
        client may have gone, or may still read answers; only a write to the connection can detect this. A TLS
        connection is always closed, because asyncio does not support half-closed TLS connections.
        """
        self._is_half_closed = True
        if self._answer is not None:
            self._answer.probe_later()
        return self.scheme == "http" and (self._owes_answer() or bool(self._received))

    def on_message_begin(self) -> None:
        self._num_head_bytes = self._num_unused_bytes = 0
        self._is_in_head = True
        self._timer.set(HEAD_TIMEOUT_S, self._end)
        super().on_message_begin()
        self.scope["certificate_names"] = self._certificate_names  # type: ignore[typeddict-unknown-key]
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._is_in_head:
            return  # a trailer after the body: it is not part of the request, and proxies may not have checked it
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise HttpParserError("too many headers")  # this ends the connection

    def on_headers_complete(self) -> None:
        self._timer.stop()
        self._is_in_head = False
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise HttpRefusal(405, "CONNECT is not supported: this server is not a proxy")
        if self.parser.should_upgrade():
            return  # `_parse_piece` parses the head again
        self.url = _check_head(version, self.url, self.headers)
        if not self._owes_answer():
            self._listener.set_use(self._descriptor, Use.RECEIVING)
        self._num_body_bytes = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self.expect_100_continue &= version != "1.0"
        super().on_headers_complete()
        self.flow.resume_reading()  # otherwise an early disconnect of the client would not be noticed

    def on_body(self, body: bytes) -> None:
        self._num_unused_bytes = 0
        self._num_body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unused_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._listener.set_use(self._descriptor, Use.SERVING)
        self.cycle.keep_alive &= self.parser.should_keep_alive()  # a trailer may also request a close
        self.cycle.waiting_for_100_continue = False

    def on_response_complete(self) -> None:
        answered = self._answer
        super().on_response_complete()
        self._parse()
        self._unset_keepalive_if_required()  # an empty line would stop uvicorn's timer
        if self._answer is not answered:
            self._listener.set_use(self._descriptor, Use.SERVING if self._owes_answer() else Use.RECEIVING)
            return
        self._listener.set_use(self._descriptor, Use.IDLE)
        if answered is not None and not self._is_in_head:
            self._timer.set(
                HEAD_TIMEOUT_S if answered.cycle.more_body or self.transport.is_closing() else KEEP_ALIVE_S, self._end
            )

    def _parse(self) -> None:
        """Parse the received bytes as HTTP requests. If a request arrives before the previous request is answered, keep
        its remaining bytes for later. After 16 pieces of data, let other tasks run before parsing more."""
        if self._parses_later:
            return
        for _ in range(_PIECES_IN_A_ROW):
            if not self._received or self.pipeline or self.flow.ignores_input:
                break
            self._parse_piece()
        else:
            self._parses_later = True
            self.loop.call_soon(self._parse_on)
        is_full = len(self._received) > MAX_AHEAD_BYTES
        if is_full != self.flow.is_full:
            self.flow.is_full = is_full
            (self.flow.pause_reading if is_full else self.flow.resume_reading)()
        if self._is_half_closed and not self._received and not self._owes_answer():
            self.transport.close()

    def _parse_on(self) -> None:
        self._parses_later = False
        self._parse()

    def _parse_piece(self) -> None:
        piece = self._received[: max(_PIECE_PARSED_BYTES, self._num_body_bytes)]
        del self._received[: len(piece)]
        self._num_unused_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            # The parser treats the body as another protocol. So parse the head again without the Upgrade header.
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self._received[:0] = b"\r\n".join((*head, b"", piece[upgrade.args[0] :]))
            self.parser = HttpRequestParser(self)  # the old parser reads nothing more if the connection will close
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        except HttpParserError as error:
            self._refuse(error.__context__)
        else:
            if self._num_unused_bytes > MAX_HEAD_BYTES:
                self._refuse(None)

    def _refuse(self, cause: BaseException | None) -> None:
        """End the connection after an invalid HTTP request: stop reading, send the remaining answers, and close the
        connection. If no complete request waits for its answer, and no answer has been sent in part, send a JSON error
        first. If `cause` is an HttpRefusal, it is the error. Otherwise the error has status 400."""
        self.flow.ignores_input = True
        self._received.clear()
        self._timer.stop()
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        serving = None if self._answer is None else self._answer.cycle
        if self._owes_answer():
            self.cycle = self.pipeline[0][0] if self.pipeline else serving  # type: ignore[assignment]
            self.cycle.keep_alive = False
            return
        self._timer.set(HEAD_TIMEOUT_S, self._end)
        if serving is None or serving.response_complete or not serving.response_started:
            text = f"invalid HTTP request, or more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of headers"
            refusal = cause if isinstance(cause, HttpRefusal) else HttpRefusal(400, text)
            body = msgspec.json.encode(error_answer(refusal, ""))
            head = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(STATUS_LINE[refusal.status] + head.encode() + body)
        self.transport.close()

    def _owes_answer(self) -> bool:
        """Return whether the server has received a whole HTTP request on this connection and has not completed its
        answer yet."""
        return self._answer is not None and self._answer.is_owed

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:
        self._answer = _Answer(cycle, self.loop)
        super()._start_asgi_task(cycle, partial(self._answer.serve, app))
        if self._is_half_closed:
            self._answer.probe_later()

    def _count(self, num_bytes: int) -> None:
        self._num_unused_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HttpParserError("the head is too long")

    def _end(self) -> None:
        """Close the connection of a client that has been silent for too long. If earlier data has not been parsed yet,
        check again after HEAD_TIMEOUT_S seconds. If the client has not read its answer, abort the connection."""
        if self.flow.read_paused or self._received:  # earlier requests are not answered yet
            self._timer.set(HEAD_TIMEOUT_S, self._end)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()  # close() would wait forever for a client that does not read
        else:
            self.transport.close()


def _check_head(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Validate the head of an HTTP request, and return the path that it requests. If the request line contains a full
    URL, return the URL's path, and replace the Host header in `headers` by the URL's host. Raises HttpRefusal if RFC
    9112 forbids the head, or if the HTTP version is not supported."""
    if version not in ("1.0", "1.1"):
        raise HttpRefusal(505, f"HTTP/{version} is not supported; send HTTP/1.1")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or codings != [b"chunked"]):
        is_unknown = version == "1.1" and codings[-1].endswith(b"chunked")
        raise HttpRefusal(501 if is_unknown else 400, "the transfer coding must be chunked, with HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts) or not all(map(_HOST.fullmatch, hosts)):
        raise HttpRefusal(400, "the request must have one Host header, of the form HOST or HOST:PORT")
    if b"#" in url:
        raise HttpRefusal(400, "the request's target has a fragment; send it without #")
    if absolute := _ABSOLUTE.fullmatch(url):
        if not _HOST.fullmatch(absolute[1]):
            raise HttpRefusal(400, "the authority of the request's target must be HOST or HOST:PORT")
        headers[:] = [header for header in headers if header[0] != b"host"] + [(b"host", absolute[1])]
        url = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    elif not url.startswith((b"/", b"*")):
        raise HttpRefusal(400, "the request's target must be a path, such as /v1/models, or an HTTP URL")
    return url
