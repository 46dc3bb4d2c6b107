"""A request as an API has parsed it, before its prompt is tokenized.

Each field is validated and resolved once, by the same rules for all APIs. Only the lengths of prompt and output are
open. The rules that do not depend on the model are in `pagewire/common/wire/sampling_rules.py`.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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

TokenIds = TypeVar("TokenIds", bound=Sequence[int])
MAX_REQUEST_ID_CHARS = 128
MAX_ANSWER_BYTES = 16 << 20  # memory of one call's response, which is copied as a whole
LOGPROB_BYTES = 80  # estimated memory of one log-probability in a response
_MAX_NAME_CHARS = {"tenant": 1024, "cache_salt": 1024, "session_id": 128}
# Options that have the same name in a request and in a row.
SAME_NUMBERS = tuple(name for name in RANGES if name in SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Truncation:
    """A request's instruction to shorten a prompt that has too many tokens."""

    max_tokens: int | None  # None: all that fit, with one output token
    keeps_first: bool = False  # else keeps the last tokens

    def cut(self, token_ids: Sequence[int], max_sequence_tokens: int) -> Sequence[int]:
        """Shorten a prompt to at most `max_tokens` tokens, from its beginning or its end, and return these tokens.
        Without `max_tokens`, keep as many tokens as fit into a sequence of `max_sequence_tokens` tokens with one output
        token."""
        most = max_sequence_tokens - 1 if self.max_tokens is None else self.max_tokens
        if len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if self.keeps_first else token_ids[len(token_ids) - most :]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    request: Request  # complete, except for the prompt's tokens, the output's length and the deadline
    prompt: str | Sequence[int]
    add_special_tokens: bool = True  # around a text prompt
    truncation: Truncation | None = None
    max_tokens: int | None = None  # None: up to the context length or the default
    default_max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end an output
    include_stop_text: bool = False
    skip_special_tokens: bool = True

    @property
    def is_embedding(self) -> bool:
        """Whether the request is for an embedding. If it is, the hidden states of the prompt are computed and pooled,
        and no tokens are generated."""
        return self.request.sampling.pooling is not Pooling.NONE

    def with_prompt(
        self, prompt: str | tuple[int, ...], request_id: str, seed: int | None, model: ModelInfo
    ) -> "ParsedRequest":
        """Return a copy of the parsed request with another request id, prompt and seed. A client's call with several
        prompts becomes several such copies, so its options are parsed only once. If `seed` is None, the copy has a
        random seed. Raise RefusedError if the id or the prompt is invalid."""
        check_request_id(request_id)
        _check_text(prompt, model)
        request = replace(self.request, request_id=request_id, seed=_seed_or_random(seed))
        return replace(self, request=request, prompt=prompt)

    def fit(
        self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int, deadline: float | None
    ) -> Request:
        """Complete the request for the engine and return it: with its prompt tokens, its maximum output length and its
        deadline. Prompt and output together have at most `max_sequence_tokens` tokens. `deadline` is a time of the
        engine's clock in seconds. Raise RefusedError if the prompt or the requested output is too long, or if the
        requested log-probabilities use too much memory."""
        prompt = self._fit_prompt(token_ids, model, max_sequence_tokens)
        max_tokens = 0 if self.is_embedding else self._fit_output(len(prompt), max_sequence_tokens)
        request = replace(self.request, prompt_token_ids=prompt, max_tokens=max_tokens, deadline=deadline)
        for field, size in all_logprobs_bytes(request).items():
            if size > MAX_ANSWER_BYTES:
                raise invalid(
                    f"sampling.{field}",
                    f"{field} is {ALL_TOKENS}, which requests all {model.vocab_size} tokens of the vocabulary at each "
                    f"position, {size} bytes in total; the limit of a request is {MAX_ANSWER_BYTES}; lower max_tokens, "
                    f"shorten the prompt, request up to {LOGPROBS.high} tokens, or use logprob_token_ids",
                )
        return request

    def _fit_prompt(self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int) -> tuple[int, ...]:
        """Check the prompt's tokens and return them as a tuple. Raise RefusedError if the prompt is empty, is too long
        or contains a token id that is not in the vocabulary. `token_ids` may be a field of a protobuf message; its
        length is checked before it is copied."""
        is_text = isinstance(self.prompt, str)
        field = "text" if is_text else "token_ids.ids"
        if not token_ids:
            raise invalid(field, "the prompt has no tokens; send at least 1")
        if len(token_ids) >= max_sequence_tokens:
            raise too_many_tokens(field, len(token_ids), max_sequence_tokens)
        prompt = tuple(token_ids[:])  # copying a protobuf field as a slice is faster
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
    """Estimate the memory of the log-probabilities of a request that asks for the whole vocabulary at each position.
    Return a mapping from each such option to bytes; it is empty for other requests. The limit also applies to streamed
    requests, because each of their tokens then has a large event."""
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
    """Raise RefusedError if a token id is not in the model's vocabulary. `field` is the path of the request field that
    contains the token id, for the error message."""
    if not 0 <= token_id < model.vocab_size:
        raise invalid(field, f"{field} is the token id {token_id}, but must be from 0 to {model.vocab_size - 1}")


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
    """Validate the fields that an API has read from a client's request, and return them as a ParsedRequest. `call` is
    the HTTP request or RPC that contained the fields. Without `options`, the request is for an embedding. Raise
    RefusedError if a field is invalid."""
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
        if model.only_embeds:
            names = ", ".join(model.architectures)
            raise invalid("sampling", f"this checkpoint of {names} generates no text; ask for embeddings")
        return _with_sampling(parsed, options, model)
    if model.embedding.refusal:
        raise invalid("embed", model.embedding.refusal)
    return parsed


