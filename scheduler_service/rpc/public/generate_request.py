"""A GenerateRequest, checked field by field and made a core Request with nothing left to choose.

The legal ranges of its numbers stand in `common/sampling_ranges.py`.
"""

import secrets
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from pagewire.common.messages import SamplingParams
from pagewire.common.sampling_ranges import LOGIT_BIAS, RANGES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BeamParams, Grammar, Request
from scheduler_service.rpc.public.beam_search import check_beam_search, num_candidates, resolve_beam
from scheduler_service.rpc.public.prompt_text import too_many_tokens
from scheduler_service.rpc.public.structured_output import check_structured_output, resolve_grammar
from scheduler_service.rpc.status import invalid
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.sampling_defaults import FILTERS_OFF

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
_MAX_NAME_CHARS = {"tenant": 1024, "cache_salt": 1024, "session_id": 128}
# What a request and a row call by the same name.
SAME_NUMBERS = tuple(
    field.name
    for field in scheduler_pb2.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.name in SamplingParams.__dataclass_fields__
)


def check_before_tokenizing(request: scheduler_pb2.GenerateRequest, model: ModelInfo) -> None:
    """Everything that needs no prompt token. Raises RpcError."""
    if request.HasField("request_id") and not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARS:
        raise invalid(
            "request_id",
            f"request_id has {len(request.request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}; "
            "leave it unset to have one drawn",
        )
    for field, limit in _MAX_NAME_CHARS.items():
        length = len(getattr(request, field))
        if length > limit:
            raise invalid(field, f"{field} has {length} characters, at most {limit} are allowed; shorten it")
    if request.HasField("retention_seconds") and request.retention_seconds == 0:
        raise invalid("retention_seconds", "retention_seconds is 0, but must be at least 1; leave it unset for none")
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise invalid("prompt", "the request has no prompt; set text or token_ids")
    if prompt == "text" and not model.has_tokenizer:
        raise invalid("text", "the served checkpoint has no tokenizer; send the prompt as token_ids")
    if request.embed:
        _check_embedding(request, model)
    _check_sampling(request.sampling, model)


def resolve_request(
    request: scheduler_pb2.GenerateRequest,
    prompt_token_ids: list[int],
    model: ModelInfo,
    max_sequence_tokens: int,
    deadline: float | None,
) -> Request:
    """`deadline` in the caller's clock. Raises RpcError. Call `check_before_tokenizing` first."""
    _check_prompt(request, prompt_token_ids, model, max_sequence_tokens)
    if request.embed:
        return _resolve_embedding(request, prompt_token_ids, model, deadline)
    sampling = request.sampling
    max_tokens = max_sequence_tokens - len(prompt_token_ids)
    if sampling.HasField("max_tokens"):
        if len(prompt_token_ids) + sampling.max_tokens > max_sequence_tokens:
            raise invalid(
                "sampling.max_tokens",
                f"the prompt has {len(prompt_token_ids)} tokens and max_tokens is {sampling.max_tokens}, together "
                f"{len(prompt_token_ids) + sampling.max_tokens}; this server allows {max_sequence_tokens}; lower "
                f"max_tokens to {max_tokens} or shorten the prompt",
            )
        max_tokens = sampling.max_tokens
    if sampling.min_tokens > max_tokens:
        raise invalid(
            "sampling.min_tokens",
            f"min_tokens is {sampling.min_tokens}, but the output has at most {max_tokens} tokens; lower min_tokens",
        )
    beam, grammar = resolve_beam(sampling), resolve_grammar(sampling, model)
    return Request(
        request_id=_request_id(request),
        tenant=request.tenant,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_resolve_sampling(sampling, model, beam, grammar),
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        n=_value_or(sampling, "n", 1),
        priority=request.priority,
        cache_salt=request.cache_salt,
        beam=beam,
        deadline=deadline,
        grammar=grammar,
        **_session(request),
    )


def _request_id(request: scheduler_pb2.GenerateRequest) -> str:
    return request.request_id if request.HasField("request_id") else f"req-{secrets.token_hex(8)}"


def _check_embedding(request: scheduler_pb2.GenerateRequest, model: ModelInfo) -> None:
    if model.embedding.refusal:
        raise invalid("embed", model.embedding.refusal)
    if request.HasField("sampling"):
        raise invalid("sampling", "an embedding chooses no tokens; leave sampling unset")


