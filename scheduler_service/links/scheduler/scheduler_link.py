"""A front end's link to its scheduler: one GenerateMany call at a time, restarted when it is lost.

The link is the request engine of a front end, as the step loop is the engine of a scheduler. The scheduler sends tokens
in columns, and the link distributes them to the outputs of the requests. A stream's id is also the sequence id in this
process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from pagewire.common.wire.generate_many import GenerateManyClient, is_broken
from pagewire.common.wire.sampling_rules import MAX_SAMPLES
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES, too_large
from pagewire.common.wire.transport.wrong_port import RightPort
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.api.grpc.generate_response import decode_end, decode_logprobs
from scheduler_service.api.grpc.resolved_request import FRONT_END_PROTOCOL, encode_resolved
from scheduler_service.core.request import EndReason, OutputMode
from scheduler_service.links.reconnection import LINK_OPTIONS, Backoff, Ended, Outage, Outdated
from scheduler_service.links.scheduler.forwarder import Forwarder
from scheduler_service.links.scheduler.scheduler_availability import SchedulerAvailability
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.output import SampleRecord, TokenCounts
from scheduler_service.serving.refusal import REASONS, Reason, RefusedError, invalid

logger = logging.getLogger(__name__)

CHANNEL_OPTIONS = (
    *LINK_OPTIONS,
    ("grpc.max_receive_message_length", 64 << 20),
    # The maximum unread bytes of a stream whose client does not read.
    ("grpc.http2.lookahead_bytes", 256 << 10),
    ("grpc.http2.bdp_probe", 0),
)
_PORT = RightPort.of_link(
    "scheduler",
    give="give the gRPC port of a scheduler in --scheduler, which is 50051 unless its --port says otherwise",
    strangers="a worker's port or another service's",
)


class SchedulerLink:
    """The connection of a front end to its scheduler. It is also the front end's engine: it sends requests to the
    scheduler, and passes the scheduler's output to these requests."""

    def __init__(
        self,
        dialler: Dialler,
        address: str,
        *,
        model: ModelInfo,
        read_metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
        tenants_revision: Callable[[], str] = str,
        clock: Clock | None = None,
    ) -> None:
        """Create the link of a front end to its scheduler; `run` then connects it. `address` is the scheduler's network
        address, for messages. `read_metadata` returns the gRPC metadata that identify this front end, such as its API
        key. `tenants_revision` returns the digest of the front end's file of tenants, or an empty string without such a
        file. The default `clock` is the event loop's clock."""
        self.clock = clock or Clock()
        self._dialler = dialler
        self._address = address
        self._model = model
        self._read_metadata = read_metadata
        self._tenants_revision = tenants_revision
        self._client: GenerateManyClient | None = None  # None if not connected
        self.availability = SchedulerAvailability(address)
        self.forwarder = Forwarder(self.availability, read_metadata, tenants_revision)
        self._outage = Outage(f"the scheduler at {address}", logger, _PORT, self.availability.disconnected)
        self._idle = asyncio.Event()
        self._idle.set()
        self._streams: dict[int, tuple[SampleRecord, ActiveRequest]] = {}  # streams that have not ended
        self._requests: dict[tuple[str, str], ActiveRequest] = {}  # by tenant and request id
        self._first_stream_id = 0  # of the next call; an id is never used twice, not even by another call
        self.counts = TokenCounts()  # of this front end's clients
        self.num_ended: Counter[EndReason] = Counter()  # samples
        self.num_failed = 0  # requests
        self._loads: asyncio.Future[scheduler_pb2.GetLoadsResponse] | None = None  # the pending answer of get_loads

    # Operations of requests

    async def loads(self) -> scheduler_pb2.GetLoadsResponse:
        """Ask the scheduler for its current load and return the answer. Raise RefusedError if the scheduler is not
        connected, or if the connection is lost before the answer."""
        if self._client is None:
            raise RefusedError(Reason.UNAVAILABLE, self.availability.unreachable_reason)
        if self._loads is None:
            self._loads = asyncio.get_running_loop().create_future()
            self._client.send(scheduler_pb2.GenerateManyRequest(get_loads=scheduler_pb2.GetLoadsRequest()))
        return await asyncio.shield(self._loads)

    def submit(self, request: ActiveRequest, trace: Mapping[str, str]) -> None:
        """Send a request to the scheduler. Raise RefusedError if the scheduler is not connected, or if the request is
        too large for a message.

        If the scheduler refuses the request later, the request fails with the scheduler's error. The link does not add
        samples to the request's ready list: it processes their output itself.
        """
        client, asked = self._client, request.request
        if client is None or self.availability.unreachable_reason:
            raise RefusedError(Reason.UNAVAILABLE, self.availability.unreachable_reason)
        timeout = None if asked.deadline is None else max(0.0, asked.deadline - self.clock.now())
        submission = scheduler_pb2.Submission(
            stream_id=client.next_stream_id,
            timeout_seconds=timeout,
            traceparent=trace.get("traceparent"),
            tenants_revision=self._tenants_revision(),
            read_whole=asked.output_mode is OutputMode.WHOLE,
            tells_kept=not request.keeps_all,
        )
        message = scheduler_pb2.GenerateManyRequest(submit=submission)
        message.submit.resolved.CopyFrom(encode_resolved(asked, self.availability.max_sequence_tokens))
        if message.ByteSize() > MAX_MESSAGE_BYTES:  # too large a message would end the call, with all of its requests
            raise invalid("", too_large(message.ByteSize(), MAX_MESSAGE_BYTES))
        client.submit(message, asked.n)
        request.queued(asked, range(submission.stream_id, client.next_stream_id), self.clock.now())
        self._streams.update((output.sequence_id, (output, request)) for output in request.outputs)
        self._requests.setdefault((asked.tenant, asked.request_id), request)
        self._idle.clear()

    def abort(self, tenant: str, request_id: str) -> None:
        """Abort a tenant's request, so that its samples end with the reason ABORT. Raise KeyError if this front end has
        no unfinished request with this id."""
        self._abort(self._requests[tenant, request_id])

    def cancel(self, request: ActiveRequest) -> None:
        """Abort a request whose output no client reads any more.

        The samples of the request end later, when the scheduler reports their end. Another request can use the request
        id at once.
        """
        if any(output.sequence_id in self._streams for output in request.outputs):
            self._free_name(request)
            self._abort(request)

    def stop(self, output: SampleRecord, num_tokens: int) -> None:
        """Report to the scheduler that a stop text ended a sample after its first `num_tokens` output tokens."""
        if output.sequence_id in self._streams:
            self._send_stop(output, num_tokens)

    def count_kept_tokens(self, output: SampleRecord, num_kept: int) -> None:
        """Record how many output tokens of a sample the client kept, and report the number to the scheduler. The
        remaining tokens count as discarded."""
        self.counts.count_kept_tokens(output, num_kept)
        self._send_stop(output, num_kept)

    def _send_stop(self, output: SampleRecord, num_tokens: int) -> None:
        if self._client is not None:
            stop = scheduler_pb2.StreamStop(stream_id=output.sequence_id, num_tokens=num_tokens)
            self._client.send(scheduler_pb2.GenerateManyRequest(stop=stop))

    @property
    def num_running(self) -> int:
        """The number of samples of this front end's requests that have not ended. It can be read from any thread."""
        return len(self._streams)

    # Running

    async def run(self) -> None:
        """Connect to the scheduler, and connect again whenever the connection is lost, until cancelled. One
        GenerateMany RPC (a stream) transmits all requests. If this RPC ends, its requests fail."""
        backoff = Backoff()
        while True:
            ended = await self._run_call()
            if ended.was_held:
                self._outage.end()
                logger.log(
                    logging.INFO if ended.is_calm else logging.WARNING,
                    "lost the scheduler at %s: %s",
                    self._address,
                    ended.reason,
                )
                self.availability.disconnected(ended.reason)
                self._fail_all(str(self.availability.lost(ended.reason)))
            else:
                self._outage.tell(ended.reason, is_calm=ended.is_calm)
            self.availability.changed.set()
            await backoff.wait(ended)

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when all requests of this front end have ended."""
        self.availability.drain()
        await self._idle.wait()

    def end_all(self, message: str) -> None:
        """Fail every request of this front end with the error UNAVAILABLE and this message."""
        self.availability.drain()
        for request in {request for _, request in self._streams.values()}:
            if self._client is not None:
                self._client.abort(request.outputs[0].sequence_id)
        self._fail_all(message)

    async def _run_call(self) -> Ended:
        """Connect to the scheduler and run one GenerateMany RPC (a stream that transmits all requests) until it ends.
        Return the reason of the end."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(await self._dialler.channel())
        call = stub.GenerateMany(wait_for_ready=True, metadata=tuple(self._read_metadata()))
        client, is_held = GenerateManyClient(call, self._first_stream_id), False
        try:
            connecting = call.wait_for_connection()
            await self._outage.connect(connecting, self._dialler, stub.GenerateMany)
            async for message in call:
                if message.HasField("server_info"):
                    if mismatch := _mismatch(message.server_info, self._model, self._tenants_revision()):
                        return Ended(mismatch, is_held)
                    if not is_held:
                        is_held, self._client, self.forwarder.stub = True, client, stub
                        client.begin()
                        logger.info("connected to the scheduler at %s", self._address)
                    self.availability.reported(message.server_info)
                self._take(message)
            return Ended("it has shut down", is_held, is_calm=True)
        except Outdated as error:
            return Ended(str(error), False, is_calm=True)
        except grpc.aio.AioRpcError as error:
            if is_broken(error):
                return Ended("the connection broke", is_held)
            is_calm = error.code() is grpc.StatusCode.UNAVAILABLE and not is_held
            return Ended(f"{error.code().name}: {error.details()}", is_held, is_calm=is_calm)
        finally:
            self._client, self._first_stream_id = None, client.next_stream_id
            client.end()

    # Output from the scheduler

    def _take(self, message: scheduler_pb2.GenerateManyResponse) -> None:
        if message.HasField("loads") and self._loads is not None:
            self._loads.set_result(message.loads)
            self._loads = None
        counts = message.num_tokens or [1] * len(message.stream_ids)
        token_ids, start = list(message.token_ids), 0
        for stream_id, count in zip(message.stream_ids, counts, strict=True):
            if stream := self._streams.get(stream_id):
                self._deliver(*stream, token_ids[start : start + count])
            start += count
        for entry in message.deltas:
            if stream := self._streams.get(entry.stream_id):
                self._take_delta(*stream, entry.delta)
        for failure in message.failures:
            # The request's first samples may have ended already.
            samples = map(self._streams.get, range(failure.stream_id, failure.stream_id + MAX_SAMPLES))
            requests = (stream[1] for stream in samples if stream)
            if request := next((each for each in requests if each.outputs[0].sequence_id == failure.stream_id), None):
                self._forget(request)
                self.num_failed += 1
                request.fail(RefusedError(REASONS.get(failure.code, Reason.INTERNAL), failure.message, failure.field))

    def _take_delta(self, output: SampleRecord, request: ActiveRequest, delta: scheduler_pb2.GenerateResponse) -> None:
        end = cumulative_logprob = None
        if delta.HasField("usage"):
            end = decode_end(output.sequence_id, delta)
            # The log-probability of a beam hypothesis. For a sample, it is the sum of its tokens' log-probabilities.
            cumulative_logprob = delta.cumulative_logprob if request.request.beam is not None else None
            self.num_ended[end.reason] += 1
            del self._streams[output.sequence_id]
            if not any(each.sequence_id in self._streams for each in request.outputs):
                self._forget(request)
        logprobs, prompt_logprobs = map(decode_logprobs, delta.logprobs), map(decode_logprobs, delta.prompt_logprobs)
        self._deliver(output, request, list(delta.token_ids), logprobs, prompt_logprobs, cumulative_logprob, end)

    def _deliver(self, output: SampleRecord, request: ActiveRequest, token_ids: list[int], *more: Any) -> None:
        if request.keeps_all:
            self.counts.num_kept += len(token_ids)
        request.process_output(output, token_ids, *more)

    def _abort(self, request: ActiveRequest) -> None:
        """Ask the scheduler to abort a request. If the request is not known to the scheduler, because it has not been
        sent yet, end its samples at once."""
        if self._client is None or self._client.abort(request.outputs[0].sequence_id):
            return
        usage = scheduler_pb2.Usage(prompt_tokens=len(request.request.prompt_token_ids))
        end = scheduler_pb2.GenerateResponse(finish_reason=scheduler_pb2.FINISH_REASON_ABORT, usage=usage)
        for output in request.outputs:
            self._take_delta(output, request, end)

    def _forget(self, request: ActiveRequest) -> None:
        for output in request.outputs:
            self._streams.pop(output.sequence_id, None)
        self._free_name(request)
        if not self._streams:
            self._idle.set()

    def _free_name(self, request: ActiveRequest) -> None:
        name = (request.request.tenant, request.request.request_id)
        if self._requests.get(name) is request:
            del self._requests[name]

    def _fail_all(self, message: str) -> None:
        if self._loads is not None:
            self._loads.set_exception(RefusedError(Reason.UNAVAILABLE, message))
            self._loads.exception()  # retrieved here, because the caller may be gone
            self._loads = None
        while self._streams:
            _, request = next(iter(self._streams.values()))
            self._forget(request)
            self.num_failed += 1
            request.fail(RefusedError(Reason.UNAVAILABLE, message))


def _mismatch(info: scheduler_pb2.GetServerInfoResponse, model: ModelInfo, tenants_revision: str) -> str:
    """Check that a front end matches the scheduler to which it has connected. Return the reason why the front end's
    model or file of tenants does not match, or an empty string. `info` is the scheduler's report about itself."""
    if info.front_end_protocol != FRONT_END_PROTOCOL:
        versions = f"version {info.front_end_protocol} of the front-end protocol, this front end {FRONT_END_PROTOCOL}"
        return f"it speaks {versions}; install the same release for both"
    if info.model_digest != model.digest:
        digests = f"digest {info.model_digest.hex()[:16]}, here {model.digest.hex()[:16]}"
        return f"it serves another model ({digests}); start both with the same --model"
    if tuple(info.eos_token_ids) != model.eos_token_ids:
        tokens = f"{list(info.eos_token_ids)}, here {list(model.eos_token_ids)}"
        return f"its end tokens are {tokens}; start both with the same generation_config.json"
    if info.has_tenants and not tenants_revision:
        # The front end's own credentials would let any caller name any tenant.
        return "it has API keys; start this front end with the same --tenants or --api-key"
    return ""
