"""The OpenAI HTTP API of one process: its routes, who may call them, and the server behind them.

A call is served in the task of its connection, and ends with its client: what it had begun is cancelled within a step.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import uvicorn
from msgspec import Struct, structs
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.common import __version__
from pagewire.common.transport.addresses import join
from pagewire.common.transport.host_names import HostNames
from pagewire.common.transport.listening import check_port, max_open_connections, passive_host, refusal
from pagewire.common.transport.tls import TlsFiles
from scheduler_service.doors.http.answering import longest_sequence, now
from scheduler_service.doors.http.answers import Model, Models, encode
from scheduler_service.doors.http.body import MAX_BODY_BYTES, decode_in_turn, decode_query, lenient, read_body
from scheduler_service.doors.http.chat_completions import complete_chat, read_chat, without_media
from scheduler_service.doors.http.completions import complete_prompts, read_completion
from scheduler_service.doors.http.detached_requests import abort_request, read_detached, submit_detached
from scheduler_service.doors.http.embeddings import embed_inputs
from scheduler_service.doors.http.messages.answers import described_model, model_page
from scheduler_service.doors.http.messages.messages import answer_message, count_tokens
from scheduler_service.doors.http.openapi import NAMED, POSTED, TypedRoute, document, page
from scheduler_service.doors.http.options import ReadCall
from scheduler_service.doors.http.refusals import HttpRefusal, error_answer, error_response
from scheduler_service.doors.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetachedQuery,
    GenerationRequest,
    NamedRequest,
)
from scheduler_service.doors.http.responses.requests import (
    InputItemsQuery,
    NamedResponse,
    ResponseQuery,
    ResponsesRequest,
)
from scheduler_service.doors.http.responses.responses import answer_response, compact_conversation, count_input_tokens
from scheduler_service.doors.http.responses.stored_responses import StoredResponses
from scheduler_service.doors.http.tokenization import described_tokenizer, detokenize, render, tokenize
from scheduler_service.doors.http.transport import event_stream
from scheduler_service.doors.http.transport.connection import HttpConnection, Listener, UnreadAnswers
from scheduler_service.doors.http.transport.event_stream import EventStream
from scheduler_service.doors.scheduler.request_servicer import Forward
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import Reason, RefusedError, invalid, timed_out
from scheduler_service.serving.tenants.caller import Call, Caller
from scheduler_service.serving.tenants.tenant_file import TenantFile
from scheduler_service.serving.turns import PIECE_SIZE, TenantBytes

logger = logging.getLogger(__name__)

_SESSION_HEADER = b"x-session-id"
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_CLOSE_TIMEOUT_S = 2
# Bodies larger than PIECE_SIZE that are on their way have this much memory together, and those of a tenant a quarter.
MAX_BODIES_BYTES = 64 << 20
# Requests of such bodies, each of which is kept until its call ends, by the bytes of the bodies.
MAX_REQUESTS_BYTES = 1 << 30
_JSON = "application/json"
# Serves a request, and returns the answer unless it is streamed.
Serve = Callable[[Any, Call, EventStream], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where the API is served, and the files of TLS, if it is on."""

    host: str
    port: int
    tls: TlsFiles | None


