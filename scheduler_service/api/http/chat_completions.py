"""The endpoint `/v1/chat/completions`. The model's chat template renders the conversation into a prompt."""

import secrets
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType, structs

from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_template import text_of
from scheduler_service.api.http.answering import (
    PromptProgress,
    answer_call,
    fingerprint,
    finish_reason,
    now,
    stop_reason,
)
from scheduler_service.api.http.answers import (
    ChatAnswer,
    ChatChoice,
    ChatMessage,
    OutputTokensDetails,
    PromptLogprobsField,
    UsageCounts,
)
from scheduler_service.api.http.prompts import (
    FILE_LEFT_OUT,
    FILES_WARNING,
    IMAGE_LEFT_OUT,
    IMAGES_WARNING,
    chosen_template,
    render_messages,
)
from scheduler_service.api.http.request_options import DecodedCall, RequestNames, request_for_prompt, sampling_options
from scheduler_service.api.http.requests import ChatCompletionRequest
from scheduler_service.api.http.token_texts import ReasoningTokens, TokenTexts
from scheduler_service.api.http.tool_calls import (
    MessageParts,
    ParserMaker,
    SampleReader,
    chat_grammars,
    functions_of,
    without_indexes,
)
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_ROLE = "assistant"
# The placeholder for each type of part in a tool's result that the model cannot read.
_LEFT_OUT = {kind: {"type": "text", "text": IMAGE_LEFT_OUT} for kind in ("image_url", "input_image", "image")}
_LEFT_OUT |= {kind: {"type": "text", "text": FILE_LEFT_OUT} for kind in ("file", "input_file")}


class ChatWriter:
    """The writer of the answers of `/v1/chat/completions`. It converts generated output into chat messages (see
    `AnswerWriter`)."""

    num_hidden_tokens = 0

    def __init__(
        self, request: ChatCompletionRequest, head: tuple[str, str], intake: Intake, make_parser: ParserMaker
    ) -> None:
        """Create the writer for the answer to one chat request. `head` contains the answer's id and the model's name.
        `make_parser` returns a new output parser, and is called once for each of the `n` samples."""
        self._request = request
        self._head = head[0], now(), head[1], fingerprint(intake)
        last = request.messages[-1]
        goes_on = request.continue_final_message or request.add_generation_prompt is False
        self._role = str(last["role"]) if goes_on else _ROLE
        self._echoed = text_of(last) if request.echo and last["role"] == self._role else ""
        self._texts = TokenTexts(intake.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        parsers = [make_parser() for _ in range(request.n or 1)]
        joins = request.separate_reasoning is False and request.include_reasoning is not False
        self._readers = [SampleReader(parser, joins_reasoning=joins) for parser in parsers]
        self._reasoning = [ReasoningTokens(self._texts, parser) for parser in parsers if parser.has_reasoning]

    @property
    def output_details(self) -> OutputTokensDetails:
        return OutputTokensDetails(sum(each.count for each in self._reasoning))

    def first_choices(self, progress: PromptProgress) -> list[ChatChoice]:
        openings = [ChatMessage(role=self._role, content="")]
        openings += [ChatMessage(content=self._echoed)] if self._echoed else []
        indexes = range(len(progress.num_tokens))
        return [ChatChoice(index, UNSET, opening, None, None) for index in indexes for opening in openings]

    def choice(self, progress: PromptProgress, delta: Delta, *, is_whole: bool) -> ChatChoice | None:
        request, end = self._request, delta.end
        reader = self._readers[delta.sample_index]
        told = reader.read(delta.text, is_last=end is not None)
        others = self._reasoning[delta.sample_index].others(delta) if self._reasoning else delta
        if request.include_reasoning is False:
            told, delta = told._replace(reasoning=""), others
        shows = any(told) or end is not None or (delta.token_ids and (request.return_token_ids or request.logprobs))
        if not shows:
            return None
        return ChatChoice(
            delta.sample_index,
            self._whole(told) if is_whole else UNSET,
            UNSET if is_whole else _added(told, is_last=end is not None),
            self._texts.chat_logprobs(delta.logprobs) if request.logprobs else None,
            finish_reason(end, calls=reader.num_calls > 0),
            UNSET if end is None else stop_reason(request, delta),
            list(delta.token_ids) if request.return_token_ids else None if is_whole else UNSET,
        )

    def _whole(self, told: MessageParts) -> ChatMessage:
        content = self._echoed + told.content
        reasoning = told.reasoning or None
        calls = without_indexes(told.tool_calls) or UNSET
        says_nothing = reasoning is None and calls is UNSET
        return ChatMessage(self._role, content or ("" if says_nothing else None), None, reasoning, reasoning, calls)

    def answer(
        self,
        choices: list[Any],
        usage: UsageCounts | UnsetType | None,
        progress: PromptProgress | None,
        *,
        is_whole: bool,
    ) -> ChatAnswer:
        request = self._request
        not_asked = None if is_whole else UNSET  # omitted in events, to keep them short
        token_ids: list[int] | UnsetType | None = not_asked
        logprobs: PromptLogprobsField | UnsetType | None = not_asked
        if progress is not None and request.return_token_ids:
            token_ids = list(progress.prompt_token_ids)
        if progress is not None and request.prompt_logprobs is not None and is_whole:
            logprobs = self._texts.prompt_logprobs(progress.logprobs)
        return ChatAnswer(
            *self._head,
            "chat.completion" if is_whole else "chat.completion.chunk",
            choices,
            usage,
            token_ids,
            logprobs,
        )


def _added(told: MessageParts, *, is_last: bool) -> ChatMessage:
    reasoning = told.reasoning or UNSET
    is_empty = not any(told) and not is_last
    return ChatMessage(
        content="" if is_empty else told.content or UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=list(told.tool_calls) or UNSET,
    )


async def without_media(
    request: ChatCompletionRequest, call: Call, intake: Intake, stream: EventStream
) -> ChatCompletionRequest:
    """Return a chat request in which placeholder texts replace the images and files in tool results, because the model
    reads only text. Add a warning to the answer if anything was replaced."""
    warnings: set[str] = set()
    messages = await intake.turns.run_in_turn(
        call.caller.tenant(request.tenant or ""),
        call.size,
        lambda: [_without_media(message, warnings) for message in request.messages],
    )
    for text in sorted(warnings):
        stream.warn(text)
    return structs.replace(request, messages=messages) if warnings else request


def _without_media(message: dict[str, Any], warnings: set[str]) -> dict[str, Any]:
    """Replace the images and files in a chat message by placeholder texts if the message is a tool result, and return
    the new message. Add a warning to `warnings` for each kind of content (images or files) that was replaced. Return
    other messages unchanged."""
    match message:
        case {"role": "tool", "content": list() as parts}:
            kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in parts]
            warnings |= {FILES_WARNING if "file" in kind else IMAGES_WARNING for kind in kinds if kind in _LEFT_OUT}
            return {**message, "content": [*map(_LEFT_OUT.get, kinds, parts)]}
    return message


