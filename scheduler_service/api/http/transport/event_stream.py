"""The streamed answer of one call, a sequence of events.

The HTTP response starts with the first event, or with a comment after SILENCE_S seconds without one. A call that fails
earlier gets an HTTP error status.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from scheduler_service.api.http.refusals import HttpRefusal

logger = logging.getLogger(__name__)

# Many proxies close a connection that is silent for a minute or less.
SILENCE_S = 15.0
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_SSE, _COMMENT = "text/event-stream; charset=utf-8", b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """The format in which the events of a stream are written.

    Attributes:
        write: Returns the bytes of an event. Its arguments are the data of the event, as JSON, and the event's name.
        end: The bytes after the last event.
        comment: The bytes that are sent during silence. If they are empty, nothing is sent, because the format has no
            comments.
    """

    content_type: str
    write: Callable[[bytes, str], bytes]
    end: bytes = b""
    comment: bytes = b""


# Server-sent events (SSE) without names. The stream ends with the event `[DONE]`, as in OpenAI's API.
EVENTS = Framing(_SSE, lambda data, _: b"data: %b\n\n" % data, b"data: [DONE]\n\n", _COMMENT)
# Server-sent events without names. The last event marks the end.
ENDING_EVENTS = Framing(_SSE, EVENTS.write, b"", _COMMENT)
# Server-sent events with names. The last event marks the end.
NAMED_EVENTS = Framing(_SSE, lambda data, name: b"event: %b\ndata: %b\n\n" % (name.encode(), data), b"", _COMMENT)
# One JSON object per line.
JSON_LINES = Framing("application/x-ndjson", lambda data, _: data + b"\n")


class EventStream:
    """The answer to one HTTP call as a stream of events."""

    def __init__(self, send: Send) -> None:
        self.framing = EVENTS
        self._send = send
        self._warnings: list[str] = []
        self._told_at = time.monotonic()
        self._turn = asyncio.Lock()  # one event at a time, because an event may be sent in pieces
        self.is_kept_alive = False  # whether comments are sent during silence
        self.has_begun = False

    @property
    def warning_headers(self) -> dict[str, str]:
        """The HTTP header `warning`, which contains the warnings for the client. An empty dict if there are no
        warnings. Streamed answers and other answers have this header."""
        return {"warning": ", ".join(self._warnings)} if self._warnings else {}

    def warn(self, text: str) -> None:
        """Log a warning, and add it to the `warning` header of the answer. If the answer has begun, its headers are
        already sent, so the client does not get the warning. `text` must be ASCII without quotes. Its length must not
        depend on the request."""
        logger.warning("a request was answered with a warning: %s", text)
        self._warnings.append(f'299 - "{text}"')

    async def send_event(self, message: bytes, name: str = "") -> None:
        """Send one event, and wait until the client has read enough for another event. `message` is the data of the
        event. `name` is sent only if the events of this stream have names."""
        await self._write(self.framing.write(message, name))

    async def end(self) -> None:
        """End the event stream and the HTTP answer."""
        await self._write(self.framing.end, is_last=True)

    async def break_silence(self) -> None:
        """Send a comment if nothing was sent for SILENCE_S seconds, so that proxies do not close the connection. Do
        nothing if the stream is not kept alive, if its format has no comments, or if an earlier event still waits for
        the client to read."""
        is_silent = not self._turn.locked() and time.monotonic() - self._told_at >= SILENCE_S
        if self.is_kept_alive and self.framing.comment and is_silent:
            await self._write(self.framing.comment)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._turn:
            if not self.has_begun:
                self.has_begun = True
                headers = {"content-type": self.framing.content_type, **self.warning_headers}
                encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": [*encoded, *_HEADERS]})
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._told_at = time.monotonic()


@contextlib.asynccontextmanager
async def while_connected(scope: Scope, receive: Receive, *, is_streamed: bool) -> AsyncIterator[EventStream]:
    """Return a context manager that runs its `with` block only while the client is connected, and yields the event
    stream of the HTTP call. If the client disconnects, cancel the block and raise HttpRefusal with status 499. If
    `is_streamed`, send comments to keep the connection alive while the block sends nothing."""
    task = asyncio.current_task()
    assert task is not None

    async def cancel_when_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    stream: EventStream = scope["stream"]
    watching = asyncio.create_task(cancel_when_gone())
    try:
        stream.is_kept_alive = is_streamed
        yield stream
    except asyncio.CancelledError:
        if not watching.done():  # cancelled for another reason
            raise
        task.uncancel()
        raise HttpRefusal(499, "the client has disconnected") from None
    finally:
        stream.is_kept_alive = False
        watching.cancel()
