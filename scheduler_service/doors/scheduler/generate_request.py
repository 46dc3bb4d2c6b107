"""A GenerateRequest, each of whose fields is read once, checked and resolved: nothing is left to choose but lengths;
and the inverse, a core Request as the message that another scheduler resolves to the same.

The legal ranges of its numbers stand in `common/sampling_ranges.py`.
"""

import json
import math
import secrets
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from pagewire.common.messages import GrammarKind, Pooling, SamplingParams
from pagewire.common.sampling_ranges import LOGIT_BIAS, RANGES
from pagewire.common.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BeamParams, EarlyStopping, Grammar, Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.sampling_defaults import FILTERS_OFF, SUPPRESSING_BIAS
from scheduler_service.serving.parsed_request import ParsedRequest, check_token_id
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_BYTES = 512 * 1024  # of UTF-8
_MAX_NAME_CHARS = {"tenant": 1024, "cache_salt": 1024, "session_id": 128}
_EARLY_STOPPING = {
    scheduler_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{number: EarlyStopping(name) for number, name in enum_names(scheduler_pb2.EarlyStopping.DESCRIPTOR).items()},
}
# What a request and a row call by the same name.
SAME_NUMBERS = tuple(
    field.name
    for field in scheduler_pb2.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.name in SamplingParams.__dataclass_fields__
)


def read_request(message: scheduler_pb2.GenerateRequest, call: Call, model: ModelInfo) -> ParsedRequest:
    """Read all of a request that came with a call. Raises RefusedError."""
    request = Request(
        request_id=_read_request_id(message),
        tenant=call.caller.tenant(message.tenant),
        prompt_token_ids=(),
        sampling=SamplingParams(pooling=model.embedding.pooling),
        max_tokens=0,
        priority=message.priority,
        cache_salt=message.cache_salt,
        session_id=message.session_id or call.session_id,
        will_return=value_or(message, "will_return", None),
        retention_seconds=value_or(message, "retention_seconds", None),
    )
    for field, limit in _MAX_NAME_CHARS.items():
        length = len(getattr(request, field))
        if length > limit:
            raise invalid(field, f"{field} has {length} characters, at most {limit} are allowed; shorten it")
    if request.retention_seconds == 0:
        raise invalid("retention_seconds", "retention_seconds is 0, but must be at least 1; leave it unset for none")
    parsed = ParsedRequest(request, _read_prompt(message, model))
    if not message.embed:
        return _with_sampling(parsed, message.sampling, model)
    if model.embedding.refusal:
        raise invalid("embed", model.embedding.refusal)
    if message.HasField("sampling"):
        raise invalid("sampling", "an embedding chooses no tokens; leave sampling unset")
    return parsed


def _read_request_id(message: scheduler_pb2.GenerateRequest) -> str:
    if not message.HasField("request_id"):
        return f"req-{secrets.token_hex(8)}"
    if not 1 <= len(message.request_id) <= MAX_REQUEST_ID_CHARS:
        raise invalid(
            "request_id",
            f"request_id has {len(message.request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}; "
            "leave it unset to have one drawn",
        )
    return message.request_id


def _read_prompt(message: scheduler_pb2.GenerateRequest, model: ModelInfo) -> str | tuple[int, ...]:
    prompt = message.WhichOneof("prompt")
    if prompt is None:
        raise invalid("prompt", "the request has no prompt; set text or token_ids")
    if prompt == "token_ids":
        return tuple(message.token_ids.ids)
    if not model.has_tokenizer:
        raise invalid("text", "the served checkpoint has no tokenizer; send the prompt as token_ids")
    return message.text


def _with_sampling(parsed: ParsedRequest, sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> ParsedRequest:
    for field, legal in RANGES.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and not legal.holds(value):
            raise invalid(f"sampling.{field}", f"{field} is {value:g}, but must be {legal}")
    beam, grammar = _read_beam(sampling), _read_grammar(sampling, model)
    request = replace(
        parsed.request,
        sampling=_read_sampling(sampling, model, beam, grammar),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        n=value_or(sampling, "n", 1),
        beam=beam,
        grammar=grammar,
    )
    return replace(
        parsed,
        request=request,
        max_tokens=value_or(sampling, "max_tokens", None),
        stop=_read_stop(sampling, model),
        include_stop_text=sampling.include_stop_str_in_output,
        skip_special_tokens=value_or(sampling, "skip_special_tokens", True),
    )


def _read_sampling(
    sampling: scheduler_pb2.SamplingParams, model: ModelInfo, beam: BeamParams | None, grammar: Grammar | None
) -> SamplingParams:
    _check_tokens(sampling, model)
    # A grammar ends at end tokens whatever else is asked for; min_tokens delays them where it allows others.
    eos_token_ids = () if sampling.ignore_eos and grammar is None else model.eos_token_ids
    defaults = model.sampling_defaults
    suppressed = zip(defaults.logit_bias_token_ids, defaults.logit_bias_values, strict=True)
    biases = sorted({**sampling.logit_bias, **dict(suppressed)}.items())
    resolved = replace(
        defaults,
        logit_bias_token_ids=tuple(token_id for token_id, _ in biases),
        logit_bias_values=tuple(bias for _, bias in biases),
        stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})),
        num_logprobs=value_or(sampling, "logprobs", None),
        num_prompt_logprobs=value_or(sampling, "prompt_logprobs", None),
        **{name: getattr(sampling, name) for name in SAME_NUMBERS if sampling.HasField(name)},
    )
    if beam is None:
        return resolved
    end_token_ids = {*resolved.stop_token_ids, *(grammar.end_token_ids if grammar is not None else ())}
    # Continuations of each beam that a step looks at: even if all stop tokens come first, enough go on (after
    # transformers).
    candidates = min(model.vocab_size, max(2, 1 + len(end_token_ids)) * beam.beam_width)
    return replace(resolved, num_candidates=candidates, **FILTERS_OFF)


