"""Conversion of a Messages API request into a chat completion request."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from scheduler_service.api.http.messages.requests import (
    VENDOR_TYPE,
    AnyChoice,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    NoChoice,
    OutputConfig,
    ReadableBlock,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from scheduler_service.api.http.prompts import FILE_LEFT_OUT, FILES_WARNING, IMAGE_LEFT_OUT, IMAGES_WARNING
from scheduler_service.api.http.requests import (
    ChatCompletionRequest,
    FunctionField,
    JsonSchemaFormat,
    NamedSchema,
    SampledRequest,
    ToolField,
)
from scheduler_service.api.http.vendor_calls import VENDOR_WARNING, leaves_out
from scheduler_service.serving.refusal import invalid

# Fields that have the same meaning in a chat completion request.
_SAME = ("stream", *(name for name in MessagesRequest.__struct_fields__ if name in SampledRequest.__struct_fields__))
# The blocks that are allowed in the messages of each role.
_BLOCKS = {
    "user": ReadableBlock | ToolResultBlock,
    "assistant": TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    "system": ReadableBlock,
}
_VENDOR_TYPE = re.compile(VENDOR_TYPE)
_VENDOR_OPTIONS = MessagesTool.__struct_fields__[MessagesTool.__struct_fields__.index("max_uses") :]
# The first block of Claude Code's system text. It differs between sessions, between the agents of a session and, in
# some versions, between requests. It is removed: the model does not need it, and it would prevent prefix cache hits.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: *[\w.-]+=[^;\s]*(?:;|\s*\Z))+\s*")
_MAX_BILLING_CHARS = 4096  # the line has about 100; matching a very long text would hold the GIL


def chat_of(request: CountTokensRequest) -> ChatCompletionRequest:
    """Convert a request of Anthropic's Messages API to the equivalent chat completion request. Raises RefusedError if a
    tool or a message block is invalid."""
    config, choice, thinking = request.output_config or OutputConfig(), request.tool_choice, request.thinking
    output = request.output_format or config.format
    same: dict[str, Any] = {name: getattr(request, name, None) for name in _SAME}
    return ChatCompletionRequest(
        messages=list(_messages(request)),
        tools=[_tool(index, tool) for index, tool in enumerate(request.tools or ()) if not _vendor_kind(tool)],
        tool_choice=_choice(choice),
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", None),
        reasoning_effort=config.effort,
        enable_thinking=None if thinking is None else thinking.type != "disabled",
        chat_template_kwargs=request.chat_template_kwargs,
        thinking_token_budget=thinking.budget_tokens if thinking and thinking.type == "enabled" else None,
        response_format=None if output is None else JsonSchemaFormat(json_schema=NamedSchema(output.schema)),
        max_completion_tokens=getattr(request, "max_tokens", None),
        continue_final_message=_is_continued(request.messages[-1]) or None,
        stop=request.stop_sequences if isinstance(request, MessagesRequest) else None,
        **same,
    )


def message_warnings(request: CountTokensRequest) -> list[str]:
    """Return the warnings to send to the client of a Messages request. They list the parts of the request that the
    server ignores or replaces by placeholders."""
    warnings = []
    if kinds := sorted({*map(_vendor_kind, request.tools or ())} - {""}):
        warnings.append(f"tools that run at Anthropic are left out: {', '.join(kinds)}")
    lists = [message.content for message in request.messages if not isinstance(message.content, str)]
    parts = [part for blocks in lists for part in _result_parts(blocks)]
    if any(isinstance(part, ImageBlock) for part in parts):
        warnings.append(IMAGES_WARNING)
    if any(isinstance(part, TextBlock) and part.text == FILE_LEFT_OUT for part in parts):
        warnings.append(FILES_WARNING)
    if any(leaves_out(block.text) for blocks in lists for block in blocks if isinstance(block, TextBlock)):
        warnings.append(VENDOR_WARNING)
    return warnings


def _vendor_kind(tool: MessagesTool) -> str:
    """Return the kind of a tool that runs on Anthropic's servers, such as `web_search`. Return an empty string for a
    tool that the client runs."""
    found = _VENDOR_TYPE.fullmatch(tool.type or "")
    return found[1] if found else ""


def _result_parts(blocks: Iterable[Any]) -> list[Any]:
    """Return the parts (such as texts and images) of all tool results among the content blocks of a message."""
    contents = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_continued(message: InputMessage) -> bool:
    """Return whether the model continues the text of `message`, the last message of the conversation. Otherwise the
    model begins a new message. The model continues an assistant message that has text and no tool calls."""
    content = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    has_calls = any(isinstance(block, ToolUseBlock) for block in content)
    return message.role == "assistant" and not has_calls and bool("".join(texts).strip())


def _tool(index: int, tool: MessagesTool) -> ToolField:
    """Convert a tool of the Messages API to a tool of chat completions. `index` is the tool's index in the request.
    Raises RefusedError if the tool has no input schema or does not allow direct calls by the model. Raises RefusedError
    also if the tool sets an option that only tools on Anthropic's servers have."""
    if tool.input_schema is None:
        field = f"tools[{index}].input_schema"
        raise invalid(field, f"{field} is not set; send the JSON Schema of the tool's input")
    if name := next((name for name in _VENDOR_OPTIONS if getattr(tool, name) is not None), ""):
        field = f"tools[{index}].{name}"
        raise invalid(
            field, f"{field} is an option of tools that run at Anthropic, but the client runs this tool; leave it unset"
        )
    callers = tool.allowed_callers
    if callers and "direct" not in callers:
        field = f"tools[{index}].allowed_callers"
        raise invalid(field, f"{field} does not include 'direct', so the model could not call the tool; add 'direct'")
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of inputs:\n{examples}".lstrip()
    return ToolField(FunctionField(tool.name, description, parameters=tool.input_schema, strict=tool.strict))


