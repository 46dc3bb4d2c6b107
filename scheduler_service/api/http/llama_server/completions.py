"""The endpoints `/completion` and `/infill` of llama-server. A request is converted into a request of
`/v1/completions`, so both give the same text."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from msgspec import UNSET, Raw, structs

from pagewire.common.wire.messages import SamplingParams
from pagewire.common.wire.sampling_rules import FILTERS_OFF
from scheduler_service.api.http.answering import PromptProgress, all_of, begin_requests, deltas_of, full_outputs
from scheduler_service.api.http.answers import encode, encode_list
from scheduler_service.api.http.completions import read_completion
from scheduler_service.api.http.infill import infill_prompt, infill_stops
from scheduler_service.api.http.llama_server.requests import InfillRequest, LlamaCompletionRequest
from scheduler_service.api.http.request_options import RequestNames
from scheduler_service.api.http.requests import CompletionRequest, SampledRequest
from scheduler_service.api.http.token_texts import LOWEST, TokenTexts
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import EndReason, TokenLogprobs
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.prompt_text import ANY_NUMBER
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_RANDOM_SEEDS = (-1, 2**32 - 1)
_MAX_PARTS = 1024  # of all prompts and logit biases of a call together
_OFF = {**FILTERS_OFF, "temperature": 1.0}
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_FLAGS = ("ignore_eos", "stream", "timings_per_token", "post_sampling_probs")
_STOP_TYPES = {EndReason.STOP: "eos", EndReason.LENGTH: "limit", EndReason.ABORT: "none"}
# The field names of llama-server, by the names of the fields of `/v1/completions`.
_NAMES = RequestNames(
    "prompt", max_tokens="n_predict", n="n_cmpl", logprobs="n_probs", echo="prompt", return_token_ids="return_tokens"
)
_PromptPieces = list[str | list[int]]


class LlamaWriter:
    """The writer of the answers of `/completion`. It converts generated output into llama-server's format. The field
    `id_slot` is always -1, because requests have no slots."""

    def __init__(
        self, request: LlamaCompletionRequest, prompts: Sequence[str], model_name: str, intake: Intake
    ) -> None:
        """Create the writer for the answer to one call. `prompts` are the texts of the prompts, with their special
        tokens."""
        self._request = request
        self._prompts = prompts
        self._model_name = model_name
        self._tokens = TokenTexts(intake.tokenizer)
        # If n_predict is 0, one token is computed but not shown, because a prompt cannot be computed alone.
        self._limit = -1 if request.n_predict is None else request.n_predict
        self._with_newline: set[int] = set()  # the outputs that contain a newline, by index

    def events(self, progress: PromptProgress, delta: Delta) -> list[bytes]:
        """Convert a delta (a piece of new output) into the events of a streamed answer, and return their JSON. The last
        event of an output describes the whole output, and has no text of its own."""
        events = []
        if (delta.token_ids or delta.text) and self._limit:
            part = self._part(progress, delta) | {"stop": False, "tokens": [*delta.token_ids]}
            timings = {"timings": _timings(progress, part)} if self._request.timings_per_token else {}
            events.append(encode(part | timings))
        if delta.end is not None:
            events.append(self.whole(progress, delta._replace(text="", token_ids=(), logprobs=())))
        return events

    def whole(self, progress: PromptProgress, delta: Delta) -> bytes:
        """Write the JSON object that describes a complete output. The text, tokens and log-probabilities are those of
        `delta`. If the request selects fields, the object has only these fields."""
        request, queued, part = self._request, progress.active.request, self._part(progress, delta)
        reason = EndReason.LENGTH if self._limit == 0 or delta.end is None else delta.end.reason
        answer = part | {
            "tokens": [*delta.token_ids] if request.return_tokens and self._limit else [],
            "model": self._model_name,
            "generation_settings": settings_of(
                queued.sampling,
                **{name: bool(getattr(request, name)) for name in _FLAGS},
                seed=(queued.seed + 2**63) % 2**64 - 2**63,  # as requests accept it
                n_predict=self._limit,
                max_tokens=queued.max_tokens,
                stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
                grammar="" if queued.grammar is None else queued.grammar.text,
            ),
            "prompt": self._prompts[progress.index],
            "has_new_line": part["index"] in self._with_newline,
            "truncated": reason is EndReason.LENGTH and part["tokens_predicted"] != self._limit,
            "stop_type": "word" if delta.stop_text is not None else _STOP_TYPES[reason],
            "stopping_word": delta.stop_text or "",
            "tokens_cached": progress.num_cached_tokens,
            "timings": _timings(progress, part),
        }
        return encode(_selected(answer, request.response_fields) if request.response_fields else answer)

    def _part(self, progress: PromptProgress, delta: Delta) -> dict[str, Any]:
        """Return the fields that events and whole answers share."""
        index = progress.index * progress.active.request.n + delta.sample_index
        if "\n" in delta.text:
            self._with_newline.add(index)
        num_tokens = progress.num_tokens[delta.sample_index]
        part = {
            "index": index,
            "content": delta.text if self._limit else "",
            "stop": True,
            "id_slot": -1,
            "tokens_predicted": num_tokens if self._limit < 0 else min(num_tokens, self._limit),
            "tokens_evaluated": len(progress.prompt_token_ids),
        }
        if delta.logprobs and self._limit:
            part["completion_probabilities"] = encode_list(map(self._probability, delta.logprobs))
        return part

    def _probability(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Convert the log-probabilities at one position of an output. After sampling at temperature 0, the chosen token
        has the probability 1, and no other token is possible."""
        if self._request.post_sampling_probs:
            chosen = self._token(entry.token_id) | {"prob": 1.0}
            return chosen | {"top_probs": [chosen]}
        top = [self._token(token_id) | {"logprob": max(logprob, LOWEST)} for token_id, logprob in entry.top]
        return self._token(entry.token_id) | {"logprob": max(entry.logprob, LOWEST), "top_logprobs": top}

    def _token(self, token_id: int) -> dict[str, Any]:
        content = self._tokens.bytes_of(token_id)
        return {"id": token_id, "token": content.decode(errors="ignore"), "bytes": [*content]}


