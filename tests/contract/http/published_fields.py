"""The request fields that OpenAI, Anthropic and vLLM publish, including fields of nested objects.

The fields of OpenAI and Anthropic are read from their pinned packages. The fields of vLLM are copied from its
repository (https://github.com/vllm-project/vllm, as stored on 28 November 2026). A comment names the source module.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_compact_params, response_create_params

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_INPUT, COUNT_TOKENS = f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens"
# Clients send these fields as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# The request types of each path. Some paths have several.
TYPED: dict[str, list[Any]] = {
    COMPLETIONS: [completion_params.CompletionCreateParamsStreaming],
    CHAT: [chat_params.CompletionCreateParamsStreaming],
    EMBEDDINGS: [embedding_create_params.EmbeddingCreateParams],
    RESPONSES: [response_create_params.ResponseCreateParamsStreaming, response_compact_params.ResponseCompactParams],
    COUNT_INPUT: [input_token_count_params.InputTokenCountParams],
    MESSAGES: [message_create_params.MessageCreateParamsStreaming, beta_create_params.MessageCreateParamsStreaming],
    COUNT_TOKENS: [
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ],
}
_SAMPLED = """
    allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens model n
    presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
    return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed
    session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval
    stream_options structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens
    truncation_side use_beam_search user vllm_xargs watermarking add_special_tokens echo
"""
_TEMPLATE = "add_generation_prompt chat_template chat_template_kwargs continue_final_message"
_MEDIA = "media_io_kwargs mm_processor_kwargs"
VLLM: dict[str, list[str]] = {
    path: text.split()
    for path, text in {
        # vllm/entrypoints/openai/completion/protocol.py
        COMPLETIONS: f"{_SAMPLED} prompt prompt_embeds suffix",
        # vllm/entrypoints/openai/chat_completion/protocol.py
        CHAT: f"{_SAMPLED} {_TEMPLATE} {_MEDIA} documents include_reasoning max_completion_tokens messages "
        "parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs",
        # vllm/entrypoints/openai/responses/protocol.py
        RESPONSES: "background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output input "
        "instructions logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs model "
        "parallel_tool_calls previous_input_messages previous_response previous_response_id priority prompt "
        "prompt_cache_key reasoning repetition_penalty request_id seed service_tier skip_special_tokens stop store "
        "stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation user "
        "vllm_xargs",
        # vllm/entrypoints/pooling/base/protocol.py, and the older `normalize` of embed/protocol.py
        EMBEDDINGS: f"{_TEMPLATE} {_MEDIA} add_special_tokens cache_salt dimensions embed_dtype encoding_format "
        "endianness input messages model normalize padding priority request_id truncate_prompt_tokens truncation_side "
        "use_activation user",
        # vllm/entrypoints/anthropic/protocol.py
        MESSAGES: "chat_template_kwargs kv_transfer_params max_tokens messages metadata model output_config "
        "stop_sequences stream system temperature tool_choice tools top_k top_p",
        COUNT_TOKENS: "chat_template_kwargs messages model system tool_choice tools",
        # vllm/entrypoints/serve/tokenize/protocol.py
        "/tokenize": f"{_TEMPLATE} {_MEDIA} add_special_tokens messages model prompt return_token_strs tools",
        "/detokenize": "model tokens",
    }.items()
}


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of an object's fields, keyed by field name."""
    return get_type_hints(kind, include_extras=True)


def published(path: str) -> set[str]:
    """Return the names of the published fields of a path's requests."""
    typed = {name for kind in TYPED.get(path, ()) for name in fields_of(kind)}
    return (typed | {*VLLM.get(path, ())}) - HEADERS


def is_tag(hint: Any) -> bool:
    """Return whether a field has a single literal value, which distinguishes the object from others."""
    hint = _bare(hint)
    return get_origin(hint) is Literal and len(get_args(hint)) == 1


def variants(path: str, hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the object types that a field accepts, each with its path.

    The path has the object's tag in parentheses, if it has one, and brackets if the object is in a list.
    """
    hint = _bare(hint)
    if typing_extensions.is_typeddict(hint):
        yield f"{path}{_tag(hint)}", hint
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from variants(path, part)
    elif get_origin(hint) in (list, Iterable, Sequence):
        yield from variants(f"{path}[]", get_args(hint)[0])


def _bare(hint: Any) -> Any:
    while get_origin(hint) in (Required, NotRequired, Annotated, typing_extensions.Required):
        hint = get_args(hint)[0]
    return hint


def _tag(kind: Any) -> str:
    fields = fields_of(kind)
    for name in ("type", "role"):
        for part in (fields.get(name), *get_args(_bare(fields.get(name)))):
            if get_origin(_bare(part)) is Literal:
                return f"({get_args(_bare(part))[0]})"
    return ""
