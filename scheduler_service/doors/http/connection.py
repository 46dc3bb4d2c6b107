"""One connection of the HTTP server, with bounds on what stands before a body: its bytes, and the time it takes."""

import asyncio
from typing import Any

import msgspec
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as UvicornConnection

from scheduler_service.doors.http.refusals import Error, ErrorAnswer

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10  # of the path and all headers
HEAD_TIMEOUT_S = 30.0  # from a connection to its first request's head, and from any head's first byte to its last


class HttpConnection(UvicornConnection):
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise HttpParserError("too many headers")  # which ends the connection

    def on_headers_complete(self) -> None:
        self._head_has_come()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Say in JSON what uvicorn says in plain text."""
        self._head_has_come()
        text = f"this is no HTTP request, or it has more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them"
        body = msgspec.json.encode(ErrorAnswer(Error(text, "invalid_request_error")))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HttpParserError("the head is too long")

    def _expect_head(self) -> None:
        self._head_has_come()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_has_come(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
