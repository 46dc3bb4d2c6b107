"""The endpoints `/api/chat` and `/api/generate` of Ollama's API. A streamed answer consists of lines of JSON; joined,
they are the whole answer."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET, Raw, UnsetType

from pagewire.common.chat.chat_output import Arguments, CallStart, Content, OutputParser, Reasoning
from scheduler_service.api.http.answering import PromptProgress, begin_requests, deltas_of, finish_reason
from scheduler_service.api.http.answers import encode, encode_list
from scheduler_service.api.http.chat_completions import read_chat
from scheduler_service.api.http.completions import read_completion
from scheduler_service.api.http.ollama.answers import (
    MadeCall,
    MadeFunction,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaReply,
)
from scheduler_service.api.http.ollama.conversation import chat_of, completion_of, field_names, max_output_tokens
from scheduler_service.api.http.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from scheduler_service.api.http.request_options import DecodedCall
from scheduler_service.api.http.token_texts import TokenTexts
from scheduler_service.api.http.tool_calls import object_of
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_Request = OllamaChatRequest | OllamaGenerateRequest
_Result = TypeVar("_Result")
_NAMES = {OllamaChatRequest: field_names("messages"), OllamaGenerateRequest: field_names("prompt")}


class OutputPiece(NamedTuple):
    """The parts that new output adds to an answer. `logprobs` contains JSON, or is empty."""

    content: str = ""
    thinking: str = ""
    tool_calls: tuple[MadeCall, ...] = ()
    logprobs: bytes = b""


class PieceReader:
    """A converter from the deltas (pieces of new output) of one output to the pieces of an answer. Each tool call is
    returned as a whole, as soon as its arguments are complete."""

    def __init__(self, parser: OutputParser | None, texts: TokenTexts, *, with_logprobs: bool) -> None:
        """Create a reader of one output. `parser` splits the output into text, reasoning and tool calls. Without it,
        the output consists of text."""
        self._parser = parser
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._num_calls = 0
        self._call: tuple[str, list[str]] | None = None  # name and pieces of the arguments of an incomplete call

    def read(self, delta: Delta) -> OutputPiece:
        """Convert a delta to the piece of the answer that it adds."""
        is_last = delta.end is not None
        parts = [Content(delta.text)] if self._parser is None else self._parser.feed(delta.text, is_last=is_last)
        content, thinking, calls = list[str](), list[str](), list[MadeCall]()
        for part in parts:
            match part:
                case Content():
                    content.append(part.text)
                case Reasoning():
                    thinking.append(part.text)
                case CallStart():
                    calls += self._complete_call()
                    self._call = part.name, []
                case Arguments() if self._call is not None:
                    self._call[1].append(part.text)
        if is_last or content or thinking:
            calls += self._complete_call()
        logprobs = b""
        if self._with_logprobs and delta.logprobs:
            logprobs = bytes(encode_list(map(self._texts.chat_logprob, delta.logprobs)))
        return OutputPiece("".join(content), "".join(thinking), tuple(calls), logprobs)

    def _complete_call(self) -> Iterator[MadeCall]:
        if self._call is not None:
            name, pieces = self._call
            yield MadeCall(
                f"call_{secrets.token_hex(12)}", MadeFunction(self._num_calls, name, object_of("".join(pieces)))
            )
            self._num_calls += 1
            self._call = None


class AnswerLines:
    """A writer of the answer to one call, as the lines of a stream or as a whole. It measures the times that the answer
    reports."""

    def __init__(self, request: _Request, model_name: str) -> None:
        """Create the writer of an answer. `model_name` is used if the request names no model."""
        self.model = request.model or model_name
        self._is_chat = isinstance(request, OllamaChatRequest)
        self._began_at = time.monotonic_ns()
        self._queued_at = self._first_at = 0

    def mark_queued(self) -> None:
        """Record that the request is queued now."""
        self._queued_at = time.monotonic_ns()

    def mark_output(self) -> None:
        """Record that output has arrived now."""
        self._first_at = self._first_at or time.monotonic_ns()

    def line(self, piece: OutputPiece, *, done: bool = False, **ending: Any) -> OllamaAnswer:
        """Return an object of the answer that contains `piece`. `ending` contains the fields of the last object."""
        head: dict[str, Any] = {"model": self.model, "created_at": datetime.now(UTC), "done": done, **ending}
        if piece.logprobs:
            head["logprobs"] = Raw(piece.logprobs)
        thinking: str | UnsetType = piece.thinking or UNSET
        if self._is_chat:
            reply = OllamaReply("assistant", piece.content, thinking, list(piece.tool_calls) or UNSET)
            return OllamaChatAnswer(message=reply, **head)
        return OllamaGenerateAnswer(response=piece.content, thinking=thinking, **head)

    def last_line(self, piece: OutputPiece, reason: str, progress: PromptProgress) -> OllamaAnswer:
        """Return the last object of the answer, with the counts of tokens and the measured times."""
        ended_at = time.monotonic_ns()
        first_at = self._first_at or ended_at
        return self.line(
            piece,
            done=True,
            done_reason=reason,
            total_duration=ended_at - self._began_at,
            load_duration=self._queued_at - self._began_at,
            prompt_eval_count=len(progress.prompt_token_ids),
            prompt_eval_duration=first_at - self._queued_at,
            eval_count=sum(progress.num_tokens),
            eval_duration=ended_at - first_at,
        )


async def answer_ollama(
    request: _Request, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/api/chat` or `/api/generate`. Return the JSON of the answer, or None if the answer was sent as
    a stream. A request without messages or without a prompt is answered at once: elsewhere, it loads or unloads the
    model. Raises RefusedError if the request is invalid or refused."""
    lines = AnswerLines(request, model_name)
    if is_empty(request):
        return encode(lines.line(OutputPiece(), done=True, done_reason="unload" if request.unloads else "load"))
    _check_options(request, lines.model, intake)
    with _NAMES[type(request)].translate_refusals():
        asked, parser = await _read(request, call, intake, stream)
        reader = PieceReader(parser, TokenTexts(intake.tokenizer), with_logprobs=bool(request.logprobs))
        async with begin_requests(asked, call, intake, is_streamed=request.is_streamed, is_timed=True) as [progress]:
            lines.mark_queued()
            return await _write(lines, reader, progress, stream if request.is_streamed else None)


