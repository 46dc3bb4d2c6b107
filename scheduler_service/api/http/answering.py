"""Conversion of the deltas of a call's requests into its answer, whole or as server-sent events."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from pagewire.common import __version__
from scheduler_service.api.http.answers import OutputTokensDetails, PromptTokensDetails, UsageCounts, encode
from scheduler_service.api.http.request_options import DecodedCall
from scheduler_service.api.http.requests import GenerationRequest, StreamOptions
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import EndReason, OutputMode, Request, SequenceEnd
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta, LogprobColumns
from scheduler_service.serving.parsed_request import LOGPROB_BYTES, MAX_ANSWER_BYTES
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call
from scheduler_service.serving.turns import PIECE_SIZE, Turns

_FINISH_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.ABORT: "abort"}
_Result = TypeVar("_Result")
_Event = TypeVar("_Event", bound=Struct)
_TOKEN_BYTES = 16  # estimated size of each token id that an answer repeats
_EXPECTED_TOKENS = 4096  # assumed output length if the request sets no maximum
_ENTRY_VALUES = 32  # cost of writing one log-probability, in JSON values
CHAR_VALUES = 16  # cost of parsing one character of an output, in JSON values


class PromptProgress:
    """The state of one prompt of an HTTP call while its output is computed. It counts the tokens of each sample (one of
    the `n` outputs of a prompt), collects the log-probabilities of the prompt, and notes when the prompt was queued and
    when its first output arrived."""

    def __init__(self, index: int, active: ActiveRequest, turns: Turns) -> None:
        num_samples = active.request.n
        self._turns = turns
        self.index = index
        self.active = active
        self.num_tokens = [0] * num_samples
        self.has_begun = [False] * num_samples  # an event or choice of the sample was written
        self.num_cached_tokens = 0
        self.queued_at = self.first_output_at = time.monotonic_ns()
        self.logprobs = LogprobColumns()  # of the prompt, from the second token on

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.active.request.prompt_token_ids

    async def write(self, num_values: int, work: Callable[..., _Result], *args: Any, **named: Any) -> _Result:
        """Call `work`, a function that writes a part of the HTTP answer, and return its result. If `num_values` (the
        cost of the work, in JSON values) exceeds PIECE_SIZE, run `work` on a thread so that it does not block the event
        loop. The tenants use that thread in turn (see `Turns`)."""
        if num_values <= PIECE_SIZE:
            return work(*args, **named)
        return await self._turns.call(self.active.request.tenant, partial(work, *args, **named))

    def num_values(self, delta: Delta) -> int:
        """Estimate the cost of writing a delta (a piece of new output of one sample) as JSON. The unit is the cost of
        one JSON value. The estimate covers the text and the log-probabilities of the delta. For the first delta of a
        sample, it also covers the log-probabilities of the prompt."""
        sampling = self.active.request.sampling
        num_prompt = 0 if self.has_begun[delta.sample_index] else len(self.logprobs)
        num_output = len(delta.logprobs)
        num_entries = num_prompt * (1 + (sampling.num_prompt_logprobs or 0))
        num_entries += num_output * (1 + (sampling.num_logprobs or 0))
        return num_entries * _ENTRY_VALUES + len(delta.text) * CHAR_VALUES

    def add_delta(self, delta: Delta) -> None:
        """Update this state with a delta (a piece of new output of one sample): count its tokens, and collect its
        log-probabilities of prompt tokens. The last delta of a sample also sets the number of prompt tokens from the
        prefix cache."""
        if not any(self.num_tokens):
            self.first_output_at = time.monotonic_ns()
        self.logprobs.extend(delta.prompt_logprobs)
        self.num_tokens[delta.sample_index] += len(delta.token_ids)
        if delta.end is not None:
            self.num_cached_tokens = delta.end.num_cached_tokens


class AnswerWriter(Protocol):
    """The interface of the objects that write the HTTP answers of one endpoint. A writer converts generated output into
    the JSON format of its endpoint."""

    num_hidden_tokens: int  # tokens of each sample that were computed but are not shown

    @property
    def output_details(self) -> OutputTokensDetails | UnsetType:
        """The number of reasoning tokens in all outputs up to now, for the answer's `usage`. It is UNSET if the
        endpoint does not report this number."""

    def first_choices(self, progress: PromptProgress) -> list[Any]:
        """Return the choices (elements of the field `choices`) that a streamed answer sends for a prompt before the
        model has generated output. Each choice is sent in its own event."""

    def choice(self, progress: PromptProgress, delta: Delta, *, is_whole: bool) -> Any:
        """Convert a delta (a piece of new output of one sample) into an element of the answer's field `choices`. Return
        None if a streamed answer needs no event for this delta. `is_whole` is true if the answer is not streamed; the
        delta then contains the complete output of the sample."""

    def answer(
        self,
        choices: list[Any],
        usage: UsageCounts | UnsetType | None,
        progress: PromptProgress | None,
        *,
        is_whole: bool,
    ) -> Struct:
        """Build the JSON object of an answer with the given choices. `is_whole` is true for an answer that is not
        streamed, and false for one event of a streamed answer. `progress` is the state of the prompt that the choices
        belong to. It is None if the choices belong to several prompts, or if an earlier event has already described the
        prompt."""


async def answer_call(
    request: GenerationRequest,
    asked: DecodedCall,
    call: Call,
    intake: Intake,
    writer: AnswerWriter,
    stream: EventStream,
    num_best: int | None = None,
    *,
    is_timed: bool = False,
) -> bytes | None:
    """Run all generation requests of an HTTP call and answer the call. Return the JSON of the answer, or None if the
    answer was sent as a stream of events. If `num_best` is set, an answer that is not streamed contains only the
    `num_best` samples of each prompt with the highest mean log-probability. If `is_timed`, the state of each prompt
    contains the time of its first output, even if the answer is whole. If a request is refused or fails, cancel all
    requests of the call and raise RefusedError."""
    if request.stream_options is not None and not request.stream:
        raise invalid(
            "stream_options", "stream_options is set, but stream is not true; set stream, or leave both unset"
        )
    async with begin_requests(asked, call, intake, is_streamed=bool(request.stream), is_timed=is_timed) as begun:
        if not request.stream:
            return await _full_answer(begun, writer, num_best)
        await _stream_answer(begun, writer, stream, request.stream_options or StreamOptions())
        return None


@contextlib.asynccontextmanager
async def begin_requests(
    asked: DecodedCall, call: Call, intake: Intake, *, is_streamed: bool, is_timed: bool = False
) -> AsyncIterator[list[PromptProgress]]:
    """Return a context manager that queues all generation requests of an HTTP call and yields the state of each prompt.
    If `is_timed`, the output arrives in pieces even if the answer is whole, so that the block can measure times. When
    the `with` block ends, requests that are still running are cancelled. If a request is refused, cancel all requests
    of the call and raise RefusedError. A RefusedError raised inside the block is raised again with the field names of
    the HTTP request."""
    mode = OutputMode.STREAMED if is_streamed or is_timed else OutputMode.WHOLE
    begun: list[PromptProgress] = []
    with asked.names.translate_refusals():
        resolved = []
        for parsed in asked.requests:
            resolved.append(await intake.resolve(parsed, call, mode))
            await asyncio.sleep(0)  # let other tasks run
        with intake.answers.held(resolved[0].tenant, answer_size(asked, resolved, is_streamed=is_streamed)):
            try:
                for index, (parsed, request) in enumerate(zip(asked.requests, resolved, strict=True)):
                    begun.append(PromptProgress(index, intake.start(parsed, request, call), intake.turns))
                    await asyncio.sleep(0)  # let other tasks run
                yield begun
            finally:
                for progress in begun:
                    progress.active.cancel()


def answer_size(asked: DecodedCall, resolved: Sequence[Request], *, is_streamed: bool) -> int:
    """Estimate the memory in bytes that the answer to an HTTP call may need, and return the estimate. It covers
    log-probabilities, token ids and embeddings, but not the generated texts. Raises RefusedError if the estimate
    exceeds MAX_ANSWER_BYTES. The error names the request field that needs the most memory."""
    sizes: Counter[str] = Counter()  # by the request field that causes the bytes
    for parsed, request in zip(asked.requests, resolved, strict=True):
        sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
        num_tokens = 0
        if not is_streamed:  # a streamed answer sends tokens at once and stores none
            is_open = parsed.max_tokens is None and parsed.default_max_tokens is None
            num_tokens = min(request.max_tokens, _EXPECTED_TOKENS) if is_open else request.max_tokens
        for field, num, number in (
            ("prompt_logprobs", num_prompt_tokens, sampling.num_prompt_logprobs),
            ("logprobs", num_tokens, sampling.num_logprobs),
        ):
            if number is not None:
                sizes[f"sampling.{field}"] += request.n * num * (1 + number) * LOGPROB_BYTES
        sizes["input"] += asked.embedding_bytes
        sizes["echo"] += asked.echoes * request.n * num_prompt_tokens * _TOKEN_BYTES
        sizes["return_token_ids"] += asked.shows_tokens * request.n * (num_prompt_tokens + num_tokens) * _TOKEN_BYTES
    field, size = sizes.most_common(1)[0]
    if sizes.total() > MAX_ANSWER_BYTES:
        raise invalid(
            field,
            f"the answer may need {sizes.total()} bytes, {size} of them for {field.removeprefix('sampling.')}; the "
            f"limit of a call is {MAX_ANSWER_BYTES}; ask for fewer or shorter outputs, stream them, or send prompts "
            "in separate calls",
        )
    return sizes.total()


async def deltas_of(progress: PromptProgress) -> AsyncIterator[Delta]:
    """Yield the deltas (pieces of new output) of one prompt while they are computed. Each delta is added to `progress`
    before it is yielded."""
    async with contextlib.aclosing(progress.active.deltas()) as deltas:
        async for delta in deltas:
            progress.add_delta(delta)
            yield delta


async def output_events(
    progress: PromptProgress,
    first: Iterable[_Event],
    events_for: Callable[[Delta], Awaitable[Iterable[_Event]]],
    stream: EventStream,
    *,
    is_streamed: bool,
) -> list[_Event]:
    """Collect the events of one generated output and return them: first the events in `first`, then the events that
    `events_for` returns for each delta (a piece of new output). If `is_streamed`, send the events to the client while
    the model generates the output. Then end the stream and return an empty list."""
    if not is_streamed:
        await progress.active.wait_for_end()
    events = list(first)
    async for delta in deltas_of(progress):
        events += await events_for(delta)
        if is_streamed:
            await send_events(events, stream)
            events.clear()
    if is_streamed:
        await stream.end()
    return events


async def send_events(events: Iterable[Struct], stream: EventStream) -> None:
    """Send msgspec structs to the client as events. The name of an event is the struct's field `type`. If the struct
    has no such field, the name is the struct's msgspec tag."""
    for event in events:
        await stream.send_event(encode(event), str(getattr(event, "type", event.__struct_config__.tag)))


