"""The request types of OpenAI's Responses API. These types alone decide which requests are valid."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from pagewire.common.wire.sampling_rules import UINT32
from scheduler_service.api.http.prompts import FILE_LEFT_OUT
from scheduler_service.api.http.requests import (
    INERT,
    Empty,
    FunctionField,
    JsonObjectFormat,
    NamedSchema,
    NamedTool,
    SampledRequest,
    StructuredOutputsField,
    TextFormat,
    why,
)

_INERT = Meta(description=INERT)
_FILE = {"type": "input_text", "text": FILE_LEFT_OUT}
_LATER = why("tool results are sent with the next request")


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True, frozen=True):
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any], _INERT] | None = None


class RefusalText(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True, frozen=True):
    """The part of an earlier answer in which the model refused the user's request."""

    text: str = field(name="refusal")


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True, frozen=True):
    """A text in an earlier answer of the model, sent back as a part of the conversation."""

    text: str
    annotations: Annotated[list[Any], _INERT] | None = None
    logprobs: Annotated[list[Any], _INERT] | None = None


class ReasoningText(Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True, frozen=True):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True, frozen=True):
    text: str


def _renamed(part: Any, kinds: tuple[str, ...], kind: str) -> Any:
    """Convert a part of a message's content to another type of part. If the part's type is in `kinds`, set its type to
    `kind` and remove the fields `annotations` and `logprobs`. Otherwise return the part unchanged."""
    if _type(part) not in kinds:
        return part
    return {name: value for name, value in part.items() if name not in ("annotations", "logprobs")} | {"type": kind}


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


class MessageItem(
    Struct, tag_field="type", tag="message", forbid_unknown_fields=True, omit_defaults=True, frozen=True, kw_only=True
):
    """A message of the conversation. When the server lists the items of a conversation, the field `phase` appears only
    if the client has set it, and is never null."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | RefusalText]
    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None
    phase: Annotated[str, _INERT] | None = None
    end_turn: Annotated[bool, _INERT] | None = None  # sent by Codex

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert the content of a message from the format of chat completions to the format of the Responses API. The
        part type `text` becomes `output_text` in assistant messages and `input_text` in other messages."""
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        match given:
            case {"content": list() as parts}:
                return {**given, "content": [_renamed(part, ("text",), kind) for part in parts]}
        return given


class DirectCaller(Struct, forbid_unknown_fields=True, frozen=True):
    """Marks a tool call that the model made directly, and not through a program that the model wrote."""

    type: Literal["direct"]


class Item(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A conversation item other than a message. The JSON of a subclass lists the fields of this class last."""

    id: Annotated[str, _INERT] | None = None
    status: Annotated[str, _INERT] | None = None


class CallItem(Item, forbid_unknown_fields=True, frozen=True):
    """The fields that calls of functions and of custom tools share."""

    call_id: str
    name: str
    namespace: str | None = None
    is_asynchronous: Annotated[Literal[False], _LATER] | None = field(default=None, name="async")
    caller: Annotated[DirectCaller, _INERT] | None = None


class FunctionCallItem(CallItem, tag_field="type", tag="function_call", forbid_unknown_fields=True, frozen=True):
    arguments: str = ""


class CustomCallItem(CallItem, tag_field="type", tag="custom_tool_call", forbid_unknown_fields=True, frozen=True):
    input: str = ""


class InputImage(Struct, tag_field="type", tag="input_image", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An image in the result of a tool call. The model reads only text, so the prompt contains a placeholder text in
    place of the image."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: Annotated[dict[str, Any], _INERT] | None = None


class ResultItem(Item, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that results of functions and of custom tools share."""

    output: str | list[InputText | InputImage] = ""
    caller: Annotated[DirectCaller, _INERT] | None = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert the parts of a tool result to the types of the Responses API. The type of a text becomes
        `input_text`. A placeholder text replaces each file, because the model reads only text."""
        match given:
            case {"output": list() as parts}:
                parts = [_renamed(part, ("text", "output_text"), "input_text") for part in parts]
                return {**given, "output": [_FILE if _type(part) == "input_file" else part for part in parts]}
        return given


class FunctionResultItem(
    ResultItem, tag_field="type", tag="function_call_output", forbid_unknown_fields=True, frozen=True
):
    """The result of a function call. A result without a `call_id` is the output of a tool that the client ran by
    itself, without a call by the model."""

    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None


class CustomResultItem(
    ResultItem, tag_field="type", tag="custom_tool_call_output", forbid_unknown_fields=True, frozen=True
):
    call_id: str
    name: Annotated[str, _INERT] | None = None
    namespace: Annotated[str, _INERT] | None = None


class ReasoningItem(Item, tag_field="type", tag="reasoning", forbid_unknown_fields=True, frozen=True):
    content: list[ReasoningText] | None = None
    summary: Annotated[list[SummaryText], _INERT] | None = None
    encrypted_content: Annotated[str, _INERT] | None = None


class CompactionItem(Item, tag_field="type", tag="compaction", forbid_unknown_fields=True, frozen=True):
    """A summary that replaces the earlier part of a conversation. `encrypted_content` is not encrypted: it contains the
    plain text of the summary."""

    encrypted_content: str


def _unnest_fields(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Move the fields of the nested object called `name` to the top level of a JSON object, and return the new object.
    For example, `{"type": "t", name: {"a": 1}}` becomes `{"type": "t", "a": 1}`. If a field would then occur twice,
    return the object unchanged."""
    inner, own = given.get(name), {key: value for key, value in given.items() if key != name}
    return {**own, **inner} if isinstance(inner, dict) and own.keys().isdisjoint(inner) else given


class FunctionTool(
    FunctionField, tag_field="type", tag="function", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """A function that the model may call."""

    output_schema: Annotated[dict[str, Any], _INERT] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], why("only the model can call tools, not a program")] | None = (
        None
    )
    is_asynchronous: Annotated[Literal[False], _LATER] | None = field(default=None, name="async")

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool of chat completions to a tool of the Responses API. The fields of the nested object `function`
        move to the top level. A tool of the Responses API is returned unchanged."""
        return _unnest_fields(given, "function")


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True, frozen=True):
    """The grammar that the input of a custom tool should match. The prompt contains the grammar, but the server does
    not enforce it."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(NamedTool, tag_field="type", tag="custom", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A tool whose input is one text instead of JSON arguments. The model calls the tool as a function with one
    parameter, `input`."""

    format: TextFormat | GrammarFormat | None = None
    allowed_callers: Annotated[list[Literal["direct"]], why("only the model can call tools, not a program")] | None = (
        None
    )
    is_asynchronous: Annotated[Literal[False], _LATER] | None = field(default=None, name="async")


class NamespaceTool(Struct, tag_field="type", tag="namespace", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A group of tools under a common name. The model calls each tool of the group as the function
    `namespace__name`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


class ToolSearchTool(
    Struct, tag_field="type", tag="tool_search", forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """A tool with which the model can search for other tools. If the client executes the search, the model calls it as
    the function `tool_search`. Otherwise the search has no effect, because the prompt describes all tools from the
    start."""

    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class VendorTool(Struct, tag_field="type", frozen=True):
    """A tool that runs on OpenAI's servers. The server ignores the tool and all its options. The `warning` header of
    the answer names the ignored tools."""


class WebSearchTool(VendorTool, tag="web_search", frozen=True):
    """OpenAI's web search tool."""


