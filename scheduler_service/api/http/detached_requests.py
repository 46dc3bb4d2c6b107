"""Endpoints for detached requests over HTTP. The scheduler stores the requests, so every front end can answer for every
id."""

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import UNSET, Raw

from pagewire.common.wire.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc.generate_response import decode_logprobs
from scheduler_service.api.grpc.request_servicer import Forward, answer_of
from scheduler_service.api.grpc.resolved_request import encode_resolved
from scheduler_service.api.http.answering import counts
from scheduler_service.api.http.answers import DetachedAnswer, DetachedOutput, PromptTokensDetails, encode
from scheduler_service.api.http.request_options import DecodedCall
from scheduler_service.api.http.requests import DetachedQuery, GenerationRequest, NamedRequest
from scheduler_service.api.http.token_texts import TokenTexts
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.detached import unknown_result
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import ParsedRequest
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call
from scheduler_service.serving.turns import PIECE_SIZE

_STATES: Mapping[int, Any] = enum_names(scheduler_pb2.ResultState.DESCRIPTOR)
_FINISH_REASONS = enum_names(scheduler_pb2.FinishReason.DESCRIPTOR)
_OF_ANSWERS = ("stream", "stream_options", "echo", "best_of", "timeout")
_BYTE_VALUES = 4  # cost of converting one byte of a message, in JSON values


async def submit_detached(
    request: GenerationRequest, asked: DecodedCall, call: Call, intake: Intake, forward: Forward
) -> bytes:
    """Submit a detached request, which keeps running if the client disconnects. Return the JSON with the request id,
    which the client uses to read the output later. Raises RefusedError if the call has several prompts, or sets a field
    that detached requests do not support."""
    for field in _OF_ANSWERS:
        if getattr(request, field, None):
            raise invalid(field, f"{field} has no effect in a detached request; leave it or detached unset")
    if getattr(request, "include_reasoning", None) is False:
        raise invalid(
            "include_reasoning", "include_reasoning is false, but detached requests return all text; leave it unset"
        )
    if len(asked.requests) > 1:
        raise invalid(
            "prompt",
            f"a detached request must have one prompt, not {len(asked.requests)}; send each in its own request",
        )
    [parsed] = asked.requests
    with asked.names.translate_refusals():
        submitted = await answer_of(forward("Submit", await encoded_request(parsed, intake), call))
    return encode(DetachedAnswer(submitted.request_id, "running"))


async def read_detached(
    query: DetachedQuery, call: Call, intake: Intake, forward: Forward, stream: EventStream
) -> bytes | None:
    """Return the JSON of the state and outputs of a detached request (a request that keeps running if its client
    disconnects). If `query.stream` is set, send the outputs as a stream of events and return None. Raises RefusedError
    if the request is unknown or the query is invalid."""
    named, texts = _named(query, call), TokenTexts(intake.tokenizer)
    if query.from_token is not None and not query.stream:
        raise invalid("from_token", "from_token is set, but stream is not true; set stream, or leave both unset")
    if not query.stream:
        result = await answer_of(forward("GetResult", scheduler_pb2.GetResultRequest(**named), call))
        if not result.outputs:  # only a record is stored: another endpoint answered the request
            raise unknown_result(query.request_id)
        outputs: list[Any] = []
        for output in result.outputs:
            size = _BYTE_VALUES * output.ByteSize()
            outputs.append(Raw(await intake.turns.run_in_turn(named["tenant"], size, _encoded, output, texts, intake)))
            await asyncio.sleep(0)  # let other tasks run
        failure = result.failure.message if result.HasField("failure") else UNSET
        return encode(DetachedAnswer(result.request_id, _STATES[result.state], outputs, failure))
    message = scheduler_pb2.AttachRequest(**named, from_token=query.from_token or 0)
    async with contextlib.aclosing(forward("Attach", message, call)) as deltas:
        async for delta in deltas:
            is_large = _BYTE_VALUES * delta.ByteSize() > PIECE_SIZE  # it may have the whole vocabulary's logprobs
            work = partial(_encoded, delta, texts, intake)
            await stream.send_event(await intake.turns.call(named["tenant"], work) if is_large else work())
    await stream.end()
    return None


async def abort_request(named: NamedRequest, call: Call, intake: Intake) -> bytes:
    """Abort a running generation request, and return the JSON with its id. The request may come from any API of the
    server. Raises RefusedError if the request is unknown."""
    await intake.abort(**_named(named, call), call=call)
    return encode({"request_id": named.request_id})


def _named(named: NamedRequest, call: Call) -> dict[str, str]:
    return {"request_id": named.request_id, "tenant": call.caller.tenant(named.tenant or "")}


async def encoded_request(parsed: ParsedRequest, intake: Intake, record: bytes = b"") -> scheduler_pb2.SubmitRequest:
    """Build the gRPC message that submits a detached request to the scheduler. The message contains the token ids of
    the prompt. It also contains the stop texts, because the scheduler itself searches the output for them. The
    scheduler stores `record` with the request. Raises RefusedError if the prompt is invalid or too long."""
    token_ids = await intake.tokenize(parsed, OutputMode.DETACHED)
    limit = intake.engine.availability.max_sequence_tokens
    return scheduler_pb2.SubmitRequest(
        resolved=encode_resolved(parsed.fit(token_ids, intake.model, limit, None), limit),
        stop=parsed.stop,
        include_stop_text=parsed.include_stop_text,
        skip_special_tokens=parsed.skip_special_tokens,
        record=record,
    )


def _encoded(delta: scheduler_pb2.GenerateResponse, texts: TokenTexts, intake: Intake) -> bytes:
    usage = delta.usage
    # The model's own end tokens are not reported as the stop reason.
    token_id = None if delta.stop_token_id in intake.model.eos_token_ids else delta.stop_token_id
    stops = {"stop_text": delta.stop_text, "stop_token_id": token_id}
    prompt_logprobs = list(map(decode_logprobs, delta.prompt_logprobs))
    output = DetachedOutput(
        delta.index,
        delta.first_token,
        delta.text,
        list(delta.token_ids),
        _FINISH_REASONS.get(delta.finish_reason),
        stops.get(delta.WhichOneof("stop") or ""),
        counts(usage.prompt_tokens, usage.completion_tokens, PromptTokensDetails(usage.cached_tokens))
        if delta.HasField("usage")
        else None,
        texts.chat_logprobs(map(decode_logprobs, delta.logprobs)) if delta.logprobs else UNSET,
        texts.prompt_logprobs(prompt_logprobs) if prompt_logprobs else UNSET,
    )
    return encode(output)
