"""The endpoints `/v1/responses`, `/v1/responses/input_tokens` and `/v1/responses/compact` of OpenAI's Responses API.
Answers consist of items: reasoning, text and calls of functions."""

import dataclasses
import secrets

import msgspec

from pagewire.common.wire.messages import SamplingParams
from scheduler_service.api.http.answering import begin_requests, now, output_events, send_events
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.chat_completions import read_chat
from scheduler_service.api.http.refusals import detailed_error
from scheduler_service.api.http.request_options import DecodedCall, RequestNames
from scheduler_service.api.http.requests import TextFormat
from scheduler_service.api.http.responses.answers import (
    CompactedConversation,
    InputTokenCount,
    MessageOutput,
    ResponseAnswer,
    ResponseEvent,
)
from scheduler_service.api.http.responses.conversation import items_of, to_chat_request, warnings_of
from scheduler_service.api.http.responses.requests import (
    CompactionItem,
    InputItem,
    MessageItem,
    ResponsesRequest,
    TextField,
    VendorTool,
)
from scheduler_service.api.http.responses.response_teller import ID_PREFIX
from scheduler_service.api.http.responses.stored_responses import PROMPT_END_CHARS, ResponseRecord, StoredResponses
from scheduler_service.api.http.tool_calls import ParserMaker
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import Delta
from scheduler_service.serving.parsed_request import SAME_NUMBERS, check_request_id
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

# The field names of a Responses request, by the names of the chat fields that they become.
_NAMES = RequestNames("input", messages="input", max_tokens="max_output_tokens", response_format="text.format")
_SUMMARIZE = (
    "Summarize this conversation for a reader who goes on with it and sees only the user's messages besides: what is "
    "asked for, what was done and found, with names, paths and numbers, and what is left to do. Call no tool."
)
_USED = [name for name in ResponseAnswer.__struct_fields__ if name in SAME_NUMBERS]  # sampling options to report
_REFERENCE = "item_reference"  # the type of items that refer to an earlier item by its id


async def answer_response(
    request: ResponsesRequest,
    call: Call,
    intake: Intake,
    stored: StoredResponses,
    model_name: str,
    stream: EventStream,
) -> bytes | None:
    """Answer a call of `/v1/responses`. Return the JSON of the response, or None if the response was sent as a stream
    of events. Raises RefusedError if the request is invalid or refused."""
    is_stored = request.store is not False
    if request.background and not is_stored:
        raise invalid(
            "background", "background is true, but store is false, so no client could read the response; set store"
        )
    if request.background and request.timeout is not None:
        raise invalid("timeout", "timeout has no effect on a background response; leave timeout or background unset")
    with _NAMES.translate_refusals():
        request, conversation, call, asked, make_parser = await _read(request, call, intake, stored, stream)
        prompt = asked.requests[0].prompt
        assert isinstance(prompt, str), "the prompt of a chat is text"
        begun = _begun(request, asked.requests[0].request.sampling, model_name)
        record = ResponseRecord(conversation, begun, prompt_end=prompt[-PROMPT_END_CHARS:])
        if request.background:
            return await stored.begin(request, record, asked, stream)
        if is_stored:
            await stored.in_turn(call.size, record.encoded)  # refuse a record that is too large before computing
        event_writer = stored.event_writer(make_parser, record, request)
        try:
            async with begin_requests(asked, call, intake, is_streamed=bool(request.stream)) as [progress]:

                async def events_for(delta: Delta) -> list[ResponseEvent]:
                    events = await event_writer.events_for(delta)
                    if delta.end is not None and is_stored:  # store it before the client can refer to it
                        kept = await stored.keep(msgspec.structs.replace(record, response=events[-1].response))
                        events[-1] = msgspec.structs.replace(events[-1], response=kept)
                    return events

                events = await output_events(
                    progress, event_writer.begin(), events_for, stream, is_streamed=bool(request.stream)
                )
                return encode(events[-1].response) if events else None
        except RefusedError as refused:
            if refused.overflow is None or not request.stream:
                raise
            # Codex compacts its conversation after this event, but gives up after an HTTP error.
            error = detailed_error(refused, "/v1/responses").error
            await send_events(
                [*event_writer.begin(), *event_writer.fail(error.message, "context_length_exceeded")], stream
            )
            await stream.end()
            return None


async def count_input_tokens(
    request: ResponsesRequest, call: Call, intake: Intake, stored: StoredResponses, stream: EventStream
) -> bytes:
    """Answer a call of `/v1/responses/input_tokens`. Return the JSON with the number of tokens in the prompt. Raises
    RefusedError if the request is invalid."""
    with _NAMES.translate_refusals():
        _, _, _, asked, _ = await _read(request, call, intake, stored, stream)
        return encode(InputTokenCount(len(await intake.tokenize(asked.requests[0]))))


