"""A request as its door has read it, before its prompt is tokens: each of its fields is checked and resolved once,
whatever door it came by, and nothing is left to choose but lengths.

What is legal whatever the model stands in `pagewire/common/wire/sampling_rules.py`.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pagewire.common.wire.messages import Pooling, SamplingParams
from pagewire.common.wire.sampling_rules import (
    ALL_TOKENS,
    FILTERS_OFF,
    LOGPROBS,
    RANGES,
    Fault,
    Options,
    faults_in,
    faults_of_min_tokens,
    grammar_kind,
    grammar_text,
)
from scheduler_service.core.request import BeamParams, EarlyStopping, Grammar, Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.prompt_text import too_many_tokens
from scheduler_service.serving.refusal import ContextOverflow, invalid
from scheduler_service.serving.tenants.caller import Call

MAX_REQUEST_ID_CHARS = 128
MAX_ANSWER_BYTES = 16 << 20  # that the answer of one call may hold in memory; it is copied at once
LOGPROB_BYTES = 80  # an estimate of what an answer holds of each log-probability
_MAX_NAME_CHARS = {"tenant": 1024, "cache_salt": 1024, "session_id": 128}
# What a request and a row call by the same name.
SAME_NUMBERS = tuple(name for name in RANGES if name in SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How much is kept of a prompt that is too long."""

    max_tokens: int | None  # None: as many as fit, with one of the output
    keeps_first: bool = False  # else the last are kept

    def cut(self, token_ids: Sequence[int], max_sequence_tokens: int) -> Sequence[int]:
        """Return the tokens that are kept."""
        most = max_sequence_tokens - 1 if self.max_tokens is None else self.max_tokens
        if len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if self.keeps_first else token_ids[len(token_ids) - most :]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    request: Request  # whole, but for the prompt's tokens, the length of the output and the deadline
    prompt: str | Sequence[int]
    add_special_tokens: bool = True  # around a text
    truncation: Truncation | None = None
    max_tokens: int | None = None  # None: as many as fit, and at most the default
    default_max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end an output
    include_stop_text: bool = False
    skip_special_tokens: bool = True

    @property
    def is_embedding(self) -> bool:
        """Whether its prompt alone is computed, and pooled."""
        return self.request.sampling.pooling is not Pooling.NONE

    def with_prompt(
        self, prompt: str | tuple[int, ...], request_id: str, seed: int | None, model: ModelInfo
    ) -> "ParsedRequest":
        """Return the request with another prompt, and a seed that is drawn unless given. Both share the options, which
        are read once. Raises RefusedError."""
        check_request_id(request_id)
        _check_text(prompt, model)
        request = replace(self.request, request_id=request_id, seed=_drawn(seed))
        return replace(self, request=request, prompt=prompt)

    def fit(
        self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int, deadline: float | None
    ) -> Request:
        """Return the request in full, of which prompt and output have at most so many tokens; `deadline` is of the
        engine's clock. Raises RefusedError."""
        prompt = self._fit_prompt(token_ids, model, max_sequence_tokens)
        max_tokens = 0 if self.is_embedding else self._fit_output(len(prompt), max_sequence_tokens)
        request = replace(self.request, prompt_token_ids=prompt, max_tokens=max_tokens, deadline=deadline)
        for field, size in all_logprobs_bytes(request).items():
            if size > MAX_ANSWER_BYTES:
                raise invalid(
                    f"sampling.{field}",
                    f"{field} is {ALL_TOKENS}, which asks for all {model.vocab_size} tokens of the vocabulary at each "
                    f"position, {size} bytes in all, and {MAX_ANSWER_BYTES} are the most of a request; lower "
                    f"max_tokens or shorten the prompt, ask for up to {LOGPROBS.high}, or for logprob_token_ids",
                )
        return request

    def _fit_prompt(self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int) -> tuple[int, ...]:
        """Return the tokens of the prompt, which may be a message's until it is known that they fit."""
        is_text = isinstance(self.prompt, str)
        field = "text" if is_text else "token_ids.ids"
        if not token_ids:
            raise invalid(field, "the prompt has no tokens; send at least 1")
        if len(token_ids) >= max_sequence_tokens:
            raise too_many_tokens(field, len(token_ids), max_sequence_tokens)
        prompt = tuple(token_ids[:])  # of a message's tokens a slice is read faster than one by one
        largest = max(prompt)
        if largest >= model.vocab_size:
            check_token_id(field if is_text else f"{field}[{prompt.index(largest)}]", largest, model)
        return prompt

    def _fit_output(self, num_prompt_tokens: int, max_sequence_tokens: int) -> int:
        room = max_sequence_tokens - num_prompt_tokens
        default = room if self.default_max_tokens is None else min(self.default_max_tokens, room)
        max_tokens = default if self.max_tokens is None else self.max_tokens
        if max_tokens > room:
            raise invalid(
                "sampling.max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}; this server allows {max_sequence_tokens}; lower max_tokens to "
                f"{room} or shorten the prompt",
                ContextOverflow(max_sequence_tokens, num_prompt_tokens + max_tokens),
            )
        refuse(faults_of_min_tokens({"min_tokens": self.request.sampling.min_tokens, "max_tokens": max_tokens}))
        return max_tokens


