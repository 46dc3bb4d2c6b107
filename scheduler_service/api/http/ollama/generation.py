"""The endpoints `/api/chat` and `/api/generate` of Ollama's API. Streamed answers consist of lines of JSON."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, structs

from pagewire.common.chat.chat_output import ChatFormat
from scheduler_service.api.http.answering import PromptProgress, answer_call, finish_reason
from scheduler_service.api.http.answers import ToolCall, UsageCounts, encode, encode_list
from scheduler_service.api.http.chat_completions import read_chat
from scheduler_service.api.http.completions import read_completion
from scheduler_service.api.http.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer, OllamaReply
from scheduler_service.api.http.ollama.conversation import NAMES, chat_of, completion_of, max_output_tokens
from scheduler_service.api.http.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from scheduler_service.api.http.requests import GenerationRequest
from scheduler_service.api.http.token_texts import TokenTexts
from scheduler_service.api.http.tool_calls import MessageParts, ParserMaker, SampleReader, object_of
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

_Asked = OllamaChatRequest | OllamaGenerateRequest
_Line = OllamaChatAnswer | OllamaGenerateAnswer
_NOTHING = MessageParts("")
_PLAIN_TEXT: ParserMaker = partial(ChatFormat(None, None).parser, "", {})


class OllamaWriter:
    """The writer of the answers of `/api/chat` and `/api/generate` (see `AnswerWriter`). Each tool call is sent as a
    whole, when the output is complete."""

    output_details = UNSET
    num_hidden_tokens = 0

    def __init__(self, request: _Asked, model_name: str, intake: Intake) -> None:
        """Create the writer for the answer to one request. `model_name` is the name in the answer if the request names
        no model."""
        self.model = request.model or model_name
        self.reader = SampleReader(_PLAIN_TEXT())
        self._request = request
        self._began_at = time.monotonic_ns()
        self._texts = TokenTexts(intake.tokenizer)
        self._calls: list[tuple[ToolCall, list[str]]] = []  # each with the pieces of its arguments
        self._whole = self.line()
        self._ending: tuple[PromptProgress, str | None] | None = None

    def line(self, told: MessageParts = _NOTHING, calls: Sequence[dict[str, Any]] = (), **fields: Any) -> _Line:
        """Return an object of the answer with the content and reasoning in `told`, the given tool calls, and further
        fields."""
        fields |= {"model": self.model, "created_at": datetime.now(UTC)}
        thinking: str | UnsetType = told.reasoning or UNSET
        if isinstance(self._request, OllamaGenerateRequest):
            return OllamaGenerateAnswer(response=told.content, thinking=thinking, **fields)
        reply = OllamaReply("assistant", told.content, thinking, list(calls) or UNSET)
        return OllamaChatAnswer(message=reply, **fields)

    def first_choices(self, progress: PromptProgress) -> list[Any]:
        return []

    def choice(self, progress: PromptProgress, delta: Delta, *, is_whole: bool) -> _Line | None:
        told = self.reader.read(delta.text, is_last=delta.end is not None)
        for call in told.tool_calls:
            if call.id is not UNSET:
                self._calls.append((call, []))
            self._calls[-1][1].append(call.function.arguments)
        logprobs = encode_list(map(self._texts.chat_logprob, delta.logprobs)) if delta.logprobs else UNSET
        calls: list[dict[str, Any]] = []
        if delta.end is not None:
            self._ending = progress, finish_reason(delta.end)
            for index, (call, pieces) in enumerate(self._calls):
                function = {"index": index, "name": call.function.name, "arguments": object_of("".join(pieces))}
                calls.append({"id": call.id, "function": function})
        self._whole = self.line(told, calls, logprobs=logprobs)
        return self._whole if is_whole or told.content or told.reasoning or calls or delta.logprobs else None

    def answer(
        self,
        choices: list[Any],
        usage: UsageCounts | UnsetType | None,
        progress: PromptProgress | None,
        *,
        is_whole: bool,
    ) -> _Line:
        if not isinstance(usage, UsageCounts):  # in a stream, only the last event reports the usage
            line: _Line = choices[0]
            return line
        assert self._ending is not None, "the output has ended"
        (progress, reason), ended_at = self._ending, time.monotonic_ns()
        return structs.replace(
            self._whole if is_whole else self.line(),
            done=True,
            done_reason=reason,
            total_duration=ended_at - self._began_at,
            load_duration=progress.queued_at - self._began_at,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=progress.first_output_at - progress.queued_at,
            eval_count=usage.completion_tokens,
            eval_duration=ended_at - progress.first_output_at,
        )


async def answer_ollama(
    request: _Asked, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/api/chat` or `/api/generate`. Return the JSON of the answer, or None if the answer was sent as
    a stream. A request without messages, prompt and suffix, which loads or unloads a model of Ollama, is answered when
    a worker has loaded the model. Raises RefusedError if the request is invalid or refused."""
    writer = OllamaWriter(request, model_name, intake)
    template = intake.model.chat_template
    if not (request.messages if isinstance(request, OllamaChatRequest) else request.prompt or request.suffix):
        await intake.engine.availability.wait_for_first_worker(OutputMode.STREAMED)
        if reason := intake.engine.availability.refusal():
            raise RefusedError(Reason.UNAVAILABLE, reason)
        unloads = request.keep_alive is not None and re.search("[1-9]", str(request.keep_alive)) is None
        return encode(writer.line(done=True, done_reason="unload" if unloads else "load"))
    if request.think and not (template and intake.chats.format_of(template).has_reasoning):
        raise invalid("think", f'"{writer.model}" does not support thinking; leave think unset')
    if request.top_logprobs and not request.logprobs:
        raise invalid(
            "top_logprobs", "top_logprobs is set, but logprobs is not true; set logprobs, or leave both unset"
        )
    tenant = call.caller.tenant(request.tenant or "")
    with NAMES.translate_refusals():
        asked: GenerationRequest
        if isinstance(request, OllamaGenerateRequest) and (request.raw or request.suffix or template is None):
            asked = completion = await intake.turns.run_in_turn(tenant, call.size, completion_of, request)
            read = await read_completion(completion, call, intake)
            read.requests[0] = replace(read.requests[0], default_max_tokens=max_output_tokens(request))
        else:
            asked = chat = await intake.turns.run_in_turn(tenant, call.size, chat_of, request)
            read, make_parser = await read_chat(chat, call, intake, stream)
            writer.reader = SampleReader(make_parser())
        return await answer_call(asked, read, call, intake, writer, stream, is_timed=True)
