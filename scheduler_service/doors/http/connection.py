"""One connection of the HTTP server, with bounds on what stands before a body."""

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler_service.doors.http.refusals import Error, ErrorAnswer

MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10  # of the path and all headers


class Connection(HttpToolsProtocol):
    _num_head_bytes = 0

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # which ends the connection

    def send_400_response(self, msg: str) -> None:
        """Say in JSON what uvicorn says in plain text."""
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
            raise ValueError("the head is too long")
