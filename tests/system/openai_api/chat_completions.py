"""/v1/chat/completions."""

from tests.system.openai_api.completions import PROMPT, SAMPLED, TO_THE_END
from tests.system.openai_api.field import (
    ABSENT,
    COUNT,
    Exchange,
    Route,
    Verdict,
    changed,
    constraints,
    counts,
    greedy,
    has_texts,
    honoured,
    ignored,
    is_count,
    refused,
    refused_by_pagewire,
    repeats,
)

MESSAGES = [{"role": "user", "content": PROMPT}]
_FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": _FUNCTION}]
TOOLS_NOTE = (
    "given to the chat template; one that does not show them ignores them. "
    "Calls are parsed where the gateway knows the model's format"
)
FORCED = {"type": "function", "function": {"name": "count", "parameters": COUNT}}
FORCED_NOTE = "calls come parsed, without a parser of the model's format"
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def _has_longer_prompt(exchange: Exchange) -> bool:
    """What the template shows of the field is in the prompt."""
    return exchange.reply.num_prompt_tokens > exchange.plain.num_prompt_tokens


def _has_shorter_prompt(exchange: Exchange) -> bool:
    return exchange.reply.num_prompt_tokens < exchange.plain.num_prompt_tokens


def _has_logprobs(exchange: Exchange) -> bool:
    content = exchange.reply.choice["logprobs"]["content"]
    return "".join(entry["token"] for entry in content) == exchange.plain.text and not content[0]["top_logprobs"]


def _has_top_logprobs(exchange: Exchange) -> bool:
    """Greedy takes the likeliest."""
    content = exchange.reply.choice["logprobs"]["content"]
    tops = [[top["token"] for top in entry["top_logprobs"]] for entry in content]
    return all(len(top) == 2 and top[0] == entry["token"] for top, entry in zip(tops, content, strict=True))


def _calls_count(exchange: Exchange) -> bool:
    calls = [call["function"] for call in exchange.reply.choice["message"]["tool_calls"]]
    return bool(calls) and all(call["name"] == "count" and is_count(call["arguments"]) for call in calls)


