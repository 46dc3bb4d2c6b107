"""The answers of Ollama's API. A streamed answer consists of several objects of the same type."""

from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from scheduler_service.api.http.answers import ChatLogprob


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """The fields that all answers with generated text share. The last object of a streamed answer sets the counts, and
    the times in nanoseconds."""

    model: str
    created_at: datetime
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # until the request was queued
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class MadeFunction(Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class MadeCall(Struct, frozen=True):
    """A tool call of the model."""

    id: str
    function: MadeFunction


class OllamaReply(Struct, frozen=True):
    """A message of the model, or the new part of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaReply


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbeddingAnswer(Struct, frozen=True):
    embedding: list[float]


class ModelDetails(Struct, frozen=True, omit_defaults=True):
    """The properties of the served model. Properties that are not known are left out."""

    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    quantization_level: str = ""


class ShownModel(Struct, frozen=True):
    """The answer of `/api/show`."""

    details: ModelDetails
    model_info: dict[str, Any]
    parameters: str
    capabilities: list[str]
    modified_at: datetime
    template: str | UnsetType = UNSET


class ListedModel(Struct, frozen=True):
    """A name of the served model. `size` is the number of bytes of the model's files."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails


class LoadedModel(Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    context_length: int


class OllamaStatus(Struct, frozen=True):
    status: Literal["success"] = "success"