class DatedWebSearchTool(VendorTool, tag="web_search_2025_08_26", frozen=True):
    """A version of OpenAI's web search tool with a date in its name."""


class PreviewWebSearchTool(VendorTool, tag="web_search_preview", frozen=True):
    """OpenAI's older web search tool, from the time of its preview."""


class DatedPreviewWebSearchTool(VendorTool, tag="web_search_preview_2025_03_11", frozen=True):
    """A version of OpenAI's older web search tool with a date in its name."""


class FileSearchTool(VendorTool, tag="file_search", frozen=True):
    """OpenAI's tool for a search of files that are stored at OpenAI."""


class CodeInterpreterTool(VendorTool, tag="code_interpreter", frozen=True):
    """OpenAI's sandbox that runs code."""


class ImageGenerationTool(VendorTool, tag="image_generation", frozen=True):
    """OpenAI's image generation model."""


class McpTool(VendorTool, tag="mcp", frozen=True):
    """An MCP server that OpenAI calls."""


Tool = (
    FunctionTool
    | CustomTool
    | NamespaceTool
    | ToolSearchTool
    | WebSearchTool
    | DatedWebSearchTool
    | PreviewWebSearchTool
    | DatedPreviewWebSearchTool
    | FileSearchTool
    | CodeInterpreterTool
    | ImageGenerationTool
    | McpTool
)


class ToolSearchCallItem(Item, tag_field="type", tag="tool_search_call", forbid_unknown_fields=True, frozen=True):
    """A call by the model of a tool search, which the client executes."""

    call_id: str
    arguments: dict[str, Any] | str | None = None
    execution: Annotated[str, _INERT] | None = None


class ToolSearchResultItem(Item, tag_field="type", tag="tool_search_output", forbid_unknown_fields=True, frozen=True):
    """The result of a tool search: the tools that the search has found. The model may call these tools in the rest of
    the conversation."""

    call_id: str
    tools: list[Tool]
    execution: Annotated[str, _INERT] | None = None


InputItem = (
    MessageItem
    | FunctionCallItem
    | FunctionResultItem
    | CustomCallItem
    | CustomResultItem
    | ReasoningItem
    | CompactionItem
    | ToolSearchCallItem
    | ToolSearchResultItem
)


class InputItems(Struct, forbid_unknown_fields=True, frozen=True):
    """The input items of a Responses request, as read from its field `input`. Each item has its `type` set. The server
    sets the type of messages that the client sent without a type."""

    input: list[InputItem]


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True, frozen=True):
    """Restricts the model's calls to some of the request's tools. The prompt still describes all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionTool | CustomTool], Meta(min_length=1)]

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool choice of chat completions to a tool choice of the Responses API. The fields of the nested
        object `allowed_tools` move to the top level. A tool choice of the Responses API is returned unchanged."""
        return _unnest_fields(given, "allowed_tools")


