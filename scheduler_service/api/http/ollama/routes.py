"""The routes of Ollama's API whose requests are decoded into a type."""

from typing import Any

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
from scheduler_service.api.http.transport.event_stream import JSON_LINES

OLLAMA_ROUTES = (
    TypedRoute(
        "/api/chat",
        OllamaChatRequest,
        OllamaChatAnswer,
        lambda asked, call, stream, routes: answer_ollama(
            asked, call, routes.intake, routes.admission.model_name(), stream
        ),
        "Create a chat message with Ollama's API",
        framing=JSON_LINES,
    ),
    TypedRoute(
        "/api/generate",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        lambda asked, call, stream, routes: answer_ollama(
            asked, call, routes.intake, routes.admission.model_name(), stream
        ),
        "Answer or complete a prompt with Ollama's API",
        framing=JSON_LINES,
    ),
    TypedRoute(
        "/api/embed",
        OllamaEmbedRequest,
        dict[str, Any],
        lambda asked, call, _, routes: embed_texts(asked, call, routes.intake, routes.admission.model_name()),
        "Create embeddings with Ollama's API",
    ),
    TypedRoute(
        "/api/embeddings",
        OllamaEmbeddingRequest,
        dict[str, list[float]],
        lambda asked, call, _, routes: embed_texts(asked, call, routes.intake, routes.admission.model_name()),
        "Create the embedding of one text with Ollama's deprecated endpoint",
    ),
    TypedRoute(
        "/api/show",
        OllamaShowRequest,
        dict[str, Any],
        lambda asked, _, stream, routes: show_model(asked, routes.admission, routes.intake),
        "Describe the served model",
    ),
    TypedRoute(
        "/api/pull",
        OllamaPullRequest,
        dict[str, str],
        lambda asked, _, stream, routes: pull_model(asked, routes.admission, stream),
        "Report success for the served model, and refuse other models",
        framing=JSON_LINES,
    ),
)
