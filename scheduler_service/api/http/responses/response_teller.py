"""Conversion of a request's output into the events of a response."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pagewire.common.chat.chat_output import Arguments, CallStart, Content, OutputParser, OutputPart, Reasoning
from scheduler_service.api.http.answering import CHAR_VALUES, now
from scheduler_service.api.http.answers import ChatLogprob, OutputTokensDetails
from scheduler_service.api.http.responses.answers import (
    AnswerText,
    CachedTokens,
    CustomCallOutput,
    ErrorCode,
    FunctionCallOutput,
    Incomplete,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
    ResponseAnswer,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    ThoughtText,
    ToolSearchOutput,
)
from scheduler_service.api.http.responses.called_tools import CalledTool, input_of
from scheduler_service.api.http.token_texts import ReasoningTokens, TokenTexts
from scheduler_service.api.http.tool_calls import object_of
from scheduler_service.core.request import EndReason, SequenceEnd
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.turns import PIECE_SIZE

ID_PREFIX = "resp_"  # a response's id is this prefix and the id of its request
_STATUSES = {EndReason.STOP: "completed", EndReason.LENGTH: "incomplete", EndReason.ABORT: "cancelled"}
_TEXT_DELTA = "response.output_text.delta"
_LAST_EVENTS = {"cancelled": "incomplete"}  # clients know no event "response.cancelled"


class ResponseEvents:
    """A converter from generated output to the events of OpenAI's Responses API. One object converts the deltas (pieces
    of new output) of one output."""

    def __init__(
        self, parser: OutputParser, begun: ResponseAnswer, tools: Mapping[str, CalledTool], intake: Intake, tenant: str
    ) -> None:
        """Create the event writer for one response. `parser` splits the output into text, reasoning and tool calls.
        `begun` is the response at its start, without output. `tools` are the tools that the model may call, keyed by
        their function names. `tenant` is the owner of the response."""
        self._parser = parser
        self._texts = TokenTexts(intake.tokenizer)
        self._reasoning = ReasoningTokens(self._texts, parser)
        self._begun = begun
        self._intake = intake
        self._tenant = tenant
        self._tools = tools
        self._name = begun.id.removeprefix(ID_PREFIX)
        self._num_events = 0
        self._is_in_progress = False
        self._items: list[OutputItem] = []  # finished items
        self._open: OutputItem | None = None
        self._pieces: list[str] = []  # texts of the open item
        self._logprobs: list[ChatLogprob] = []  # of all tokens of the message, whether sent or not
        self._num_reported_logprobs = 0

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the first events of a response: `response.created`, and `response.queued` if the response is generated
        in the background."""
        yield self._event("response.created", response=self._begun)
        if self._begun.status == "queued":
            yield self._event("response.queued", response=self._begun)

    async def events_for(self, delta: Delta) -> list[ResponseEvent]:
        """Convert a delta (a piece of new output) into response events. If the delta ends the output, the last event
        contains the complete response."""
        end, events = delta.end, []
        if not self._is_in_progress:
            self._is_in_progress = True
            in_progress = msgspec.structs.replace(self._begun, status="in_progress")
            events.append(self._event("response.in_progress", response=in_progress))
        if CHAR_VALUES * len(delta.text) <= PIECE_SIZE:
            events += self._text_events(delta)
        else:
            events += await self._intake.turns.call(self._tenant, self._text_events, delta)
        if end is not None:
            status = _STATUSES[end.reason]
            details = Incomplete("max_output_tokens") if status == "incomplete" else None
            events += self._end(status, incomplete_details=details, usage=self._usage(end))
        return events

    def fail(self, message: str, code: ErrorCode = "server_error") -> Iterator[ResponseEvent]:
        """Yield the last events of a response that has failed. The events contain the error with this `message` and
        `code`."""
        yield from self._tell_text("", is_last=True)
        yield from self._end("failed", error=ResponseError(code, message))

    def _end(self, status: str, **told: Any) -> Iterator[ResponseEvent]:
        yield from self._close("completed" if status == "completed" else "incomplete")
        completed_at = now() if status == "completed" and not self._begun.background else None
        response = msgspec.structs.replace(
            self._begun, status=status, completed_at=completed_at, output=self._items, **told
        )
        yield self._event(f"response.{_LAST_EVENTS.get(status, status)}", response=response)

    def _text_events(self, delta: Delta) -> list[ResponseEvent]:
        """Convert the text of a delta (a piece of new output) into response events. The first text event also contains
        the log-probabilities of the message's tokens that earlier events have not contained."""
        events = list(self._tell_text(delta.text, is_last=delta.end is not None))
        others = self._reasoning.others(delta) if self._parser.has_reasoning else delta
        self._logprobs += map(self._texts.chat_logprob, others.logprobs)
        for index, event in enumerate(events):
            if event.type == _TEXT_DELTA and self._num_reported_logprobs < len(self._logprobs):
                events[index] = msgspec.structs.replace(event, logprobs=self._logprobs[self._num_reported_logprobs :])
                self._num_reported_logprobs = len(self._logprobs)
        return events

    def _tell_text(self, text: str, *, is_last: bool) -> Iterator[ResponseEvent]:
        for part in self._parser.feed(text, is_last=is_last):
            yield from self._tell_part(part)

    def _tell_part(self, part: OutputPart) -> Iterator[ResponseEvent]:
        match part:
            case CallStart(name):
                yield from self._begin_item(self._call_of(self._tools.get(name, CalledTool(name))))
            case Arguments(text) if isinstance(self._open, CustomCallOutput | ToolSearchOutput):
                self._pieces.append(text)  # it can be parsed only when complete
            case Arguments(text):
                yield self._delta("response.function_call_arguments.delta", text)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningOutput):
                    yield from self._begin_item(ReasoningOutput(self._new_id("rs"), [], "in_progress"))
                yield self._delta("response.reasoning_text.delta", text, content_index=0)
            case Content(text) if text:
                if not isinstance(self._open, MessageOutput):
                    yield from self._begin_item(MessageOutput(self._new_id("msg"), [], "in_progress"))
                yield self._delta(_TEXT_DELTA, text, content_index=0, logprobs=[])

    def _call_of(self, tool: CalledTool) -> OutputItem:
        """Create the output item for a tool call that the model has just begun. The arguments of the item are empty."""
        call_id = self._new_id("call")
        if tool.is_search:
            return ToolSearchOutput(self._new_id("tsc"), call_id, {}, "in_progress")
        if tool.is_custom:
            return CustomCallOutput(self._new_id("ctc"), call_id, tool.name, "in_progress", tool.namespace, "")
        return FunctionCallOutput(self._new_id("fc"), call_id, tool.name, "in_progress", tool.namespace, "")

    def _begin_item(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._open = item
        yield self._of_item("response.output_item.added", item=item)
        if isinstance(item, ReasoningOutput | MessageOutput):
            yield self._of_item("response.content_part.added", item_id=item.id, content_index=0, part=_part(item, ""))

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        """Finish the current output item (a message, a reasoning text or a tool call) with the given `status`, and
        yield the events for its end. Yield nothing if there is no current item."""
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        place: dict[str, Any] = {"item_id": item.id}
        match item:
            case FunctionCallOutput():
                whole: OutputItem = msgspec.structs.replace(item, arguments=text, status=status)
                yield self._of_item("response.function_call_arguments.done", **place, arguments=text, name=item.name)
            case ToolSearchOutput():
                whole = msgspec.structs.replace(item, arguments=object_of(text), status=status)
            case CustomCallOutput():
                given = input_of(text)
                whole = msgspec.structs.replace(item, input=given, status=status)
                if given:
                    yield self._of_item("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._of_item("response.custom_tool_call_input.done", **place, input=given)
            case _:
                part = _part(item, text, self._logprobs)
                whole = msgspec.structs.replace(item, content=[part], status=status)
                kind = "reasoning_text" if isinstance(item, ReasoningOutput) else "output_text"
                logprobs = part.logprobs if isinstance(part, AnswerText) else None
                yield self._of_item(f"response.{kind}.done", **place, content_index=0, text=text, logprobs=logprobs)
                yield self._of_item("response.content_part.done", **place, content_index=0, part=part)
        yield self._of_item("response.output_item.done", item=whole)
        self._items.append(whole)
        self._open, self._pieces = None, []
        if isinstance(item, MessageOutput):
            self._logprobs, self._num_reported_logprobs = [], 0

    def _delta(self, kind: str, text: str, **place: Any) -> ResponseEvent:
        assert self._open is not None, "an item has begun"
        self._pieces.append(text)
        return self._of_item(kind, item_id=self._open.id, delta=text, **place)

    def _of_item(self, kind: str, **told: Any) -> ResponseEvent:
        return self._event(kind, output_index=len(self._items), **told)

    def _event(self, kind: str, **told: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(kind, self._num_events - 1, **told)

    def _new_id(self, kind: str) -> str:
        """Return an id for the next output item of the response. `kind` is the prefix of the id. The id is
        deterministic: if the events of the response are generated again, the item gets the same id."""
        return f"{kind}_{self._name}_{len(self._items) + (self._open is not None)}"

    def _usage(self, end: SequenceEnd) -> ResponseUsage:
        return ResponseUsage(
            end.num_prompt_tokens,
            CachedTokens(end.num_cached_tokens),
            end.num_output_tokens,
            OutputTokensDetails(self._reasoning.count),
            end.num_prompt_tokens + end.num_output_tokens,
        )


def _part(
    item: ReasoningOutput | MessageOutput, text: str, logprobs: Iterable[ChatLogprob] = ()
) -> ThoughtText | AnswerText:
    return ThoughtText(text) if isinstance(item, ReasoningOutput) else AnswerText(text, logprobs=list(logprobs))
