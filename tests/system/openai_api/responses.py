"""/v1/responses."""

from tests.system.openai_api.chat_completions import FORCED, FORCED_NOTE, TOOLS_NOTE
from tests.system.openai_api.completions import PROMPT
from tests.system.openai_api.field import (
    ABSENT,
    COUNT,
    Body,
    Exchange,
    Field,
    Proof,
    Route,
    Verdict,
    counts,
    greedy,
    honoured,
    ignored,
    is_count,
    refused,
    refused_by_pagewire,
    varies,
)

TOOLS = [
    {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
]
_FORCED = {"type": "function", **FORCED["function"]}
_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


def _has_longer_prompt(exchange: Exchange) -> bool:
    return exchange.reply.num_prompt_tokens > exchange.plain.num_prompt_tokens


def _goes_on(exchange: Exchange) -> bool:
    first = exchange.ask({"store": True}).body["id"]
    second = exchange.ask({"previous_response_id": first, "input": "One day"})
    return second.num_prompt_tokens > exchange.plain.num_prompt_tokens + 24


def _goes_on_in_a_conversation(exchange: Exchange) -> bool:
    conversation = exchange.send("/v1/conversations", {}).body["id"]
    exchange.ask({"conversation": conversation})
    second = exchange.ask({"conversation": conversation, "input": "One day"})
    return second.num_prompt_tokens > exchange.plain.num_prompt_tokens + 24


def _is_random_with(body: Body) -> Proof:
    """Honouring the body would leave one story only."""
    return varies({"temperature": 1, "max_output_tokens": 120, **body})


def _calls_count(exchange: Exchange) -> bool:
    calls = exchange.reply.body["output"]
    return bool(calls) and all(
        (call["type"], call["name"]) == ("function_call", "count") and is_count(call["arguments"]) for call in calls
    )


FIELDS = (
    honoured("model", {"model": "storyteller"}, lambda it: it.reply.text == it.plain.text, note="required"),
    honoured(
        "input",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]},
        lambda it: it.reply.text == it.plain.text,
        note="required; a text, or messages of text",
    ),
    refused(
        "input, with an image", {"input": [{"role": "user", "content": [_IMAGE]}]}, says="image input is not supported"
    ),
    honoured("instructions", {"instructions": "Be brief."}, _has_longer_prompt),
    honoured(
        "max_output_tokens",
        {"max_output_tokens": 3},
        lambda it: it.reply.num_output_tokens == 3,
        note="unset: as many as fit",
    ),
    refused_by_pagewire("max_output_tokens, beyond the context", {"max_output_tokens": 100_000}),
    honoured("temperature", {"temperature": 1}, varies({"temperature": 1}), note="0 to 2"),
    honoured(
        "temperature, unset", {}, _is_random_with({"temperature": ABSENT}), note="1, whatever the checkpoint says"
    ),
    honoured("top_p", {"top_p": 0.01}, greedy, beside={"temperature": 1}),
    honoured("stream", {"stream": True}, lambda it: it.reply.texts == it.plain.texts and len(it.reply.events) > 10),
    honoured(
        "store",
        {"store": True},
        lambda it: it.reply.body["store"] is True,
        note="kept in the gateway's memory, by default; `GET /v1/responses/ID` reads it",
    ),
    honoured(
        "background",
        {"background": True},
        lambda it: it.reply.body["status"] in ("queued", "in_progress"),
        note="answers at once; `GET /v1/responses/ID` reads it later",
    ),
    honoured("previous_response_id", {"store": True}, _goes_on, note="of a stored response"),
    refused("previous_response_id, unknown", {"previous_response_id": "resp_none"}, says="resp_none"),
    honoured("conversation", {"store": True}, _goes_on_in_a_conversation, note="an id of `POST /v1/conversations`"),
    refused("conversation, unknown", {"conversation": "conv_none"}, says="conv_none", status=404),
    honoured(
        "tools, functions",
        {"tools": TOOLS},
        _has_longer_prompt,
        note=TOOLS_NOTE,
    ),
    ignored("tools, of other types", {"tools": [{"type": "web_search"}]}),
    honoured(
        "tool_choice, required",
        {"tools": [_FORCED], "tool_choice": "required", "temperature": 1, "max_output_tokens": 1000},
        _calls_count,
        note=FORCED_NOTE,
    ),
    honoured(
        "tool_choice, of a function",
        {"tools": [*TOOLS, _FORCED], "tool_choice": {"type": "function", "name": "count"}},
        _calls_count,
        note=FORCED_NOTE,
    ),
    refused("tool_choice, without tools", {"tool_choice": "auto"}),
    honoured(
        "text.format, json_object",
        {"text": {"format": {"type": "json_object"}}},
        lambda it: it.reply.text.startswith("{"),
    ),
    honoured(
        "text.format, json_schema",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": COUNT}}},
        counts,
    ),
    refused_by_pagewire(
        "text.format, json_schema that is none",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "thing"}}}},
        says="text.format",
    ),
    ignored("text.verbosity", {"text": {"verbosity": "low"}}),
    ignored("include", {"include": ["message.output_text.logprobs"]}),
    refused("include, unknown", {"include": ["bogus"]}),
    ignored("top_logprobs", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
    Field("top_k", Verdict.IGNORED, {}, _is_random_with({"top_k": 1})),
    Field("min_p", Verdict.IGNORED, {}, _is_random_with({"min_p": 1})),
    ignored("frequency_penalty", {"frequency_penalty": 2}),
    ignored("presence_penalty", {"presence_penalty": 2}),
    ignored("repetition_penalty", {"repetition_penalty": 1.9}),
    ignored("stop", {"stop": "him"}),
    honoured(
        "reasoning", {"reasoning": {"effort": "low"}}, _has_longer_prompt, note="`effort` is given to the chat template"
    ),
    ignored("prompt", {"prompt": {"id": "p"}}),
    ignored("truncation", {"truncation": "auto"}),
    ignored("context_management", {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
    ignored("max_tool_calls", {"max_tool_calls": 1}),
    ignored("parallel_tool_calls", {"parallel_tool_calls": False}),
    ignored("metadata", {"metadata": {"a": "b"}}),
    ignored("user", {"user": "u"}),
    ignored("request_id", {"request_id": "abc"}),
    ignored("priority", {"priority": 3}, note="gRPC has it"),
    ignored("service_tier", {"service_tier": "flex"}),
    ignored("safety_identifier", {"safety_identifier": "s"}),
    ignored("prompt_cache_key", {"prompt_cache_key": "k"}, note="prefixes are cached by their tokens"),
    ignored("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    ignored("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": False}}),
    *(
        refused(name, {name: value})
        for name, value in {
            "prompt_cache_options": {},
            "background_options": {},
            "moderation": {},
            "access_programs": [],
            "image": {},
            "seed": 7,
            "n": 2,
            "logit_bias": {"602": -100},
            "logprobs": True,
            "max_tokens": 3,
            "min_tokens": 3,
            "stop_token_ids": [602],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "guided_json": {},
            "structured_outputs": {},
        }.items()
    ),
)

RESPONSES = Route(
    "/v1/responses",
    {"model": "storyteller", "input": PROMPT, "temperature": 0, "max_output_tokens": 24},
    FIELDS,
    unknown=Verdict.REFUSED,
)
