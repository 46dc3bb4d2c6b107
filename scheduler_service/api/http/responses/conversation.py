"""Conversion of a Responses API request into a chat completion request."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from scheduler_service.api.http.body import decode_body, lenient
from scheduler_service.api.http.prompts import FILE_LEFT_OUT, FILES_WARNING, IMAGE_LEFT_OUT, IMAGES_WARNING
from scheduler_service.api.http.requests import (
    AllowedTools,
    AllowedToolsChoice,
    ChatCompletionRequest,
    FunctionField,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    SampledRequest,
    ToolField,
)
from scheduler_service.api.http.responses.called_tools import (
    SEARCH,
    found_names,
    found_tools,
    function_name,
    input_arguments,
    tool_fields,
    tool_warnings,
)
from scheduler_service.api.http.responses.requests import (
    AllowedFunctions,
    CompactionItem,
    CustomCallItem,
    CustomResultItem,
    CustomTool,
    FunctionCallItem,
    FunctionResultItem,
    FunctionTool,
    InputImage,
    InputItem,
    InputItems,
    InputText,
    MessageItem,
    OutputText,
    ReasoningConfig,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    TextField,
    ToolSearchCallItem,
    ToolSearchResultItem,
)
from scheduler_service.api.http.vendor_calls import VENDOR_WARNING, is_vendor_result, leaves_out, vendor_text
from scheduler_service.serving.refusal import invalid

_SAME = (
    *SampledRequest.__struct_fields__,
    *("stream", "structured_outputs", "chat_template_kwargs", "parallel_tool_calls"),
)
_IN_TURN = "commentary"  # the phase of an assistant message that is followed by more items of the same turn
# Prefixes of the ids that are assigned to items without an id.
_KINDS = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    FunctionResultItem: "fco",
    CustomCallItem: "ctc",
    CustomResultItem: "ctco",
    CompactionItem: "cmp",
    ToolSearchCallItem: "tsc",
    ToolSearchResultItem: "tso",
}


def items_of(request: ResponsesRequest, before: Iterable[InputItem] = ()) -> list[InputItem]:
    """Convert the input of a Responses request to conversation items. Each item gets an id and a status if it has none.
    If the id of an item occurs earlier in the input or in `before`, the item gets a new id. Raises RefusedError if an
    item is invalid."""
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input or []
    typed = [_vendor_item_as_message({"type": "message", **_without_nulls(item)}) for item in given]
    kind = InputItems if type(request) is ResponsesRequest else lenient(InputItems)  # as the request was decoded
    items: list[InputItem] = decode_body(msgspec.json.encode({"input": typed}), kind).input
    taken = {item.id for item in before}
    return [_whole(item, f"{request.request_id}_input_{index}", taken) for index, item in enumerate(items)]


def _vendor_item_as_message(item: dict[str, Any]) -> dict[str, Any]:
    """Convert the call or the result of a tool that ran on a vendor's servers to a message that describes it. `item` is
    an item of the conversation. Other items are returned unchanged."""
    text = vendor_text(item)
    if not text:
        return item
    own: dict[str, Any] = {"role": "user"} if is_vendor_result(item) else {"role": "assistant", "phase": _IN_TURN}
    return {"type": "message", "id": item.get("id"), "content": text, **own}


def _without_nulls(value: Any) -> Any:
    """Return a copy of a JSON value without null fields, at any depth of nested objects. The server treats a null field
    as unset."""
    match value:
        case dict():
            return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
        case list():
            return [_without_nulls(inner) for inner in value]
    return value


def _whole(item: InputItem, name: str, taken: set[str | None]) -> InputItem:
    item_id = (
        f"{next(kind for each, kind in _KINDS.items() if isinstance(item, each))}_{name}"
        if not item.id or item.id in taken
        else item.id
    )
    taken.add(item_id)
    changes: dict[str, Any] = {
        "id": item_id,
        "status": item.status or "completed",
    }
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        is_answer = item.role == "assistant"
        changes["content"] = [OutputText(item.content, []) if is_answer else InputText(item.content)]
    return msgspec.structs.replace(item, **changes)


def to_chat_request(request: ResponsesRequest, conversation: Iterable[InputItem]) -> ChatCompletionRequest:
    """Convert a request of OpenAI's Responses API to the equivalent chat completion request. `conversation` contains
    all items of the conversation, including the items of earlier responses. Raises RefusedError if log-probabilities
    are requested together with tools, or a tool is invalid."""
    same: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    text = request.text or TextField()
    if request.wants_logprobs and request.tools and request.tool_choice != "none":
        field = "top_logprobs" if request.top_logprobs else "include"
        raise invalid(field, f"{field} requests log-probabilities, but tools may be called; set tool_choice to none")
    return ChatCompletionRequest(
        messages=list(_messages(request.instructions, conversation)),
        max_tokens=request.max_output_tokens,
        tools=tool_fields(request.tools or (), found_tools(conversation)),
        tool_choice=_choice(request.tool_choice),
        reasoning_effort=(request.reasoning or ReasoningConfig()).effort,
        response_format=_format(text.format),
        verbosity=text.verbosity,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        **same,
    )


def warnings_of(request: ResponsesRequest, conversation: Iterable[InputItem]) -> list[str]:
    """Return the warnings to send to the client of a Responses request. They list the parts of the request and its
    conversation that are ignored, replaced by placeholders or not enforced."""
    warnings = list(tool_warnings([*(request.tools or ()), *found_tools(conversation)]))
    results = [item.output for item in conversation if isinstance(item, FunctionResultItem | CustomResultItem)]
    parts = [part for output in results if isinstance(output, list) for part in output]
    if any(isinstance(part, InputImage) for part in parts):
        warnings.append(IMAGES_WARNING)
    if any(isinstance(part, InputText) and part.text == FILE_LEFT_OUT for part in parts):
        warnings.append(FILES_WARNING)
    messages = [item.content for item in conversation if isinstance(item, MessageItem)]
    if any(leaves_out(part.text) for content in messages for part in content if not isinstance(part, str)):
        warnings.append(VENDOR_WARNING)
    return warnings


def _choice(given: Any) -> Any:
    match given:
        case FunctionTool() | CustomTool():
            return ToolField(FunctionField(given.name))
        case AllowedFunctions():
            return AllowedToolsChoice(AllowedTools(given.mode, [_choice(tool) for tool in given.tools]))
    return given


def _format(given: Any) -> ResponseFormat | None:
    match given:
        case SchemaFormat():
            return JsonSchemaFormat(NamedSchema(given.schema, given.name))
        case JsonObjectFormat():
            return given
    return None


def _messages(instructions: str | None, conversation: Iterable[InputItem]) -> Iterator[dict[str, Any]]:
    if instructions is not None:
        yield {"role": "system", "content": instructions}
    answer: dict[str, Any] = {}  # the items of one assistant turn become one message
    last: InputItem | None = None
    for item in conversation:
        if answer and not _belongs_to_turn(answer, item, last):
            yield _joined(answer)
            answer = {}
        last = item
        match item:
            case (
                MessageItem(role="assistant")
                | ReasoningItem()
                | FunctionCallItem()
                | CustomCallItem()
                | ToolSearchCallItem()
            ):
                answer = answer or {"role": "assistant", "content": []}
                _add(answer, item)
            case MessageItem():
                yield {"role": "system" if item.role == "developer" else item.role, "content": _text(item.content)}
            case CompactionItem():
                yield {"role": "user", "content": f"Summary of the conversation so far:\n\n{item.encrypted_content}"}
            case FunctionResultItem(call_id=None):
                yield {"role": "user", "content": f"{_output_heading(item)}\n\n{_text(item.output)}"}
            case FunctionResultItem() | CustomResultItem():
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            case ToolSearchResultItem():
                names = ", ".join(found_names(item)) or "none"
                yield {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "content": f"Tools that may be called now: {names}",
                }
    if answer:
        yield _joined(answer)


def _output_heading(item: FunctionResultItem) -> str:
    """Return the first line of the user message that contains the output of a tool that the model has not called. Such
    an output becomes a user message, because many chat templates reject a tool message without a preceding tool
    call."""
    return f"Output of {function_name(item.name, item.namespace) if item.name else 'a tool'}:"


def _belongs_to_turn(answer: dict[str, Any], item: InputItem, last: InputItem | None) -> bool:
    """Return whether a conversation item is part of the current assistant turn, so that it can be added to the same
    chat message. `answer` is the chat message up to now, and `last` is the item before `item`.

    A turn consists of reasoning, then text, then tool calls. A text whose phase is `commentary` may occur anywhere in a
    turn.
    """
    is_within = isinstance(last, MessageItem) and last.phase == _IN_TURN
    match item:
        case FunctionCallItem() | CustomCallItem() | ToolSearchCallItem():
            return True
        case MessageItem(role="assistant", phase="commentary"):
            return True
        case MessageItem(role="assistant"):
            return is_within or (not answer["content"] and "tool_calls" not in answer)
    return is_within and isinstance(item, ReasoningItem)


def _add(answer: dict[str, Any], item: InputItem) -> None:
    """Add a conversation item to `answer`, the chat message of an assistant turn. While the message is built, its
    content and its reasoning are lists of texts. `_joined` joins these lists later."""
    match item:
        case MessageItem():
            answer["content"] += filter(None, [_text(item.content)])
        case ReasoningItem():
            answer.setdefault("reasoning_content", []).extend(filter(None, [_text(item.content or [])]))
        case FunctionCallItem() | CustomCallItem() | ToolSearchCallItem():
            call = {"id": item.call_id, "type": "function", "function": _called(item)}
            answer.setdefault("tool_calls", []).append(call)


def _joined(answer: dict[str, Any]) -> dict[str, Any]:
    """Finish the chat message of an assistant turn. Join the texts of its content, and the texts of its reasoning, into
    one text each."""
    names = answer.keys() & {"content", "reasoning_content"}
    return answer | {name: "\n\n".join(answer[name]) for name in names}


def _called(item: FunctionCallItem | CustomCallItem | ToolSearchCallItem) -> dict[str, Any]:
    if isinstance(item, ToolSearchCallItem):
        return {"name": SEARCH, "arguments": item.arguments}
    arguments = item.arguments if isinstance(item, FunctionCallItem) else input_arguments(item.input)
    return {"name": function_name(item.name, item.namespace), "arguments": arguments}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(IMAGE_LEFT_OUT if isinstance(part, InputImage) else part.text for part in content)
