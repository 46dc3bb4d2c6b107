"""The request types of Anthropic's Messages API. These types alone decide which requests are valid."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from pagewire.common.wire.sampling_rules import RANGES, UINT32
from scheduler_service.api.http.prompts import FILE_LEFT_OUT
from scheduler_service.api.http.requests import (
    INERT,
    INT64,
    STRICT,
    Empty,
    EmptyObject,
    NamedTool,
    QueuedRequest,
    TopK,
    TopP,
    why,
    within,
)
from scheduler_service.api.http.vendor_calls import vendor_text

_INERT = Meta(description=INERT)
# Fields that only answers have. A client may send an answer back as a message.
_OF_ANSWERS = ("id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container")
_NO_TOOLSETS = why("list each tool separately")


class Block(Struct, tag_field="type", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A content block, which is one part of a message."""

    cache_control: Annotated[dict[str, Any], _INERT] | None = None


class CitationsConfig(Struct, forbid_unknown_fields=True, frozen=True):
    enabled: Annotated[Literal[False], why("the model does not cite texts")] | None = None


class TextBlock(Block, tag="text", forbid_unknown_fields=True, frozen=True):
    text: str
    citations: Annotated[list[Any], why("no effect: citations of earlier answers")] | None = None
    parsed_output: Annotated[Any, _INERT] = None  # the text as parsed by Anthropic's client


class ThinkingBlock(Block, tag="thinking", forbid_unknown_fields=True, frozen=True):
    thinking: str
    signature: Annotated[str, _INERT] | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking", forbid_unknown_fields=True, frozen=True):
    """Reasoning of an earlier answer that only Anthropic's servers can decrypt. The server leaves this block out of the
    prompt."""

    data: Annotated[str, _INERT]


class ToolUseBlock(Block, tag="tool_use", forbid_unknown_fields=True, frozen=True):
    id: str
    name: str
    input: dict[str, Any] | str | None = None  # a string if the call was truncated
    caller: Annotated[dict[str, Any], _INERT] | None = None
    toolset_name: Annotated[None, _NO_TOOLSETS] = None


