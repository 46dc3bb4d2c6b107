"""From the deltas of one call's requests to its answer, whole or as events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from scheduler_service.core.request import EndReason, OutputMode, SequenceEnd, TokenLogprobs
from scheduler_service.doors.http.answers import PromptTokensDetails, UsageCounts
from scheduler_service.doors.http.event_stream import EventStream
from scheduler_service.doors.http.options import ReadCall
from scheduler_service.doors.http.requests import GenerationRequest, StreamOptions
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_FINISH_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.ABORT: "abort"}
_Result = TypeVar("_Result")
_encode = msgspec.json.Encoder().encode


class PromptProgress:
    """What has come of one prompt so far."""

    def __init__(self, index: int, active: ActiveRequest) -> None:
        num_samples = active.request.n
        self.index = index
        self.active = active
        self.num_tokens = [0] * num_samples
        self.has_begun = [False] * num_samples  # something was told of the sample
        self.num_cached_tokens = 0
        self.logprobs: list[TokenLogprobs] = []  # of the prompt, from its second token on

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.active.request.prompt_token_ids

    def take(self, delta: Delta) -> None:
        self.logprobs += delta.prompt_logprobs
        self.num_tokens[delta.sample_index] += len(delta.token_ids)
        if delta.end is not None:
            self.num_cached_tokens = delta.end.num_cached_tokens


class AnswerWriter(Protocol):
    """How one kind of answer is written."""

    num_hidden_tokens: int  # of each sample, that were computed and are not shown

    def first_choices(self, progress: PromptProgress) -> list[Any]:
        """Make the choices that an answer in events begins with, each in an event of its own."""

    def choice(self, progress: PromptProgress, delta: Delta, *, is_whole: bool) -> Any:
        """Make the choice that tells a delta."""

    def answer(
        self,
        choices: list[Any],
        usage: UsageCounts | UnsetType | None,
        progress: PromptProgress | None,
        *,
        is_whole: bool,
    ) -> Struct:
        """Put choices into a whole answer or into an event. `progress` is that of the prompt that they are of, if it
        is one, and none of its choices was told before."""


async def answer_call(
    request: GenerationRequest,
    asked: ReadCall,
    call: Call,
    intake: Intake,
    writer: AnswerWriter,
    stream: EventStream,
    num_best: int | None = None,
) -> bytes | None:
    """Queue what a call asks for, all of it or nothing, and return the answer, unless it is streamed. A whole one has
    of each prompt the best so many samples, if so many are wanted. Raises RefusedError."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is set, but stream is not true; set it, or leave both unset")
    async with begin_requests(asked, call, intake, is_streamed=bool(request.stream)) as begun:
        if not request.stream:
            return await _whole_answer(begun, writer, num_best)
        await _stream_answer(begun, writer, stream, request.stream_options or StreamOptions())
        return None


@contextlib.asynccontextmanager
async def begin_requests(
    asked: ReadCall, call: Call, intake: Intake, *, is_streamed: bool
) -> AsyncIterator[list[PromptProgress]]:
    """Queue what a call asks for, all of it or nothing, until the block ends. Raises RefusedError, and what is refused
    inside the block under the request's own names."""
    mode = OutputMode.STREAMED if is_streamed else OutputMode.WHOLE
    begun: list[PromptProgress] = []
    try:
        with asked.names.in_refusals():
            for index, parsed in enumerate(asked.requests):
                begun.append(PromptProgress(index, await intake.begin(parsed, call, mode)))
            yield begun
    finally:
        for progress in begun:
            progress.active.cancel()


async def deltas_of(progress: PromptProgress) -> AsyncIterator[Delta]:
    """Yield what comes of a prompt, once its progress knows of it."""
    async with contextlib.aclosing(progress.active.deltas()) as deltas:
        async for delta in deltas:
            progress.take(delta)
            yield delta


