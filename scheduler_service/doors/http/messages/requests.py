"""Requests of Anthropic's Messages API: these types alone decide what is valid."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from pagewire.common.sampling_rules import RANGES, UINT32
from scheduler_service.doors.http.requests import INERT, INT64, Empty, QueuedRequest, why, within

_INERT = Meta(description=INERT)


class Block(Struct, tag_field="type", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A part of a message."""

    cache_control: Annotated[dict[str, Any], _INERT] | None = None


class TextBlock(Block, tag="text", forbid_unknown_fields=True, frozen=True):
    text: str
    citations: Annotated[Empty, why("texts are not cited")] | None = None


class ThinkingBlock(Block, tag="thinking", forbid_unknown_fields=True, frozen=True):
    thinking: str
    signature: Annotated[str, _INERT] | None = None


class ToolUseBlock(Block, tag="tool_use", forbid_unknown_fields=True, frozen=True):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, tag="tool_result", forbid_unknown_fields=True, frozen=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Annotated[bool, _INERT] | None = None


class InputMessage(Struct, forbid_unknown_fields=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class MessagesTool(Struct, forbid_unknown_fields=True, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input_schema: Annotated[dict[str, Any], why("a JSON Schema, which is always kept to")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Annotated[bool, _INERT] | None = None
    cache_control: Annotated[dict[str, Any], _INERT] | None = None


class _Choice(Struct, tag_field="type", forbid_unknown_fields=True, frozen=True, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, tag="auto", forbid_unknown_fields=True, frozen=True):
    """Calls as the model likes."""


class AnyChoice(_Choice, tag="any", forbid_unknown_fields=True, frozen=True):
    """At least one call."""


class ToolChoice(_Choice, tag="tool", forbid_unknown_fields=True, frozen=True):
    """A call of that tool."""

    name: str


class NoChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True, frozen=True):
    """No call."""


class Thinking(Struct, forbid_unknown_fields=True, frozen=True):
    """Whether the template is asked for reasoning, by its variable `enable_thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, le=UINT32.high), why("reasoning ends behind so many")] | None = None
    display: Annotated[str, _INERT] | None = None


class OutputFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True, frozen=True):
    format: OutputFormat | None = None
    effort: Annotated[str, why("the template's variable reasoning_effort")] | None = None


class CountTokensRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, why("the older form of output_config.format")] | None = None
    mcp_servers: Annotated[Empty, why("no other server is called")] | None = None
    context_management: Annotated[None, why("a conversation is taken as it is sent")] = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32.high)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, within(RANGES["temperature"])] | None = None
    top_p: Annotated[float, within(RANGES["top_p"])] | None = None
    top_k: Annotated[int, Meta(ge=0, le=UINT32.high)] | None = None
    seed: Annotated[int, within(INT64)] | None = None
    thread: Annotated[None, why("conversations are not kept; send the whole one")] = None
    container: Annotated[None, why("no code is run")] = None
    inference_geo: Annotated[str, _INERT] | None = None
