"""The endpoints `/api/embed` and `/api/embeddings` of Ollama's API. Embeddings always have length 1."""

import secrets
import time
from typing import Any

from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.embeddings import encoded_embeddings
from scheduler_service.api.http.ollama.requests import OllamaEmbeddingRequest, OllamaEmbedRequest
from scheduler_service.api.http.request_options import RequestNames
from scheduler_service.api.http.requests import EmbeddingRequest, QueuedRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.tenants.caller import Call


async def embed_texts(
    request: OllamaEmbedRequest | OllamaEmbeddingRequest, call: Call, intake: Intake, model_name: str
) -> bytes:
    """Answer a call of `/api/embed`, or of `/api/embeddings` with a single text. Return the JSON with one embedding for
    each text; an empty text has none. Raises RefusedError if the request is invalid or refused."""
    began_at = time.monotonic_ns()
    options: dict[str, Any] = {name: getattr(request, name) for name in QueuedRequest.__struct_fields__}
    if isinstance(request, OllamaEmbedRequest):
        field, texts = "input", request.input
        cuts = request.truncate is not False and request.truncate_prompt_tokens is None
        options |= {"truncate_prompt_tokens": -1, "truncation_side": "right"} if cuts else {}
        options |= {"dimensions": request.dimensions or None}
    else:
        field, texts = "prompt", request.prompt
    embeddings, num_tokens = list[Any](), 0
    if texts:
        answer_id = request.request_id or f"embd-{secrets.token_hex(12)}"
        with RequestNames(field, input=field).translate_refusals():
            asked = EmbeddingRequest(input=texts if isinstance(texts, str) else [*texts], **options)
            embeddings, num_tokens = await encoded_embeddings(asked, answer_id, call, intake)
    if field == "prompt":
        return encode({"embedding": embeddings[0] if embeddings else []})
    counts = {"total_duration": time.monotonic_ns() - began_at, "prompt_eval_count": num_tokens}
    return encode({"model": request.model or model_name, "embeddings": embeddings, **counts})
