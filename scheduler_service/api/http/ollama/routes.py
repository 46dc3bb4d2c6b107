"""The routes of Ollama's API."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pagewire.common import __version__
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.ollama.answers import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingAnswer,
    OllamaGenerateAnswer,
    OllamaStatus,
    ShownModel,
)
from scheduler_service.api.http.ollama.embeddings import embed_text, embed_texts
from scheduler_service.api.http.ollama.generation import answer_ollama
from scheduler_service.api.http.ollama.models import REFUSED_CALLS, list_loaded, list_models, pull_model, show_model
from scheduler_service.api.http.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from scheduler_service.api.http.openapi import TypedRoute
from scheduler_service.api.http.transport.event_stream import JSON_LINES, EventStream
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call

if TYPE_CHECKING:
    from scheduler_service.api.http.routes import Routes

_JSON = "application/json"


async def _generate(
    asked: OllamaChatRequest | OllamaGenerateRequest, call: Call, stream: EventStream, routes: "Routes"
) -> bytes | None:
    return await answer_ollama(asked, call, routes.intake, routes.admission.model_name(), stream)


async def _show(asked: OllamaShowRequest, call: Call, stream: EventStream, routes: "Routes") -> bytes:
    routes.admission.check_model(asked.name)
    return show_model(routes.intake)


async def _pull(asked: OllamaPullRequest, call: Call, stream: EventStream, routes: "Routes") -> bytes | None:
    routes.admission.check_model(asked.name)
    return await pull_model(asked, stream)


OLLAMA_ROUTES = (
    TypedRoute(
        "/api/chat",
        OllamaChatRequest,
        OllamaChatAnswer,
        _generate,
        "Create a chat message with Ollama's API",
        framing=JSON_LINES,
    ),
    TypedRoute(
        "/api/generate",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        _generate,
        "Answer or complete a prompt with Ollama's API",
        framing=JSON_LINES,
    ),
    TypedRoute(
        "/api/embed",
        OllamaEmbedRequest,
        OllamaEmbedAnswer,
        lambda asked, call, _, routes: embed_texts(asked, call, routes.intake, routes.admission.model_name()),
        "Create embeddings with Ollama's API",
    ),
    TypedRoute(
        "/api/embeddings",
        OllamaEmbeddingRequest,
        OllamaEmbeddingAnswer,
        lambda asked, call, _, routes: embed_text(asked, call, routes.intake),
        "Create the embedding of one text with Ollama's deprecated endpoint",
    ),
    TypedRoute("/api/show", OllamaShowRequest, ShownModel, _show, "Describe the served model"),
    TypedRoute(
        "/api/pull",
        OllamaPullRequest,
        OllamaStatus,
        _pull,
        "Report success for the served model; other models are refused",
        framing=JSON_LINES,
    ),
)


def plain_routes(routes: "Routes") -> list[Route]:
    """Return the routes of Ollama's API whose requests have no body, and the routes of the calls that are refused."""

    async def tags(request: Request) -> Response:
        routes.admission.call(request.scope)
        return Response(list_models(routes.admission.model_names(), routes.intake), media_type=_JSON)

    async def ps(request: Request) -> Response:
        routes.admission.call(request.scope)
        return Response(list_loaded(routes.admission.model_names(), routes.intake), media_type=_JSON)

    async def version(request: Request) -> Response:
        return Response(encode({"version": __version__}), media_type=_JSON)

    async def greet(request: Request) -> Response:
        return PlainTextResponse("Pagewire is running")

    def refuse(reason: str) -> Callable[[Request], Awaitable[Response]]:
        async def refused(request: Request) -> Response:
            routes.admission.call(request.scope)
            raise RefusedError(Reason.UNIMPLEMENTED, reason)

        return refused

    return [
        Route("/", greet, methods=["GET"]),
        Route("/api/version", version, methods=["GET"]),
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", ps, methods=["GET"]),
        *(Route(path, refuse(reason), methods=methods) for path, (methods, reason) in REFUSED_CALLS.items()),
    ]