class TextSource(Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    data: str
    media_type: Annotated[Literal["text/plain"], why("documents must be plain text")] = "text/plain"


class ContentSource(Struct, tag_field="type", tag="content", forbid_unknown_fields=True, frozen=True):
    content: str | list[TextBlock]


class DocumentBlock(Block, tag="document", forbid_unknown_fields=True, frozen=True):
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None


class SearchResultBlock(Block, tag="search_result", forbid_unknown_fields=True, frozen=True):
    source: str
    title: str
    content: list[TextBlock]
    citations: CitationsConfig | None = None


class ToolReferenceBlock(Block, tag="tool_reference", forbid_unknown_fields=True, frozen=True):
    """The name of a tool that a tool search has found. The prompt describes all tools from the start."""

    tool_name: str


class ImageBlock(Block, tag="image", forbid_unknown_fields=True, frozen=True):
    """An image in the result of a tool. The model reads only text, so the prompt contains a placeholder text in place
    of the image."""

    source: dict[str, Any]
    transformations: Annotated[dict[str, Any], _INERT] | None = None


ReadableBlock = TextBlock | DocumentBlock | SearchResultBlock
ResultBlock = ReadableBlock | ToolReferenceBlock | ImageBlock


class ToolResultBlock(Block, tag="tool_result", forbid_unknown_fields=True, frozen=True):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: Annotated[bool, _INERT] | None = None
    toolset_name: Annotated[None, _NO_TOOLSETS] = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Replace each file in a tool result by a placeholder text, because the model reads only text. Return the new
        tool result."""
        match given:
            case {"content": list() as blocks}:
                return {**given, "content": [*map(_without_file, blocks)]}
        return given


def _without_file(block: Any) -> Any:
    match block:
        case {"type": "document", "source": {"type": "base64" | "url" | "file"}}:
            return {"type": "text", "text": FILE_LEFT_OUT}
    return block


def _vendor_block_as_text(block: Any) -> Any:
    text = vendor_text(block) if isinstance(block, dict) else ""
    return {"type": "text", "text": f"\n{text}\n"} if text else block


class InputMessage(Struct, forbid_unknown_fields=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ReadableBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]
    output_config: Annotated[EmptyObject, why("set it once, in the request")] | None = None
    clear_at: Annotated[Literal["never"], why("messages are never cleared")] | None = None
    cache_control: Annotated[dict[str, Any], _INERT] | None = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Remove the fields of a message that only answers have, so that clients can send an answer back as a message.
        Replace the content blocks of tools that ran on a vendor's servers by texts. Return the new message."""
        own = {
            name: value for name, value in given.items() if given.get("type") != "message" or name not in _OF_ANSWERS
        }
        match own:
            case {"content": list() as blocks}:
                return {**own, "content": [*map(_vendor_block_as_text, blocks)]}
        return own


# The types of tools that run at Anthropic.
VENDOR_TYPE = "(web_search|web_fetch|code_execution|tool_search_tool_bm25|tool_search_tool_regex|advisor)_[0-9]{8}"
_OF_VENDOR = why("an option of a tool that runs at Anthropic")


class MessagesTool(NamedTool, forbid_unknown_fields=True, frozen=True):
    """A tool that the model may call. `type` decides whether the client or Anthropic's servers run the tool. The server
    ignores a tool that runs on Anthropic's servers."""

    input_schema: Annotated[dict[str, Any], why("a JSON Schema, which is always enforced")] | None = None
    type: Annotated[str, Meta(pattern=f"^(custom|{VENDOR_TYPE})$")] | None = None
    strict: Annotated[bool, STRICT] | None = None
    cache_control: Annotated[dict[str, Any], _INERT] | None = None
    eager_input_streaming: Annotated[bool, _INERT] | None = None
    input_examples: Annotated[list[dict[str, Any]], why("appended to the description")] | None = None
    allowed_callers: Annotated[list[str], why("must include direct; the server runs no code")] | None = None
    # The following are options of tools that run at Anthropic.
    max_uses: Annotated[int, _OF_VENDOR] | None = None
    allowed_domains: Annotated[list[str], _OF_VENDOR] | None = None
    blocked_domains: Annotated[list[str], _OF_VENDOR] | None = None
    user_location: Annotated[dict[str, Any], _OF_VENDOR] | None = None
    max_content_tokens: Annotated[int, _OF_VENDOR] | None = None
    citations: Annotated[dict[str, Any], _OF_VENDOR] | None = None
    use_cache: Annotated[bool, _OF_VENDOR] | None = None
    response_inclusion: Annotated[str, _OF_VENDOR] | None = None
    url_sources: Annotated[dict[str, Any], _OF_VENDOR] | None = None
    caching: Annotated[dict[str, Any], _OF_VENDOR] | None = None
    max_tokens: Annotated[int, _OF_VENDOR] | None = None
    model: Annotated[str, _OF_VENDOR] | None = None


class _Choice(Struct, tag_field="type", forbid_unknown_fields=True, frozen=True, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice, tag="auto", forbid_unknown_fields=True, frozen=True):
    """The model decides by itself whether it calls tools."""


class AnyChoice(_Choice, tag="any", forbid_unknown_fields=True, frozen=True):
    """The model must call at least one tool."""


class ToolChoice(_Choice, tag="tool", forbid_unknown_fields=True, frozen=True):
    """The model must call the named tool."""

    name: str


class NoChoice(_Choice, tag="none", forbid_unknown_fields=True, frozen=True):
    """The model must not call tools."""


class Thinking(Struct, forbid_unknown_fields=True, frozen=True):
    """Turns the model's reasoning on or off. The setting becomes the variable `enable_thinking` of the chat
    template."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, le=UINT32.high), why("the maximum number of reasoning tokens")] | None = (
        None
    )
    display: Annotated[Literal["summarized", "omitted"], why("omitted: thinking blocks are empty")] | None = None
    block_binding: Annotated[dict[str, Any], _INERT] | None = None  # blocks of any conversation are accepted


class OutputFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    schema: Raw


class OutputConfig(Struct, forbid_unknown_fields=True, frozen=True):
    format: OutputFormat | None = None
    effort: Annotated[str, why("sets the chat template's variable reasoning_effort")] | None = None
    task_budget: Annotated[None, why("the model is shown no budget; use max_tokens")] = None


class AllTurns(Struct, tag_field="type", tag="all", forbid_unknown_fields=True, frozen=True):
    """Keep the reasoning of all turns of the conversation."""


class ThinkingTurns(Struct, tag_field="type", tag="thinking_turns", forbid_unknown_fields=True, frozen=True):
    value: int


class ToolUses(Struct, tag_field="type", tag="tool_uses", forbid_unknown_fields=True, frozen=True):
    value: int


class InputTokens(Struct, tag_field="type", tag="input_tokens", forbid_unknown_fields=True, frozen=True):
    value: int


class ClearThinking(
    Struct, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    keep: Literal["all"] | AllTurns | ThinkingTurns | None = None


class ClearToolUses(
    Struct, tag_field="type", tag="clear_tool_uses_20250919", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    trigger: InputTokens | ToolUses | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None


class Compact(Struct, tag_field="type", tag="compact_20260112", forbid_unknown_fields=True, frozen=True, kw_only=True):
    trigger: InputTokens | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(Struct, forbid_unknown_fields=True, frozen=True):
    edits: Annotated[list[ClearThinking | ClearToolUses | Compact], Meta(max_length=8)] | None = None


class Diagnostics(Struct, forbid_unknown_fields=True, frozen=True):
    previous_message_id: Annotated[None, why("cache misses are not diagnosed")] = None


class CountTokensRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, why("alias of output_config.format")] | None = None
    mcp_servers: Annotated[Empty, why("the server calls no other servers")] | None = None
    context_management: Annotated[ContextManagement, why("refused if an edit would change the conversation")] | None = (
        None
    )
    cache_control: Annotated[dict[str, Any], _INERT] | None = None
    speed: Annotated[str, _INERT] | None = None
    user_profile_id: Annotated[str, _INERT] | None = None
    diagnostics: Diagnostics | None = None
    billing_policy: Annotated[dict[str, Any], _INERT] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables for the chat template")] | None = None
    compaction: Annotated[None, why("conversations are not compacted automatically")] = None
    fallbacks: Annotated[Empty, why("there are no fallback models")] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    max_tokens: Annotated[int, Meta(ge=1, le=UINT32.high), why("lowered if the maximum sequence length requires it")]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, within(RANGES["temperature"])] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Annotated[int, within(INT64)] | None = None
    thread: Annotated[None, why("conversations are not stored; send the whole conversation")] = None
    container: Annotated[None, why("the server runs no code")] = None
    inference_geo: Annotated[str, _INERT] | None = None
    fallback_credit_token: Annotated[str | dict[str, Any], _INERT] | None = None