class HttpDoor:
    def __init__(
        self,
        address: HttpAddress,
        intake: Intake,
        forward: Forward,
        tenants: TenantFile | None,
        model_names: Callable[[], Sequence[str]],
        read_metrics: Callable[[], bytes],
        allowed_origins: Sequence[str],
        *,
        takes_any_model_name: bool,
        is_lenient: bool,
    ) -> None:
        """Bind the port. `intake` is that of all doors of this process, and `forward` passes calls on to the scheduler;
        `model_names` are those by which requests may ask for the model, first the one in answers; `read_metrics` gives
        metrics in Prometheus' text format; `allowed_origins` are of web pages that may call; `takes_any_model_name`:
        requests are answered whatever model they name; `is_lenient`: fields that are not known are ignored. Raises
        OSError."""
        self._intake = intake
        self._forward = forward
        self._tenants = tenants
        self._model_names = model_names
        self._takes_any_model_name = takes_any_model_name
        self._read_metrics = read_metrics
        self._streams: set[EventStream] = set()
        self._comments: set[asyncio.Task[None]] = set()
        self._bodies = TenantBytes("bodies", MAX_BODIES_BYTES, max(MAX_BODY_BYTES, MAX_BODIES_BYTES // 4))
        self._requests = TenantBytes("requests", MAX_REQUESTS_BYTES, MAX_REQUESTS_BYTES // 4)
        self._unread = UnreadAnswers()
        self._begun_at = now()
        self._hosts = HostNames(address.host)
        self._origins = frozenset(allowed_origins)
        self._as_read: Callable[[type[Struct]], Any] = lenient if is_lenient else lambda kind: kind
        self._page, self._document = page().encode(), encode(document(self._as_read))  # made once: it takes long
        routes = self._routes()
        self._paths = {route.path for route in routes}
        self._router = Router(routes, redirect_slashes=False)
        self._socket = Listener(_bound(address.host, address.port), max_open_connections() // 2)  # gRPC has the others
        self.url = f"{'http' if address.tls is None else 'https'}://{join(address.host, self._socket.getsockname()[1])}"
        self._application: ASGIApp = self._serve
        if allowed_origins:
            self._application = CORSMiddleware(
                self._serve, allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        self._server = self._make_server(address.tls)

    async def run(self) -> None:
        """Serve until cancelled."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            while True:
                await asyncio.wait([serving], timeout=event_stream.SILENCE_S / 3)
                if serving.done():
                    raise RuntimeError("the HTTP server has ended")
                for stream in self._streams:
                    comment = asyncio.create_task(self._comment(stream))  # which a connection may hold up
                    self._comments.add(comment)
                    comment.add_done_callback(self._comments.discard)
        finally:
            self._server.should_exit = True
            await serving

    async def _comment(self, stream: EventStream) -> None:
        if stream in self._streams:  # still
            await stream.break_silence()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, as ASGI has it. Preflight requests are calls too."""
        send = partial(_send_named, send, f"req_{secrets.token_hex(12)}".encode())
        # The first of a name counts.
        scope["header_values"] = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        why = self._hosts.refusal(scope["header_values"].get(b"host", "localhost"))
        if why:
            await error_response(HttpRefusal(403, why), scope["path"])(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # or the router would answer in plain text
        send = partial(self._unread.send, send, scope)
        stream = EventStream(send)
        scope["stream"] = stream
        try:
            self._check_origin(scope)
            # As it was sent: slashes within an id are none of the path's.
            path = scope["raw_path"].decode()
            # Clients join a base URL that ends in a slash, and a path that begins with one.
            plain = re.sub("/+", "/", path).removesuffix("/")
            await self._router({**scope, "path": plain if plain in self._paths else path}, receive, send)
        except HTTPException as error:
            await _refuse(
                HttpRefusal(error.status_code, _of_route(error.status_code, scope)), stream, scope, receive, send
            )
        except (RefusedError, HttpRefusal) as refused:
            await _refuse(refused, stream, scope, receive, send)
        except asyncio.CancelledError:  # the server shuts down, and has waited for the call
            if stream.has_begun:
                raise
            stopped = RefusedError(Reason.UNAVAILABLE, "the server has shut down; send the request to another one")
            await _refuse(stopped, stream, scope, receive, send)
        except RecursionError:
            await _refuse(invalid("", "the body is nested too deeply"), stream, scope, receive, send)
        except Exception:
            logger.exception("%s %r has failed", scope["method"], scope["path"][:80])
            failure = RefusedError(Reason.INTERNAL, "the call has failed; see the server's log")
            await _refuse(failure, stream, scope, receive, send)

    def _make_server(self, tls: TlsFiles | None) -> "_Server":
        return _Server(
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

    def _routes(self) -> list[Route]:
        intake, forward, stored = self._intake, self._forward, self._stored
        handlers: Mapping[str, Serve] = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._complete_chat,
            "/v1/responses": lambda asked, call, stream: answer_response(
                asked, call, intake, stored(asked, call), self._model_name(), stream
            ),
            "/v1/responses/input_tokens": lambda asked, call, stream: count_input_tokens(
                asked, call, intake, stored(asked, call), stream
            ),
            "/v1/responses/compact": lambda asked, call, stream: compact_conversation(
                asked, call, intake, stored(asked, call), self._model_name(), stream
            ),
            "/v1/messages": lambda asked, call, stream: answer_message(asked, call, intake, self._model_name(), stream),
            "/v1/messages/count_tokens": lambda asked, call, stream: count_tokens(asked, call, intake, stream),
            "/v1/embeddings": lambda asked, call, _: embed_inputs(asked, call, intake, self._model_name()),
            "/v1/completions/render": self._render_prompts,
            "/v1/chat/completions/render": self._render_chat,
            "/tokenize": lambda asked, call, _: tokenize(asked, call, intake),
            "/detokenize": lambda asked, call, _: detokenize(asked, call, intake),
        }
        named: Mapping[tuple[str, type[Struct]], Serve] = {
            ("GET", DetachedQuery): lambda query, call, stream: read_detached(query, call, intake, forward, stream),
            ("DELETE", NamedRequest): lambda query, call, _: abort_request(query, call, intake),
            ("GET", ResponseQuery): lambda query, call, stream: stored(query, call).show(query, stream),
            ("GET", InputItemsQuery): lambda query, call, _: stored(query, call).input_items(query),
            ("POST", NamedResponse): lambda query, call, _: stored(query, call).cancel(query.response_id),
            ("DELETE", NamedResponse): lambda query, call, _: stored(query, call).delete(query.response_id),
        }
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/tokenizer_info", self._tokenizer_info, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/docs", self._docs, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            *(self._typed(route, handlers[route.path]) for route in POSTED),
            *(self._typed(route, named[route.method, route.request]) for route in NAMED),
        ]

    # Routes

    async def _health(self, request: object) -> Response:
        """Answer 503 while requests would be refused."""
        availability = self._intake.engine.availability
        if availability.is_serving:
            return Response(status_code=200)
        raise RefusedError(Reason.UNAVAILABLE, availability.refusal() or "no worker computes now")

    async def _version(self, request: object) -> Response:
        return Response(encode({"version": __version__}), media_type=_JSON)

    async def _tokenizer_info(self, request: Any) -> Response:
        self._call(request.scope)
        return Response(described_tokenizer(self._intake), media_type=_JSON)

    async def _metrics(self, request: Any) -> Response:
        self._call(request.scope).caller.check_operator("/metrics")
        return Response(self._read_metrics(), media_type="text/plain; version=0.0.4")

    async def _docs(self, request: object) -> Response:
        return Response(self._page, media_type="text/html")

    async def _openapi(self, request: object) -> Response:
        return Response(self._document, media_type=_JSON)

    async def _models(self, request: Any) -> Response:
        self._call(request.scope)
        cards = [self._card(name) for name in self._model_names()]
        answer = model_page(cards) if _is_of_anthropic(request.scope) else Models("list", cards)
        return Response(encode(answer), media_type=_JSON)

    async def _model(self, request: Any) -> Response:
        self._call(request.scope)
        name = unquote(request.path_params["name"])
        self._check_model(name)
        card = self._card(name)
        return Response(encode(described_model(card) if _is_of_anthropic(request.scope) else card), media_type=_JSON)

    async def _complete(self, request: CompletionRequest, call: Call, stream: EventStream) -> bytes | None:
        if request.detached:
            return await self._submit(request, await read_completion(request, call, self._intake), call)
        return await complete_prompts(request, call, self._intake, self._model_name(), stream)

    async def _complete_chat(self, request: ChatCompletionRequest, call: Call, stream: EventStream) -> bytes | None:
        request = await without_media(request, call, self._intake, stream)
        if request.detached:
            return await self._submit(request, (await read_chat(request, call, self._intake, stream))[0], call)
        return await complete_chat(request, call, self._intake, self._model_name(), stream)

    def _stored(self, request: ResponsesRequest | NamedResponse, call: Call) -> StoredResponses:
        return StoredResponses(request.tenant, call, self._intake, self._forward)

    async def _submit(self, request: GenerationRequest, asked: ReadCall, call: Call) -> bytes:
        self._served()  # what fits is known then
        return await submit_detached(request, asked, call, self._intake, self._forward)

    async def _render_prompts(self, request: CompletionRequest, call: Call, stream: EventStream) -> bytes:
        read = await read_completion(request, call, self._intake)
        return encode(await render(read, self._intake, self._model_name()))

    async def _render_chat(self, request: ChatCompletionRequest, call: Call, stream: EventStream) -> bytes:
        asked, _ = await read_chat(await without_media(request, call, self._intake, stream), call, self._intake, stream)
        (prompt,) = await render(asked, self._intake, self._model_name())
        return encode(prompt)

    def _card(self, name: str) -> Model:
        return Model(name, "model", self._begun_at, "pagewire", self._served(), None, longest_sequence(self._intake))

    def _typed(self, route: TypedRoute, serve: Serve) -> Route:
        kind = self._as_read(route.request)

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            call, size = self._call(scope), 0
            tenant = call.caller.tenant("")
            if route.is_named:
                named = {name: unquote(value) for name, value in scope["path_params"].items()}
                request = decode_query({**QueryParams(scope["query_string"]), **named}, kind)
            else:
                turns = self._intake.turns
                request, size = await decode_in_turn(await self._read_body(scope, receive, tenant), kind, tenant, turns)
            call = replace(call, time_remaining=getattr(request, "timeout", None), size=size)
            self._check_model(getattr(request, "model", None))
            if rid := getattr(request, "rid", None):
                request = structs.replace(request, request_id=request.request_id or rid)
            with self._requests.held(tenant, size if size > PIECE_SIZE else 0):
                try:
                    async with self._while_connected(scope, receive) as stream, asyncio.timeout(call.time_remaining):
                        if getattr(request, "stream", None):
                            self._streams.add(stream)
                        answer = await serve(request, call, stream)
                except TimeoutError:
                    raise timed_out() from None
            if answer is not None:
                await Response(answer, headers=stream.warning_headers, media_type=_JSON)(scope, receive, send)

        # Ids may have slashes that clients send as they are.
        return Route(route.path.replace("}", ":path}"), _Endpoint(endpoint), methods=[route.method])

    # What a call goes through

    async def _read_body(self, scope: Scope, receive: Receive, tenant: str) -> bytes:
        """Return the whole body, if it has room among those that are on their way. Raises RefusedError, HttpRefusal."""
        num_bytes = num_counted = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes, num_counted
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > PIECE_SIZE:
                self._bodies.add(tenant, num_bytes - num_counted)
                num_counted = num_bytes
            return message

        try:
            return await read_body(scope, receive_counted)
        finally:
            self._bodies.remove(tenant, num_counted)

    @contextlib.asynccontextmanager
    async def _while_connected(self, scope: Scope, receive: Receive) -> AsyncIterator[EventStream]:
        """Serve a call inside the block, which is cancelled when its client has gone."""
        task = asyncio.current_task()
        assert task is not None
        has_gone = False

        async def cancel_when_gone() -> None:
            nonlocal has_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            has_gone = True
            task.cancel()

        stream: EventStream = scope["stream"]
        watching = asyncio.create_task(cancel_when_gone())
        try:
            yield stream
        except asyncio.CancelledError:
            if not has_gone:
                raise
            task.uncancel()
            raise HttpRefusal(499, "the client has gone") from None
        finally:
            self._streams.discard(stream)
            watching.cancel()

    def _call(self, scope: Scope) -> Call:
        """Return who calls, if that may be known. Raises RefusedError.

        Where there are no tenants a key is not looked at: OpenAI's clients always send one.
        """
        headers = scope["header_values"]
        key = None
        if self._tenants is not None:
            # Clients of the Messages API send it so.
            alone = headers.get(b"x-api-key")
            key = headers.get(b"authorization", f"Bearer {alone}" if alone else None)
        caller = Caller(self._tenants, key, scope["certificate_names"])
        caller.check()
        scope["state"]["tenant"] = caller.tenant("")
        trace = {name.decode(): headers[name] for name in _TRACE_HEADERS if name in headers}
        return Call(caller, headers.get(_SESSION_HEADER, ""), trace)

    def _model_name(self) -> str:
        return self._model_names()[0]

    def _check_model(self, name: str | None) -> None:
        served = self._served()
        if name is not None and not self._takes_any_model_name and name not in self._model_names():
            raise RefusedError(
                Reason.NOT_FOUND,
                f"the model {name[:80]!r} is not served here; send {served!r}, or leave model unset "
                "(--any-model-name accepts any)",
                "model",
            )

    def _served(self) -> str:
        """Return the model's name. Raises RefusedError as long as it is not known."""
        name = self._model_name()
        if not name:
            raise RefusedError(Reason.UNAVAILABLE, self._intake.engine.availability.refusal())
        return name

    def _check_origin(self, scope: Scope) -> None:
        """Refuse what a web page of another origin asks for: it could read no answer, but what it starts would run."""
        headers = scope["header_values"]
        origin = headers.get(b"origin")
        is_open = scope["method"] in ("GET", "HEAD") or not self._origins.isdisjoint(("*", origin))
        if origin is not None and not is_open and origin.partition("://")[2] != headers.get(b"host", "localhost"):
            raise HttpRefusal(403, f"the web page's origin {origin[:80]!r} may not call; name it in --allowed-origins")


class _Endpoint:
    """Lets a route have an application where it would take a function for a handler of requests."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to the service that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _send_named(send: Send, call_id: bytes, message: Message) -> None:
    """Send a part of an answer. Add the call's id to the headers, under the names that the clients of OpenAI and of
    Anthropic read."""
    if message["type"] == "http.response.start":
        names = [(b"x-request-id", call_id), (b"request-id", call_id)]
        message = {**message, "headers": [*message["headers"], *names]}
    await send(message)


async def _refuse(
    refused: RefusedError | HttpRefusal, stream: EventStream, scope: Scope, receive: Receive, send: Send
) -> None:
    """End a call by an error, as its last event if it has begun."""
    if stream.has_begun:
        await stream.tell(encode(error_answer(refused, scope["path"])), "error")
        await stream.end()
    else:
        await error_response(refused, scope["path"])(scope, receive, send)


def _is_of_anthropic(scope: Scope) -> bool:
    """Return whether the client is one of Anthropic's API, which reads other lists of models."""
    return b"anthropic-version" in scope["header_values"]


def _of_route(status: int, scope: Scope) -> str:
    if status == 405:
        return f"{scope['path'][:80]} is not served by {scope['method']}"
    return f"there is no {scope['path'][:80]} here; see /docs for what there is"


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens, one line for people if there can be none. Raises OSError."""
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