class SchemaFormat(NamedSchema, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert an output format of chat completions to a format of the Responses API. The fields of the nested
        object `json_schema` move to the top level. A format of the Responses API is returned unchanged."""
        return _unnest_fields(given, "json_schema")


class TextField(Struct, forbid_unknown_fields=True, frozen=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: (
        Annotated[
            Literal["low", "medium", "high"],
            why("a variable for the chat template; ignored with a warning if the template does not read it"),
        ]
        | None
    ) = None


class ReasoningConfig(Struct, forbid_unknown_fields=True, frozen=True):
    effort: Annotated[str, why("sets the chat template's variable reasoning_effort")] | None = None
    summary: Annotated[str, why("no effect: answers contain the full reasoning")] | None = None
    generate_summary: Annotated[str, _INERT] | None = None
    context: Annotated[Literal["auto"], why("the chat template selects the earlier reasoning in the prompt")] | None = (
        None
    )
    mode: Annotated[Literal["standard"], why("there is only the standard mode")] | None = None


# Additional data in an answer. Only the log-probabilities are supported: the other values concern tools that do not run
# here, or encrypted reasoning, which answers contain in plain text.
Included = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
]


class ResponsesRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    input: (
        str | Annotated[list[dict[str, Any]], Meta(min_length=1), why("optional with previous_response_id")] | None
    ) = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=UINT32.high)] | None = None
    stream: bool | None = None
    stream_options: Annotated[dict[str, Any], _INERT] | None = None
    structured_outputs: StructuredOutputsField | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables for the chat template")] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionTool | CustomTool | AllowedFunctions | None = None
    parallel_tool_calls: Annotated[bool, why("false: at most one call")] | None = None
    text: TextField | None = None
    reasoning: ReasoningConfig | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
            why("repeated in the answer; at most 16 texts of 512 characters, with keys of 64 characters"),
        ]
        | None
    ) = None
    include: (
        Annotated[
            list[Included],
            why("message.output_text.logprobs adds logprobs, but not with tools; other values have no effect"),
        ]
        | None
    ) = None
    truncation: (
        Annotated[
            Literal["disabled", "auto"],
            why("no effect: a conversation that does not fit is refused; use truncate_prompt_tokens instead"),
        ]
        | None
    ) = None
    store: (
        Annotated[bool, why("default: true; store the response for some time, for GET and previous_response_id")] | None
    ) = None
    background: (
        Annotated[bool, why("return at once and compute in the background; read the response with GET")] | None
    ) = None
    previous_response_id: Annotated[str, why("the conversation of this response precedes the input")] | None = None
    conversation: Annotated[None, why("conversations are not stored; send the items as input")] = None
    prompt: Annotated[None, why("prompts are not stored; send the text as input")] = None
    max_tool_calls: (
        Annotated[int, Meta(ge=0), why("repeated in the answer; no effect: it limits only tools that run at OpenAI")]
        | None
    ) = None
    prompt_cache_key: Annotated[str, why("repeated in the answer; no effect: prefixes are always cached")] | None = None
    safety_identifier: Annotated[str, why("repeated in the answer")] | None = None
    user: Annotated[str, why("repeated in the answer")] | None = None
    client_metadata: Annotated[dict[str, Any], _INERT] | None = None
    context_management: Annotated[Empty, why("conversations are not edited")] | None = None
    background_options: Annotated[dict[str, Any], _INERT] | None = None  # the accepted delay of a background response
    image: Annotated[dict[str, Any], _INERT] | None = None
    access_programs: Annotated[dict[str, Literal["standard"]], why("there are no access programs")] | None = None
    moderation: Annotated[None, why("the server does not moderate texts")] = None
    personality: Annotated[None, why("describe it in the instructions")] = None
    enable_response_messages: Annotated[Literal[False], why("use return_token_ids of chat completions")] | None = None
    previous_input_messages: Annotated[Empty, why("send the messages as input")] | None = None
    previous_response: Annotated[None, why("send its output as input")] = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20), why("cannot be combined with tools")] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requests log-probabilities of the tokens in the answer's text."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class NamedResponse(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Names a stored response of the Responses API by its id and tenant."""

    response_id: str
    tenant: str | None = None


class ResponseQuery(NamedResponse, kw_only=True, forbid_unknown_fields=True, frozen=True):
    stream: Annotated[bool, why("send all events of a background response, from the beginning")] | None = None
    starting_after: Annotated[None, why("event numbers differ from read to read; read from the beginning")] = None
    include: Annotated[str, _INERT] | None = field(default=None, name="include[]")
    include_obfuscation: Annotated[bool, _INERT] | None = None


class InputItemsQuery(NamedResponse, kw_only=True, forbid_unknown_fields=True, frozen=True):
    order: Annotated[Literal["asc", "desc"], why("default: desc, the last item first")] | None = None
    limit: Annotated[int, Meta(ge=1, le=100), why("default: 20")] | None = None
    after: Annotated[str, why("the id of the item that precedes the page")] | None = None
    include: Annotated[str, _INERT] | None = field(default=None, name="include[]")
