"""A VllmEngine GenerateRequest as one of ours. Ranges are checked where ours are; here only what has no counterpart.

proto3 cannot tell an unset number from 0, so 0 means what vLLM's servicer takes it for. The checkpoint's own sampling
defaults are not filled in: a gateway reads them from GetModelInfo and sends them itself. What is never served is
INVALID_ARGUMENT, which a gateway answers with 400: of UNIMPLEMENTED it makes 501, which HTTP clients try again.
"""

import json

from smg_grpc_proto import vllm_engine_pb2

from pagewire.common.sampling_ranges import RANGES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.serving.refusal import invalid

_CONSTRAINTS = vllm_engine_pb2.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"]
# Numbers and truth values that both have by the same name, and whether theirs may be unset.
_SAME = {
    field.name: field.has_presence
    for field in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields
    for ours in (scheduler_pb2.SamplingParams.DESCRIPTOR.fields_by_name.get(field.name),)
    if ours is not None and ours.has_presence and field.containing_oneof != _CONSTRAINTS
}
# Fields that are 0 where they are unset, though theirs is no legal value: that means 1, off.
_ZERO_IS_ONE = [name for name, legal in RANGES.items() if not legal.holds(0) and _SAME.get(name) is False]
_UNSUPPORTED_INPUTS = {
    "mm_inputs": "images, audio and video",
    "extra_mm_inputs": "images, audio and video",
    "media_refs": "images, audio and video",
    "kv_transfer_params": "a KV cache of another engine",
    "kv_transfer_params_json": "a KV cache of another engine",
}
# How a gateway's JSON Schema begins where `tool_choice` is "required": a list of calls, each an object with the name of
# a tool and its parameters.
_CALLS_BEGINNING = '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":'
_MAX_SCHEMA_LENGTH = 512 * 1024  # of a schema that is served
# As most models write JSON. Of space before a comma or a bracket the gateway makes text, and of the calls behind it.
_SPELLING_OF_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def translate_request(message: vllm_engine_pb2.GenerateRequest) -> scheduler_pb2.GenerateRequest:
    """Raises RefusedError for what this engine does not do."""
    _check_supported(message)
    request = scheduler_pb2.GenerateRequest()
    if message.request_id:
        request.request_id = message.request_id
    given = message.WhichOneof("input")
    if given is None:
        raise invalid("input", "the request has no prompt; set tokenized or text")
    if given == "text":
        request.text = message.text
    else:
        request.token_ids.ids.extend(message.tokenized.input_ids)
    _translate_sampling(message.sampling_params, request.sampling)
    return request


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


def _translate_sampling(given: vllm_engine_pb2.SamplingParams, sampling: scheduler_pb2.SamplingParams) -> None:
    sampling.temperature = 1.0
    for field, may_be_unset in _SAME.items():
        if may_be_unset and not given.HasField(field):
            continue
        value = getattr(given, field)
        if field in ("logprobs", "prompt_logprobs") and value < 0:
            raise invalid(
                f"sampling_params.{field}",
                f"{field} is {value}, but this server does not send the whole vocabulary; ask for a number of them",
            )
        if field in _ZERO_IS_ONE:
            value = value or 1
        setattr(sampling, field, value % 2**64 if field == "seed" else value)
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(given.stop_token_ids)
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise invalid(f"sampling_params.logit_bias[{token_id}]", f"{token_id} is no token id; send 0 or more")
        sampling.logit_bias[token_id] = bias
    _translate_constraint(given, sampling)


def _translate_constraint(given: vllm_engine_pb2.SamplingParams, sampling: scheduler_pb2.SamplingParams) -> None:
    """A constraint begins at the first token, whatever `grammar_from_first_token` says: the server parses no reasoning
    after which one could begin, and tells gateways so in GetServerInfo."""
    constraint = given.WhichOneof("constraint")
    if constraint == "choice":
        sampling.choice.SetInParent()
        sampling.choice.texts.extend(given.choice.choices)
    elif constraint == "json_schema":
        sampling.json_schema = close_calls(given.json_schema)
    elif constraint is not None:
        setattr(sampling, constraint, getattr(given, constraint))


def close_calls(schema: str) -> str:
    """Return a list of calls with nothing in a call but its name and parameters, spelt in one way, and any other schema
    as it is.

    The gateway reads such calls alone, though its schema leaves room for more: what else stood in one would make text
    of all of them.
    """
    if not schema.startswith(_CALLS_BEGINNING) or len(schema) > _MAX_SCHEMA_LENGTH:
        return schema
    try:
        calls = json.loads(schema)
        for call in calls["items"]["anyOf"]:
            if set(call) != {"properties", "required"} or set(call["properties"]) != {"name", "parameters"}:
                return schema
            call["additionalProperties"] = False
        return json.dumps({**calls, "x-guidance": _SPELLING_OF_CALLS}, allow_nan=False)
    except (ValueError, LookupError, TypeError, RecursionError):
        return schema  # is refused where schemas are read
