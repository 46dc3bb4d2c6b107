"""A VllmEngine GenerateRequest as plain values, of which `serving/parsed_request.py` makes a request. Ranges are
checked there; here only what it has no word for.

proto3 cannot tell an unset number from 0, so 0 means what vLLM's servicer takes it for. The checkpoint's own sampling
defaults are not filled in: a router reads them from GetModelInfo and sends them itself. What is never served is
INVALID_ARGUMENT, which a router answers with 400: of UNIMPLEMENTED it makes 501, which HTTP clients try again.
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
# How the values of some fields are read; those of others mean what ours do. What is 0 where it is unset, though 0 is no
# legal value, is 1 then: off.
_READINGS: Mapping[str, Callable[[Any], Any]] = {
    **{
        field.name: lambda value: value or type(value)(1)
        for field in _SAMPLING_FIELDS
        if field.name in RANGES and not field.has_presence and not RANGES[field.name].holds(0)
    },
    "seed": lambda seed: seed % 2**64,
    "choice": lambda choice: list(choice.choices),
    "json_schema": lambda schema: close_calls(schema),
}
# Each field, with whether it may be unset.
_OPTIONS = [
    (field.name, field.has_presence, _READINGS.get(field.name, lambda value: value)) for field in _SAMPLING_FIELDS
]
# How a router's JSON Schema begins where `tool_choice` is "required": a list of calls, each an object with the name of
# a tool and its parameters.
_CALLS_BEGINNING = '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":'
# As most models write JSON. Of space before a comma or a bracket the router makes text, and of the calls behind it.
_SPELLING_OF_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def read_generate_request(message: vllm_engine_pb2.GenerateRequest, call: Call, model: ModelInfo) -> ParsedRequest:
    """Read all of a request that came with a call. Raises RefusedError, also for what this engine does not do."""
    _check_supported(message)
    given = message.WhichOneof("input")
    if given is None:
        raise invalid("input", "the request has no prompt; set tokenized or text")
    prompt = message.text if given == "text" else tuple(message.tokenized.input_ids)
    return parse_request(prompt, _options(message.sampling_params), call, model, request_id=message.request_id or None)


def _check_supported(message: vllm_engine_pb2.GenerateRequest) -> None:
    for field, what in _UNSUPPORTED_INPUTS.items():
        if field in {name.name for name, _ in message.ListFields()}:
            raise invalid(field, f"this server does not take {what}; leave {field} unset")
    if message.data_parallel_rank != 0:
        raise invalid(
            "data_parallel_rank", f"data_parallel_rank is {message.data_parallel_rank}, but there is only rank 0 here"
        )
    sampling = message.sampling_params
    if sampling.HasField("truncate_prompt_tokens"):
        raise invalid(
            "sampling_params.truncate_prompt_tokens",
            "this server does not truncate prompts; cut the prompt and leave truncate_prompt_tokens unset",
        )


def _options(sampling: vllm_engine_pb2.SamplingParams) -> dict[str, Any]:
    """Return the options that are set, by their names, which are ours. A constraint begins at the first token, whatever
    `grammar_from_first_token` says: the server parses no reasoning after which one could begin, and tells routers so
    in GetServerInfo."""
    options: dict[str, Any] = {"temperature": 1.0}
    for name, may_be_unset, read in _OPTIONS:
        if not may_be_unset or sampling.HasField(name):
            options[name] = read(getattr(sampling, name))
    for token_id in options["logit_bias"]:
        if token_id < 0:
            raise invalid(f"sampling_params.logit_bias[{token_id}]", f"{token_id} is no token id; send 0 or more")
    return options


def close_calls(schema: str) -> str:
    """Return a list of calls with nothing in a call but its name and parameters, spelt in one way, and any other schema
    as it is.

    The router reads such calls alone, though its schema leaves room for more: what else stood in one would make text
    of all of them.
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
        return schema  # is refused where schemas are read
