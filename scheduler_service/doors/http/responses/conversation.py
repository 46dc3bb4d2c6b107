"""A request of the Responses API as the chat that it means."""

from collections.abc import Iterator
from typing import Any

import msgspec

from scheduler_service.doors.http.body import decode_body
from scheduler_service.doors.http.requests import (
    ChatCompletionRequest,
    FunctionChoice,
    FunctionField,
    FunctionName,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    QueuedRequest,
    ResponseFormat,
    ToolField,
)
from scheduler_service.doors.http.responses.requests import (
    FunctionCallItem,
    FunctionResultItem,
    InputItem,
    InputItems,
    MessageItem,
    NamedFunction,
    ReasoningConfig,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    TextField,
)

_SAME = (*QueuedRequest.__struct_fields__, "stream", "temperature", "top_p", "seed", "parallel_tool_calls")


def chat_meant(request: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat that a request means. Raises RefusedError."""
    choice = request.tool_choice
    same: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    return ChatCompletionRequest(
        messages=list(_messages(request)),
        max_completion_tokens=request.max_output_tokens,
        tools=[ToolField(FunctionField(tool.name, tool.description, tool.parameters)) for tool in request.tools or ()],
        tool_choice=FunctionChoice(FunctionName(choice.name)) if isinstance(choice, NamedFunction) else choice,
        reasoning_effort=(request.reasoning or ReasoningConfig()).effort,
        response_format=_format((request.text or TextField()).format),
        **same,
    )


def _format(given: Any) -> ResponseFormat | None:
    match given:
        case SchemaFormat():
            return JsonSchemaFormat(NamedSchema(given.schema, given.name))
        case JsonObjectFormat():
            return given
    return None


def _messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if request.instructions is not None:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    typed = [{"type": "message", **item} for item in request.input]
    answer: dict[str, Any] = {}  # what the model wrote in one turn is one message
    for item in decode_body(msgspec.json.encode({"input": typed}), InputItems).input:
        if answer and not _goes_on(answer, item):
            yield answer
            answer = {}
        match item:
            case MessageItem(role="assistant") | FunctionCallItem() | ReasoningItem():
                answer = answer or {"role": "assistant", "content": ""}
                _add(answer, item)
            case MessageItem():
                yield {"role": "system" if item.role == "developer" else item.role, "content": _text(item.content)}
            case FunctionResultItem():
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    if answer:
        yield answer


def _goes_on(answer: dict[str, Any], item: InputItem) -> bool:
    """Tell whether an item is of the turn that has begun: reasoning comes first, then a text, then calls."""
    match item:
        case FunctionCallItem():
            return True
        case MessageItem(role="assistant"):
            return not answer["content"] and "tool_calls" not in answer
    return False


def _add(answer: dict[str, Any], item: InputItem) -> None:
    match item:
        case MessageItem():
            answer["content"] = _text(item.content)
        case ReasoningItem():
            answer["reasoning_content"] = _text(item.content or [])
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