def prompt_to_embed(prompt: str | TokenIds, name: str | None, model: ModelInfo) -> str | TokenIds:
    """Return a text to embed, preceded by the checkpoint's prompt called `name`, or by its default prompt if `name` is
    None. Return token ids without change. Raise RefusedError for an unknown name, or for a name with token ids."""
    prompts = model.embedding_prompts
    if not isinstance(prompt, str):
        if name is not None:
            raise invalid("prompt_name", "prompt_name applies to texts, but the input is token ids; leave it unset")
        return prompt
    if name is not None and name not in prompts.texts:
        known = f"one of {', '.join(prompts.texts)}" if prompts.texts else "unset: the checkpoint has no prompts"
        raise invalid("prompt_name", f"prompt_name is {name!r:.80}, but must be {known}")
    return prompts.texts.get(prompts.default or "" if name is None else name, "") + prompt


def _check_text(prompt: str | Sequence[int], model: ModelInfo) -> None:
    if isinstance(prompt, str) and model.tokenizer_path is None:
        raise invalid("text", "the served checkpoint has no tokenizer; send the prompt as token_ids")


def _seed_or_random(seed: int | None) -> int:
    """Return the seed that a client requested, or a new random 64-bit seed if `seed` is None."""
    return secrets.randbits(64) if seed is None else seed


def check_request_id(request_id: str) -> None:
    """Raise RefusedError if the id of a request is empty or too long."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise invalid(
            "request_id",
            f"request_id has {len(request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}; "
            "leave it unset to get a random one",
        )


def check_names(request: Request) -> None:
    """Raise RefusedError if the request's id, tenant, cache salt or session id is too long, or if its retention hint is
    0."""
    check_request_id(request.request_id)
    for field, limit in _MAX_NAME_CHARS.items():
        length = len(getattr(request, field))
        if length > limit:
            raise invalid(field, f"{field} has {length} characters, at most {limit} are allowed; shorten it")
    if request.retention_seconds == 0:
        raise invalid("retention_seconds", "retention_seconds is 0, but must be at least 1; leave it unset for no hint")


def _with_sampling(parsed: ParsedRequest, options: Options, model: ModelInfo) -> ParsedRequest:
    refuse(faults_in(options))
    beam, grammar = _read_beam(options), _read_grammar(options, model)
    request = replace(
        parsed.request,
        sampling=_read_sampling(options, model, beam, grammar),
        seed=_seed_or_random(options.get("seed")),
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
    # An output that matches a grammar always ends at an end token, even with ignore_eos. With min_tokens the end is
    # delayed, as long as the grammar allows other tokens.
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
    """Return the number of most likely next tokens that a beam search considers for one sequence in a step. Return None
    if the request has no beam search. The number is chosen, as in transformers, so that beams can continue even if all
    stop tokens are among these tokens."""
    if beam is None:
        return None
    end_token_ids = {*sampling.stop_token_ids, *(grammar.end_token_ids if grammar is not None else ())}
    return min(model.vocab_size, max(2, 1 + len(end_token_ids)) * beam.beam_width)


def _resolved_number(number: int | None, model: ModelInfo) -> int | None:
    return model.vocab_size if number == ALL_TOKENS else number


def check_tokens(options: Options, model: ModelInfo) -> None:
    """Raise RefusedError if a client's sampling options contain a token id that is not in the model's vocabulary."""
    for field in ("stop_token_ids", "logprob_token_ids"):
        for position, token_id in enumerate(options.get(field, ())):
            check_token_id(f"sampling.{field}[{position}]", token_id, model)
    for token_id in options.get("logit_bias", {}):
        check_token_id(f"sampling.logit_bias[{token_id}]", token_id, model)


def _read_beam(options: Options) -> BeamParams | None:
    """Return the parameters of the beam search that a client's options request, or None if they request no beam
    search."""
    if "beam_width" not in options:
        return None
    return BeamParams(
        beam_width=options["beam_width"],
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", EarlyStopping.HEURISTIC),
    )


def _read_grammar(options: Options, model: ModelInfo) -> Grammar | None:
    """Return the grammar that the output must match, or None if a client's options contain no grammar. The text of the
    grammar is checked later. Raise RefusedError if the model supports no grammars."""
    kind = grammar_kind(options)
    if kind is None:
        return None
    if model.grammar_refusal:
        raise invalid(f"sampling.{kind.name.lower()}", model.grammar_refusal)
    return Grammar(kind, grammar_text(options, kind), model.grammar_end_token_ids)


def read_stop(options: Options, model: ModelInfo) -> tuple[str, ...]:
    """Return the stop texts in a client's options. Raise RefusedError if there are stop texts but the model has no
    tokenizer, because stop texts are found in the decoded output."""
    stop = tuple(options.get("stop", ()))
    if stop and model.tokenizer_path is None:
        raise invalid(
            "sampling.stop", "the served checkpoint has no tokenizer, so stop texts do not work; use stop_token_ids"
        )
    return stop


def refuse(faults: Iterable[Fault]) -> None:
    """Raise RefusedError for the first fault that was found in a request's options. Do nothing if there are no
    faults."""
    for fault in faults:
        raise invalid(f"sampling.{fault.field}", fault.text)