async def _full_answer(begun: Sequence[PromptProgress], writer: AnswerWriter, num_best: int | None) -> bytes:
    choices = []
    for progress in begun:
        if progress.active.request.output_mode is OutputMode.WHOLE:
            await progress.active.wait_for_end()
        wholes = await full_outputs(progress)
        if num_best is not None and num_best < len(wholes):
            best = sorted(wholes, key=_mean_logprob, reverse=True)[:num_best]
            wholes = [delta._replace(sample_index=index) for index, delta in enumerate(best)]
        for delta in wholes:
            choices.append(await progress.write(progress.num_values(delta), _whole_choice, writer, progress, delta))
            await asyncio.sleep(0)  # let other tasks run
    usage, only = _usage(begun, writer), begun[0] if len(begun) == 1 else None
    num_values = 0 if only is None else max(map(only.num_values, wholes))
    return await begun[0].write(num_values, _encoded_answer, writer, choices, usage, only)


def _whole_choice(writer: AnswerWriter, progress: PromptProgress, delta: Delta) -> Raw:
    return Raw(encode(writer.choice(progress, delta, is_whole=True)))


def _encoded_answer(writer: AnswerWriter, choices: list[Any], usage: UsageCounts, only: PromptProgress | None) -> bytes:
    return encode(writer.answer(choices, usage, only, is_whole=True))


