"""The answers of Ollama's API. A streamed answer consists of several objects of the same type."""

from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from scheduler_service.api.http.answers import ChatLogprob


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """The fields that all answers with generated text share. The last object of a streamed answer has the counts, and
    the times in nanoseconds."""

    model: str
    created_at: datetime
    done: bool = False
    done_reason: str | UnsetType | None = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # until the request was queued
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OllamaReply(Struct, frozen=True):
    """A message of the model, or the new part of it. The arguments of a tool call are an object."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    message: OllamaReply


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
