"""The connections of the HTTP server, with bounds on what clients can do to them: how many there are, what stands
before a body, how long they may say nothing, how long they may read nothing, how many requests come ahead, what waits
until it is read."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from httptools import HttpParserError
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as UvicornConnection
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as Cycle

from scheduler_service.doors.http.refusals import Error, ErrorAnswer

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10  # of the path and all headers, and of anything else of which no body comes
HEAD_TIMEOUT_S = 30.0  # from a connection to its first request's head, and from any head's first byte to its last
KEEP_ALIVE_S = 75.0  # longer than clients keep theirs
UNREAD_TIMEOUT_S = 60.0  # in which a client reads some of what waits for it
# Answers that wait until their clients have read them have so much memory together, but for those of one piece.
MAX_UNREAD_BYTES = 128 << 20
_PIECE_BYTES = 64 << 10
_ACCEPTED_IN_A_ROW = 16  # asyncio would take thousands before it does anything else
MAX_AHEAD = 16  # requests that have come on a connection before the one ahead of them was answered


class Listener(socket.socket):
    """Listens, and closes what is beyond so many connections at once, those in their TLS handshake among them."""

    def __init__(self, listening: socket.socket, max_connections: int) -> None:
        super().__init__(fileno=listening.detach())
        self.num_open = 0
        self._num_tries = 0
        self._max_connections = max_connections

    def accept(self) -> "tuple[_Accepted, Any]":
        self._num_tries = (self._num_tries + 1) % _ACCEPTED_IN_A_ROW
        if self._num_tries == 0:
            raise BlockingIOError("others have their turn")
        accepted, address = super().accept()
        connection = _Accepted(accepted, self)
        if self.num_open > self._max_connections:
            connection.close()
            raise ConnectionAbortedError("there are too many connections")  # asyncio takes it for the client's doing
        return connection, address


class _Accepted(socket.socket):
    def __init__(self, accepted: socket.socket, listener: Listener) -> None:
        super().__init__(fileno=accepted.detach())
        self._listener: Listener | None = listener
        listener.num_open += 1

    def close(self) -> None:
        if self._listener is not None:
            self._listener.num_open -= 1
            self._listener = None
        super().close()


class UnreadAnswers:
    """Answers on their way to all clients. Beyond a bound the connections end that have taken longest: a client that
    reads is done soon."""

    def __init__(self) -> None:
        self._num_bytes: dict[Callable[[], None], int] = {}  # by what ends the connection; oldest first

    async def send(self, send: Send, abort: Callable[[], None], message: Message) -> None:
        """Send a message of a call's answer, a piece whenever the client has read enough of what came before: a
        transport copies all that it is given, and that of TLS takes it for read."""
        body = memoryview(message.get("body", b""))
        if len(body) <= _PIECE_BYTES:
            await send(message)
            return
        self._num_bytes[abort] = len(body)
        while sum(self._num_bytes.values()) > MAX_UNREAD_BYTES:
            oldest = next(iter(self._num_bytes))
            del self._num_bytes[oldest]
            oldest()
        try:
            while len(body) > _PIECE_BYTES:
                await send({**message, "body": body[:_PIECE_BYTES], "more_body": True})
                body = body[_PIECE_BYTES:]
            await send({**message, "body": body})
        except asyncio.CancelledError:
            abort()  # nothing can come behind a part of a message
            raise
        finally:
            self._num_bytes.pop(abort, None)


class HttpConnection(UvicornConnection):
    _num_head_bytes = 0
    _num_unused_bytes = 0  # that have come since something could be made of them
    _is_in_head = False
    _certificate_names: tuple[str, ...] = ()  # the DNS names of the client's certificate, as gRPC's doors have them
    _serving: Cycle | None = None  # or served last; others may wait behind it
    _timer: asyncio.TimerHandle | None = None  # which ends a connection that is silent
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert") or {}
        names = certificate.get("subjectAltName", ())
        self._certificate_names = tuple(name for kind, name in names if kind == "DNS")
        self._end_after(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        if self._serving is not None and not self._serving.response_complete:  # uvicorn tells the last to come alone
            self._serving.disconnected = True
            self._serving.message_event.set()
        super().connection_lost(exc)
        self.pipeline.clear()  # which refers to this connection, and so would stay until a garbage collection
        self.cycle = self._serving  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._num_unused_bytes += len(data)
        super().data_received(data)
        if self._num_unused_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._num_head_bytes = self._num_unused_bytes = 0
        self._is_in_head = True
        self._end_after(HEAD_TIMEOUT_S)
        super().on_message_begin()
        self.scope["certificate_names"] = self._certificate_names  # type: ignore[typeddict-unknown-key]
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._is_in_head:
            return  # behind a body: it is no part of the request, and proxies may not have looked at it
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise HttpParserError("too many headers")  # which ends the connection

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        if len(self.pipeline) >= MAX_AHEAD:
            raise HttpParserError("too many requests ahead")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unused_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        served = self._serving
        super().on_response_complete()
        self._unset_keepalive_if_required()  # a line without a request would end uvicorn's timer
        if served is not None and self._serving is served and not self._is_in_head:
            self._end_after(HEAD_TIMEOUT_S if served.more_body or self.transport.is_closing() else KEEP_ALIVE_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def send_400_response(self, msg: str) -> None:
        """Say in JSON what uvicorn says in plain text, and nothing within or before another request's answer."""
        self._end_after(HEAD_TIMEOUT_S)
        serving = self._serving
        if serving is None or serving.response_complete or (serving.more_body and not serving.response_started):
            text = f"this is no HTTP request, or has more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them"
            body = msgspec.json.encode(ErrorAnswer(Error(text, "invalid_request_error")))
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, num_bytes: int) -> None:
        self._num_unused_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HttpParserError("the head is too long")

    def _end_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if self.flow.read_paused:  # until what came before is answered
            self._end_after(HEAD_TIMEOUT_S)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()  # a client that reads nothing would never let it close
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