async def full_outputs(progress: PromptProgress) -> list[Delta]:
    """Wait until all outputs of a prompt are complete. Return one delta for each sample, with all tokens, the whole
    text and all log-probabilities of the sample."""
    parts: list[list[Delta]] = [[] for _ in progress.num_tokens]
    logprobs = [LogprobColumns() for _ in parts]
    async for delta in deltas_of(progress):
        if delta.logprobs or delta.prompt_logprobs:
            logprobs[delta.sample_index].extend(delta.logprobs)
            await asyncio.sleep(0)  # let other tasks run
        parts[delta.sample_index].append(delta._replace(logprobs=(), prompt_logprobs=()))
    return [
        deltas[-1]._replace(
            first_token=0,
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            logprobs=logprobs[index],
            text="".join(delta.text for delta in deltas),
        )
        for index, deltas in enumerate(parts)
    ]


def _mean_logprob(delta: Delta) -> float:
    return (delta.cumulative_logprob or 0.0) / max(1, len(delta.token_ids))


async def _stream_answer(
    begun: Sequence[PromptProgress], writer: AnswerWriter, stream: EventStream, options: StreamOptions
) -> None:
    if len(begun) == 1:
        await _stream_prompt(begun[0], writer, stream, options)
    else:
        await all_of(_stream_prompt(progress, writer, stream, options) for progress in begun)
    if options.include_usage:
        await stream.send_event(encode(writer.answer([], _usage(begun, writer), None, is_whole=False)))
    await stream.end()


