"""The answers of OpenAI's Responses API, and the events of a streamed response."""

from typing import Any, Literal

from msgspec import Struct

from scheduler_service.api.http.answers import OutputTokensDetails
from scheduler_service.api.http.responses.requests import InputItem


class AnswerText(Struct, tag_field="type", tag="output_text", frozen=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ThoughtText(Struct, tag_field="type", tag="reasoning_text", frozen=True):
    text: str


class ReasoningOutput(Struct, tag_field="type", tag="reasoning", frozen=True):
    id: str
    content: list[ThoughtText]
    status: str
    summary: list[Any] = []


class MessageOutput(Struct, tag_field="type", tag="message", frozen=True):
    id: str
    content: list[AnswerText]
    status: str
    role: Literal["assistant"] = "assistant"


class CallOutput(Struct, frozen=True):
    """The fields that calls of functions and of custom tools share."""

    id: str
    call_id: str
    name: str
    status: str
    namespace: str | None


class FunctionCallOutput(CallOutput, tag_field="type", tag="function_call", frozen=True):
    arguments: str


class CustomCallOutput(CallOutput, tag_field="type", tag="custom_tool_call", frozen=True):
    input: str


class ToolSearchOutput(Struct, tag_field="type", tag="tool_search_call", frozen=True):
    id: str
    call_id: str
    arguments: dict[str, Any]
    status: str
    execution: Literal["client"] = "client"


OutputItem = ReasoningOutput | MessageOutput | FunctionCallOutput | CustomCallOutput | ToolSearchOutput


class CachedTokens(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Incomplete(Struct, frozen=True):
    reason: str


ErrorCode = Literal["server_error", "context_length_exceeded"]


class ResponseError(Struct, frozen=True):
    code: ErrorCode
    message: str


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    """A response of OpenAI's Responses API. It repeats some fields of the request. Its sampling options are the values
    that were used, including defaults."""

    id: str
    created_at: int
    completed_at: int | None = None  # always None in background, where the time of the end is not stored
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: Incomplete | None
    error: ResponseError | None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    max_tool_calls: int | None = None
    temperature: float | None
    top_p: float | None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    tool_choice: Any
    tools: list[Any]
    text: Any
    reasoning: Any
    metadata: dict[str, Any]
    background: bool
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    store: bool
    object: Literal["response"] = "response"
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"


class ResponseEvent(Struct, frozen=True, omit_defaults=True):
    """A server-sent event of a streamed response of the Responses API. The field `type` determines which of the other
    fields are set."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: AnswerText | ThoughtText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    name: str | None = None
    logprobs: list[Any] | None = None


class InputTokenCount(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class CompactedConversation(Struct, frozen=True):
    """A conversation in a short form: the user's messages and a summary of the rest."""

    id: str
    created_at: int
    output: list[InputItem]
    usage: ResponseUsage | None
    object: Literal["response.compaction"] = "response.compaction"


class InputItemList(Struct, frozen=True):
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
