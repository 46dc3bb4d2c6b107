"""Encoding of a sample's output, delta by delta, as GenerateResponses."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, Sequence
from operator import itemgetter
from typing import Any

import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.serving.active_request import ActiveRequest, News
from scheduler_service.serving.output import Delta, OutputReader, SampleRecord

# Proxies close a connection that is silent for a minute or less. With `--worker-grace`, requests of a scheduler without
# a worker fail earlier.
SILENCE_S = 15.0
_MAX_TOP_MESSAGES = 256  # top tokens per position; a longer list is encoded as columns, which is much faster
_WHOLE_DELTA_TOKENS = 256  # encoded in less than a millisecond
FINISH_REASONS = {
    EndReason.STOP: scheduler_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: scheduler_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: scheduler_pb2.FINISH_REASON_ABORT,
}
_END_REASONS = {finish_reason: end_reason for end_reason, finish_reason in FINISH_REASONS.items()}


def encode_delta(request_id: str, delta: Delta) -> scheduler_pb2.GenerateResponse:
    """Encode a piece of a sample's output as the message GenerateResponse. The last piece of a sample also contains the
    end reason, the token counts and the embedding."""
    response = scheduler_pb2.GenerateResponse(
        request_id=request_id,
        index=delta.sample_index,
        first_token=delta.first_token,
        token_ids=delta.token_ids,
        text=delta.text,
        cumulative_logprob=delta.cumulative_logprob,
    )
    if delta.logprobs or delta.prompt_logprobs:
        response.logprobs.extend(map(_encode_logprobs, delta.logprobs))
        response.prompt_logprobs.extend(map(_encode_logprobs, delta.prompt_logprobs))
    if delta.end is not None:
        response.finish_reason = FINISH_REASONS[delta.end.reason]
        response.usage.CopyFrom(usage_of(delta.end))
        response.embedding.extend(decode_embedding(delta.end.embedding))
        if delta.stop_text is not None:
            response.stop_text = delta.stop_text
        elif delta.end.stop_token_id is not None:
            response.stop_token_id = delta.end.stop_token_id
    return response


def decode_delta(response: scheduler_pb2.GenerateResponse) -> Delta:
    """Decode a GenerateResponse to a piece of a sample's output. The result lacks the log-probabilities and the stop
    text or stop token."""
    end = decode_end(0, response) if response.HasField("usage") else None
    return Delta(response.index, response.first_token, list(response.token_ids), response.text, end=end)


def decode_end(sequence_id: int, delta: scheduler_pb2.GenerateResponse) -> SequenceEnd:
    """Convert the last GenerateResponse of a sample into the core's end event of the sample's sequence.

    The message contains no times, so the times of the event are 0 or None.
    """
    return SequenceEnd(
        sequence_id=sequence_id,
        reason=_END_REASONS[delta.finish_reason],
        num_prompt_tokens=delta.usage.prompt_tokens,
        num_cached_tokens=delta.usage.cached_tokens,
        num_output_tokens=delta.usage.completion_tokens,
        stop_token_id=delta.stop_token_id if delta.WhichOneof("stop") == "stop_token_id" else None,
        message="",
        arrived_at=0.0,
        first_scheduled_at=None,
        first_token_at=None,
        embedding=encode_embedding(delta.embedding),
    )


async def write_deltas(
    active: ActiveRequest, context: grpc.aio.ServicerContext, first_tokens: Sequence[int] | None = None
) -> None:
    """Write the output of all samples of a request to the gRPC stream until the request ends. `first_tokens` contains,
    for each sample, the index of the first output token to write (see `ActiveRequest.deltas`).

    Raise RefusedError if the request fails.
    """
    request_id = active.request.request_id
    async with contextlib.aclosing(active.deltas(first_tokens)) as deltas:
        async for delta in deltas:
            await context.write(encode_delta(request_id, delta))


async def send_headers_if_silent(active: ActiveRequest, context: grpc.aio.ServicerContext) -> None:
    """Wait for the first output of a request, but at most SILENCE_S seconds. If none has arrived by then, send the
    response headers of the RPC.

    With the headers, proxies keep the connection open, and routers start their own response. If another server should
    retry a request (`--worker-grace`), the request fails before this time, because a response that has started cannot
    be retried elsewhere.
    """
    news = News()
    active.listeners[news.tell] = None
    try:
        async with asyncio.timeout(SILENCE_S):
            if active.error is None and not any(output.num_tokens for output in active.outputs):
                await news.wait()
    except TimeoutError:
        await context.send_initial_metadata(())
    finally:
        active.listeners.pop(news.tell, None)


async def write_all(messages: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext) -> None:
    """Write the messages of a generator to the gRPC stream. Close the generator when the RPC ends, even if the client
    cancels."""
    async with contextlib.aclosing(messages) as closing:
        async for message in closing:
            await context.write(message)


async def whole_response(
    request_id: str, output: SampleRecord, max_delta_tokens: int = _WHOLE_DELTA_TOKENS
) -> scheduler_pb2.GenerateResponse:
    """Return the output so far of one sample as a single message. The sample's output must be kept after it is read, as
    the output of a detached request is.

    The message is built from pieces of at most `max_delta_tokens` tokens, and other tasks can run between two pieces.
    """
    whole, texts = encode_delta(request_id, output.delta(0, 0)), []
    for delta in OutputReader(output, max_tokens=min(_WHOLE_DELTA_TOKENS, max_delta_tokens)).take():
        texts.append(delta.text)
        part = encode_delta(request_id, delta)
        part.ClearField("first_token")
        whole.MergeFrom(part)
        await asyncio.sleep(0)
    whole.text = "".join(texts)
    return whole


def _encode_logprobs(entry: TokenLogprobs) -> scheduler_pb2.TokenLogprobs:
    message = scheduler_pb2.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)
    if len(entry.top) > _MAX_TOP_MESSAGES:
        message.top_token_ids.extend(map(itemgetter(0), entry.top))
        message.top_logprobs.extend(map(itemgetter(1), entry.top))
    else:
        message.top.extend(scheduler_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top)
    return message


def decode_logprobs(entry: scheduler_pb2.TokenLogprobs) -> TokenLogprobs:
    """Decode the log-probabilities of one token from their message. This is the inverse of `_encode_logprobs`."""
    columns = zip(entry.top_token_ids[:], entry.top_logprobs[:], strict=False)
    top = ((each.token_id, each.logprob) for each in entry.top)
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, (*top, *columns))


def usage_of(end: SequenceEnd) -> scheduler_pb2.Usage:
    """Return the numbers of prompt, cached and output tokens of a sequence that has ended, as a Usage message."""
    return scheduler_pb2.Usage(
        prompt_tokens=end.num_prompt_tokens,
        cached_tokens=end.num_cached_tokens,
        completion_tokens=end.num_output_tokens,
    )


def decode_embedding(data: bytes) -> tuple[float, ...]:
    """Decode an embedding vector from the worker's bytes, which are little-endian float32 numbers."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def encode_embedding(numbers: Sequence[float]) -> bytes:
    """Encode an embedding vector as little-endian float32 bytes. This is the inverse of `decode_embedding`."""
    return struct.pack(f"<{len(numbers)}f", *numbers)