def all_logprobs_bytes(request: Request) -> dict[str, int]:
    """Return the bytes of the log-probabilities of whole vocabularies, by the option that asks for them. They are
    bounded in streams too: each of their tokens has a large event."""
    sampling = request.sampling
    asked = {
        "prompt_logprobs": (len(request.prompt_token_ids), sampling.num_prompt_logprobs),
        "logprobs": (request.n * request.max_tokens, None if sampling.logprob_token_ids else sampling.num_logprobs),
    }
    return {
        field: num * (1 + number) * LOGPROB_BYTES
        for field, (num, number) in asked.items()
        if number is not None and number > LOGPROBS.high
    }


def check_token_id(field: str, token_id: int, model: ModelInfo) -> None:
    """Raises RefusedError for a token that the model does not have, which `field` of the request names."""
    if not 0 <= token_id < model.vocab_size:
        raise invalid(field, f"token id {token_id} is not in the vocabulary of {model.vocab_size} tokens")


def parse_request(
    prompt: str | Sequence[int],
    options: Options | None,
    call: Call,
    model: ModelInfo,
    *,
    request_id: str | None = None,
    tenant: str = "",
    priority: int = 0,
    cache_salt: str = "",
    session_id: str = "",
    will_return: bool | None = None,
    retention_seconds: int | None = None,
    add_special_tokens: bool = True,
    default_max_tokens: int | None = None,
    truncation: Truncation | None = None,
) -> ParsedRequest:
    """Make a request of what its door found, which came with a call. Without `options` of sampling it is for an
    embedding. Raises RefusedError."""
    request = Request(
        request_id=f"req-{secrets.token_hex(8)}" if request_id is None else request_id,
        tenant=call.caller.tenant(tenant),
        prompt_token_ids=(),
        sampling=SamplingParams(pooling=model.embedding.pooling),
        max_tokens=0,
        priority=priority,
        cache_salt=cache_salt,
        session_id=session_id or call.session_id,
        will_return=will_return,
        retention_seconds=retention_seconds,
    )
    check_names(request)
    _check_text(prompt, model)
    parsed = ParsedRequest(request, prompt, add_special_tokens, truncation, default_max_tokens=default_max_tokens)
    if options is not None:
        return _with_sampling(parsed, options, model)
    if model.embedding.refusal:
        raise invalid("embed", model.embedding.refusal)
    return parsed


def _check_text(prompt: str | Sequence[int], model: ModelInfo) -> None:
    if isinstance(prompt, str) and model.tokenizer_path is None:
        raise invalid("text", "the served checkpoint has no tokenizer; send the prompt as token_ids")


def _drawn(seed: int | None) -> int:
    """Return a seed, or another one each time for None."""
    return secrets.randbits(64) if seed is None else seed