FIELDS = (
    honoured("model", {"model": "storyteller"}, lambda it: it.reply.text == it.plain.text, note="required"),
    honoured(
        "messages",
        {"messages": [{"role": "system", "content": "Hello."}, *MESSAGES]},
        _has_longer_prompt,
        note="required; text and text parts",
    ),
    refused(
        "messages, with an image",
        {"messages": [{"role": "user", "content": [_IMAGE]}]},
        says="image input is not supported",
    ),
    refused("messages, empty", {"messages": []}),
    honoured("max_tokens", {"max_tokens": 3}, lambda it: it.reply.num_output_tokens == 3, note="unset: as many as fit"),
    honoured(
        "max_completion_tokens",
        {"max_completion_tokens": 3},
        lambda it: it.reply.num_output_tokens == 3,
        note="goes before `max_tokens`",
    ),
    refused_by_pagewire("max_tokens, beyond the context", {"max_tokens": 100_000}),
    refused_by_pagewire("max_completion_tokens, beyond the context", {"max_completion_tokens": 100_000}),
    honoured("temperature", {"temperature": 1, "seed": 7}, note="0 to 2"),
    honoured("temperature, unset", {"temperature": ABSENT}, greedy, note="the checkpoint's own, else 1"),
    honoured("top_p", {"top_p": 0.01}, greedy, beside=SAMPLED),
    honoured("top_k", {"top_k": 1}, greedy, beside=SAMPLED, note="-1 is off"),
    honoured("min_p", {"min_p": 1}, greedy, beside=SAMPLED),
    honoured("n", {"n": 3}, has_texts(3), note="1 to 10"),
    refused("n, above 10", {"n": 11}),
    honoured(
        "seed",
        {"seed": 7},
        repeats({"temperature": 1, "seed": 7}, {"temperature": 1, "seed": 8}),
        beside={"temperature": 1},
    ),
    changed(
        "seed, above 2147483647",
        {"seed": 2**40},
        lambda it: it.reply.texts == it.ask({"temperature": 1, "seed": 2**31 - 1}).texts,
        note="counts as 2147483647",
        beside={"temperature": 1},
    ),
    # A reward for what was said before: the model is too sure of its words for a penalty to change them.
    honoured("frequency_penalty", {"frequency_penalty": -2}),
    honoured("presence_penalty", {"presence_penalty": -2}),
    honoured("repetition_penalty", {"repetition_penalty": 1.9}, note="up to 2"),
    refused("repetition_penalty, above 2", {"repetition_penalty": 2.1}),
    honoured(
        "stop",
        {"stop": ["never", "him"]},
        lambda it: (it.reply.text, it.reply.ends) == (", and everyone called ", ["stop"]),
        note="a text or up to 4",
    ),
    refused("stop, more than 4", {"stop": ["a", "b", "c", "d", "e"]}),
    honoured("stop_token_ids", {"stop_token_ids": [602]}, lambda it: it.reply.ends == ["stop"]),
    honoured(
        "no_stop_trim",
        {"no_stop_trim": True, "stop": "him"},
        lambda it: it.reply.text == ", and everyone called him",
        note="the output keeps its stop text",
    ),
    honoured("ignore_eos", {"ignore_eos": True}, lambda it: it.reply.num_output_tokens == 120, beside=TO_THE_END),
    honoured(
        "skip_special_tokens",
        {"skip_special_tokens": False},
        lambda it: "<|endoftext|>" in it.reply.text,
        beside=TO_THE_END | {"ignore_eos": True},
    ),
    honoured("logprobs", {"logprobs": True}, _has_logprobs),
    honoured(
        "top_logprobs", {"logprobs": True, "top_logprobs": 2}, _has_top_logprobs, note="with `logprobs` only; up to 20"
    ),
    refused("top_logprobs, without logprobs", {"top_logprobs": 2}),
    honoured("stream", {"stream": True}, lambda it: it.reply.texts == it.plain.texts and len(it.reply.events) > 10),
    honoured("stream, with n", {"stream": True, "n": 2}, lambda it: it.reply.texts == 2 * it.plain.texts),
    ignored(
        "stream_options.include_obfuscation",
        {"stream_options": {"include_obfuscation": True}},
        beside={"stream": True},
    ),
    honoured(
        "stream_options.include_usage",
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda it: it.reply.events[-1]["usage"]["completion_tokens"] == 24,
        note="with `stream` only",
    ),
    honoured(
        "stream_options.continuous_usage_stats",
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        lambda it: it.reply.events[3]["usage"]["completion_tokens"] > 1,
    ),
    refused("stream_options, without stream", {"stream_options": {"include_usage": True}}),
    honoured(
        "tools",
        {"tools": TOOLS},
        _has_longer_prompt,
        note=TOOLS_NOTE,
    ),
    honoured("tool_choice, auto", {"tools": TOOLS, "tool_choice": "auto"}, _has_longer_prompt, note="as unset"),
    honoured("tool_choice, none", {"tools": TOOLS, "tool_choice": "none"}, lambda it: it.reply.text == it.plain.text),
    honoured(
        "tool_choice, required",
        {"tools": [FORCED], "tool_choice": "required", "temperature": 1, "max_tokens": 1000},
        _calls_count,
        note=FORCED_NOTE,
    ),
    honoured(
        "tool_choice, of a function",
        {"tools": [*TOOLS, FORCED], "tool_choice": {"type": "function", "function": {"name": "count"}}},
        _calls_count,
        note=FORCED_NOTE,
    ),
    honoured("functions", {"functions": [_FUNCTION]}, _has_longer_prompt, note="as `tools`"),
    honoured(
        "function_call, none",
        {"functions": [_FUNCTION], "function_call": "none"},
        lambda it: it.reply.text == it.plain.text,
        note="as `tool_choice`",
    ),
    honoured(
        "function_call, of a function",
        {"functions": [FORCED["function"]], "function_call": {"name": "count"}},
        _calls_count,
        note="as `tool_choice`",
    ),
    honoured("chat_template_kwargs", {"chat_template_kwargs": {"mood": "merry"}}, _has_longer_prompt),
    honoured("reasoning_effort", {"reasoning_effort": "low"}, _has_longer_prompt, note="given to the chat template"),
    honoured(
        "continue_final_message",
        {"continue_final_message": True},
        _has_shorter_prompt,
        beside={"messages": [*MESSAGES, {"role": "assistant", "content": ", so"}]},
        note="the template is not asked for a new turn",
    ),
    honoured("response_format, text", {"response_format": {"type": "text"}}, lambda it: it.reply.text == it.plain.text),
    honoured(
        "response_format, json_object",
        {"response_format": {"type": "json_object"}},
        lambda it: it.reply.text.startswith("{"),
    ),
    honoured(
        "response_format, json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": COUNT}}},
        counts,
    ),
    refused_by_pagewire(
        "response_format, json_schema that is none",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}},
    ),
    *(field for field in constraints() if field.name != "json_schema"),
    refused("modalities, audio", {"modalities": ["audio"]}, says="modality"),
    refused("return_audio", {"return_audio": True}),
    ignored("logit_bias", {"logit_bias": {"602": -100}}, note="gRPC has it: `sampling.logit_bias`"),
    ignored("min_tokens", {"min_tokens": 120}, beside=TO_THE_END, note="completions have it"),
    ignored("parallel_tool_calls", {"parallel_tool_calls": False}),
    ignored("user", {"user": "u"}),
    ignored("metadata", {"metadata": {"a": "b"}}),
    ignored("store", {"store": True}),
    ignored("service_tier", {"service_tier": "flex"}),
    ignored("safety_identifier", {"safety_identifier": "s"}),
    ignored("prompt_cache_key", {"prompt_cache_key": "k"}, note="prefixes are cached by their tokens"),
    ignored("prompt_cache_options", {"prompt_cache_options": {}}),
    ignored("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    ignored("moderation", {"moderation": {"model": "omni"}}),
    ignored("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ignored("audio", {"audio": {"voice": "alloy", "format": "wav"}}),
    ignored("verbosity", {"verbosity": "low"}),
    ignored("web_search_options", {"web_search_options": {}}),
    ignored(
        "separate_reasoning",
        {"separate_reasoning": False},
        note="an effect only on models whose reasoning the gateway parses",
    ),
    ignored(
        "stream_reasoning",
        {"stream_reasoning": False},
        note="an effect only on models whose reasoning the gateway parses",
    ),
    honoured(
        "thinking",
        {"thinking": {"type": "enabled"}},
        _has_longer_prompt,
        note="given to a chat template that asks for it",
    ),
    ignored("json_schema", {"json_schema": "{}"}),
    ignored("structured_outputs", {"structured_outputs": {"regex": "a+"}}),
    ignored("guided_json", {"guided_json": {"type": "object"}}),
    ignored("guided_regex", {"guided_regex": "a+"}),
    ignored("guided_choice", {"guided_choice": ["a"]}),
    ignored("guided_grammar", {"guided_grammar": "root ::= 'a'"}),
    ignored(
        "use_beam_search", {"use_beam_search": True, "n": 2}, beside={"n": 2}, note="gRPC has it: `sampling.beam_width`"
    ),
    ignored("length_penalty", {"length_penalty": 2.0}),
    ignored("early_stopping", {"early_stopping": True}),
    ignored("best_of", {"best_of": 3}),
    ignored(
        "include_stop_str_in_output",
        {"include_stop_str_in_output": True},
        beside={"stop": "him"},
        note="`no_stop_trim` does it",
    ),
    ignored("prompt_logprobs", {"prompt_logprobs": 1}, note="gRPC has it: `sampling.prompt_logprobs`"),
    ignored("allowed_token_ids", {"allowed_token_ids": [1, 2]}),
    ignored("bad_words", {"bad_words": ["everyone"]}),
    ignored("logits_processors", {"logits_processors": ["x"]}),
    ignored("truncate_prompt_tokens", {"truncate_prompt_tokens": 2}),
    ignored("add_special_tokens", {"add_special_tokens": False}),
    ignored("spaces_between_special_tokens", {"spaces_between_special_tokens": False}),
    ignored("add_generation_prompt", {"add_generation_prompt": False}),
    ignored("chat_template", {"chat_template": "x"}, note="smg's flag `--chat-template` sets it for all"),
    ignored("documents", {"documents": [{"title": "a", "text": "b"}]}),
    ignored("echo", {"echo": True}),
    ignored("include_reasoning", {"include_reasoning": False}),
    ignored("mm_processor_kwargs", {"mm_processor_kwargs": {"a": 1}}),
    ignored("return_token_ids", {"return_token_ids": True}),
    ignored("return_tokens_as_token_ids", {"return_tokens_as_token_ids": True}),
    ignored("priority", {"priority": 3}, note="gRPC has it"),
    ignored("cache_salt", {"cache_salt": "abc"}, note="gRPC has it"),
    ignored("request_id", {"request_id": "abc"}),
    ignored("rid", {"rid": "abc"}),
    ignored("sampling_seed", {"sampling_seed": 8}, beside=SAMPLED, note="`seed` does it"),
    ignored("kv_transfer_params", {"kv_transfer_params": {"remote_port": 1}}),
    ignored("vllm_xargs", {"vllm_xargs": {"a": 1}}),
    ignored("thinking_token_budget", {"thinking_token_budget": 2}),
    ignored("lora_path", {"lora_path": "x"}),
    ignored("session_params", {"session_params": {"id": "x"}}),
    ignored("return_hidden_states", {"return_hidden_states": True}),
)

CHAT_COMPLETIONS = Route(
    "/v1/chat/completions",
    {"model": "storyteller", "messages": MESSAGES, "temperature": 0, "max_tokens": 24},
    FIELDS,
    unknown=Verdict.IGNORED,
)
