"""The endpoint `/v1/completions`. Prompts are texts or token ids; the answer continues them."""

import itertools
import secrets
from typing import Any

from msgspec import UNSET, UnsetType, structs

from scheduler_service.api.http.answering import (
    PromptProgress,
    answer_call,
    fingerprint,
    finish_reason,
    now,
    request_ids,
    stop_reason,
)
from scheduler_service.api.http.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs, UsageCounts
from scheduler_service.api.http.infill import infill_prompt, infill_stops
from scheduler_service.api.http.prompts import reading_size, separate_prompts
from scheduler_service.api.http.request_options import (
    DecodedCall,
    RequestNames,
    output_constraints,
    request_for_prompt,
    sampling_options,
)
from scheduler_service.api.http.requests import CompletionRequest
from scheduler_service.api.http.token_texts import CompletionTokens, TokenTexts
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import EndReason
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.parsed_request import ParsedRequest
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_DEFAULT_MAX_TOKENS = 16
_MAX_GRAMMARS_BYTES = 8 << 20  # of the grammars in all requests of a call together


class CompletionWriter:
    """The writer of the answers of `/v1/completions`. It converts generated output into text completions (see
    `AnswerWriter`)."""

    output_details = UNSET

    def __init__(self, request: CompletionRequest, head: tuple[str, str], intake: Intake, echoed: list[str]) -> None:
        """Create the writer for the answer to one completion request. `head` contains the answer's id and the model's
        name. `echoed` contains the text of each prompt if the request sets `echo`; otherwise it is empty."""
        self._request = request
        self._head = head[0], now(), head[1], fingerprint(intake)
        self._echoed = echoed
        self._texts = TokenTexts(intake.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._tokens: dict[int, CompletionTokens] = {}  # by the index of the choice
        self.num_hidden_tokens = 1 if request.max_tokens == 0 else 0

    def first_choices(self, progress: PromptProgress) -> list[CompletionChoice]:
        return []

    def choice(self, progress: PromptProgress, delta: Delta, *, is_whole: bool) -> CompletionChoice | None:
        request, sample = self._request, delta.sample_index
        index = progress.index * (request.n or 1) + sample
        is_first = not progress.has_begun[sample]
        if self.num_hidden_tokens:
            delta = delta._replace(text="", token_ids=(), logprobs=())
        text, token_ids, end = delta.text, delta.token_ids, delta.end
        echoed = self._echoed[progress.index] if self._echoed and is_first else ""
        shows = echoed or text or end is not None or (token_ids and (request.return_token_ids or delta.logprobs))
        if not shows or (delta.prompt_logprobs and not token_ids and end is None):
            return None
        progress.has_begun[sample] = True
        not_asked = None if is_whole else UNSET  # omitted in events, to keep them short
        reason = finish_reason(end)
        if end is not None and self.num_hidden_tokens and end.reason is not EndReason.ABORT:
            reason = "length"
        return CompletionChoice(
            index,
            echoed + text,
            self._logprobs(index, delta, progress if self._echoed and is_first else None),
            reason,
            stop_reason(request, delta),
            list(token_ids) if request.return_token_ids else not_asked,
            list(progress.prompt_token_ids) if request.return_token_ids and is_first else not_asked,
            self._texts.prompt_logprobs(progress.logprobs)
            if request.prompt_logprobs is not None and is_first
            else not_asked,
        )

    def answer(
        self,
        choices: list[Any],
        usage: UsageCounts | UnsetType | None,
        progress: PromptProgress | None,
        *,
        is_whole: bool,
    ) -> CompletionAnswer:
        return CompletionAnswer(*self._head, "text_completion", choices, usage)

    def _logprobs(self, index: int, delta: Delta, echoed: PromptProgress | None) -> CompletionLogprobs | None:
        """Return the log-probabilities of the tokens in a delta (a piece of new output), or None if the request does
        not ask for log-probabilities. If `echoed` (the state of an echoed prompt) is set, the log-probabilities of the
        prompt's tokens come first. `index` is the index of the output in the answer's field `choices`."""
        if self._request.logprobs is None:
            return None
        tokens = self._tokens.get(index)
        if tokens is None:
            tokens = self._tokens[index] = CompletionTokens(self._texts)
        if echoed is None:
            return tokens.logprobs(delta.logprobs)
        return tokens.logprobs(itertools.chain(echoed.logprobs, delta.logprobs), echoed.prompt_token_ids[0])


async def complete_prompts(
    request: CompletionRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/v1/completions`. Return the JSON of the answer, or None if the answer was sent as a stream of
    events. Raises RefusedError if the request is invalid or refused."""
    asked = await read_completion(request, call, intake)
    echoed = [await _text_of(prompt, intake) for prompt in asked.requests] if request.echo else []
    writer = CompletionWriter(request, (asked.answer_id, model_name), intake, echoed)
    num_best = request.n or 1 if request.best_of is not None else None
    return await answer_call(request, asked, call, intake, writer, stream, num_best)


async def read_completion(request: CompletionRequest, call: Call, intake: Intake) -> DecodedCall:
    """Convert the body of a `/v1/completions` call into generation requests, one for each prompt. Raises RefusedError
    if a field is invalid."""
    if request.suffix:
        request = await _with_infill_prompts(request, request.suffix, call, intake)
    tenant, size = call.caller.tenant(request.tenant or ""), reading_size(request.prompt, call)
    return await intake.turns.run_in_turn(tenant, size, _read, request, call, intake)


async def _with_infill_prompts(
    request: CompletionRequest, suffix: str, call: Call, intake: Intake
) -> CompletionRequest:
    """Return a copy of a request with a suffix whose prompts are token ids that ask for the text between each prompt
    and the suffix. The tokens that end such a text are added to `stop_token_ids`, unless the request sets `ignore_eos`.
    Raises RefusedError if a prompt is not a text, if the model cannot infill, or if an option of the request does not
    work with a suffix."""
    if request.echo or request.truncate_prompt_tokens is not None:
        raise invalid("suffix", "suffix does not work with echo or truncate_prompt_tokens; leave them unset")
    prompts: list[str | int | list[int]] = []
    for prompt in separate_prompts(request.prompt, "prompt"):
        if not isinstance(prompt, str):
            raise invalid(
                "suffix", "suffix does not work with token ids; send the prompt as text, or leave suffix unset"
            )
        token_ids = await infill_prompt(
            prompt,
            suffix,
            call,
            intake,
            tenant=request.tenant or "",
            add_special_tokens=request.add_special_tokens is not False,
        )
        prompts.append([*token_ids])
    return structs.replace(request, prompt=prompts, stop_token_ids=infill_stops(request, intake))


def _read(request: CompletionRequest, call: Call, intake: Intake) -> DecodedCall:
    options, names = sampling_options(request, intake.model, output_constraints(request))
    called = RequestNames("prompt", **names)
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "max_tokens is 0, which requires echo; set echo, or send at least 1")
    if request.max_tokens not in (None, -1):
        options["max_tokens"] = request.max_tokens or 1
    if request.logprob_token_ids and (request.logprobs is None or request.max_tokens == 0):
        told = "logprobs is not; set logprobs too" if request.logprobs is None else "max_tokens is 0; send at least 1"
        raise invalid("logprob_token_ids", f"logprob_token_ids is set, but {told}")
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
        if request.echo:
            options.setdefault("prompt_logprobs", request.logprobs)
    if request.best_of is not None:
        _check_best_of(request, request.best_of)
        options["n"] = request.best_of
        options.setdefault("logprobs", 0)
    prompts = separate_prompts(request.prompt, "prompt")
    drawn = f"cmpl-{secrets.token_hex(12)}"
    first_name, *names_behind = request_ids(request.request_id or drawn, len(prompts))
    with called.translate_refusals():
        first = request_for_prompt(
            request,
            prompts[0],
            options,
            call,
            intake.model,
            request_id=first_name,
            default_max_tokens=_DEFAULT_MAX_TOKENS if request.max_tokens is None else None,
        )
        _check_grammars(first, len(prompts))
        requests = [first]
        for prompt, name in zip(prompts[1:], names_behind, strict=True):
            requests.append(first.with_prompt(prompt, name, options.get("seed"), intake.model))
    answer_id = drawn if request.request_id is None else f"cmpl-{request.request_id}"
    return DecodedCall(requests, answer_id, called, bool(request.echo), bool(request.return_token_ids))


def _check_grammars(request: ParsedRequest, num_prompts: int) -> None:
    """Limit the total size of the grammars in an HTTP call. The generation request of each prompt sends its own copy of
    the grammar to the scheduler. Raises RefusedError if all copies together have more than _MAX_GRAMMARS_BYTES."""
    grammar = request.request.grammar
    size = 0 if grammar is None else len(grammar.text.encode()) * num_prompts
    if grammar is not None and size > _MAX_GRAMMARS_BYTES:
        raise invalid(
            f"sampling.{grammar.kind.name.lower()}",
            f"the output constraint has {size} bytes for {num_prompts} prompts together; the limit is "
            f"{_MAX_GRAMMARS_BYTES}; shorten it, or send fewer prompts",
        )


def _check_best_of(request: CompletionRequest, best_of: int) -> None:
    """Check that `best_of` (the number of generated samples) is at least `n` (the number of returned samples). In a
    streamed request, the two must be equal. Raises RefusedError otherwise."""
    if best_of < (request.n or 1):
        raise invalid("best_of", f"best_of is {best_of}, but must be at least n, which is {request.n or 1}")
    if request.stream and best_of > (request.n or 1):
        raise invalid(
            "best_of", "best_of and stream are set, but the best samples are known only at the end; leave one unset"
        )


async def _text_of(asked: ParsedRequest, intake: Intake) -> str:
    """Return the text of a prompt, which the answer repeats if the request sets `echo`. A prompt of token ids is
    decoded. Raises RefusedError if the served checkpoint has no tokenizer to decode the token ids."""
    prompt = asked.prompt
    if isinstance(prompt, str):
        return prompt
    if intake.texts is None:
        raise invalid(
            "echo", "echo is true, but the served checkpoint has no tokenizer to decode the prompt; leave echo unset"
        )
    # Token ids outside the vocabulary are refused later.
    known = [token_id for token_id in prompt if token_id < intake.model.vocab_size]
    return await intake.texts.decode(known, asked.request.tenant, skip_special_tokens=False)
