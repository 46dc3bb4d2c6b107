"""Conversion of VllmEngine's GenerateRequest into plain values for `serving/parsed_request.py`.

`parse_request` checks the ranges of values. This module checks only the fields that `parse_request` does not know.

An unset number in proto3 cannot be distinguished from 0, so 0 has the meaning that vLLM's servicer gives it. The
checkpoint's sampling defaults are not applied: a router reads them with GetModelInfo and sends them itself. An
unsupported field is INVALID_ARGUMENT, which a router maps to status 400. It would map UNIMPLEMENTED to 501, which HTTP
clients retry.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from pagewire.common.chat.schema_budget import SchemaBudget
from pagewire.common.strict_json import from_json
from pagewire.common.wire.sampling_rules import RANGES
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.parsed_request import ParsedRequest, parse_request
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_UNSUPPORTED_INPUTS = {
    "mm_inputs": "images, audio and video",
    "extra_mm_inputs": "images, audio and video",
    "media_refs": "images, audio and video",
    "kv_transfer_params": "a KV cache of another engine",
    "kv_transfer_params_json": "a KV cache of another engine",
}
_SAMPLING_FIELDS = vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields
# Conversions of field values; the values of other fields have the same meaning as here. If 0 is not a legal value of a
# number, an unset field becomes 1, which turns the option off.
_READINGS: Mapping[str, Callable[[Any], Any]] = {
    **{
        field.name: lambda value: value or type(value)(1)
        for field in _SAMPLING_FIELDS
        if field.name in RANGES and not field.has_presence and not RANGES[field.name].holds(0)
    },
    "seed": lambda seed: seed % 2**64,
    "choice": lambda choice: list(choice.choices),
    "json_schema": lambda schema: restrict_tool_calls(schema),
}
# For each field: its name, whether it can be unset, and its conversion.
_OPTIONS = [
    (field.name, field.has_presence, _READINGS.get(field.name, lambda value: value)) for field in _SAMPLING_FIELDS
]
# The beginning of the JSON Schema that a router sends for `tool_choice` "required": an array of tool calls, each an
# object with the tool's name and parameters.
_CALLS_BEGINNING = '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":'
# The JSON formatting of most models. After a space before a comma or bracket, the router treats the rest of the output,
# calls included, as text.
_SPELLING_OF_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def read_generate_request(message: vllm_engine_pb2.GenerateRequest, call: Call, model: ModelInfo) -> ParsedRequest:
    """Parse the request of VllmEngine's Generate RPC. Raise RefusedError if a field is invalid, or if a field is set
    that this server does not support."""
    _check_supported(message)
    given = message.WhichOneof("input")
    if given is None:
        raise invalid("input", "the request has no prompt; set tokenized or text")
    prompt = message.text if given == "text" else tuple(message.tokenized.input_ids)
    return parse_request(prompt, _options(message.sampling_params), call, model, request_id=message.request_id or None)


def _check_supported(message: vllm_engine_pb2.GenerateRequest) -> None:
    for field, what in _UNSUPPORTED_INPUTS.items():
        if field in {name.name for name, _ in message.ListFields()}:
            raise invalid(field, f"this server does not support {what}; leave {field} unset")
    if message.data_parallel_rank != 0:
        raise invalid(
            "data_parallel_rank", f"data_parallel_rank is {message.data_parallel_rank}, but must be 0, the only rank"
        )
    sampling = message.sampling_params
    if sampling.HasField("truncate_prompt_tokens"):
        raise invalid(
            "sampling_params.truncate_prompt_tokens",
            "truncate_prompt_tokens is set, but this server truncates no prompts; cut the prompt and leave it unset",
        )


def _options(sampling: vllm_engine_pb2.SamplingParams) -> dict[str, Any]:
    """Return the sampling options in a VllmEngine request, by name. This server's options have the same names as the
    fields of VllmEngine.

    A grammar always applies from the first token, and the field `grammar_from_first_token` is ignored: the server does
    not parse reasoning, so a grammar cannot start after the reasoning. GetServerInfo reports this to routers
    (`constrained_decoding_start`).
    """
    options: dict[str, Any] = {"temperature": 1.0}
    for name, may_be_unset, read in _OPTIONS:
        if not may_be_unset or sampling.HasField(name):
            options[name] = read(getattr(sampling, name))
    for token_id in options["logit_bias"]:
        if token_id < 0:
            raise invalid(
                f"sampling_params.logit_bias[{token_id}]",
                f"logit_bias has the token id {token_id}, but must have 0 or more",
            )
    return options


def restrict_tool_calls(schema: str) -> str:
    """Make a router's JSON schema for tool calls stricter, so that the router can parse every output: a call has no
    extra properties, and the JSON formatting is fixed. Return the new schema. Return any other schema unchanged.

    The router's own schema allows extra properties in a call, which the router's parser does not accept. With an extra
    property, the router would treat all calls as text.
    """
    if not schema.startswith(_CALLS_BEGINNING):
        return schema
    try:
        SchemaBudget().take_json(schema)
        calls = from_json(schema)
        for call in calls["items"]["anyOf"]:
            if set(call) != {"properties", "required"} or set(call["properties"]) != {"name", "parameters"}:
                return schema
            call["additionalProperties"] = False
        return json.dumps({**calls, "x-guidance": _SPELLING_OF_CALLS}, allow_nan=False)
    except (ValueError, LookupError, TypeError):
        return schema  # the schema is refused later, when the grammar is read
