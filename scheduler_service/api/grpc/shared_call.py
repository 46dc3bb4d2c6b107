"""One GenerateMany call: many requests in one stream, with one message for the new output of all requests.

A request is handled as in Generate: it is checked by `intake.py`, and its output comes from `active_request.py`. Only
the tokens of token-only requests have a faster path: they wait in a ready list and are encoded as columns, with a few
list operations per token. A message is built only after gRPC has accepted the previous message. So a slow client gets
fewer and longer messages.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import chain

import grpc
import grpc.aio

from pagewire.common.wire.sampling_rules import MAX_SAMPLES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc.generate_response import encode_delta
from scheduler_service.api.grpc.resolved_request import read_submitted, submitted
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.active_request import ActiveRequest, News
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.output import OutputReader, ReadyList, SampleRecord
from scheduler_service.serving.refusal import Reason, RefusedError, invalid, timed_out
from scheduler_service.serving.tenants.caller import Call

logger = logging.getLogger(__name__)

# The maximum weight of a message; a token weighs 1. It keeps messages far below gRPC's default limit of 4 MiB.
_MAX_MESSAGE_WEIGHT = 65_536
# The maximum number of failures that a client has not read. At this limit the server stops reading its requests.
_MAX_UNREAD_FAILURES = 1024
_END_OF_STREAM_IDS = 2**64
_LOGPROB_WEIGHT = 32  # so that a message takes a few milliseconds


class _Submitted:
    """A request that a client has submitted over a GenerateMany RPC, and the readers of its output. The request waits
    for admission or runs."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.active: ActiveRequest | None = None  # None until the request is queued
        self.readers: list[OutputReader] = []  # one per sample; sample i has the stream id `stream_id + i`
        self.num_kept: dict[int, int] = {}  # by sample, the number of tokens that the client has reported as kept
        self.error: RefusedError | None = None  # an error other than the active request's
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def failure(self) -> RefusedError | None:
        return self.error or (self.active.error if self.active is not None else None)

    @property
    def has_ended(self) -> bool:
        """Whether all samples of the request have ended without failure, and all of their output has been encoded for
        the client."""
        is_well = self.active is not None and self.active.has_ended and self.active.error is None
        return is_well and all(reader.has_ended for reader in self.readers)


