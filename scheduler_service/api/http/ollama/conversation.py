"""Conversion of a request of Ollama's API into a request for a chat completion or for the completion of a prompt."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from scheduler_service.api.http.ollama.requests import (
    OllamaCall,
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
)
from scheduler_service.serving.refusal import invalid

# Fields and options that have the same meaning in the requests of OpenAI's API.
_SAME = QueuedRequest.__struct_fields__
_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def field_names(prompt: str) -> RequestNames:
    """Return the field names of a request of Ollama's API, for errors. `prompt` is the field with the prompt."""
    return RequestNames(
        prompt,
        **{name: f"options.{name}" for name in (*_SAME_OPTIONS, "seed")},
        messages=prompt,
        continue_final_message=prompt,
        max_tokens="options.num_predict",
        max_completion_tokens="options.num_predict",
        repetition_penalty="options.repeat_penalty",
        response_format="format",
    )


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
        max_completion_tokens=_max_tokens(request),
        continue_final_message=(last.role == "assistant" and bool(last.content) and not last.tool_calls) or None,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        enable_thinking=think if think is None else bool(think),
        reasoning_effort=think if isinstance(think, str) else None,
        **_options(request),
    )


def completion_of(request: OllamaGenerateRequest, prompt: str | tuple[int, ...]) -> CompletionRequest:
    """Convert a request of `/api/generate` to a completion request for a prompt that the chat template does not render:
    a text, or token ids. Its output is not limited yet (see `max_output_tokens`). Raises RefusedError if an option is
    not supported."""
    return CompletionRequest(
        prompt=prompt if isinstance(prompt, str) else list(prompt),
        max_tokens=-1,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **_options(request),
    )


def max_output_tokens(request: OllamaRequest) -> int | None:
    """Return the maximum number of output tokens, or None if only the maximum sequence length limits the output. Raises
    RefusedError if the request sets 0."""
    number = (request.options or OllamaOptions()).num_predict
    if number == 0:
        field = "options.num_predict"
        raise invalid(field, f"{field} is 0; send at least 1, or -1 for outputs up to the maximum sequence length")
    return None if number is None or number < 0 else number


def _max_tokens(request: OllamaRequest) -> int:
    number = max_output_tokens(request)
    return -1 if number is None else number


def _options(request: OllamaRequest) -> dict[str, Any]:
    """Return the fields of a completion request that all requests for text have, except the limit on the output."""
    options = request.options or OllamaOptions()
    found: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    found |= {name: getattr(options, name) for name in _SAME_OPTIONS}
    found |= {"repetition_penalty": options.repeat_penalty, "seed": None if options.seed == -1 else options.seed}
    if isinstance(request.format, dict):
        found["response_format"] = JsonSchemaFormat(NamedSchema(Raw(msgspec.json.encode(request.format))))
    elif request.format:
        found["response_format"] = JsonObjectFormat()
    if options.repeat_last_n == 0:
        found |= _NO_PENALTIES
    elif (options.repeat_last_n or -1) > 0 and any(
        found[name] not in (None, off) for name, off in _NO_PENALTIES.items()
    ):
        field = "options.repeat_last_n"
        raise invalid(field, f"{field} is {options.repeat_last_n}, but penalties apply to all tokens; send -1")
    return found


def _messages(given: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Convert the messages of a conversation to chat messages, and yield them. Calls without an id get one. A result
    without the id of its call belongs to the first call of the same tool, or else to the first call, that has no result
    yet."""
    waiting: dict[str, str] = {}  # the names of tools that were called, by the ids of calls without a result
    for index, message in enumerate(given):
        found: dict[str, Any] = {"role": message.role.lower(), "content": message.content or ""}
        if message.thinking:
            found["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = {call.id or f"call_{index}_{at}": call for at, call in enumerate(message.tool_calls)}
            found["tool_calls"] = [_call(call_id, call) for call_id, call in calls.items()]
            waiting |= {call_id: call.function.name for call_id, call in calls.items()}
        if found["role"] == "tool":
            name = message.tool_name or message.name
            call_id = message.tool_call_id or next((each for each in waiting if waiting[each] == name), "")
            call_id = call_id or next(iter(waiting), "")
            found |= {"tool_call_id": call_id} if call_id else {}
            found |= {"name": name or waiting.get(call_id)} if name or call_id in waiting else {}
            waiting.pop(call_id, None)
        yield found


def _call(call_id: str, call: OllamaCall) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
