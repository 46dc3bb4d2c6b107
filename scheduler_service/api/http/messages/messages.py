"""The endpoints `/v1/messages` and `/v1/messages/count_tokens` of Anthropic's Messages API. Answers consist of blocks
of text, thinking and tool calls."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from pagewire.common.chat.chat_output import Arguments, CallStart, Content, OutputParser, OutputPart, Reasoning
from scheduler_service.api.http.answering import PromptProgress, begin_requests, output_events
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.chat_completions import read_chat
from scheduler_service.api.http.messages.answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentPart,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    Stop,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenCount,
    ToolUsePart,
)
from scheduler_service.api.http.messages.conversation import chat_of, message_warnings
from scheduler_service.api.http.messages.edits import check_edits
from scheduler_service.api.http.messages.requests import CountTokensRequest, MessagesRequest
from scheduler_service.api.http.prompts import chosen_template
from scheduler_service.api.http.request_options import DecodedCall, RequestNames
from scheduler_service.api.http.tool_calls import ParserMaker, object_of
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import EndReason
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.tenants.caller import Call

_STOP_REASONS = {EndReason.STOP: "end_turn", EndReason.LENGTH: "max_tokens", EndReason.ABORT: "abort"}
# The signature of each thinking block. Clients omit blocks without a signature from the next request.
_SIGNATURE = "unsigned"
# The field names of a Messages request, by the names of the chat fields that they become.
_NAMES = RequestNames(
    "messages",
    continue_final_message="messages",
    max_completion_tokens="max_tokens",
    stop="stop_sequences",
    response_format="output_config.format",
    thinking_token_budget="thinking.budget_tokens",
)
_Result = TypeVar("_Result")


class MessageEvents:
    """A converter from generated output to the events of a streamed message of Anthropic's Messages API. One object
    converts the deltas (pieces of new output) of one output."""

    def __init__(self, parser: OutputParser, head: MessageAnswer, *, shows_thinking: bool) -> None:
        """Create the event writer for one message. `parser` splits the output into text, reasoning and tool calls.
        `head` is the message at its start, without content. If `shows_thinking` is false, the thinking blocks do not
        contain the text of the reasoning."""
        self._parser = parser
        self._head = head
        self._shows_thinking = shows_thinking
        self._index = -1  # of the block that was started last
        self._kind: type[OutputPart] | None = None  # the content of the open block; None if no block is open
        self._has_begun = False
        self._has_calls = False

    def events_for(self, delta: Delta, progress: PromptProgress) -> Iterator[MessageEvent]:
        """Convert a delta (a piece of new output) into message events and yield them. Before the events of the first
        delta, yield `message_start`. After the events of the last delta, yield `message_delta` and `message_stop`."""
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(self._head)
        for part in self._parser.feed(delta.text, is_last=delta.end is not None):
            yield from self._tell_part(part)
        if delta.end is not None:
            yield from self._close()
            reason = _STOP_REASONS[delta.end.reason]
            if delta.end.reason is EndReason.STOP and (self._has_calls or delta.stop_text is not None):
                reason = "tool_use" if self._has_calls else "stop_sequence"
            yield MessageDelta(Stop(reason, delta.stop_text), message_usage(progress))
            yield MessageStop()

    def _tell_part(self, part: OutputPart) -> Iterator[MessageEvent]:
        match part:
            case CallStart():
                self._has_calls = True
                yield from self._open(Arguments, ToolUsePart(f"toolu_{secrets.token_hex(12)}", part.name, {}))
            case Arguments():
                yield BlockDelta(self._index, InputDelta(part.text))
            case Reasoning():
                if self._kind is not Reasoning:
                    yield from self._open(Reasoning, ThinkingPart(""))
                if self._shows_thinking:
                    yield BlockDelta(self._index, ThinkingDelta(part.text))
            case Content(text) if text:
                if self._kind is not Content:
                    yield from self._open(Content, TextPart(""))
                yield BlockDelta(self._index, TextDelta(text))

    def _open(self, kind: type[OutputPart], block: ContentPart) -> Iterator[MessageEvent]:
        yield from self._close()
        self._index += 1
        self._kind = kind
        yield BlockStart(self._index, block)

    def _close(self) -> Iterator[MessageEvent]:
        if self._kind is Reasoning:
            yield BlockDelta(self._index, SignatureDelta(_SIGNATURE))
        if self._kind is not None:
            self._kind = None
            yield BlockStop(self._index)


async def answer_message(
    request: MessagesRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/v1/messages`. Return the JSON of the message, or None if the message was sent as a stream of
    events. Raises RefusedError if the request is invalid or refused."""
    with _NAMES.translate_refusals():
        asked, make_parser = await _read(request, call, intake, stream)
        async with begin_requests(asked, call, intake, is_streamed=bool(request.stream)) as [progress]:
            await _in_turn(request, call, intake, check_edits, request, len(progress.prompt_token_ids))
            message_id = f"msg_{request.request_id or secrets.token_hex(12)}"
            head = MessageAnswer(
                message_id, "message", "assistant", model_name, [], None, None, message_usage(progress)
            )
            is_omitted = request.thinking is not None and request.thinking.display == "omitted"
            event_writer = MessageEvents(make_parser(), head, shows_thinking=not is_omitted)

            async def events_for(delta: Delta) -> list[MessageEvent]:
                """Convert a delta (a piece of new output) into message events. A long delta is converted on a thread,
                which the tenants use in turn."""
                return await progress.write(
                    progress.num_values(delta), lambda: list(event_writer.events_for(delta, progress))
                )

            events = await output_events(progress, (), events_for, stream, is_streamed=bool(request.stream))
            return encode(join_events(events)) if events else None