def _timings(progress: PromptProgress, part: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of computed tokens, and the times that they took as measured in this front end."""
    num_prompt, num_predicted = len(progress.prompt_token_ids) - progress.num_cached_tokens, part["tokens_predicted"]
    prompt_ms = 1e-6 * (progress.first_output_at - progress.queued_at + 1)
    predicted_ms = 1e-6 * (time.monotonic_ns() - progress.first_output_at + 1)
    return {
        "cache_n": progress.num_cached_tokens,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, num_prompt),
        "prompt_per_second": 1e3 * num_prompt / prompt_ms,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, num_predicted),
        "predicted_per_second": 1e3 * num_predicted / predicted_ms,
    }


def _selected(answer: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an answer that the request selects. A slash in a name selects a field of a nested object.
    Names that do not exist are ignored, as in llama-server."""

    def inner(value: Any, name: str) -> Any:
        return value.get(name, UNSET) if isinstance(value, dict) else UNSET

    found = {field: reduce(inner, field.split("/"), answer) for field in fields}
    return {field: value for field, value in found.items() if value is not UNSET}


def settings_of(sampling: SamplingParams, **others: Any) -> dict[str, Any]:
    """Return sampling parameters as the object `generation_settings` of llama-server's answers. It includes settings
    that are always off here. `others` are further settings, by their names in that object."""
    biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    return {
        **{name: getattr(sampling, name) for name in (*_OFF, "presence_penalty", "frequency_penalty")},
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
        "n_probs": sampling.num_logprobs or 0,
        "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in biases],
        "samplers": ["penalties", *_OFF],
        **dict.fromkeys(("dynatemp_range", "xtc_probability", "dry_multiplier"), 0.0),
        **dict.fromkeys(("mirostat", "n_keep", "n_discard", "min_keep"), 0),
        **{"typical_p": 1.0, "top_n_sigma": -1.0, "adaptive_target": -1.0, "adaptive_decay": 0.9, "lora": []},
        **others,
    }


async def complete_for_llama(
    request: LlamaCompletionRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/completion`. Return the JSON of the answer, which is a list if there are several outputs, or
    None if the answer was sent as a stream of events. An output length that does not fit is reduced, as in
    llama-server. Raises RefusedError if the request is invalid or refused."""
    texts, tenant = intake.texts, call.caller.tenant(request.tenant or "")
    with _NAMES.translate_refusals():
        asked = await read_completion(await _completion_of(request, tenant, call, intake), call, intake)
        asked = asked._replace(
            requests=[replace(each, max_tokens=None, default_max_tokens=each.max_tokens) for each in asked.requests],
            echoes=True,
            shows_tokens=bool(request.return_tokens),
        )
        async with begin_requests(asked, call, intake, is_streamed=bool(request.stream), is_timed=True) as begun:
            prompts = [
                await texts.decode(each.prompt_token_ids, tenant, skip_special_tokens=False) if texts else ""
                for each in begun
            ]
            writer = LlamaWriter(request, prompts, model_name, intake)
            written = await all_of(_written(each, writer, stream if request.stream else None) for each in begun)
            if request.stream:
                await stream.end()
                return None
            answers = [Raw(answer) for several in written for answer in several]
            return encode(answers if len(answers) > 1 else answers[0])


async def infill_for_llama(
    request: InfillRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/infill`, as `complete_for_llama` does. The prompt consists of the other files, the text around
    the gap, and the tokens with which the model infills. Raises RefusedError if the model cannot infill."""
    token_ids = await infill_prompt(
        request.input_prefix + request.prompt,
        request.input_suffix,
        call,
        intake,
        field="input_suffix",
        extra=[(file.filename, file.text) for file in request.input_extra or ()],
        tenant=request.tenant or "",
        add_special_tokens=request.add_special_tokens is not False,
    )
    completed = structs.replace(request, prompt=[*token_ids], stop_token_ids=infill_stops(request, intake))
    return await complete_for_llama(completed, call, intake, model_name, stream)


async def _written(progress: PromptProgress, writer: LlamaWriter, stream: EventStream | None) -> list[bytes]:
    """Send the output of one prompt to `stream`. Without `stream`, return the JSON of each output at its end."""
    if stream is None:
        outputs = await full_outputs(progress)
        return [await progress.write(progress.num_values(each), writer.whole, progress, each) for each in outputs]
    async for delta in deltas_of(progress):
        for event in await progress.write(progress.num_values(delta), writer.events, progress, delta):
            await stream.send_event(event)
    return []


async def _completion_of(request: LlamaCompletionRequest, tenant: str, call: Call, intake: Intake) -> CompletionRequest:
    """Convert a request of `/completion` into the equivalent request of `/v1/completions`. Raises RefusedError if a
    field is invalid, or if the tenant has too many texts that wait to be tokenized."""
    prompts = await intake.turns.run_in_turn(tenant, call.size, _prompts_of, request)
    options = {name: getattr(request, name) for name in SampledRequest.__struct_fields__}
    if request.repeat_last_n not in (None, -1) and any(
        options[name] not in (None, neutral) for name, neutral in _NO_PENALTIES.items()
    ):
        raise invalid(
            "repeat_last_n",
            f"repeat_last_n is {request.repeat_last_n}, but penalties apply to all tokens; send -1, or no penalties",
        )
    if request.samplers is not None:
        options |= {name: off for name, off in _OFF.items() if name not in request.samplers}
    if request.post_sampling_probs and request.n_probs and options["temperature"] != 0:
        raise invalid("post_sampling_probs", "post_sampling_probs requires temperature 0; send that, or leave it unset")
    biases, seed = await _biases(request, tenant, intake), None if request.seed in _RANDOM_SEEDS else request.seed
    return CompletionRequest(
        **options | {"seed": seed, "logit_bias": biases},
        prompt=[await _joined(parts, tenant, intake) for parts in prompts],
        max_tokens=request.n_predict if request.n_predict else -1 if request.n_predict is None else 1,
        n=request.n_cmpl,
        logprobs=request.n_probs or None,
        grammar=request.grammar or None,
        json_schema=request.json_schema,
    )


def _prompts_of(request: LlamaCompletionRequest) -> list[_PromptPieces]:
    """Split the prompts of a request into their parts, which are texts and lists of consecutive token ids. Raises
    RefusedError if the prompts and the logit biases have too many parts."""
    given: Any = request.prompt
    is_mixed = not isinstance(given, str) and any(isinstance(each, int) for each in given)
    if is_mixed and (lists := [place for place, each in enumerate(given) if isinstance(each, list)]):
        place = f"prompt[{lists[0]}]"
        raise invalid(place, f"{place} is a list among token ids; send one list of texts and ids for each prompt")
    prompts = [given] if isinstance(given, str) or is_mixed else given
    separated = [
        [
            part
            for kind, run in itertools.groupby([prompt] if isinstance(prompt, str) else prompt, type)
            for part in ([[*run]] if kind is int else run)
        ]
        for prompt in prompts
    ]
    number = sum(max(1, len(parts)) for parts in separated) + len(request.logit_bias or ())
    if number > _MAX_PARTS:
        raise invalid(
            "logit_bias" if request.logit_bias else "prompt",
            f"prompt and logit_bias have {number} parts, at most {_MAX_PARTS} are allowed; send fewer",
        )
    return separated


async def _joined(parts: _PromptPieces, tenant: str, intake: Intake) -> Any:
    """Return a prompt as a text or as token ids. If it mixes both, its texts are tokenized. Only a text at the
    beginning of such a prompt gets the special tokens of a prompt."""
    if len(parts) == 1:
        return parts[0]
    encoded = [
        await _encode(part, "prompt", tenant, intake, adds_special=place == 0) if isinstance(part, str) else part
        for place, part in enumerate(parts)
    ]
    return [*itertools.chain.from_iterable(encoded)]


async def _biases(request: LlamaCompletionRequest, tenant: str, intake: Intake) -> dict[int, float] | None:
    """Return the logit biases of a request by token id, or None if it has none. The bias of a text applies to each of
    its tokens. The biases of one token are added up, within the limits of a bias."""
    given, biases = request.logit_bias or {}, dict[int, float]()
    for key, value in given.items() if isinstance(given, dict) else given:
        is_id = isinstance(key, int) or (isinstance(given, dict) and key.isdecimal())
        for token_id in [int(key)] if is_id else await _encode(str(key), "logit_bias", tenant, intake):
            total = biases.get(token_id, 0.0) + (-100.0 if value is False else value)
            biases[token_id] = max(-100.0, min(100.0, total))
    return biases or None


async def _encode(text: str, field: str, tenant: str, intake: Intake, *, adds_special: bool = False) -> list[int]:
    if intake.texts is None:
        raise invalid(field, f"the served checkpoint has no tokenizer; send token ids in {field}")
    return await intake.texts.encode(text, tenant, ANY_NUMBER, field=field, add_special_tokens=adds_special)
