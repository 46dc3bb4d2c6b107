"""/v1/completions."""

from tests.system.openai_api.field import (
    ABSENT,
    Exchange,
    Route,
    Verdict,
    changed,
    constraints,
    greedy,
    has_texts,
    honoured,
    ignored,
    refused,
    refused_by_pagewire,
    repeats,
)

PROMPT = "Once there was a brave turtle"
SAMPLED = {"temperature": 1, "seed": 7, "max_tokens": 24}
TO_THE_END = {"max_tokens": 120}  # the plain story has 97 tokens
_LARGEST_SEED = 2**31 - 1


def _echoes(exchange: Exchange) -> bool:
    return exchange.reply.text == PROMPT + exchange.plain.text


def _stops_at_him(exchange: Exchange) -> bool:
    return (exchange.reply.text, exchange.reply.ends) == (", and everyone called ", ["stop"])


def _keeps_the_stop_text(exchange: Exchange) -> bool:
    return exchange.reply.text == ", and everyone called him"


FIELDS = (
    honoured("model", {"model": "storyteller"}, lambda it: it.reply.text == it.plain.text, note="required"),
    refused("model, unknown", {"model": "nobody"}, says="nobody", status=404),
    honoured("prompt", {"prompt": ["Once", "The"]}, has_texts(2), note="required; a text or several"),
    refused("prompt, as token ids", {"prompt": [5, 6, 7]}, note="`/generate` takes them, as `input_ids`"),
    refused_by_pagewire("prompt, empty", {"prompt": ""}),
    honoured("max_tokens", {"max_tokens": 3}, lambda it: it.reply.num_output_tokens == 3, note="unset: as many as fit"),
    refused_by_pagewire("max_tokens, beyond the context", {"max_tokens": 100_000}),
    refused_by_pagewire("max_tokens, 0", {"max_tokens": 0}),
    honoured("temperature", {"temperature": 1, "seed": 7}, note="0 to 2"),
    honoured("temperature, unset", {"temperature": ABSENT}, greedy, note="the checkpoint's own, else 1"),
    honoured("top_p", {"top_p": 0.01}, greedy, beside=SAMPLED),
    honoured("top_k", {"top_k": 1}, greedy, beside=SAMPLED, note="-1 is off; vLLM's 0 is refused"),
    refused("top_k, 0", {"top_k": 0}),
    honoured("min_p", {"min_p": 1}, greedy, beside=SAMPLED),
    honoured("n", {"n": 3}, has_texts(3), note="1 to 16"),
    refused_by_pagewire("n, above 16", {"n": 17}),
    honoured(
        "seed",
        {"seed": 7},
        repeats({"temperature": 1, "seed": 7}, {"temperature": 1, "seed": 8}),
        beside={"temperature": 1},
    ),
    changed(
        "seed, above 2147483647",
        {"seed": 2**40},
        lambda it: it.reply.texts == it.ask({"temperature": 1, "seed": _LARGEST_SEED}).texts,
        note="counts as 2147483647",
        beside={"temperature": 1},
    ),
    # A reward for what was said before: the model is too sure of its words for a penalty to change them.
    honoured("frequency_penalty", {"frequency_penalty": -2}),
    honoured("presence_penalty", {"presence_penalty": -2}),
    honoured("repetition_penalty", {"repetition_penalty": 1.9}, note="up to 2"),
    refused("repetition_penalty, above 2", {"repetition_penalty": 2.1}),
    honoured("stop", {"stop": ["never", "him"]}, _stops_at_him, note="a text or up to 4"),
    refused("stop, more than 4", {"stop": ["a", "b", "c", "d", "e"]}),
    honoured("stop_token_ids", {"stop_token_ids": [602]}, lambda it: it.reply.ends == ["stop"]),
    honoured(
        "no_stop_trim",
        {"no_stop_trim": True, "stop": "him"},
        _keeps_the_stop_text,
        note="the output keeps its stop text",
    ),
    honoured("ignore_eos", {"ignore_eos": True}, lambda it: it.reply.num_output_tokens == 120, beside=TO_THE_END),
    honoured("min_tokens", {"min_tokens": 120}, lambda it: it.reply.num_output_tokens == 120, beside=TO_THE_END),
    changed(
        "min_tokens, with stop",
        {"min_tokens": 20, "stop": "him"},
        lambda it: _stops_at_him(it) and it.reply.num_output_tokens >= 20,
        note="a stop text before so many tokens cuts the text all the same; all of them are computed, and counted",
    ),
    honoured(
        "skip_special_tokens",
        {"skip_special_tokens": False},
        lambda it: "<|endoftext|>" in it.reply.text,
        beside=TO_THE_END | {"ignore_eos": True},
    ),
    honoured("echo", {"echo": True}, _echoes, note="the prompt's text is the gateway's own copy"),
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
    refused("stream_options, without stream", {"stream_options": {"include_usage": True}}),
    changed(
        "suffix",
        {"suffix": " END"},
        lambda it: it.reply.text == it.plain.text + " END",
        note="appended to the output; nothing is filled in before it",
    ),
    *constraints(),
    ignored(
        "logprobs",
        {"logprobs": 2},
        note="computed, and left out of the answer by the gateway; chat completions have them",
    ),
    ignored("best_of", {"best_of": 3}, note="one sample, whatever it is"),
    ignored("logit_bias", {"logit_bias": {"602": -100}}, note="gRPC has it: `sampling.logit_bias`"),
    ignored("user", {"user": "u"}),
    ignored("response_format", {"response_format": {"type": "json_object"}}, note="chat completions have it"),
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
    ignored("return_token_ids", {"return_token_ids": True}),
    ignored("return_tokens_as_token_ids", {"return_tokens_as_token_ids": True}),
    ignored("prompt_embeds", {"prompt_embeds": "AAAA"}),
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

COMPLETIONS = Route(
    "/v1/completions",
    {"model": "storyteller", "prompt": PROMPT, "temperature": 0, "max_tokens": 24},
    FIELDS,
    unknown=Verdict.IGNORED,
)