def _check_tokens(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    _check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for position, token_id in enumerate(sampling.stop_token_ids):
        check_token_id(f"sampling.stop_token_ids[{position}]", token_id, model)
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        check_token_id(f"sampling.logit_bias[{token_id}]", token_id, model)
        if not LOGIT_BIAS.holds(bias):
            raise invalid(
                f"sampling.logit_bias[{token_id}]",
                f"the logit bias of token {token_id} is {bias:g}, but must be {LOGIT_BIAS}",
            )


def _read_beam(sampling: scheduler_pb2.SamplingParams) -> BeamParams | None:
    """Return the search that is asked for, if one is. Raises RefusedError. The ranges of numbers have been checked
    already."""
    if not sampling.HasField("beam_width"):
        for field in ("length_penalty", "early_stopping"):
            if sampling.HasField(field):
                raise invalid(
                    f"sampling.{field}",
                    f"{field} is set, but without beam_width there is no beam search; set beam_width too",
                )
        return None
    if sampling.n > sampling.beam_width:
        raise invalid(
            "sampling.n",
            f"n is {sampling.n}, but {sampling.beam_width} beams find at most as many hypotheses; lower n or raise "
            "beam_width",
        )
    if not math.isfinite(sampling.length_penalty):
        raise invalid(
            "sampling.length_penalty", f"length_penalty is {sampling.length_penalty:g}, but must be a finite number"
        )
    if sampling.early_stopping not in _EARLY_STOPPING:
        raise invalid(
            "sampling.early_stopping", f"early_stopping is {sampling.early_stopping}, which is none of its values"
        )
    for field, off in FILTERS_OFF.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and value != off:
            raise invalid(
                f"sampling.{field}",
                f"{field} is {value:g}, but beam search chooses nothing at random; leave {field} or beam_width unset",
            )
    for field in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(field):
            raise invalid(
                f"sampling.{field}",
                f"beam search reports no {field}; leave {field} unset, or sample without beam_width",
            )
    if sampling.stop:
        raise invalid(
            "sampling.stop", "beam search watches for no stop texts; use stop_token_ids, or sample without beam_width"
        )
    return BeamParams(
        beam_width=sampling.beam_width,
        length_penalty=value_or(sampling, "length_penalty", 1.0),
        early_stopping=_EARLY_STOPPING[sampling.early_stopping],
    )


def _read_grammar(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> Grammar | None:
    """Return what the output must match; whether that can be read is found out later. Raises RefusedError."""
    kind = sampling.WhichOneof("structured_output")
    if kind is None:
        return None
    field = f"sampling.{kind}"
    if model.grammar_refusal:
        raise invalid(field, model.grammar_refusal)
    if kind == "json_object" and not sampling.json_object:
        raise invalid(field, "json_object is false, but only true says something; leave it unset")
    text = _grammar_text(sampling, kind)
    if (not text and kind != "json_object") or (kind == "choice" and not sampling.choice.texts):
        raise invalid(field, f"{kind} is empty; say what the output must match, or leave it unset")
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"{kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; shorten it")
    return Grammar(GrammarKind[kind.upper()], text, model.grammar_end_token_ids)


def _grammar_text(sampling: scheduler_pb2.SamplingParams, kind: str) -> str:
    if kind == "json_object":
        return ""
    if kind == "choice":
        return json.dumps(list(sampling.choice.texts), ensure_ascii=False)
    return getattr(sampling, kind)


def _read_stop(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> tuple[str, ...]:
    _check_count("stop", len(sampling.stop), MAX_STOP_TEXTS)
    if sampling.stop and not model.has_tokenizer:
        raise invalid("sampling.stop", "the served checkpoint has no tokenizer and knows no text; use stop_token_ids")
    for position, text in enumerate(sampling.stop):
        if not 1 <= len(text) <= MAX_STOP_TEXT_CHARS:
            raise invalid(
                f"sampling.stop[{position}]",
                f"a stop text has {len(text)} characters, but must have 1 to {MAX_STOP_TEXT_CHARS}",
            )
    return tuple(sampling.stop)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(f"sampling.{field}", f"{field} has {count} entries, at most {limit} are allowed; send fewer")


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
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
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
