"""A GenerateRequest as plain values, of which `serving/parsed_request.py` makes a request; and the inverse, a core
Request as the message that another scheduler resolves to the same.
"""

import json
from typing import Any

from google.protobuf.message import Message

from pagewire.common.messages import GrammarKind, Pooling
from pagewire.common.sampling_rules import ALL_TOKENS, FILTERS_OFF, LOGPROB_NUMBERS, LOGPROBS, UINT32
from pagewire.common.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EarlyStopping, Grammar, Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.sampling_defaults import SUPPRESSING_BIAS
from scheduler_service.serving.parsed_request import SAME_NUMBERS, ParsedRequest, parse_request
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_EARLY_STOPPING = {
    scheduler_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{number: EarlyStopping(name) for number, name in enum_names(scheduler_pb2.EarlyStopping.DESCRIPTOR).items()},
}


def read_request(
    message: scheduler_pb2.GenerateRequest | scheduler_pb2.EmbedRequest, call: Call, model: ModelInfo
) -> ParsedRequest:
    """Read all of a request that came with a call. Raises RefusedError."""
    fields = {field.name: value for field, value in message.ListFields()}
    is_embedding = fields.pop("embed", isinstance(message, scheduler_pb2.EmbedRequest))
    text, token_ids, sampling = (fields.pop(name, None) for name in ("text", "token_ids", "sampling"))
    if is_embedding and sampling is not None:
        raise invalid("sampling", "an embedding chooses no tokens; leave sampling unset")
    if text is None and token_ids is None:
        raise invalid("prompt", "the request has no prompt; set text or token_ids")
    prompt = tuple(token_ids.ids) if text is None else text
    options = {} if sampling is None else _options(sampling)
    return parse_request(prompt, None if is_embedding else options, call, model, **fields)


def _options(sampling: scheduler_pb2.SamplingParams) -> dict[str, Any]:
    """Return the options that are set, by their names."""
    options = {field.name: value for field, value in sampling.ListFields()}
    if "choice" in options:
        options["choice"] = list(sampling.choice.texts)
    for name in LOGPROB_NUMBERS:
        if options.get(name) == UINT32.high:
            options[name] = ALL_TOKENS
    if "early_stopping" in options:
        if sampling.early_stopping not in _EARLY_STOPPING:
            raise invalid(
                "sampling.early_stopping", f"early_stopping is {sampling.early_stopping}, which is none of its values"
            )
        options["early_stopping"] = _EARLY_STOPPING[sampling.early_stopping]
    return options


def encode_request(
    request: Request, eos_token_ids: tuple[int, ...], max_sequence_tokens: int
) -> scheduler_pb2.GenerateRequest:
    """Everything explicit, but as many tokens as fit: how many those are the other one knows best."""
    message = scheduler_pb2.GenerateRequest(
        request_id=request.request_id,
        token_ids=scheduler_pb2.TokenIds(ids=request.prompt_token_ids),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        will_return=request.will_return,
        retention_seconds=request.retention_seconds,
    )
    if request.sampling.pooling is not Pooling.NONE:
        message.embed = True
        return message
    message.sampling.CopyFrom(_encode_sampling(request, eos_token_ids))
    if len(request.prompt_token_ids) + request.max_tokens != max_sequence_tokens:
        message.sampling.max_tokens = request.max_tokens
    return message


def _encode_sampling(request: Request, eos_token_ids: tuple[int, ...]) -> scheduler_pb2.SamplingParams:
    sampling, beam = request.sampling, request.beam
    ends_at_eos = bool(eos_token_ids) and set(eos_token_ids) <= set(sampling.stop_token_ids)
    biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    message = scheduler_pb2.SamplingParams(
        n=request.n,
        seed=request.seed,
        stop_token_ids=[id for id in sampling.stop_token_ids if not ends_at_eos or id not in eos_token_ids],
        ignore_eos=not ends_at_eos,
        logprobs=None if sampling.logprob_token_ids else _encode_number(sampling.num_logprobs),
        prompt_logprobs=_encode_number(sampling.num_prompt_logprobs),
        logprob_token_ids=sampling.logprob_token_ids,
        # What the checkpoint suppresses the other one knows too.
        logit_bias={token_id: bias for token_id, bias in biases if bias != SUPPRESSING_BIAS},
    )
    for name in SAME_NUMBERS:
        if beam is None or name not in FILTERS_OFF:
            setattr(message, name, getattr(sampling, name))
    if request.grammar is not None:
        _encode_grammar(request.grammar, message)
    if beam is not None:
        message.beam_width = beam.beam_width
        message.length_penalty = beam.length_penalty
        message.early_stopping = scheduler_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{beam.early_stopping.name}")
    return message


def _encode_number(num_logprobs: int | None) -> int | None:
    return num_logprobs if num_logprobs is None or num_logprobs <= LOGPROBS.high else int(UINT32.high)


def _encode_grammar(grammar: Grammar, message: scheduler_pb2.SamplingParams) -> None:
    """Its end tokens are the model's own, which the other one knows too."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            message.json_object = True
        case GrammarKind.CHOICE:
            message.choice.texts.extend(json.loads(grammar.text))
        case kind:
            setattr(message, kind.name.lower(), grammar.text)


def value_or(message: Message, field: str, default: Any) -> Any:
    """Return what a field of a message is set to, or the default if it is not."""
    return getattr(message, field) if message.HasField(field) else default
