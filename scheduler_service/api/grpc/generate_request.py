"""Conversion of a GenerateRequest into plain values for `serving/parsed_request.py`."""

from typing import Any

from google.protobuf.message import Message

from pagewire.common.wire.sampling_rules import ALL_TOKENS, LOGPROB_NUMBERS, UINT32
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EarlyStopping
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.parsed_request import ParsedRequest, parse_request, prompt_to_embed
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_EARLY_STOPPING = {
    scheduler_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{value.value: value for value in EarlyStopping},
}


def read_request(
    message: scheduler_pb2.GenerateRequest | scheduler_pb2.EmbedRequest, call: Call, model: ModelInfo
) -> ParsedRequest:
    """Return the parsed request of a Generate, Submit or Embed RPC. Raise RefusedError if a field is invalid or the
    prompt is missing."""
    fields = {field.name: value for field, value in message.ListFields()}
    is_embedding = fields.pop("embed", isinstance(message, scheduler_pb2.EmbedRequest))
    text, token_ids, sampling = (fields.pop(name, None) for name in ("text", "token_ids", "sampling"))
    if is_embedding and sampling is not None:
        raise invalid("sampling", "an embedding request has no sampling options; leave sampling unset")
    if text is None and token_ids is None:
        raise invalid("prompt", "the request has no prompt; set text or token_ids")
    prompt, name = token_ids.ids if text is None else text, fields.pop("prompt_name", None)
    if is_embedding:
        prompt = prompt_to_embed(prompt, name, model)
    elif name is not None:
        raise invalid("prompt_name", "prompt_name applies to embeddings; leave it unset, or set embed")
    options = {} if sampling is None else _options(sampling)
    return parse_request(prompt, None if is_embedding else options, call, model, **fields)


def _options(sampling: scheduler_pb2.SamplingParams) -> dict[str, Any]:
    """Return the sampling options that are set in the message, by field name. Raise RefusedError if the value of
    `early_stopping` is unknown."""
    options = {field.name: value for field, value in sampling.ListFields()}
    if "choice" in options:
        options["choice"] = list(sampling.choice.texts)
    for name in LOGPROB_NUMBERS:
        if options.get(name) == UINT32.high:
            options[name] = ALL_TOKENS
    if "early_stopping" in options:
        if sampling.early_stopping not in _EARLY_STOPPING:
            raise invalid(
                "sampling.early_stopping",
                f"early_stopping is {sampling.early_stopping}, but must be one of "
                f"{', '.join(map(str, _EARLY_STOPPING))}, the values of EarlyStopping",
            )
        options["early_stopping"] = _EARLY_STOPPING[sampling.early_stopping]
    return options


def value_or(message: Message, field: str, default: Any) -> Any:
    """Return the value of a protobuf message's field, or `default` if the field is unset."""
    return getattr(message, field) if message.HasField(field) else default
