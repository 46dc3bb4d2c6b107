"""The routes of Ollama's API whose requests are decoded into a type."""

from typing import TYPE_CHECKING, Any

from scheduler_service.api.http.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer
from scheduler_service.api.http.ollama.embeddings import embed_texts
from scheduler_service.api.http.ollama.generation import answer_ollama
from scheduler_service.api.http.ollama.models import pull_model, show_model
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
from scheduler_service.serving.tenants.caller import Call

if TYPE_CHECKING:
    from scheduler_service.api.http.routes import Routes


async def _generate(
    asked: OllamaChatRequest | OllamaGenerateRequest, call: Call, stream: EventStream, routes: "Routes"
) -> bytes | None:
    return await answer_ollama(asked, call, routes.intake, routes.admission.model_name(), stream)


async def _embed(
    asked: OllamaEmbedRequest | OllamaEmbeddingRequest, call: Call, stream: EventStream, routes: "Routes"
) -> bytes:
    return await embed_texts(asked, call, routes.intake, routes.admission.model_name())


async def _describe(asked: OllamaShowRequest, call: Call, stream: EventStream, routes: "Routes") -> bytes | None:
    routes.admission.check_model(asked.name)
    return await pull_model(asked, stream) if isinstance(asked, OllamaPullRequest) else show_model(routes.intake)


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
        dict[str, Any],
        _embed,
        "Create embeddings with Ollama's API",
    ),
    TypedRoute(
        "/api/embeddings",
        OllamaEmbeddingRequest,
        dict[str, list[float]],
        _embed,
        "Create the embedding of one text with Ollama's deprecated endpoint",
    ),
    TypedRoute("/api/show", OllamaShowRequest, dict[str, Any], _describe, "Describe the served model"),
    TypedRoute(
        "/api/pull",
        OllamaPullRequest,
        dict[str, str],
        _describe,
        "Report success for the served model, and refuse other models",
        framing=JSON_LINES,
    ),
)
