"""/generate, sglang's own route."""

from collections.abc import Mapping
from typing import Any

from tests.system.openai_api.completions import PROMPT
from tests.system.openai_api.field import (
    ABSENT,
    Exchange,
    Field,
    Proof,
    Route,
    Verdict,
    changed,
    constraints,
    differs,
    greedy,
    has_texts,
    honoured,
    ignored,
    refused,
    refused_by_pagewire,
    varies,
)

_TOKEN_IDS = [388, 347, 273, 259, 887, 368, 758]  # of the prompt


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"sampling_params": dict(values)}


_SAMPLED = _sampling({"temperature": 1})
_TO_THE_END = {"max_new_tokens": 120}


def _honoured(name: str, values: Mapping[str, Any], proof: Proof = differs, note: str = "", **beside: Any) -> Field:
    return honoured(f"sampling_params.{name}", _sampling(values), proof, note=note, beside=_sampling(beside))


def _ignored(name: str, value: Any, note: str = "", **beside: Any) -> Field:
    return ignored(f"sampling_params.{name}", _sampling({name: value}), note=note, beside=_sampling(beside))


def _takes_no_seed(name: str) -> Proof:
    """Sixteen samples of equal seeds, and of none, all differ."""
    body = _sampling({"temperature": 1, "n": 16, name: 7})
    return lambda exchange: exchange.ask(body).texts != exchange.ask(body).texts


def _stops_at_him(exchange: Exchange) -> bool:
    return (exchange.reply.text, exchange.reply.ends) == (", and everyone called ", ["stop"])


FIELDS = (
    honoured(
        "model", {"model": "storyteller"}, lambda it: it.reply.text == it.plain.text, note="required, unlike sglang's"
    ),
    refused("model, unset", {"model": ABSENT}, status=404),
    honoured("text", {"text": "The"}, note="the prompt, one text; this or `input_ids` is required"),
    refused(
        "prompt",
        {"text": ABSENT, "prompt": PROMPT},
        says="`text` or `input_ids` must be provided",
        note="vllmini's and vLLM's name of `text`",
    ),
    honoured(
        "input_ids",
        {"text": ABSENT, "input_ids": _TOKEN_IDS},
        lambda it: it.reply.text == it.plain.text,
        note="the prompt, as token ids",
    ),
    refused("input_ids, several prompts", {"text": ABSENT, "input_ids": [[388], [347]]}),
    refused("text, several prompts", {"text": [PROMPT, PROMPT]}, status=422),
    honoured(
        "stream",
        {"stream": True},
        lambda it: it.reply.texts == it.plain.texts and len(it.reply.events) > 10,
        note="each event has the whole text so far",
    ),
    _honoured(
        "max_new_tokens", {"max_new_tokens": 3}, lambda it: it.reply.num_output_tokens == 3, "unset: as many as fit"
    ),
    refused_by_pagewire("sampling_params.max_new_tokens, beyond the context", _sampling({"max_new_tokens": 100_000})),
    _honoured("temperature", {"temperature": 1}, varies(_SAMPLED)),
    _honoured("temperature, unset", {"temperature": ABSENT}, greedy, "the checkpoint's own, else 1"),
    _honoured("top_p", {"top_p": 0.01}, greedy, temperature=1),
    _honoured("top_k", {"top_k": 1}, greedy, temperature=1),
    _honoured("min_p", {"min_p": 1}, greedy, temperature=1),
    _honoured("n", {"n": 3}, has_texts(3), "1 to 16"),
    refused_by_pagewire("sampling_params.n, above 16", _sampling({"n": 17})),
    # A reward for what was said before: the model is too sure of its words for a penalty to change them.
    _honoured("frequency_penalty", {"frequency_penalty": -2}),
    _honoured("presence_penalty", {"presence_penalty": -2}),
    _honoured("repetition_penalty", {"repetition_penalty": 2.1}, note="up to 100"),
    refused_by_pagewire("sampling_params.repetition_penalty, above 100", _sampling({"repetition_penalty": 101})),
    _honoured("stop", {"stop": ["never", "him"]}, _stops_at_him, "a text or up to 16"),
    _honoured("stop_token_ids", {"stop_token_ids": [602]}, lambda it: it.reply.ends == ["stop"]),
    _honoured(
        "no_stop_trim",
        {"no_stop_trim": True, "stop": "him"},
        lambda it: it.reply.text == ", and everyone called him",
        "the output keeps its stop text",
    ),
    _honoured("ignore_eos", {"ignore_eos": True}, lambda it: it.reply.num_output_tokens == 120, **_TO_THE_END),
    _honoured("min_new_tokens", {"min_new_tokens": 120}, lambda it: it.reply.num_output_tokens == 120, **_TO_THE_END),
    changed(
        "sampling_params.min_new_tokens, with stop",
        {"sampling_params": {"min_new_tokens": 20, "stop": "him"}},
        lambda it: _stops_at_him(it) and it.reply.num_output_tokens >= 20,
        note="a stop text before so many tokens cuts the text all the same; all of them are computed, and counted",
    ),
    _honoured(
        "skip_special_tokens",
        {"skip_special_tokens": False},
        lambda it: "<|endoftext|>" in it.reply.text,
        ignore_eos=True,
        **_TO_THE_END,
    ),
    *constraints("sampling_params."),
    Field("sampling_params.seed", Verdict.IGNORED, {}, _takes_no_seed("seed"), "the other routes have it"),
    Field(
        "sampling_params.sampling_seed",
        Verdict.IGNORED,
        {},
        _takes_no_seed("sampling_seed"),
        "the other routes have `seed`",
    ),
    *(
        ignored(name, {"return_logprob": True, name: value})
        for name, value in {
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5],
            "return_text_in_logprobs": True,
        }.items()
    ),
    _ignored("structural_tag", "{}"),
    _ignored("logit_bias", {"602": -100}, "gRPC has it: `sampling.logit_bias`"),
    _ignored("custom_params", {"a": 1}),
    _ignored("spaces_between_special_tokens", False),
    _ignored("stop_regex", "him"),
    _ignored("max_tokens", 3, "`max_new_tokens` does it"),
    *(
        ignored(name, {name: value})
        for name, value in {
            "return_logprob": True,
            "return_hidden_states": True,
            "return_bytes": True,
            "return_entropy": True,
            "input_embeds": [[1.0]],
            "image_data": "x",
            "video_data": "x",
            "audio_data": "x",
            "modalities": ["image"],
            "session_params": {"id": "x"},
            "lora_path": "x",
            "lora_id": "x",
            "custom_logit_processor": "x",
            "bootstrap_host": "x",
            "bootstrap_port": 1,
            "bootstrap_room": 1,
            "bootstrap_pair_key": "x",
            "data_parallel_rank": 1,
            "background": True,
            "conversation_id": "x",
            "priority": 1,
            "extra_key": "x",
            "log_metrics": False,
            "no_logs": True,
            "custom_labels": {"a": "b"},
            "rid": "abc",
            "max_tokens": 3,
            "max_length": 3,
            "temperature": 1,
        }.items()
    ),
)

GENERATE = Route(
    "/generate",
    {"model": "storyteller", "text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 24}},
    FIELDS,
    unknown=Verdict.IGNORED,
)