async def all_of(parts: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run the coroutines concurrently and return their results in order. If a coroutine raises an exception, cancel the
    other coroutines and raise that exception."""
    tasks = []
    try:
        for part in parts:
            tasks.append(asyncio.create_task(part))
            await asyncio.sleep(0)  # let other tasks run
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream_prompt(
    progress: PromptProgress, writer: AnswerWriter, stream: EventStream, options: StreamOptions
) -> None:
    is_first = True
    async with contextlib.aclosing(progress.active.deltas()) as deltas:
        async for delta in deltas:
            if is_first:
                for choice in writer.first_choices(progress):
                    await stream.send_event(_event(writer, choice, progress, 0, options, is_first=is_first))
                    is_first = False
            progress.add_delta(delta)
            choice = await progress.write(progress.num_values(delta), writer.choice, progress, delta, is_whole=False)
            if choice is not None:
                num_tokens = progress.num_tokens[delta.sample_index]
                await stream.send_event(_event(writer, choice, progress, num_tokens, options, is_first=is_first))
                is_first = False


def _event(
    writer: AnswerWriter,
    choice: Any,
    progress: PromptProgress,
    num_tokens: int,
    options: StreamOptions,
    *,
    is_first: bool,
) -> bytes:
    usage: UsageCounts | UnsetType | None = UNSET
    if options.include_usage:
        usage = None
        if options.continuous_usage_stats:
            usage = counts(len(progress.prompt_token_ids), num_tokens - min(num_tokens, writer.num_hidden_tokens))
    return encode(writer.answer([choice], usage, progress if is_first else None, is_whole=False))


def _usage(begun: Sequence[PromptProgress], writer: AnswerWriter) -> UsageCounts:
    return counts(
        sum(len(progress.prompt_token_ids) for progress in begun),
        sum(num - min(num, writer.num_hidden_tokens) for progress in begun for num in progress.num_tokens),
        PromptTokensDetails(sum(progress.num_cached_tokens for progress in begun)),
        writer.output_details,
    )


def counts(
    num_prompt: int,
    num_output: int,
    details: PromptTokensDetails | UnsetType = UNSET,
    output_details: OutputTokensDetails | UnsetType = UNSET,
) -> UsageCounts:
    return UsageCounts(num_prompt, num_output, num_prompt + num_output, details, output_details)


def finish_reason(end: SequenceEnd | None, *, calls: bool = False) -> str | None:
    """Return the value of OpenAI's field `finish_reason` for an output, such as "stop" or "length". Return None while
    the output is being generated. `calls` is true if the output contains tool calls."""
    if calls and end is not None and end.reason is EndReason.STOP:
        return "tool_calls"
    return None if end is None else _FINISH_REASONS[end.reason]


def stop_reason(request: GenerationRequest, delta: Delta) -> int | str | None:
    """Return the reason for the end of an output, for the answer's field `stop_reason`. The reason is the stop text
    that was found, or the id of a token in the request's `stop_token_ids`. Return None if the output has not ended, or
    has ended for another reason."""
    if delta.end is None or delta.stop_text is not None:
        return delta.stop_text
    token_id = delta.end.stop_token_id
    return token_id if token_id in (request.stop_token_ids or ()) else None


def now() -> int:
    """Return the current Unix time in whole seconds, for the creation time of an answer."""
    return int(time.time())


def longest_sequence(intake: Intake) -> int:
    """Return the maximum length of a sequence (prompt and output together) in tokens. The limit is the capacity that
    the workers have reported. Before they report it, the limit is the context length of the model."""
    availability = intake.engine.availability
    return availability.max_sequence_tokens if availability.capacity else intake.model.max_model_len


def fingerprint(intake: Intake) -> str:
    """Return an identifier of the server's configuration, for the answer's field `system_fingerprint`. It depends on
    Pagewire's version, config.json, the tokenizer, and the worker's data type, weight format and attention backend. It
    does not depend on the values of the weights."""
    worker = intake.engine.availability.capacity
    named = (intake.model.digest, worker and (worker.dtype, worker.weight_format, worker.attention_backend))
    return f"pagewire-{__version__}-{sha256(repr(named).encode()).hexdigest()[:8]}"


def request_ids(request_id: str, count: int) -> Iterator[str]:
    """Yield the ids of the `count` generation requests of an HTTP call, one request for each prompt. A single request
    has the id `request_id`. Several requests have the ids `request_id-0`, `request_id-1` and so on."""
    for index in range(count):
        yield request_id if count == 1 else f"{request_id}-{index}"