def _choice(choice: Any) -> Any:
    match choice:
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case ToolChoice():
            return ToolField(FunctionField(choice.name))
    return None


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    system = request.system or []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if texts and len(texts[0]) <= _MAX_BILLING_CHARS and _BILLING_LINE.fullmatch(texts[0]):
        del texts[0]
    if texts:
        yield {"role": "system", "content": "\n".join(texts)}
    for index, message in enumerate(request.messages):
        _check_blocks(index, message)
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _answer(message)
        else:
            yield from _question(message)


def _check_blocks(index: int, message: InputMessage) -> None:
    """Check the types of the content blocks in a message. Raises RefusedError if the role of the message does not allow
    a block, for example a tool call in a user message. `index` is the message's index in the request."""
    for position, block in enumerate(message.content):
        if not isinstance(block, str | _BLOCKS[message.role]):
            field = f"messages[{index}].content[{position}]"
            kind = str(block.__struct_config__.tag)
            types = " or ".join(repr(each.__struct_config__.tag) for each in get_args(_BLOCKS[message.role]))
            raise invalid(
                field, f"{field} has the type {kind!r}, but blocks of the role {message.role!r} must have {types}"
            )


def _question(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Convert a user or system message of the Messages API to one or more chat messages, and yield them. Each tool
    result becomes a message of role `tool`. The texts before, between and after tool results become messages with the
    original role."""
    texts: list[dict[str, str]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": texts}
                texts = []
            given = block.content or ""
            content = given if isinstance(given, str) else "\n".join(map(_text, given))
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, ReadableBlock):  # true for all remaining blocks
            texts.append({"type": "text", "text": _text(block)})
    if texts:
        yield {"role": message.role, "content": texts}


def _text(block: ResultBlock) -> str:
    """Convert a content block of a message to the text that the prompt contains for it. An image becomes a placeholder
    text."""
    match block:
        case ToolReferenceBlock():
            return f"Tool: {block.tool_name}"
        case ImageBlock():
            return IMAGE_LEFT_OUT
        case SearchResultBlock():
            return _document([block.title, block.source], "\n".join(part.text for part in block.content))
        case DocumentBlock():
            source = block.source
            given = source.data if isinstance(source, TextSource) else source.content
            text = given if isinstance(given, str) else "\n".join(part.text for part in given)
            return _document([block.title, block.context], text)
    return block.text


def _document(head: Iterable[str | None], text: str) -> str:
    return "\n".join(["<document>", *filter(None, head), text, "</document>\n"])


def _answer(message: InputMessage) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = block.input if isinstance(block.input, str) else json.dumps(block.input or {})
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
    return {
        "role": message.role,
        "content": "".join(texts),
        "reasoning_content": "".join(thoughts) or None,
        "tool_calls": calls or None,
    }
