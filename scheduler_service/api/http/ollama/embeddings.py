"""The endpoints `/api/embed` and `/api/embeddings` of Ollama's API. Embeddings always have length 1."""

import secrets
import time
from typing import Any

from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.embeddings import encoded_embeddings
from scheduler_service.api.http.ollama.answers import OllamaEmbedAnswer
from scheduler_service.api.http.ollama.requests import OllamaEmbeddingRequest, OllamaEmbedRequest
from scheduler_service.api.http.request_options import RequestNames
from scheduler_service.api.http.requests import EmbeddingRequest, QueuedRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.tenants.caller import Call


async def embed_texts(request: OllamaEmbedRequest, call: Call, intake: Intake, model_name: str) -> bytes:
    """Answer a call of `/api/embed`. Return the JSON with one embedding for each text. Raises RefusedError if the
    request is invalid or refused."""
    began_at = time.monotonic_ns()
    options: dict[str, Any] = {"dimensions": request.dimensions or None}
    if request.truncate is not False and request.truncate_prompt_tokens is None:
        options |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    embeddings, num_tokens = await _embed(request, "input", request.input, call, intake, options)
    duration = time.monotonic_ns() - began_at
    return encode(OllamaEmbedAnswer(request.model or model_name, embeddings, duration, num_tokens))


async def embed_text(request: OllamaEmbeddingRequest, call: Call, intake: Intake) -> bytes:
    """Answer a call of `/api/embeddings`. Return the JSON with the embedding of one text, which is empty if the text is
    empty. Raises RefusedError if the request is invalid or refused."""
    embeddings, _ = await _embed(request, "prompt", request.prompt, call, intake, {})
    return encode({"embedding": embeddings[0] if embeddings else []})


async def _embed(
    request: QueuedRequest, field: str, texts: Any, call: Call, intake: Intake, options: dict[str, Any]
) -> tuple[list[Any], int]:
    """Return the embeddings of `texts`, the value of the request's `field`, and the number of their tokens."""
    if not texts:
        return [], 0
    same = {name: getattr(request, name) for name in QueuedRequest.__struct_fields__}
    with RequestNames(field, input=field).translate_refusals():
        answer_id = request.request_id or f"embd-{secrets.token_hex(12)}"
        return await encoded_embeddings(EmbeddingRequest(input=texts, **same | options), answer_id, call, intake)