async def _whole_answer(begun: Sequence[PromptProgress], writer: AnswerWriter, num_best: int | None) -> bytes:
    choices = []
    for progress in begun:
        await progress.active.wait_for_end()
        wholes = [delta async for delta in _wholes(progress)]
        if num_best is not None and num_best < len(wholes):
            best = sorted(wholes, key=_mean_logprob, reverse=True)[:num_best]
            wholes = [delta._replace(sample_index=index) for index, delta in enumerate(best)]
        choices += [writer.choice(progress, delta, is_whole=True) for delta in wholes]
    usage = _usage(begun, writer.num_hidden_tokens)
    return _encode(writer.answer(choices, usage, begun[0] if len(begun) == 1 else None, is_whole=True))


async def _wholes(progress: PromptProgress) -> Any:
    """Yield all that came of each sample, as one delta."""
    parts: list[list[Delta]] = [[] for _ in progress.num_tokens]
    async with contextlib.aclosing(progress.active.deltas()) as deltas:
        async for delta in deltas:
            progress.take(delta)
            parts[delta.sample_index].append(delta)
    for deltas_of_sample in parts:
        yield deltas_of_sample[-1]._replace(
            first_token=0,
            token_ids=[token_id for delta in deltas_of_sample for token_id in delta.token_ids],
            logprobs=[entry for delta in deltas_of_sample for entry in delta.logprobs],
            text="".join(delta.text for delta in deltas_of_sample),
        )


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
        usage = _usage(begun, writer.num_hidden_tokens)
        await stream.tell(_encode(writer.answer([], usage, None, is_whole=False)))
    await stream.end()


async def all_of(parts: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return what each gives. If one fails, the others are cancelled, and that failure is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
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
                    await stream.tell(_event(writer, choice, progress, 0, options, is_first=is_first))
                    is_first = False
            progress.take(delta)
            choice = writer.choice(progress, delta, is_whole=False)
            if choice is not None:
                num_tokens = progress.num_tokens[delta.sample_index]
                await stream.tell(_event(writer, choice, progress, num_tokens, options, is_first=is_first))
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
    return _encode(writer.answer([choice], usage, progress if is_first else None, is_whole=False))


def _usage(begun: Sequence[PromptProgress], num_hidden_tokens: int) -> UsageCounts:
    return counts(
        sum(len(progress.prompt_token_ids) for progress in begun),
        sum(num - min(num, num_hidden_tokens) for progress in begun for num in progress.num_tokens),
        PromptTokensDetails(sum(progress.num_cached_tokens for progress in begun)),
    )


def counts(num_prompt: int, num_output: int, details: PromptTokensDetails | UnsetType = UNSET) -> UsageCounts:
    return UsageCounts(num_prompt, num_output, num_prompt + num_output, details)


def finish_reason(end: SequenceEnd | None, *, calls: bool = False) -> str | None:
    """`calls`: the output has calls of tools."""
    if calls and end is not None and end.reason is EndReason.STOP:
        return "tool_calls"
    return None if end is None else _FINISH_REASONS[end.reason]


def stop_reason(request: GenerationRequest, delta: Delta) -> int | str | None:
    """Return the text or the token of the request that ended an output."""
    if delta.end is None or delta.stop_text is not None:
        return delta.stop_text
    token_id = delta.end.stop_token_id
    return token_id if token_id in (request.stop_token_ids or ()) else None


def now() -> int:
    """Return the seconds of Unix time at which an answer is made."""
    return int(time.time())


def longest_sequence(intake: Intake) -> int:
    """Return the tokens that prompt and output can have together, as far as is known."""
    availability = intake.engine.availability
    return availability.max_sequence_tokens if availability.capacity else intake.model.max_model_len


def numbered(request_id: str, count: int) -> Iterator[str]:
    """Yield a name for each of so many requests of a call."""
    for index in range(count):
        yield request_id if count == 1 else f"{request_id}-{index}"
