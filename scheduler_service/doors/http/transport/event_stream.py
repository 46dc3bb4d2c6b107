"""Server-sent events of one call. They begin with the first of them, or with a comment once the call has been silent
for long: until then a failure has a status of its own."""

import asyncio
import logging
import time

from starlette.types import Send

logger = logging.getLogger(__name__)

# Proxies cut what is silent for a minute, or for less.
SILENCE_S = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_END = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"


class EventStream:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._warnings: list[str] = []
        self._told_at = time.monotonic()
        self._turn = asyncio.Lock()  # of an event, which may go in pieces
        self.has_begun = False
        self.is_named = False  # events have names, and the last says that it is

    @property
    def warning_headers(self) -> dict[str, str]:
        """The headers of the answer, whole or streamed, that carry the warnings."""
        return {"warning": ", ".join(self._warnings)} if self._warnings else {}

    def warn(self, text: str) -> None:
        """Log a warning, and add it to the headers of an answer that has not begun. The text is ASCII without quotes,
        and its length does not depend on the request."""
        logger.warning("the request is answered with a warning: %s", text)
        self._warnings.append(f'299 - "{text}"')

    async def tell(self, message: bytes, name: str = "") -> None:
        """Send an event. Returns when the client has read enough for the next."""
        named = b"event: %b\n" % name.encode() if self.is_named else b""
        await self._write(b"%bdata: %b\n\n" % (named, message))

    async def end(self) -> None:
        await self._write(b"" if self.is_named else _END, is_last=True)

    async def break_silence(self) -> None:
        """Send a comment if nothing was sent for long. A client that does not read what was sent gets none."""
        if not self._turn.locked() and time.monotonic() - self._told_at >= SILENCE_S:
            await self._write(_COMMENT)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._turn:
            if not self.has_begun:
                self.has_begun = True
                warnings = [(name.encode(), value.encode()) for name, value in self.warning_headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS + warnings})
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._told_at = time.monotonic()