async def count_tokens(request: CountTokensRequest, call: Call, intake: Intake, stream: EventStream) -> bytes:
    """Answer a call of `/v1/messages/count_tokens`. Return the JSON with the number of tokens in the prompt. Raises
    RefusedError if the request is invalid."""
    with _NAMES.translate_refusals():
        asked, _ = await _read(request, call, intake, stream)
        num_tokens = len(await intake.tokenize(asked.requests[0]))
        await _in_turn(request, call, intake, check_edits, request, num_tokens)
        return encode(TokenCount(num_tokens))


async def _read(
    request: CountTokensRequest, call: Call, intake: Intake, stream: EventStream
) -> tuple[DecodedCall, ParserMaker]:
    """Convert a Messages request into a generation request. Add warnings to the answer for the parts of the request
    that are ignored. If the model has no reasoning, the thinking budget is ignored, because clients send a budget to
    every model. Raises RefusedError if the request is invalid.

    Returns the decoded call with the generation request, and a function that creates an output parser.
    """
    chat = await _in_turn(request, call, intake, chat_of, request)
    for text in await _in_turn(request, call, intake, message_warnings, request):
        stream.warn(text)
    if not intake.chats.format_of(chosen_template(intake.model, None)).has_reasoning:
        chat = msgspec.structs.replace(chat, thinking_token_budget=None)
    return await read_chat(chat, call, intake, stream)


async def _in_turn(
    request: CountTokensRequest, call: Call, intake: Intake, work: Callable[..., _Result], *args: Any
) -> _Result:
    return await intake.turns.run_in_turn(call.caller.tenant(request.tenant or ""), call.size, work, *args)


def message_usage(progress: PromptProgress) -> MessageUsage:
    num_cached = progress.num_cached_tokens
    return MessageUsage(len(progress.prompt_token_ids) - num_cached, sum(progress.num_tokens), num_cached)


def join_events(events: Iterable[MessageEvent]) -> MessageAnswer:
    """Build the complete message from the events of a streamed message. Raises ValueError if `events` contains no
    `message_start`."""
    heads: list[ContentPart] = []
    texts: list[list[str]] = []
    message: MessageAnswer | None = None
    for event in events:
        match event:
            case MessageStart():
                message = event.message
            case BlockStart():
                heads.append(event.content_block)
                texts.append([])
            case BlockDelta(delta=TextDelta(text) | ThinkingDelta(text) | InputDelta(text)):
                texts[-1].append(text)
            case MessageDelta() if message is not None:
                content = [_filled(head, "".join(pieces)) for head, pieces in zip(heads, texts, strict=True)]
                stop = event.delta
                message = msgspec.structs.replace(
                    message,
                    content=content,
                    stop_reason=stop.stop_reason,
                    stop_sequence=stop.stop_sequence,
                    usage=event.usage,
                )
    if message is None:
        raise ValueError("the events have no message_start")
    return message


def _filled(head: ContentPart, text: str) -> ContentPart:
    match head:
        case TextPart():
            return TextPart(text)
        case ThinkingPart():
            return ThinkingPart(text, _SIGNATURE)
    return ToolUsePart(head.id, head.name, object_of(text))