def _resolve_embedding(
    request: scheduler_pb2.GenerateRequest, prompt_token_ids: list[int], model: ModelInfo, deadline: float | None
) -> Request:
    return Request(
        request_id=_request_id(request),
        tenant=request.tenant,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(pooling=model.embedding.pooling),
        max_tokens=0,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
        **_session(request),
    )


def _session(request: scheduler_pb2.GenerateRequest) -> dict[str, Any]:
    """Return what the request says of the conversation that it is part of."""
    return {
        "session_id": request.session_id,
        "will_return": _value_or(request, "will_return", None),
        "retention_seconds": _value_or(request, "retention_seconds", None),
    }


def _check_sampling(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    for field, legal in RANGES.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and not legal.holds(value):
            raise invalid(f"sampling.{field}", f"{field} is {value:g}, but must be {legal}")
    check_beam_search(sampling)
    check_structured_output(sampling, model)
    _check_stop(sampling, model)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for position, token_id in enumerate(sampling.stop_token_ids):
        _check_token_id(f"sampling.stop_token_ids[{position}]", token_id, model)
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        _check_token_id(f"sampling.logit_bias[{token_id}]", token_id, model)
        if not LOGIT_BIAS.holds(bias):
            raise invalid(
                f"sampling.logit_bias[{token_id}]",
                f"the logit bias of token {token_id} is {bias:g}, but must be {LOGIT_BIAS}",
            )


def _check_stop(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    _check_count("stop", len(sampling.stop), MAX_STOP_TEXTS)
    if sampling.stop and not model.has_tokenizer:
        raise invalid("sampling.stop", "the served checkpoint has no tokenizer and knows no text; use stop_token_ids")
    for position, text in enumerate(sampling.stop):
        if not 1 <= len(text) <= MAX_STOP_TEXT_CHARS:
            raise invalid(
                f"sampling.stop[{position}]",
                f"a stop text has {len(text)} characters, but must have 1 to {MAX_STOP_TEXT_CHARS}",
            )


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(f"sampling.{field}", f"{field} has {count} entries, at most {limit} are allowed; send fewer")


def _check_token_id(field: str, token_id: int, model: ModelInfo) -> None:
    if token_id >= model.vocab_size:
        raise invalid(field, f"token id {token_id} is not in the vocabulary of {model.vocab_size} tokens")


def _check_prompt(
    request: scheduler_pb2.GenerateRequest, token_ids: list[int], model: ModelInfo, max_sequence_tokens: int
) -> None:
    field = "text" if request.WhichOneof("prompt") == "text" else "token_ids.ids"
    if not token_ids:
        raise invalid(field, "the prompt has no tokens; send at least 1")
    if len(token_ids) >= max_sequence_tokens:
        raise too_many_tokens(field, len(token_ids), max_sequence_tokens)
    largest = max(token_ids)
    if largest >= model.vocab_size:
        _check_token_id(f"{field}[{token_ids.index(largest)}]" if field != "text" else field, largest, model)


def _resolve_sampling(
    sampling: scheduler_pb2.SamplingParams, model: ModelInfo, beam: BeamParams | None, grammar: Grammar | None
) -> SamplingParams:
    is_constrained = sampling.WhichOneof("structured_output") is not None
    # A grammar ends at end tokens whatever else is asked for; min_tokens delays them where it allows others.
    eos_token_ids = () if sampling.ignore_eos and not is_constrained else model.eos_token_ids
    defaults = model.sampling_defaults
    suppressed = zip(defaults.logit_bias_token_ids, defaults.logit_bias_values, strict=True)
    biases = sorted({**sampling.logit_bias, **dict(suppressed)}.items())
    resolved = replace(
        defaults,
        logit_bias_token_ids=tuple(token_id for token_id, _ in biases),
        logit_bias_values=tuple(bias for _, bias in biases),
        stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})),
        num_logprobs=_value_or(sampling, "logprobs", None),
        num_prompt_logprobs=_value_or(sampling, "prompt_logprobs", None),
        **{name: getattr(sampling, name) for name in SAME_NUMBERS if sampling.HasField(name)},
    )
    if beam is None:
        return resolved
    end_token_ids = {*resolved.stop_token_ids, *(grammar.end_token_ids if grammar is not None else ())}
    candidates = num_candidates(beam, len(end_token_ids), model.vocab_size)
    return replace(resolved, num_candidates=candidates, **FILTERS_OFF)


def _value_or(message: Message, field: str, default: Any) -> Any:
    return getattr(message, field) if message.HasField(field) else default