async def compact_conversation(
    request: ResponsesRequest,
    call: Call,
    intake: Intake,
    stored: StoredResponses,
    model_name: str,
    stream: EventStream,
) -> bytes:
    """Answer a call of `/v1/responses/compact`: let the model summarize a conversation. Return the JSON of the shorter
    conversation, which consists of the user's messages and the summary. A client may send it in place of the original
    conversation. Raises RefusedError if the request is invalid or refused, or if the model writes no summary."""
    if request.stream or request.background:
        field = "stream" if request.stream else "background"
        raise invalid(field, f"{field} is true, but a compacted conversation is returned as a whole; leave it unset")
    if request.model is None:
        raise invalid("model", "model is not set; name the model that writes the summary")
    with _NAMES.translate_refusals():
        last = MessageItem(role="user", content=_SUMMARIZE)
        request, conversation, call, asked, make_parser = await _read(request, call, intake, stored, stream, last)
        begun = _begun(request, asked.requests[0].request.sampling, model_name)
        async with begin_requests(asked, call, intake, is_streamed=False) as [progress]:
            event_writer = stored.event_writer(make_parser, ResponseRecord(conversation, begun), request)
            events = await output_events(progress, (), event_writer.events_for, stream, is_streamed=False)
    response = events[-1].response
    assert response is not None, "the last event contains the response"
    messages = [item for item in response.output if isinstance(item, MessageOutput)]
    summary = "".join(part.text for message in messages for part in message.content)
    if not summary:
        raise RefusedError(Reason.INTERNAL, "the model wrote no summary; raise max_output_tokens, or try again")
    kept = [item for item in conversation if isinstance(item, MessageItem) and item.role == "user"]
    compacted = CompactionItem(encrypted_content=summary, id=f"cmp_{request.request_id}")
    return encode(CompactedConversation(response.id, response.created_at, [*kept, compacted], response.usage))


async def _read(
    request: ResponsesRequest,
    call: Call,
    intake: Intake,
    stored: StoredResponses,
    stream: EventStream,
    *last: InputItem,
) -> tuple[ResponsesRequest, list[InputItem], Call, DecodedCall, ParserMaker]:
    """Convert a Responses request into a generation request. `last` contains items to append to the conversation.
    Raises RefusedError if the request is invalid.

    Returns a tuple of:
    - the request, with a random id if the client has set none;
    - the items of the conversation, without `last`;
    - the HTTP call, with the size of the conversation in bytes;
    - the decoded call with the generation request;
    - a function that creates an output parser.
    """
    request_id = request.request_id or secrets.token_hex(24)
    check_request_id(request_id)  # the ids of items contain it
    request = msgspec.structs.replace(request, request_id=request_id)
    conversation, call = await _conversation(request, call, stored, stream)
    chat = await stored.in_turn(call.size, to_chat_request, request, [*conversation, *last])
    return request, conversation, call, *await read_chat(chat, call, intake, stream)


async def _conversation(
    request: ResponsesRequest, call: Call, stored: StoredResponses, stream: EventStream
) -> tuple[list[InputItem], Call]:
    """Collect the conversation of a Responses request: the items of the previous response, if the request names one,
    and then the items of the request's input. Add warnings to the answer for items that are ignored, replaced or not
    enforced. Raises RefusedError if an item is invalid or unknown.

    Returns the items, and the HTTP call with the size of the items in bytes.
    """
    conversation: list[InputItem] = []
    if request.previous_response_id:
        conversation, size = await stored.conversation(request.previous_response_id)
        call = dataclasses.replace(call, size=max(call.size, size))
    given = [] if isinstance(request.input, str) else request.input or []
    if ids := {str(item.get("id")) for item in given if item.get("type") == _REFERENCE}:
        found = await stored.items(ids)
        call = dataclasses.replace(call, size=call.size + sum(map(len, found.values())))
        items = [msgspec.json.decode(found[item["id"]]) if item.get("type") == _REFERENCE else item for item in given]
        request = msgspec.structs.replace(request, input=items)
    conversation += await stored.in_turn(call.size, items_of, request, conversation)
    if not conversation:
        raise invalid("input", "neither input nor previous_response_id is set; send one of them")
    for text in warnings_of(request, conversation):
        stream.warn(text)
    return conversation, call


def _begun(request: ResponsesRequest, used: SamplingParams, model_name: str) -> ResponseAnswer:
    text = request.text or TextField()
    return ResponseAnswer(
        id=f"{ID_PREFIX}{request.request_id}",
        created_at=now(),
        model=model_name,
        status="queued" if request.background else "in_progress",
        output=[],
        usage=None,
        incomplete_details=None,
        error=None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        max_tool_calls=request.max_tool_calls,
        top_logprobs=request.top_logprobs or 0,
        tool_choice=request.tool_choice or "auto",
        tools=[tool for tool in request.tools or () if not isinstance(tool, VendorTool)],
        text=msgspec.structs.replace(text, format=text.format or TextFormat(), verbosity=text.verbosity or "medium"),
        reasoning=request.reasoning,
        metadata=request.metadata or {},
        background=bool(request.background),
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        user=request.user,
        store=request.store is not False,
        **{name: getattr(used, name) for name in _USED},
    )