class SharedCall:
    """The server's side of one GenerateMany RPC, over which a client submits many requests and receives their
    output."""

    def __init__(
        self,
        intake: Intake,
        call: Call,
        server_info: Callable[[], scheduler_pb2.GetServerInfoResponse],
        loads: Callable[[Call], scheduler_pb2.GetLoadsResponse] | None,
    ) -> None:
        """Create the server's side of a GenerateMany RPC. `server_info` returns the server's description and state.
        They are part of the first message to the client, and of a later message whenever the state has changed. `loads`
        returns the server's load; without `loads`, the client's command `get_loads` is refused."""
        self._intake = intake
        self._call = call
        self._news = News()
        self._ready_list = ReadyList(self._news.tell)
        self._server_info = server_info
        self._loads = loads
        self._announces = True  # the next message contains the server's state
        self._sends_loads = False  # the next message contains the load
        self._requests: dict[int, _Submitted] = {}  # by the first stream id
        self._streams: dict[int, _Submitted] = {}  # by each stream id
        self._ready: dict[_Submitted, None] = {}  # requests with new output, in order
        # Ended streams of relayed requests. The client has not reported yet how many of their tokens it has kept.
        self._unsettled: dict[int, SampleRecord] = {}
        self._next_stream_id = 0
        self.num_unread_failures = 0  # failed requests whose failure has not been sent yet
        self._room = asyncio.Event()  # set while more failures are allowed
        self._room.set()
        self._is_closing = False  # new submissions are refused

    def announce(self) -> None:
        """Send the server's new state to the client. The server calls this when its state has changed."""
        self._announces = True
        self._news.tell()

    def close(self) -> None:
        """Refuse new requests of this RPC, and end the RPC when its last request has ended."""
        self._is_closing = True
        self._news.tell()

    async def serve(
        self, requests: AsyncIterator[scheduler_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Run the RPC: read the client's commands and write the output of its requests. Return when all requests have
        ended and no more can follow, because the client has half-closed the RPC or `close` was called.

        Raise RefusedError if a command of the client is invalid.
        """
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self.close())
        try:
            while True:
                if reading.done():
                    reading.result()
                if self._ready_list.outputs or self._ready or self._announces or self._sends_loads:
                    message = self._take()
                    if message.ByteSize():
                        await context.write(message)
                elif self._is_closing and not self._requests:
                    return
                else:
                    await self._news.wait()
        finally:
            reading.cancel()
            for request in list(self._requests.values()):
                self._cancel(request)
            for output in self._unsettled.values():  # the client can no longer report the number
                self._intake.engine.count_kept_tokens(output, output.num_published)

    # From the client

    async def _read(self, messages: AsyncIterator[scheduler_pb2.GenerateManyRequest]) -> None:
        async for message in messages:
            command = message.WhichOneof("command")
            if command == "submit":
                await self._room.wait()
                self._begin(message.submit)
            elif command == "abort":
                self._abort(message.abort.stream_id)
            elif command == "stop":
                self._stop(message.stop.stream_id, message.stop.num_tokens)
            elif command == "get_loads":
                if self._loads is None:
                    raise invalid("get_loads", "a front end does not report loads; call the scheduler itself")
                self._sends_loads = True
                self._news.tell()
            else:
                raise invalid(
                    "command",
                    "the message has no command that this server knows; set submit, abort, stop or get_loads",
                )

    def _begin(self, submission: scheduler_pb2.Submission) -> None:
        stream_id = submission.stream_id
        if stream_id < self._next_stream_id or stream_id in self._requests:
            raise invalid(
                "submit.stream_id",
                f"stream_id is {stream_id}, but this call has used ids below {self._next_stream_id}; use higher ids",
            )
        num_samples = submission.resolved.n if submission.HasField("resolved") else submission.request.sampling.n
        end = stream_id + (num_samples if 1 <= num_samples <= MAX_SAMPLES else 1)
        request = _Submitted(stream_id)
        self._requests[stream_id] = request
        if end > _END_OF_STREAM_IDS:
            error = invalid(
                "submit.stream_id",
                f"stream_id is {stream_id} and n is {num_samples}, but stream ids end at {_END_OF_STREAM_IDS - 1}, and "
                "every sample needs one; use a smaller stream_id",
            )
            self._fail(request, error)
            return
        self._next_stream_id = end
        if submission.HasField("timeout_seconds"):
            seconds = max(0.0, submission.timeout_seconds)
            request.timer = asyncio.get_running_loop().call_later(seconds, self._expire, request)
        if self._is_closing:
            self._fail(request, RefusedError(Reason.UNAVAILABLE, "the server is shutting down; call another one"))
        else:
            request.task = asyncio.create_task(self._submit(submission, request))

    async def _submit(self, submission: scheduler_pb2.Submission, request: _Submitted) -> None:
        try:
            await self._queue_request(submission, request)
        except RefusedError as error:
            self._fail(request, error)
        except Exception:
            logger.exception("a request of a GenerateMany call could not be started")
            self._fail(request, RefusedError(Reason.INTERNAL, "the request failed; see the server's log"))

    async def _queue_request(self, submission: scheduler_pb2.Submission, request: _Submitted) -> None:
        """Queue the request of a Submission message in the engine. First check the fields that only a Submission has.
        Raise RefusedError if the request is invalid or refused."""
        message, token_only = submission.request, submission.token_only
        has_text = not (token_only or submission.HasField("resolved"))
        if submission.tenants_revision:
            self._call.caller.check_forwarded(submitted(submission).tenant, submission.tenants_revision)
        if token_only and message.WhichOneof("prompt") == "text":
            raise invalid("text", "a token-only request has no text; send the prompt as token_ids")
        if token_only and message.sampling.stop:
            raise invalid(
                "sampling.stop", "a token-only request has no stop texts; find them in the output and send stop"
            )
        call = replace(
            self._call,
            trace={"traceparent": submission.traceparent} if submission.traceparent else self._call.trace,
            time_remaining=submission.timeout_seconds if submission.HasField("timeout_seconds") else None,
        )
        output_mode = OutputMode.WHOLE if submission.read_whole else OutputMode.STREAMED
        active = await self._intake.begin(
            read_submitted(submission, call, self._intake.model),
            call,
            output_mode,
            with_text=has_text,
            ready_list=None if has_text else self._ready_list,
            label=request.stream_id,
            is_relayed=submission.tells_kept,
        )
        active.listeners[lambda: self._mark_ready(request)] = None
        request.active = active
        request.readers = [OutputReader(output, max_tokens=active.max_delta_tokens) for output in active.outputs]
        last = request.stream_id + len(request.readers)
        self._streams.update(dict.fromkeys(range(request.stream_id, last), request))

    def _abort(self, stream_id: int) -> None:
        request = self._requests.get(stream_id)
        if request is None:
            return
        if request.active is None:
            self._fail(request, RefusedError(Reason.CANCELLED, "the request was aborted before it was queued"))
        else:
            request.active.abort()

    def _stop(self, stream_id: int, num_tokens: int) -> None:
        request = self._streams.get(stream_id)
        if request is not None and request.active is not None:
            index = stream_id - request.stream_id
            request.num_kept[index] = num_tokens
            self._intake.engine.stop(request.active.outputs[index], num_tokens)
        elif stream_id in self._unsettled:
            self._intake.engine.count_kept_tokens(self._unsettled.pop(stream_id), num_tokens)

    def _expire(self, request: _Submitted) -> None:
        self._fail(request, timed_out())

    def _fail(self, request: _Submitted, error: RefusedError) -> None:
        if request.error is None:
            self.num_unread_failures += 1
            if self.num_unread_failures >= _MAX_UNREAD_FAILURES:
                self._room.clear()
        # The traceback is dropped: its frames refer to the request, a cycle that only a full collection would free.
        request.error = request.failure or error.with_traceback(None)
        self._mark_ready(request)

    def _cancel(self, request: _Submitted) -> None:
        """Remove a request from the RPC. Cancel its task and timer, and abort its samples that have not ended."""
        del self._requests[request.stream_id]
        if request.error is not None:
            self.num_unread_failures -= 1
            self._room.set()
        self._ready.pop(request, None)
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()
            request.task = None  # its frames refer to the request, a cycle that only a full collection would free
        if request.timer is not None:
            request.timer.cancel()
        for index in range(len(request.readers)):
            self._streams.pop(request.stream_id + index, None)
        if request.active is not None:
            if request.active.is_relayed:
                self._count_kept_tokens(request, request.active)
            request.active.cancel()

    def _count_kept_tokens(self, request: _Submitted, active: ActiveRequest) -> None:
        """Count the output tokens that the client kept of a relayed request. The client of such a request looks for
        stop texts itself, and reports how many tokens of each sample it kept. If this report is missing for an ended
        sample, remember the sample until the report arrives.

        A sample that has not ended yet is counted at its end, and all its tokens count as kept.
        """
        active.is_relayed = False
        for index, output in enumerate(active.outputs):
            if output.is_over and (index in request.num_kept or request.failure is not None):
                self._intake.engine.count_kept_tokens(output, request.num_kept.get(index, output.num_published))
            elif output.is_over:
                self._unsettled[request.stream_id + index] = output

    # To the client

    def _mark_ready(self, request: _Submitted) -> None:
        if request.stream_id in self._requests:
            self._ready[request] = None
            self._news.tell()

    def _take(self) -> scheduler_pb2.GenerateManyResponse:
        """Return the next message to the client, with the new output of all requests. If the output exceeds the maximum
        size of a message, the rest remains for the next message."""
        message = scheduler_pb2.GenerateManyResponse()
        if self._announces:
            self._announces = False
            message.server_info.CopyFrom(self._server_info())
        if self._sends_loads and self._loads is not None:
            self._sends_loads = False
            message.loads.CopyFrom(self._loads(self._call))
        self._take_tokens(message)
        self._take_deltas(message, _MAX_MESSAGE_WEIGHT - len(message.token_ids))
        return message

    def _take_tokens(self, message: scheduler_pb2.GenerateManyResponse) -> None:
        stream_ids: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        outputs = self._ready_list.take()
        for position, output in enumerate(outputs):
            if len(token_ids) >= _MAX_MESSAGE_WEIGHT:
                self._ready_list.put_back(outputs[position:])
                break
            new = output.pop_plain_tokens()
            if new is not None:
                stream_ids.append(output.label)
                counts.append(len(new))
                token_ids += new
            elif (request := self._streams.get(output.label)) is not None and request.active is not None:
                # The sample has ended; its reader returns the end.
                request.active.process_output(output)
        message.stream_ids.extend(stream_ids)
        message.token_ids.extend(token_ids)
        if len(token_ids) != len(stream_ids):
            message.num_tokens.extend(counts)

    def _take_deltas(self, message: scheduler_pb2.GenerateManyResponse, room: int) -> None:
        while self._ready and room > 0:
            request = next(iter(self._ready))
            # The remaining deltas are sent in the next message.
            for delta in chain.from_iterable(map(OutputReader.take, request.readers)):
                assert request.active is not None
                response = encode_delta(request.active.request.request_id, delta)
                message.deltas.add(stream_id=request.stream_id + response.index, delta=response)
                room -= _weight(response)
                if room <= 0:
                    break
            else:
                del self._ready[request]
                error = request.failure
                if request.has_ended:
                    self._cancel(request)
                elif error is not None:
                    message.failures.add(
                        stream_id=request.stream_id,
                        code=error.reason.grpc_code,
                        message=str(error),
                        field=error.field,
                        retry_delay_seconds=error.reason.retry_delay_s or None,
                    )
                    self._cancel(request)


def _weight(response: scheduler_pb2.GenerateResponse) -> int:
    entries = (*response.logprobs, *response.prompt_logprobs)
    num_logprobs = sum(1 + len(entry.top) + len(entry.top_token_ids) for entry in entries)
    num_values = len(response.token_ids) + len(response.text) + len(response.embedding)
    return 1 + num_values + _LOGPROB_WEIGHT * num_logprobs