async def complete_chat(
    request: ChatCompletionRequest, call: Call, intake: Intake, model_name: str, stream: EventStream
) -> bytes | None:
    """Answer a call of `/v1/chat/completions`. Return the JSON of the answer, or None if the answer was sent as a
    stream of events. Raises RefusedError if the request is invalid or refused."""
    asked, make_parser = await read_chat(request, call, intake, stream)
    writer = ChatWriter(request, (asked.answer_id, model_name), intake, make_parser)
    return await answer_call(request, asked, call, intake, writer, stream)


async def read_chat(
    request: ChatCompletionRequest, call: Call, intake: Intake, stream: EventStream
) -> tuple[DecodedCall, ParserMaker]:
    """Convert a chat request into a generation request. Add warnings to the answer for keywords in tool schemas that
    are not enforced, and for a `verbosity` that the chat template does not read. Raises RefusedError if the request is
    invalid.

    Returns the decoded call with the generation request, and a function that creates an output parser.
    """
    tenant = call.caller.tenant(request.tenant or "")
    template = chosen_template(intake.model, request.chat_template)
    output = intake.chats.format_of(template)
    if request.verbosity not in (None, "medium") and "verbosity" not in template:
        stream.warn("verbosity is ignored: the chat template of the model does not read it")
    # Check the schemas first: rendering is expensive.
    functions, left_out = await intake.turns.run_in_turn(tenant, call.size, functions_of, request, output)
    prompt = await render_messages(request, call, intake)
    asked, maker = await intake.turns.run_in_turn(tenant, call.size, _read, request, functions, prompt, call, intake)
    if left_out and asked.requests[0].request.grammar is not None:
        stream.warn(f"keywords in tool schemas that are not enforced: {', '.join(sorted(left_out))}")
    return asked, maker


def parser_maker(request: ChatCompletionRequest, prompt_end: str, intake: Intake) -> ParserMaker:
    """Return a function that creates an output parser for a chat. The parser splits an output into content, reasoning
    and tool calls. `prompt_end` is the end of the rendered prompt; it shows whether the output begins with reasoning.
    Raises RefusedError if a tool of the request is invalid."""
    output = intake.chats.format_of(chosen_template(intake.model, request.chat_template))
    return partial(output.parser, prompt_end, functions_of(request, output)[0])


def _read(
    request: ChatCompletionRequest, functions: dict[str, Parameters], prompt: str, call: Call, intake: Intake
) -> tuple[DecodedCall, ParserMaker]:
    output = intake.chats.format_of(chosen_template(intake.model, request.chat_template))
    options, names = sampling_options(
        request, intake.model, chat_grammars(request, output, functions, prompt, intake.chats)
    )
    read_as = output if request.separate_reasoning is not False else output._replace(thinking=None)
    make_parser = partial(read_as.parser, prompt, functions)
    special_texts = frozenset[str]() if intake.tokenizer is None else intake.tokenizer.special_texts
    if not special_texts.isdisjoint(output.tags(functions)):
        options.setdefault("skip_special_tokens", False)
    for field in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, field) and not request.logprobs:
            raise invalid(field, f"{field} is set, but logprobs is not true; set logprobs, or leave both unset")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
        names["logprobs"] = "logprobs" if request.top_logprobs is None else "top_logprobs"
    most = request.max_completion_tokens
    if most is not None:
        names["max_tokens"] = "max_completion_tokens"
    if most == 0 or (most is None and request.max_tokens not in (None, -1)):
        options["max_tokens"] = request.max_tokens if most is None else most
    called = RequestNames("messages", **names)
    drawn = f"chatcmpl-{secrets.token_hex(12)}"
    with called.translate_refusals():
        read = request_for_prompt(
            request,
            prompt,
            options,
            call,
            intake.model,
            request_id=request.request_id or drawn,
            # The template has already added the special tokens.
            add_special_tokens=False,
            # A default is lowered to the remaining context length.
            default_max_tokens=None if most == -1 else most,
        )
    answer_id = drawn if request.request_id is None else f"chatcmpl-{request.request_id}"
    return DecodedCall([read], answer_id, called, bool(request.echo), bool(request.return_token_ids)), make_parser
