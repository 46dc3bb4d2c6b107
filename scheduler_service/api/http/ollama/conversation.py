"""Conversion of a request of Ollama's API into a request for a chat completion or for the completion of a prompt."""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from scheduler_service.api.http.ollama.requests import (
    SAMPLING_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from scheduler_service.api.http.request_options import RequestNames
from scheduler_service.api.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    QueuedRequest,
    StreamOptions,
)
from scheduler_service.serving.refusal import invalid

# The field names of a request, by the names of the fields of OpenAI's API that they become.
NAMES = RequestNames(
    "prompt",
    **{name: f"options.{name}" for name in SAMPLING_OPTIONS},
    max_tokens="options.num_predict",
    max_completion_tokens="options.num_predict",
    continue_final_message="messages",
    response_format="format",
)
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def chat_of(request: OllamaChatRequest | OllamaGenerateRequest) -> ChatCompletionRequest:
    """Convert a request of `/api/chat`, or a request of `/api/generate` for an answer to a question, to the equivalent
    chat completion request. Raises RefusedError if an option is not supported."""
    if isinstance(request, OllamaChatRequest):
        given, tools = request.messages or [], request.tools
    else:
        system = [OllamaMessage("system", request.system)] if request.system else []
        given, tools = [*system, OllamaMessage("user", request.prompt)], None
    last, think = given[-1], request.think
    return ChatCompletionRequest(
        messages=list(_messages(given)),
        tools=tools or None,
        max_completion_tokens=max_output_tokens(request) or -1,
        continue_final_message=(last.role == "assistant" and bool(last.content) and not last.tool_calls) or None,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        enable_thinking=think if think is None else bool(think),
        reasoning_effort=think if isinstance(think, str) else None,
        **_options(request),
    )


def completion_of(request: OllamaGenerateRequest) -> CompletionRequest:
    """Convert a request of `/api/generate` to a completion request, for a prompt that the chat template does not
    render. The length of its output is not limited (see `max_output_tokens`). Raises RefusedError if an option is not
    supported."""
    if request.system or request.think:
        field = "system" if request.system else "think"
        raise invalid(field, f"{field} is set, but no chat template renders the prompt; leave {field} unset")
    return CompletionRequest(
        prompt=request.prompt or "",
        suffix=request.suffix,
        max_tokens=-1,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **_options(request),
    )


def max_output_tokens(request: OllamaRequest) -> int | None:
    """Return the maximum number of output tokens, or None if only the maximum sequence length limits the output. Raises
    RefusedError if the request sets 0."""
    number = request.options.num_predict if request.options else None
    if number == 0:
        raise invalid(
            "options.num_predict",
            "options.num_predict is 0; send at least 1, or -1 for outputs up to the maximum sequence length",
        )
    return number if number and number > 0 else None


def _options(request: OllamaRequest) -> dict[str, Any]:
    """Return the fields of a completion request that all requests for text have, except the limit on the output."""
    options = request.options or OllamaOptions()
    found: dict[str, Any] = {name: getattr(request, name) for name in QueuedRequest.__struct_fields__}
    found |= {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    found |= {"seed": None} if options.seed == -1 else {}
    found |= {} if options.repeat_penalty is None else {"repetition_penalty": options.repeat_penalty}
    if request.stream is not False:  # the default of Ollama
        found |= {"stream": True, "stream_options": StreamOptions(include_usage=True)}
    if isinstance(request.format, dict):
        found["response_format"] = JsonSchemaFormat(NamedSchema(Raw(msgspec.json.encode(request.format))))
    elif request.format:
        found["response_format"] = JsonObjectFormat()
    if (window := options.repeat_last_n) == 0:
        found |= _NO_PENALTIES
    elif window not in (None, -1) and any(found[name] not in (None, off) for name, off in _NO_PENALTIES.items()):
        raise invalid(
            "options.repeat_last_n", f"options.repeat_last_n is {window}, but penalties apply to all tokens; send -1"
        )
    return found


def _messages(given: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Convert the messages of a conversation to chat messages, and yield them. Calls without an id get one. A result
    without an id belongs to the first call without a result; if the result names its tool, to the first such call of
    that tool."""
    # The names of called tools, by the ids of calls without a result: for each tool, and for all tools under "".
    waiting = defaultdict[str, OrderedDict[str, str]](OrderedDict)
    for index, message in enumerate(given):
        calls = []
        for place, call in enumerate(message.tool_calls or ()):
            call_id, name = call.id or f"call_{index}_{place}", call.function.name
            function = {"name": name, "arguments": json.dumps(call.function.arguments or {}, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
            waiting[""][call_id] = waiting[name][call_id] = name
        role, tool = message.role.lower(), message.tool_name or message.name or ""
        found: dict[str, Any] = {"role": role, "content": message.content or "", "tool_calls": calls or None}
        found |= {"reasoning_content": message.thinking} if message.thinking else {}
        if role == "tool":
            answered = message.tool_call_id or next(iter(waiting[tool]), "")
            name = waiting[""].pop(answered, "")
            waiting[name].pop(answered, None)
            found |= {"tool_call_id": answered or None, "name": tool or name or None}
        yield found