def check_request_id(request_id: str) -> None:
    """Raises RefusedError."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise invalid(
            "request_id",
            f"request_id has {len(request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}; "
            "leave it unset to have one drawn",
        )


def check_names(request: Request) -> None:
    """Raises RefusedError for a name that is too long."""
    check_request_id(request.request_id)
    for field, limit in _MAX_NAME_CHARS.items():
        length = len(getattr(request, field))
        if length > limit:
            raise invalid(field, f"{field} has {length} characters, at most {limit} are allowed; shorten it")
    if request.retention_seconds == 0:
        raise invalid("retention_seconds", "retention_seconds is 0, but must be at least 1; leave it unset for none")


def _with_sampling(parsed: ParsedRequest, options: Options, model: ModelInfo) -> ParsedRequest:
    refuse(faults_in(options))
    beam, grammar = _read_beam(options), _read_grammar(options, model)
    request = replace(
        parsed.request,
        sampling=_read_sampling(options, model, beam, grammar),
        seed=_drawn(options.get("seed")),
        n=options.get("n", 1),
        beam=beam,
        grammar=grammar,
    )
    return replace(
        parsed,
        request=request,
        max_tokens=options.get("max_tokens"),
        stop=read_stop(options, model),
        include_stop_text=options.get("include_stop_str_in_output", False),
        skip_special_tokens=options.get("skip_special_tokens", True),
    )


def _read_sampling(
    options: Options, model: ModelInfo, beam: BeamParams | None, grammar: Grammar | None
) -> SamplingParams:
    check_tokens(options, model)
    # A grammar ends at end tokens whatever else is asked for; min_tokens delays them where it allows others.
    eos_token_ids = () if options.get("ignore_eos") and grammar is None else model.eos_token_ids
    defaults = model.sampling_defaults
    suppressed = zip(defaults.logit_bias_token_ids, defaults.logit_bias_values, strict=True)
    biases = sorted({**options.get("logit_bias", {}), **dict(suppressed)}.items())
    listed = tuple(dict.fromkeys(options.get("logprob_token_ids", ())))
    resolved = replace(
        defaults,
        logit_bias_token_ids=tuple(token_id for token_id, _ in biases),
        logit_bias_values=tuple(bias for _, bias in biases),
        stop_token_ids=tuple(sorted({*options.get("stop_token_ids", ()), *eos_token_ids})),
        num_logprobs=len(listed) or _resolved_number(options.get("logprobs"), model),
        num_prompt_logprobs=_resolved_number(options.get("prompt_logprobs"), model),
        logprob_token_ids=listed,
        **{name: options[name] for name in SAME_NUMBERS if name in options},
    )
    if beam is None:
        return resolved
    return replace(resolved, num_candidates=num_candidates(resolved, beam, grammar, model), **FILTERS_OFF)


def num_candidates(
    sampling: SamplingParams, beam: BeamParams | None, grammar: Grammar | None, model: ModelInfo
) -> int | None:
    """Return the number of continuations that a step looks at for each beam: even if all stop tokens come first, enough
    go on (after transformers)."""
    if beam is None:
        return None
    end_token_ids = {*sampling.stop_token_ids, *(grammar.end_token_ids if grammar is not None else ())}
    return min(model.vocab_size, max(2, 1 + len(end_token_ids)) * beam.beam_width)


def _resolved_number(number: int | None, model: ModelInfo) -> int | None:
    return model.vocab_size if number == ALL_TOKENS else number


def check_tokens(options: Options, model: ModelInfo) -> None:
    """Raises RefusedError for a token that the model does not have."""
    for field in ("stop_token_ids", "logprob_token_ids"):
        for position, token_id in enumerate(options.get(field, ())):
            check_token_id(f"sampling.{field}[{position}]", token_id, model)
    for token_id in options.get("logit_bias", {}):
        check_token_id(f"sampling.logit_bias[{token_id}]", token_id, model)


def _read_beam(options: Options) -> BeamParams | None:
    """Return the search that is asked for, if one is."""
    if "beam_width" not in options:
        return None
    return BeamParams(
        beam_width=options["beam_width"],
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", EarlyStopping.HEURISTIC),
    )


def _read_grammar(options: Options, model: ModelInfo) -> Grammar | None:
    """Return what the output must match; whether that can be read is found out later. Raises RefusedError."""
    kind = grammar_kind(options)
    if kind is None:
        return None
    if model.grammar_refusal:
        raise invalid(f"sampling.{kind.name.lower()}", model.grammar_refusal)
    return Grammar(kind, grammar_text(options, kind), model.grammar_end_token_ids)


def read_stop(options: Options, model: ModelInfo) -> tuple[str, ...]:
    """Return the texts that end an output. Raises RefusedError where the model has no texts."""
    stop = tuple(options.get("stop", ()))
    if stop and model.tokenizer_path is None:
        raise invalid("sampling.stop", "the served checkpoint has no tokenizer and knows no text; use stop_token_ids")
    return stop


def refuse(faults: Iterable[Fault]) -> None:
    """Raises RefusedError for the first of the faults that options have."""
    for fault in faults:
        raise invalid(f"sampling.{fault.field}", fault.text)
