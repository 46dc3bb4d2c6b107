"""Requests of OpenAI's Responses API: these types alone decide what is valid."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from pagewire.common.sampling_rules import UINT32
from scheduler_service.doors.http.requests import (
    INERT,
    Empty,
    JsonObjectFormat,
    SampledRequest,
    StructuredOutputsField,
    TextFormat,
    why,
)

_INERT = Meta(description=INERT)


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True, frozen=True):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True, frozen=True):
    """A text of an answer, as that had it."""

    text: str
    annotations: Annotated[list[Any], _INERT] | None = None
    logprobs: Annotated[list[Any], _INERT] | None = None


class ReasoningText(Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True, frozen=True):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True, frozen=True):
    text: str


class MessageItem(Struct, tag_field="type", tag="message", forbid_unknown_fields=True, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None
    phase: Annotated[str, _INERT] | None = None


class FunctionCallItem(
    Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    call_id: str
    name: str
    arguments: str
    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None


class FunctionResultItem(
    Struct, tag_field="type", tag="function_call_output", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    call_id: str
    output: str | list[InputText]
    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None


class ReasoningItem(Struct, tag_field="type", tag="reasoning", forbid_unknown_fields=True, frozen=True, kw_only=True):
    content: list[ReasoningText] | None = None
    summary: Annotated[list[SummaryText], _INERT] | None = None
    encrypted_content: Annotated[str, _INERT] | None = None
    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionResultItem | ReasoningItem


class InputItems(Struct, forbid_unknown_fields=True, frozen=True):
    """The items of a request, each with its type, which messages may have been sent without."""

    input: list[InputItem]


class FunctionTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], why("a JSON Schema; without one there are none")] | None = None
    strict: Annotated[bool, why("no effect: --strict-tools of the server says it for all")] | None = None


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True, frozen=True):
    """Calls of some of the tools; the template is given all."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionTool], Meta(min_length=1)]


class SchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True, kw_only=True):
    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool, why("no effect: the schema is always kept to")] | None = None


class TextField(Struct, forbid_unknown_fields=True, frozen=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[None, why("ask for it in the instructions")] = None


class ReasoningConfig(Struct, forbid_unknown_fields=True, frozen=True):
    effort: Annotated[str, why("the template's variable reasoning_effort")] | None = None
    summary: Annotated[str, why("no effect: reasoning is told as it is")] | None = None
    generate_summary: Annotated[str, _INERT] | None = None


class ResponsesRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=UINT32.high)] | None = None
    stream: bool | None = None
    stream_options: Annotated[dict[str, Any], _INERT] | None = None
    structured_outputs: StructuredOutputsField | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables of the template")] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionTool | AllowedFunctions | None = None
    parallel_tool_calls: Annotated[bool, why("false: at most one")] | None = None
    text: TextField | None = None
    reasoning: ReasoningConfig | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
            why("stands in the answer; at most 16 texts of 512 characters, with keys of 64"),
        ]
        | None
    ) = None
    include: Annotated[list[str], _INERT] | None = None
    truncation: Annotated[Literal["disabled"], why("prompts are cut by truncate_prompt_tokens")] | None = None
    store: Annotated[bool, why("kept for a while, for GET and previous_response_id, unless false")] | None = None
    background: Annotated[bool, why("the answer comes at once, for GET")] | None = None
    previous_response_id: Annotated[str, why("its conversation comes before the input")] | None = None
    conversation: Annotated[None, why("conversations are not stored; send it")] = None
    prompt: Annotated[None, why("prompts are not stored; send it")] = None
    max_tool_calls: Annotated[None, why("no tool is run here")] = None
    context_management: Annotated[Empty, why("a conversation is taken as it is sent")] | None = None
    top_logprobs: Annotated[Literal[0], why("use /v1/chat/completions")] | None = None


class NamedResponse(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Which response is meant."""

    response_id: str
    tenant: str | None = None


class ResponseQuery(NamedResponse, kw_only=True, forbid_unknown_fields=True, frozen=True):
    stream: Annotated[bool, why("events from its beginning, of one in background alone")] | None = None
    starting_after: Annotated[None, why("events are cut anew each time; read them from the beginning")] = None
    include: Annotated[str, _INERT] | None = field(default=None, name="include[]")
    include_obfuscation: Annotated[bool, _INERT] | None = None


class InputItemsQuery(NamedResponse, kw_only=True, forbid_unknown_fields=True, frozen=True):
    order: Annotated[Literal["asc", "desc"], why("desc unless set: the last first")] | None = None
    limit: Annotated[int, Meta(ge=1, le=100), why("20 unless set")] | None = None
    after: Annotated[str, why("the id of the item that comes before")] | None = None
    include: Annotated[str, _INERT] | None = field(default=None, name="include[]")
