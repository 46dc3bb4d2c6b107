"""The routes of the HTTP API, and the steps that every call passes through.

A call is served in the task of its connection. If the client disconnects, the requests of the call are cancelled within
one step.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from msgspec import Struct, structs
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from pagewire.common import __version__
from scheduler_service.api.grpc.request_servicer import Forward
from scheduler_service.api.http.answering import longest_sequence, now
from scheduler_service.api.http.answers import (
    ChatAnswer,
    CompletionAnswer,
    DecodedPrompt,
    DetachedAnswer,
    EmbeddingAnswer,
    Model,
    Models,
    RenderedPrompt,
    Tokens,
    encode,
)
from scheduler_service.api.http.body import decode_in_turn, decode_query, lenient
from scheduler_service.api.http.call_admission import CallAdmission
from scheduler_service.api.http.chat_completions import complete_chat, read_chat, without_media
from scheduler_service.api.http.completions import complete_prompts, read_completion
from scheduler_service.api.http.detached_requests import abort_request, read_detached, submit_detached
from scheduler_service.api.http.embeddings import embed_inputs
from scheduler_service.api.http.llama_server.completions import complete_for_llama, infill_for_llama
from scheduler_service.api.http.llama_server.requests import InfillRequest, LlamaCompletionRequest
from scheduler_service.api.http.llama_server.server_state import ALIASES, LLAMA_REFUSALS, properties, slots
from scheduler_service.api.http.messages.answers import (
    MessageAnswer,
    ModelInfoAnswer,
    ModelPage,
    TokenCount,
    described_model,
    model_page,
)
from scheduler_service.api.http.messages.messages import answer_message, count_tokens
from scheduler_service.api.http.messages.requests import CountTokensRequest, MessagesRequest
from scheduler_service.api.http.ollama.models import REFUSED_CALLS, list_models
from scheduler_service.api.http.ollama.routes import OLLAMA_ROUTES
from scheduler_service.api.http.openapi import TypedRoute, document, page
from scheduler_service.api.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetachedQuery,
    DetokenizeRequest,
    EmbeddingRequest,
    NamedRequest,
    TokenizeRequest,
)
from scheduler_service.api.http.responses.answers import (
    CompactedConversation,
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    ResponseAnswer,
)
from scheduler_service.api.http.responses.requests import (
    InputItemsQuery,
    NamedResponse,
    ResponseQuery,
    ResponsesRequest,
)
from scheduler_service.api.http.responses.responses import answer_response, compact_conversation, count_input_tokens
from scheduler_service.api.http.responses.stored_responses import StoredResponses
from scheduler_service.api.http.tokenization import described_tokenizer, detokenize, render, tokenize
from scheduler_service.api.http.transport.event_stream import ENDING_EVENTS, NAMED_EVENTS, EventStream, while_connected
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import Reason, RefusedError, timed_out
from scheduler_service.serving.tenants.caller import Call

_JSON = "application/json"
_VERSION = encode({"version": __version__})
_RESPONSE = "/v1/responses/{response_id}"
_REFUSED = {**REFUSED_CALLS, **LLAMA_REFUSALS}


class Routes:
    """The routes of the HTTP API: an ASGI application that passes each HTTP call to the function for its path and
    method.

    Attributes:
        intake: The intake that validates and queues the requests of all APIs of this process.
        forward: Sends RPCs about detached requests (requests that run without their client) and stored responses to the
            scheduler.
        admission: Checks the caller of each call, and limits the memory that calls use.
        as_read: Maps a request type to the type that the server decodes requests into. With `--lenient`, this is a copy
            that ignores unknown fields. Otherwise it is the request type itself.
    """

    def __init__(
        self,
        intake: Intake,
        forward: Forward,
        admission: CallAdmission,
        read_metrics: Callable[[], bytes],
        *,
        num_slots: Callable[[], int] = lambda: 0,
        is_lenient: bool,
    ) -> None:
        """Create the routes of the HTTP API. `read_metrics` returns metrics in Prometheus' text format. `num_slots`
        returns the maximum number of sequences that run at the same time. If `is_lenient`, unknown fields in the JSON
        of requests are ignored. Otherwise a request with an unknown field is refused."""
        self.intake = intake
        self.forward = forward
        self.admission = admission
        self._read_metrics = read_metrics
        self._num_slots = num_slots
        self._begun_at = now()
        self.as_read: Callable[[type[Struct]], Any] = lenient if is_lenient else lambda kind: kind
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            *(Route(path, _constant(_VERSION, _JSON), methods=["GET"]) for path in ("/version", "/api/version")),
            Route("/", _constant(b"Pagewire is running", "text/plain"), methods=["GET"]),
            Route("/api/tags", self._described(self._ollama_models), methods=["GET"]),
            Route("/api/ps", self._described(self._ollama_models), methods=["GET"]),
            Route("/props", self._described(lambda _: properties(self.intake, self._num_slots())), methods=["GET"]),
            Route("/slots", self._slots, methods=["GET"]),
            *(Route(path, _refused(why), methods=methods) for path, (methods, why) in _REFUSED.items()),
            Route("/tokenizer_info", self._described(lambda _: described_tokenizer(self.intake)), methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._described(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._described(self._model), methods=["GET"]),
            Route("/docs", _constant(page(TYPED).encode(), "text/html"), methods=["GET"]),
            Route("/openapi.json", _constant(encode(document(TYPED, self.as_read)), _JSON), methods=["GET"]),
            # Ids may contain slashes, and some clients do not escape them.
            *(Route(each.path.replace("}", ":path}"), _Endpoint(each, self), methods=[each.method]) for each in TYPED),
        ]
        self._paths = {route.path for route in routes}
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call as an ASGI application. Raises HTTPException if no route matches the path and method.
        Raises HttpRefusal or RefusedError if the call is refused, for example because a field is invalid."""
        # Use the undecoded path: an escaped slash is part of an id.
        path = scope["raw_path"].decode()
        # Some clients join a base URL that ends with a slash and a path that begins with a slash.
        plain = re.sub("/+", "/", path).removesuffix("/")
        plain = ALIASES.get(plain, plain)
        # With "app" set, the router raises HTTPException; otherwise it would answer in plain text.
        scope = {**scope, "app": self, "path": plain if plain in self._paths else path}
        await self._router(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        """Answer a health check. Return an answer with status 200 if the server accepts requests. Otherwise raise
        RefusedError; the client then gets status 503."""
        availability = self.intake.engine.availability
        if availability.is_serving:
            return Response(encode({"status": "ok"}), media_type=_JSON)
        raise RefusedError(Reason.UNAVAILABLE, availability.refusal() or "no worker is available; try again later")

    def _described(self, describe: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Return an HTTP handler that answers with the JSON of what `describe` returns for a call."""

        async def answer(request: Request) -> Response:
            self.admission.call(request.scope)
            return Response(encode(describe(request)), media_type=_JSON)

        return answer

    async def _metrics(self, request: Request) -> Response:
        self.admission.call(request.scope).caller.check_operator("/metrics")
        return Response(self._read_metrics(), media_type="text/plain; version=0.0.4")

    def _models(self, request: Request) -> Models | ModelPage:
        cards = [self._card(name) for name in self.admission.model_names()]
        return model_page(cards) if _is_of_anthropic(request.scope) else Models("list", cards)

    def _ollama_models(self, request: Request) -> dict[str, Any]:
        self.admission.model_name()  # refuse the call while the names are not known
        is_listed = request.url.path.endswith("/tags") or self.intake.engine.availability.is_serving
        return list_models(self.admission.model_names() if is_listed else (), self.intake)

    async def _slots(self, request: Request) -> Response:
        self.admission.call(request.scope).caller.check_operator("/slots")
        found = slots(self.intake, self._num_slots())
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
            raise RefusedError(Reason.UNAVAILABLE, "no slot is available; try again later")
        return Response(encode(found), media_type=_JSON)

    def _model(self, request: Request) -> Model | ModelInfoAnswer:
        name = unquote(request.path_params["name"])
        self.admission.check_model(name)
        card = self._card(name)
        return described_model(card) if _is_of_anthropic(request.scope) else card

    def _card(self, name: str) -> Model:
        return Model(
            name, "model", self._begun_at, "pagewire", self.admission.model_name(), None, longest_sequence(self.intake)
        )


def _constant(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an HTTP handler that always answers with `content`. The server builds such content (for example the API
    documents) once at its start, because building it takes long."""

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


def _refused(reason: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an HTTP handler that refuses every call for the given reason."""

    async def refuse(request: Request) -> Response:
        raise RefusedError(Reason.UNIMPLEMENTED, reason)

    return refuse


def _is_of_anthropic(scope: Scope) -> bool:
    """Return whether an HTTP call comes from a client of Anthropic's API. Such a client sends the header
    `anthropic-version`, and expects lists of models in Anthropic's format."""
    return b"anthropic-version" in scope["header_values"]


class _Endpoint:
    """An ASGI application that serves the HTTP calls of one route. It decodes the request, checks the model's name,
    applies the timeout, calls the route's function and sends the answer."""

    def __init__(self, route: TypedRoute, routes: Routes) -> None:
        self._route = route
        self._routes = routes
        self._kind = routes.as_read(route.request)
        self._is_named = route.is_named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission, turns = self._routes.admission, self._routes.intake.turns
        call, size = admission.call(scope), 0
        tenant = call.caller.tenant("")
        if self._is_named:
            named = {name: unquote(value) for name, value in scope["path_params"].items()}
            request = decode_query({**QueryParams(scope["query_string"]), **named}, self._kind)
        else:
            request, size = await decode_in_turn(
                await admission.read_body(scope, receive, tenant), self._kind, tenant, turns
            )
        call = replace(call, time_remaining=getattr(request, "timeout", None), size=size)
        admission.check_model(getattr(request, "model", None))
        if rid := getattr(request, "rid", None):
            request = structs.replace(request, request_id=request.request_id or rid)
        is_streamed = bool(getattr(request, "stream", None))
        with admission.count_request(tenant, size):
            try:
                async with (
                    while_connected(scope, receive, is_streamed=is_streamed) as stream,
                    asyncio.timeout(call.time_remaining),
                ):
                    stream.framing = self._route.framing
                    answer = await self._route.serve(request, call, stream, self._routes)
            except TimeoutError:
                raise timed_out() from None
        if answer is not None:
            await Response(answer, headers=stream.warning_headers, media_type=_JSON)(scope, receive, send)


async def _complete(request: CompletionRequest, call: Call, stream: EventStream, routes: Routes) -> bytes | None:
    if request.detached:
        return await submit_detached(
            request, await read_completion(request, call, routes.intake), call, routes.intake, routes.forward
        )
    return await complete_prompts(request, call, routes.intake, routes.admission.model_name(), stream)


async def _complete_chat(
    request: ChatCompletionRequest, call: Call, stream: EventStream, routes: Routes
) -> bytes | None:
    request = await without_media(request, call, routes.intake, stream)
    if request.detached:
        asked, _ = await read_chat(request, call, routes.intake, stream)
        return await submit_detached(request, asked, call, routes.intake, routes.forward)
    return await complete_chat(request, call, routes.intake, routes.admission.model_name(), stream)


async def _render_prompts(request: CompletionRequest, call: Call, stream: EventStream, routes: Routes) -> bytes:
    return encode(
        await render(await read_completion(request, call, routes.intake), routes.intake, routes.admission.model_name())
    )


async def _render_chat(request: ChatCompletionRequest, call: Call, stream: EventStream, routes: Routes) -> bytes:
    request = await without_media(request, call, routes.intake, stream)
    asked, _ = await read_chat(request, call, routes.intake, stream)
    (prompt,) = await render(asked, routes.intake, routes.admission.model_name())
    return encode(prompt)


async def _apply_template(request: ChatCompletionRequest, call: Call, stream: EventStream, routes: Routes) -> bytes:
    request = await without_media(request, call, routes.intake, stream)
    asked, _ = await read_chat(request, call, routes.intake, stream)
    return encode({"prompt": asked.requests[0].prompt})


def _stored(request: ResponsesRequest | NamedResponse, call: Call, routes: Routes) -> StoredResponses:
    return StoredResponses(request.tenant, call, routes.intake, routes.forward)


POSTED = (
    TypedRoute("/v1/completions", CompletionRequest, CompletionAnswer, _complete, "Complete a text prompt"),
    TypedRoute("/v1/chat/completions", ChatCompletionRequest, ChatAnswer, _complete_chat, "Create a chat completion"),
    TypedRoute(
        "/v1/responses",
        ResponsesRequest,
        ResponseAnswer,
        lambda asked, call, stream, routes: answer_response(
            asked, call, routes.intake, _stored(asked, call, routes), routes.admission.model_name(), stream
        ),
        "Create a response with OpenAI's Responses API",
        framing=NAMED_EVENTS,
    ),
    TypedRoute(
        "/v1/responses/input_tokens",
        ResponsesRequest,
        InputTokenCount,
        lambda asked, call, stream, routes: count_input_tokens(
            asked, call, routes.intake, _stored(asked, call, routes), stream
        ),
        "Count the prompt tokens of a Responses request",
    ),
    TypedRoute(
        "/v1/responses/compact",
        ResponsesRequest,
        CompactedConversation,
        lambda asked, call, stream, routes: compact_conversation(
            asked, call, routes.intake, _stored(asked, call, routes), routes.admission.model_name(), stream
        ),
        "Replace a conversation by its user messages and a summary",
    ),
    TypedRoute(
        "/v1/messages",
        MessagesRequest,
        MessageAnswer,
        lambda asked, call, stream, routes: answer_message(
            asked, call, routes.intake, routes.admission.model_name(), stream
        ),
        "Create a message with Anthropic's Messages API",
        framing=NAMED_EVENTS,
    ),
    TypedRoute(
        "/v1/messages/count_tokens",
        CountTokensRequest,
        TokenCount,
        lambda asked, call, stream, routes: count_tokens(asked, call, routes.intake, stream),
        "Count the prompt tokens of a Messages request",
    ),
    TypedRoute(
        "/v1/embeddings",
        EmbeddingRequest,
        EmbeddingAnswer,
        lambda asked, call, _, routes: embed_inputs(asked, call, routes.intake, routes.admission.model_name()),
        "Create embeddings",
    ),
    TypedRoute(
        "/v1/completions/render",
        CompletionRequest,
        list[RenderedPrompt],
        _render_prompts,
        "Return the prompt tokens of a completion request",
    ),
    TypedRoute(
        "/v1/chat/completions/render",
        ChatCompletionRequest,
        RenderedPrompt,
        _render_chat,
        "Return the prompt tokens of a chat completion request",
    ),
    TypedRoute(
        "/tokenize",
        TokenizeRequest,
        Tokens,
        lambda asked, call, _, routes: tokenize(asked, call, routes.intake),
        "Tokenize a text or a conversation",
    ),
    TypedRoute(
        "/detokenize",
        DetokenizeRequest,
        DecodedPrompt,
        lambda asked, call, _, routes: detokenize(asked, call, routes.intake),
        "Convert token ids to text",
    ),
    TypedRoute(
        "/apply-template",
        ChatCompletionRequest,
        dict[str, str],
        _apply_template,
        "Return the prompt text of a chat completion request, as llama-server does",
    ),
    TypedRoute(
        "/completion",
        LlamaCompletionRequest,
        dict[str, Any],
        lambda asked, call, stream, routes: complete_for_llama(
            asked, call, routes.intake, routes.admission.model_name(), stream
        ),
        "Complete a prompt with llama-server's API",
        framing=ENDING_EVENTS,
    ),
    TypedRoute(
        "/infill",
        InfillRequest,
        dict[str, Any],
        lambda asked, call, stream, routes: infill_for_llama(
            asked, call, routes.intake, routes.admission.model_name(), stream
        ),
        "Generate the text between a prefix and a suffix with llama-server's API",
        framing=ENDING_EVENTS,
    ),
    *OLLAMA_ROUTES,
)
NAMED = (
    TypedRoute(
        "/v1/requests/{request_id}",
        DetachedQuery,
        DetachedAnswer,
        lambda query, call, stream, routes: read_detached(query, call, routes.intake, routes.forward, stream),
        "Retrieve the state and output of a detached request",
        "GET",
    ),
    TypedRoute(
        "/v1/requests/{request_id}",
        NamedRequest,
        dict[str, str],
        lambda named, call, _, routes: abort_request(named, call, routes.intake),
        "Abort a request, detached or not",
        "DELETE",
    ),
    # Ids may contain slashes, so the longest paths come first.
    TypedRoute(
        f"{_RESPONSE}/cancel",
        NamedResponse,
        ResponseAnswer,
        lambda named, call, _, routes: _stored(named, call, routes).cancel(named.response_id),
        "Cancel a background response",
    ),
    TypedRoute(
        f"{_RESPONSE}/input_items",
        InputItemsQuery,
        InputItemList,
        lambda query, call, _, routes: _stored(query, call, routes).input_items(query),
        "List the input items of a response",
        "GET",
    ),
    TypedRoute(
        _RESPONSE,
        ResponseQuery,
        ResponseAnswer,
        lambda query, call, stream, routes: _stored(query, call, routes).show(query, stream),
        "Retrieve a stored or background response",
        "GET",
        NAMED_EVENTS,
    ),
    TypedRoute(
        _RESPONSE,
        NamedResponse,
        DeletedResponse,
        lambda named, call, _, routes: _stored(named, call, routes).delete(named.response_id),
        "Delete a response, and abort it if it is running",
        "DELETE",
    ),
)
TYPED = (*POSTED, *NAMED)
