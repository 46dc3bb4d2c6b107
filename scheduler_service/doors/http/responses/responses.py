"""`/v1/responses`, OpenAI's Responses API: chats, whose answers are items of reasoning, text, calls of functions."""

import dataclasses
import secrets

import msgspec

from scheduler_service.doors.http.answering import begin_requests, deltas_of, now
from scheduler_service.doors.http.chat_completions import read_chat
from scheduler_service.doors.http.event_stream import EventStream
from scheduler_service.doors.http.options import RequestNames
from scheduler_service.doors.http.requests import ChatCompletionRequest
from scheduler_service.doors.http.responses.answers import ResponseAnswer
from scheduler_service.doors.http.responses.conversation import chat_meant, items_of, warnings_of
from scheduler_service.doors.http.responses.requests import InputItem, ResponsesRequest, VendorTool
from scheduler_service.doors.http.responses.response_teller import ID_PREFIX, tell_events
from scheduler_service.doors.http.responses.stored_responses import PROMPT_END_CHARS, ResponseRecord, StoredResponses
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

# What a request calls the fields of the chat that it means.
_NAMES = RequestNames("input", messages="input", max_tokens="max_output_tokens", response_format="text.format")
_encode = msgspec.json.Encoder().encode


async def answer_response(
    request: ResponsesRequest,
    call: Call,
    intake: Intake,
    stored: StoredResponses,
    model_name: str,
    stream: EventStream,
) -> bytes | None:
    """Return the response, unless it is streamed. Raises RefusedError."""
    is_stored = request.store is not False
    if request.background and not is_stored:
        raise invalid("background", "background is true, but store is false: nothing could be read of it; set store")
    if request.background and request.timeout is not None:
        raise invalid("timeout", "timeout is of an answer, and one in background is not waited for; leave it unset")
    request = msgspec.structs.replace(request, request_id=request.request_id or secrets.token_hex(24))
    with _NAMES.in_refusals():
        conversation: list[InputItem] = []
        if request.previous_response_id:
            conversation, size = await stored.conversation(request.previous_response_id)
            call = dataclasses.replace(call, size=max(call.size, size))
        chat = await stored.in_turn(call.size, _chat, request, conversation)
        for text in warnings_of(request, conversation):
            stream.warn(text)
        asked, make_parser = await read_chat(chat, call, intake)
        prompt = asked.requests[0].prompt
        assert isinstance(prompt, str), "chats are of texts"
        record = ResponseRecord(conversation, _begun(request, model_name), prompt_end=prompt[-PROMPT_END_CHARS:])
        if request.background:
            return await stored.begin(request, record, asked, stream)
        if is_stored:
            await stored.in_turn(call.size, record.encoded)  # what would not be kept is not computed
        async with begin_requests(asked, call, intake, is_streamed=bool(request.stream)) as [progress]:
            teller = stored.teller(make_parser, record, request)
            if not request.stream:
                await progress.active.wait_for_end()
            events = list(teller.begin())
            async for delta in deltas_of(progress):
                events += await teller.tell(delta)
                if delta.end is not None and is_stored:  # before its client can ask for it
                    kept = await stored.keep(msgspec.structs.replace(record, response=events[-1].response))
                    events[-1] = msgspec.structs.replace(events[-1], response=kept)
                if request.stream:
                    await tell_events(events, stream)
                    events.clear()
            if request.stream:
                await stream.end()
                return None
            return _encode(events[-1].response)


def _chat(request: ResponsesRequest, conversation: list[InputItem]) -> ChatCompletionRequest:
    """Add what is asked to a conversation, and return the chat that is meant. Raises RefusedError."""
    conversation += items_of(request, conversation)
    return chat_meant(request, conversation)


def _begun(request: ResponsesRequest, model_name: str) -> ResponseAnswer:
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
        temperature=request.temperature,
        top_p=request.top_p,
        tool_choice=request.tool_choice or "auto",
        tools=[tool for tool in request.tools or () if not isinstance(tool, VendorTool)],
        text=request.text or {"format": {"type": "text"}},
        reasoning=request.reasoning,
        metadata=request.metadata,
        background=bool(request.background),
        previous_response_id=request.previous_response_id,
        store=request.store is not False,
    )