def is_empty(request: _Request) -> bool:
    if isinstance(request, OllamaChatRequest):
        return not request.messages
    return not request.prompt and not request.suffix


async def _write(
    lines: AnswerLines, reader: PieceReader, progress: PromptProgress, stream: EventStream | None
) -> bytes | None:
    """Send the output of a request to `stream`, one line for each delta (piece of new output). Without `stream`, return
    the JSON of the whole answer."""
    pieces, reason = list[OutputPiece](), ""
    async for delta in deltas_of(progress):
        lines.mark_output()
        piece = await progress.write(progress.num_values(delta), reader.read, delta)
        reason = finish_reason(delta.end) or ""
        if stream is None:
            pieces.append(piece)
        elif any(piece):
            await stream.send_event(encode(lines.line(piece)))
    if stream is None:
        num_values = sum(len(piece.content) + len(piece.logprobs) for piece in pieces)
        return await progress.write(num_values, lambda: encode(lines.last_line(_joined(pieces), reason, progress)))
    await stream.send_event(encode(lines.last_line(OutputPiece(), reason, progress)))
    await stream.end()
    return None


def _joined(pieces: list[OutputPiece]) -> OutputPiece:
    logprobs = b",".join(piece.logprobs[1:-1] for piece in pieces if piece.logprobs)
    return OutputPiece(
        "".join(piece.content for piece in pieces),
        "".join(piece.thinking for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
        b"[%b]" % logprobs if logprobs else b"",
    )


def _check_options(request: _Request, name: str, intake: Intake) -> None:
    """Check the fields `think` and `top_logprobs`. Raises RefusedError if the model cannot think although the request
    asks for it, or if the request asks for the most likely tokens without log-probabilities."""
    template = intake.model.chat_template
    thinks = template is not None and intake.chats.format_of(template).has_reasoning
    is_plain = isinstance(request, OllamaGenerateRequest) and bool(request.raw or request.suffix)
    if request.think and (is_plain or not thinks):
        reason = (
            "raw or suffix is set, so no chat template is applied"
            if is_plain
            else f'"{name}" does not support thinking'
        )
        raise invalid("think", f"{reason}; leave think unset")
    if request.top_logprobs and not request.logprobs:
        raise invalid(
            "top_logprobs", "top_logprobs is set, but logprobs is not true; set logprobs, or leave both unset"
        )


async def _read(
    request: _Request, call: Call, intake: Intake, stream: EventStream
) -> tuple[DecodedCall, OutputParser | None]:
    """Convert a request into a generation request. Raises RefusedError if the request is invalid.

    Returns the decoded call with the generation request, and a parser of the output, or None if the output is text.
    """
    if isinstance(request, OllamaGenerateRequest) and request.suffix:
        raise invalid("suffix", "suffix is set, but the model cannot insert text; leave suffix unset")
    if isinstance(request, OllamaGenerateRequest) and (request.raw or intake.model.template_file is None):
        if request.system:
            raise invalid("system", "system is set, but no chat template is applied; put the text into prompt")
        completion = await _in_turn(request, call, intake, completion_of, request, request.prompt or "")
        asked = await read_completion(completion, call, intake)
        limited = replace(asked.requests[0], default_max_tokens=max_output_tokens(request))
        return asked._replace(requests=[limited]), None
    chat = await _in_turn(request, call, intake, chat_of, request)
    asked, make_parser = await read_chat(chat, call, intake, stream)
    return asked, make_parser()


async def _in_turn(request: _Request, call: Call, intake: Intake, work: Callable[..., _Result], *args: Any) -> _Result:
    return await intake.turns.run_in_turn(call.caller.tenant(request.tenant or ""), call.size, work, *args)
