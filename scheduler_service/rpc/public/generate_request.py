"""A GenerateRequest, checked field by field and made a core Request with nothing left to choose.

The legal ranges of its numbers stand in `common/sampling_ranges.py`.
"""

import json
import math
import secrets
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from pagewire.common.messages import GrammarKind, SamplingParams
from pagewire.common.sampling_ranges import LOGIT_BIAS, RANGES
from pagewire.common.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BeamParams, EarlyStopping, Grammar, Request
from scheduler_service.rpc.public.prompt_text import too_many_tokens
from scheduler_service.rpc.status import invalid
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.sampling_defaults import FILTERS_OFF

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
    if request.embed and model.embedding.refusal:
        raise invalid("embed", model.embedding.refusal)
    if request.embed and request.HasField("sampling"):
        raise invalid("sampling", "an embedding chooses no tokens; leave sampling unset")
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
    prompt_alone = Request(  # which is all that an embedding computes
        request_id=request.request_id if request.HasField("request_id") else f"req-{secrets.token_hex(8)}",
        tenant=request.tenant,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(pooling=model.embedding.pooling),
        max_tokens=0,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline=deadline,
        session_id=request.session_id,
        will_return=_value_or(request, "will_return", None),
        retention_seconds=_value_or(request, "retention_seconds", None),
    )
    if request.embed:
        return prompt_alone
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
    beam, grammar = _resolve_beam(sampling), _resolve_grammar(sampling, model)
    return replace(
        prompt_alone,
        sampling=_resolve_sampling(sampling, model, beam, grammar),
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        n=_value_or(sampling, "n", 1),
        beam=beam,
        grammar=grammar,
    )


def _check_sampling(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    for field, legal in RANGES.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and not legal.holds(value):
            raise invalid(f"sampling.{field}", f"{field} is {value:g}, but must be {legal}")
    _check_beam_search(sampling)
    _check_structured_output(sampling, model)
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


def _check_beam_search(sampling: scheduler_pb2.SamplingParams) -> None:
    """Raises RpcError. The ranges of numbers have been checked already."""
    if not sampling.HasField("beam_width"):
        for field in ("length_penalty", "early_stopping"):
            if sampling.HasField(field):
                raise invalid(
                    f"sampling.{field}",
                    f"{field} is set, but without beam_width there is no beam search; set beam_width too",
                )
        return
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


def _check_structured_output(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    """Check everything but whether the grammar can be read."""
    kind = sampling.WhichOneof("structured_output")
    if kind is None:
        return
    field = f"sampling.{kind}"
    if model.grammar_refusal:
        raise invalid(field, model.grammar_refusal)
    if kind == "json_object":
        if not sampling.json_object:
            raise invalid(field, "json_object is false, but only true says something; leave it unset")
        return
    text = _grammar_text(sampling, kind)
    if not text or (kind == "choice" and not sampling.choice.texts):
        raise invalid(field, f"{kind} is empty; say what the output must match, or leave it unset")
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"{kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; shorten it")


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
    # Continuations of each beam that a step looks at: even if all stop tokens come first, enough go on (after
    # transformers).
    candidates = min(model.vocab_size, max(2, 1 + len(end_token_ids)) * beam.beam_width)
    return replace(resolved, num_candidates=candidates, **FILTERS_OFF)


def _resolve_beam(sampling: scheduler_pb2.SamplingParams) -> BeamParams | None:
    if not sampling.HasField("beam_width"):
        return None
    return BeamParams(
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty if sampling.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[sampling.early_stopping],
    )


def _resolve_grammar(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> Grammar | None:
    """Return what the output must match."""
    kind = sampling.WhichOneof("structured_output")
    if kind is None:
        return None
    return Grammar(GrammarKind[kind.upper()], _grammar_text(sampling, kind), model.grammar_end_token_ids)


def _grammar_text(sampling: scheduler_pb2.SamplingParams, kind: str) -> str:
    if kind == "json_object":
        return ""
    if kind == "choice":
        return json.dumps(list(sampling.choice.texts), ensure_ascii=False)
    return getattr(sampling, kind)


def _value_or(message: Message, field: str, default: Any) -> Any:
    return getattr(message, field) if message.HasField(field) else default
