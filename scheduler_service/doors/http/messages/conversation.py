"""A request of the Messages API as the chat that it means."""

import json
from collections.abc import Iterator
from typing import Any

from scheduler_service.doors.http.messages.requests import (
    AnyChoice,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    NoChoice,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from scheduler_service.doors.http.requests import (
    ChatCompletionRequest,
    FunctionField,
    JsonSchemaFormat,
    NamedSchema,
    QueuedRequest,
    ToolField,
)

_QUEUED = QueuedRequest.__struct_fields__
_SAMPLED = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed")


def chat_of(request: CountTokensRequest) -> ChatCompletionRequest:
    """Return the chat that a request means."""
    config, choice, thinking = request.output_config or OutputConfig(), request.tool_choice, request.thinking
    output = request.output_format or config.format
    same: dict[str, Any] = {name: getattr(request, name, None) for name in (*_QUEUED, *_SAMPLED)}
    return ChatCompletionRequest(
        messages=list(_messages(request)),
        tools=[
            ToolField(FunctionField(tool.name, tool.description, tool.input_schema)) for tool in request.tools or ()
        ],
        tool_choice=_choice(choice),
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", None),
        reasoning_effort=config.effort,
        chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking.type != "disabled"},
        thinking_token_budget=thinking.budget_tokens if thinking and thinking.type == "enabled" else None,
        response_format=None if output is None else JsonSchemaFormat(json_schema=NamedSchema(output.schema)),
        stop=request.stop_sequences if isinstance(request, MessagesRequest) else None,
        **same,
    )


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
    if request.system:
        texts = [request.system] if isinstance(request.system, str) else [block.text for block in request.system]
        yield {"role": "system", "content": "\n".join(texts)}
    for message in request.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _answer(message)
        else:
            yield from _question(message)


def _question(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield results of tools, each a message of its own, and texts between them."""
    texts: list[dict[str, str]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": texts}
                texts = []
            given = block.content or ""
            content = given if isinstance(given, str) else "\n".join(part.text for part in given)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        elif isinstance(block, TextBlock):
            texts.append({"type": "text", "text": block.text})
    if texts:
        yield {"role": message.role, "content": texts}


def _answer(message: InputMessage) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
    return {
        "role": message.role,
        "content": "".join(texts),
        "reasoning_content": "".join(thoughts) or None,
        "tool_calls": calls or None,
    }
