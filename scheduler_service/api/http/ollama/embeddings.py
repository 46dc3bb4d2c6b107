"""The endpoints `/api/embed` and `/api/embeddings` of Ollama's API. Embeddings always have length 1."""

import secrets
import time

from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.embeddings import encoded_embeddings
from scheduler_service.api.http.ollama.answers import OllamaEmbedAnswer, OllamaEmbeddingAnswer
from scheduler_service.api.http.ollama.requests import OllamaEmbeddingRequest, OllamaEmbedRequest
from scheduler_service.api.http.request_options import RequestNames
from scheduler_service.api.http.requests import EmbeddingRequest, QueuedRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.tenants.caller import Call

_NAMES, _OLD_NAMES = RequestNames("input"), RequestNames("prompt", input="prompt")


async def embed_texts(request: OllamaEmbedRequest, call: Call, intake: Intake, model_name: str) -> bytes:
    """Answer a call of `/api/embed`. Return the JSON with one embedding for each text. Raises RefusedError if the
    request is invalid or refused."""
    began_at = time.monotonic_ns()
    model = request.model or model_name
    if not request.input:
        return encode(OllamaEmbedAnswer(model, []))
    same = {name: getattr(request, name) for name in QueuedRequest.__struct_fields__}
    if request.truncate is not False and request.truncate_prompt_tokens is None:
        same |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    texts = request.input if isinstance(request.input, str) else [*request.input]
    asked = EmbeddingRequest(input=texts, dimensions=request.dimensions or None, **same)
    with _NAMES.translate_refusals():
        embeddings, num_tokens = await encoded_embeddings(asked, _drawn_id(request), call, intake)
    return encode(OllamaEmbedAnswer(model, embeddings, time.monotonic_ns() - began_at, 0, num_tokens))


async def embed_text(request: OllamaEmbeddingRequest, call: Call, intake: Intake) -> bytes:
    """Answer a call of `/api/embeddings`. Return the JSON with the embedding of one text. Raises RefusedError if the
    request is invalid or refused."""
    if not request.prompt:
        return encode(OllamaEmbeddingAnswer([]))
    same = {name: getattr(request, name) for name in QueuedRequest.__struct_fields__}
    with _OLD_NAMES.translate_refusals():
        asked = EmbeddingRequest(input=request.prompt, **same)
        [embedding], _ = await encoded_embeddings(asked, _drawn_id(request), call, intake)
    return encode(OllamaEmbeddingAnswer(embedding))


def _drawn_id(request: QueuedRequest) -> str:
    return request.request_id or f"embd-{secrets.token_hex(12)}"
