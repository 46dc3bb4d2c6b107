"""The HTTP server of one process: its socket, TLS, and the error answers of calls."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.common.wire.transport.listening import check_port, max_open_connections, passive_host, refusal
from pagewire.common.wire.transport.tls import TlsFiles
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.body import TOO_DEEP
from scheduler_service.api.http.call_admission import CallAdmission
from scheduler_service.api.http.refusals import HttpRefusal, error_answer, error_response
from scheduler_service.api.http.transport import event_stream
from scheduler_service.api.http.transport.connection import HttpConnection, Listener, UnreadAnswers
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.refusal import Reason, RefusedError, invalid

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2


class HttpServer:
    """An HTTP server that listens on one port and passes each HTTP call to the API's routes. If a route raises an
    exception, the client gets an error answer."""

    def __init__(self, host: str, port: int, tls: TlsFiles | None, admission: CallAdmission, routes: ASGIApp) -> None:
        """Create an HTTP server and bind its port. `routes` is the ASGI application that answers the calls. If it
        raises an exception, the client gets an error answer. `tls` contains the paths of the server's certificate
        files, or is None for plain HTTP. Raises OSError if the port cannot be bound."""
        self._admission = admission
        self._routes = routes
        self._streams: set[EventStream] = set()  # of the calls in progress
        self._comments: set[asyncio.Task[None]] = set()
        self._unread = UnreadAnswers()
        self._socket = Listener(_bound(host, port), max_open_connections() // 2)  # the other half is for gRPC
        self._for_pages = CORSMiddleware(
            self._serve,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_origin_regex=admission.origins.pattern.pattern,
            allow_private_network=True,
            expose_headers=["*"],
        )
        self._server = _Server(
            uvicorn.Config(
                self,
                http=cast("type[HttpConnection]", partial(HttpConnection, listener=self._socket)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.server_context(),
            )
        )

    async def run(self) -> None:
        """Serve HTTP calls until this task is cancelled. Raises RuntimeError if the server stops without being
        cancelled."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            while True:
                await asyncio.wait([serving], timeout=event_stream.SILENCE_S / 3)
                if serving.done():
                    raise RuntimeError("the HTTP server has stopped unexpectedly")
                for stream in filter(lambda stream: stream.is_kept_alive, self._streams):
                    comment = asyncio.create_task(stream.break_silence())  # a task, because sending may block
                    self._comments.add(comment)
                    comment.add_done_callback(self._comments.discard)
        finally:
            self._server.should_exit = True
            await serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call as an ASGI application. If the call's Host or Origin is not allowed, answer with an error
        of status 403. CORS preflight requests, which browsers send for pages of other origins, are answered if the
        origin is allowed."""
        send = partial(_send_named, send, f"req_{secrets.token_hex(12)}".encode())
        # If a header occurs several times, use the first value.
        scope["header_values"] = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        application = self._for_pages if b"origin" in scope["header_values"] else self._serve
        try:
            self._admission.check_origin(scope)
        except HttpRefusal as refused:
            application = error_response(refused, scope["path"])
        await application(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = partial(self._unread.send, send, scope)
        stream = scope["stream"] = EventStream(send)
        self._streams.add(stream)
        try:
            await self._routes(scope, receive, send)
        except HTTPException as error:
            await _refuse(_unrouted(error.status_code, scope), stream, scope, receive, send)
        except (RefusedError, HttpRefusal) as refused:
            await _refuse(refused, stream, scope, receive, send)
        except asyncio.CancelledError:  # the server shuts down, and the grace period of the call is over
            if stream.has_begun:
                raise
            stopped = RefusedError(Reason.UNAVAILABLE, "the server has shut down; send the request to another one")
            await _refuse(stopped, stream, scope, receive, send)
        except RecursionError:
            await _refuse(invalid("", TOO_DEEP), stream, scope, receive, send)
        except Exception:
            logger.exception("%s %r failed", scope["method"], scope["path"][:80])
            failure = RefusedError(Reason.INTERNAL, "the call failed; see the server's log")
            await _refuse(failure, stream, scope, receive, send)
        finally:
            self._streams.discard(stream)


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because the program around the HTTP server handles signals
    itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _send_named(send: Send, call_id: bytes, message: Message) -> None:
    """Send an ASGI message, which contains a part of an answer. Add the id of the HTTP call to the headers of the
    answer: as `x-request-id` for OpenAI's clients, and as `request-id` for Anthropic's clients."""
    if message["type"] == "http.response.start":
        names = [(b"x-request-id", call_id), (b"request-id", call_id)]
        message = {**message, "headers": [*message["headers"], *names]}
    await send(message)


async def _refuse(
    refused: RefusedError | HttpRefusal, stream: EventStream, scope: Scope, receive: Receive, send: Send
) -> None:
    """Report an error to the client of an HTTP call. If the event stream of the answer has begun, send the error as its
    last event. Otherwise send an error answer with the HTTP status of the error."""
    if stream.has_begun:
        await stream.send_event(encode(error_answer(refused, scope["path"])), "error")
        await stream.end()
    else:
        await error_response(refused, scope["path"])(scope, receive, send)


def _unrouted(status: int, scope: Scope) -> HttpRefusal:
    """Create the error for an HTTP call that no route serves. `status` is 405 if the path exists but does not support
    the method."""
    if status == 405:
        return HttpRefusal(405, f"{scope['path'][:80]} does not support the method {scope['method']}; see /docs")
    return HttpRefusal(status, f"the path {scope['path'][:80]} does not exist; /docs lists all paths")


def _bound(host: str, port: int) -> socket.socket:
    """Create a listening socket for the HTTP server, bound to `host` and `port`. Raises OSError with a one-line message
    if the port cannot be bound."""
    check_port(host, port, "--http-port")
    family, *_, address = socket.getaddrinfo(
        passive_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    try:
        return socket.create_server(
            address[:2],
            family=family,
            backlog=2048,
            dualstack_ipv6=passive_host(host) == "::" and family == socket.AF_INET6,
        )
    except OSError as error:
        raise refusal(error, host, port, "--http-port") from None
