"""`/v1/responses`, OpenAI's Responses API: chats, whose answers are items of reasoning, text, calls of functions."""

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from pagewire.common.chat_output import Arguments, CallStart, Content, OutputParser, OutputPart, Reasoning
from scheduler_service.core.request import EndReason
from scheduler_service.doors.http.answering import PromptProgress, begin_requests, deltas_of, now
from scheduler_service.doors.http.chat_completions import read_chat
from scheduler_service.doors.http.event_stream import EventStream
from scheduler_service.doors.http.options import RequestNames
from scheduler_service.doors.http.responses.answers import (
    AnswerText,
    CachedTokens,
    FunctionCallOutput,
    Incomplete,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    ReasoningTokens,
    ResponseAnswer,
    ResponseEvent,
    ResponseUsage,
    ThoughtText,
)
from scheduler_service.doors.http.responses.conversation import chat_meant
from scheduler_service.doors.http.responses.requests import ResponsesRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.prompt_text import ANY_NUMBER
from scheduler_service.serving.tenants.caller import Call

# What a request calls the fields of the chat that it means.
_NAMES = RequestNames(
    "input", messages="input", max_completion_tokens="max_output_tokens", response_format="text.format"
)
_encode = msgspec.json.Encoder().encode


class ResponseTeller:
    """Makes the events of a response of what comes of an output."""

    def __init__(self, parser: OutputParser, begun: ResponseAnswer) -> None:
        """`begun` is the response as it begins."""
        self._parser = parser
        self._begun = begun
        self._num_events = 0
        self._items: list[OutputItem] = []  # that are whole
        self._open: OutputItem | None = None
        self._pieces: list[str] = []  # of what is open
        self.reasoning: list[str] = []  # all that was told

    def begin(self) -> Iterator[ResponseEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._begun)

    def tell(self, delta: Delta) -> Iterator[ResponseEvent]:
        """Tell what is new."""
        for part in self._parser.feed(delta.text, is_last=delta.end is not None):
            yield from self._tell_part(part)

    def end(self, reason: EndReason, usage: ResponseUsage) -> Iterator[ResponseEvent]:
        """Tell the end of the output, and the whole response."""
        is_whole = reason is EndReason.STOP
        yield from self._close("completed" if is_whole else "incomplete")
        response = msgspec.structs.replace(
            self._begun,
            status="completed" if is_whole else "incomplete",
            incomplete_details=None if is_whole else Incomplete("max_output_tokens"),
            output=self._items,
            usage=usage,
        )
        yield self._event(f"response.{response.status}", response=response)

    def _tell_part(self, part: OutputPart) -> Iterator[ResponseEvent]:
        match part:
            case CallStart(name):
                call_id = f"call_{secrets.token_hex(12)}"
                yield from self._begin_item(FunctionCallOutput(_new_id("fc"), call_id, name, "", "in_progress"))
            case Arguments(text):
                yield self._delta("response.function_call_arguments.delta", text)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningOutput):
                    yield from self._begin_item(ReasoningOutput(_new_id("rs"), [], "in_progress"))
                self.reasoning.append(text)
                yield self._delta("response.reasoning_text.delta", text, content_index=0)
            case Content(text) if text:
                if not isinstance(self._open, MessageOutput):
                    yield from self._begin_item(MessageOutput(_new_id("msg"), [], "in_progress"))
                yield self._delta("response.output_text.delta", text, content_index=0, logprobs=[])

    def _begin_item(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._open = item
        yield self._of_item("response.output_item.added", item=item)
        if not isinstance(item, FunctionCallOutput):
            yield self._of_item("response.content_part.added", item_id=item.id, content_index=0, part=_part(item, ""))

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        """End the item that is open, if one is."""
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        place: dict[str, Any] = {"item_id": item.id}
        match item:
            case FunctionCallOutput():
                whole: OutputItem = msgspec.structs.replace(item, arguments=text, status=status)
                yield self._of_item("response.function_call_arguments.done", **place, arguments=text, name=item.name)
            case _:
                part = _part(item, text)
                whole = msgspec.structs.replace(item, content=[part], status=status)
                kind = "reasoning_text" if isinstance(item, ReasoningOutput) else "output_text"
                logprobs: list[Any] | None = [] if isinstance(item, MessageOutput) else None
                yield self._of_item(f"response.{kind}.done", **place, content_index=0, text=text, logprobs=logprobs)
                yield self._of_item("response.content_part.done", **place, content_index=0, part=part)
        yield self._of_item("response.output_item.done", item=whole)
        self._items.append(whole)
        self._open, self._pieces = None, []

    def _delta(self, kind: str, text: str, **place: Any) -> ResponseEvent:
        assert self._open is not None, "an item has begun"
        self._pieces.append(text)
        return self._of_item(kind, item_id=self._open.id, delta=text, **place)

    def _of_item(self, kind: str, **told: Any) -> ResponseEvent:
        return self._event(kind, output_index=len(self._items), **told)

    def _event(self, kind: str, **told: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(kind, self._num_events - 1, **told)


async def answer_response(
    request: ResponsesRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Return the response, unless it is streamed. Raises RefusedError."""
    with _NAMES.in_refusals():
        asked, make_parser = await read_chat(chat_meant(request), call, intake)
        async with begin_requests(asked, call, intake, is_streamed=bool(request.stream)) as [progress]:
            teller = ResponseTeller(make_parser(), _begun(request, model_name))
            if not request.stream:
                await progress.active.wait_for_end()
                events = [event async for event in _events(progress, teller, intake)]
                return _encode(events[-1].response)
            stream.is_named = True
            async for event in _events(progress, teller, intake):
                await stream.tell(_encode(event), event.type)
            await stream.end()
            return None


async def _events(progress: PromptProgress, teller: ResponseTeller, intake: Intake) -> AsyncIterator[ResponseEvent]:
    is_begun, end = False, None
    async for delta in deltas_of(progress):
        for event in (*(() if is_begun else teller.begin()), *teller.tell(delta)):
            yield event
        is_begun, end = True, delta.end
    assert end is not None, "an output ends"
    for event in teller.end(end.reason, await _usage(progress, "".join(teller.reasoning), intake)):
        yield event


async def _usage(progress: PromptProgress, reasoning: str, intake: Intake) -> ResponseUsage:
    """Count the tokens of reasoning by its text: one token may end it and go on behind it."""
    assert intake.tokenizer is not None, "chats are of texts"
    token_ids = await intake.tokenizer.encode(reasoning, ANY_NUMBER, add_special_tokens=False) if reasoning else []
    assert isinstance(token_ids, list), "any number of tokens is asked for"
    num_prompt, num_output = len(progress.prompt_token_ids), sum(progress.num_tokens)
    return ResponseUsage(
        num_prompt,
        CachedTokens(progress.num_cached_tokens),
        num_output,
        ReasoningTokens(len(token_ids)),
        num_prompt + num_output,
    )


def _begun(request: ResponsesRequest, model_name: str) -> ResponseAnswer:
    return ResponseAnswer(
        id=f"resp_{request.request_id or secrets.token_hex(24)}",
        created_at=now(),
        model=model_name,
        status="in_progress",
        output=[],
        usage=None,
        incomplete_details=None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=request.temperature,
        top_p=request.top_p,
        tool_choice=request.tool_choice or "auto",
        tools=list(request.tools or ()),
        text=request.text or {"format": {"type": "text"}},
        reasoning=request.reasoning,
        metadata=request.metadata,
    )


def _part(item: ReasoningOutput | MessageOutput, text: str) -> ThoughtText | AnswerText:
    return ThoughtText(text) if isinstance(item, ReasoningOutput) else AnswerText(text)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
