"""SchedulerService of a scheduler. Beyond requests, it serves detached requests and reports about the scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.authentication import Authenticator
from scheduler_service.api.grpc import report
from scheduler_service.api.grpc.generate_response import whole_response, write_all, write_deltas
from scheduler_service.api.grpc.kv_event_stream import kv_event_messages
from scheduler_service.api.grpc.request_servicer import RequestServicer
from scheduler_service.api.grpc.resolved_request import read_submitted
from scheduler_service.core import explain
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.detached import DetachedRequests
from scheduler_service.serving.grammar_checks import GrammarChecks
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import check_request_id
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.refusal import Reason, RefusedError, invalid, unknown
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tenants.caller import Call
from scheduler_service.serving.tenants.quota import Quotas


class SchedulerServicer(RequestServicer):
    """The gRPC service SchedulerService of a scheduler. It adds the RPCs that a front end cannot answer itself:
    detached requests, events of the KV cache, and reports."""

    def __init__(
        self,
        step_loop: StepLoop,
        authenticator: Authenticator,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        info: scheduler_pb2.GetServerInfoResponse,
        detached: DetachedRequests,
        generation_throughput: Callable[[], float],
        latencies: Callable[[], Mapping[str, Mapping[str, float]]],
        *,
        max_pending_calls: int,
        text_limits: TextLimits,
        grammars: GrammarChecks,
        retention_limit: Callable[[str], int],
        quotas: Quotas | None = None,
    ) -> None:
        """Create the gRPC service of a scheduler. `info` is the part of GetServerInfo's answer that stays the same.
        `generation_throughput` returns the output tokens per second, and `latencies` the fields of `Latency` by name.
        `retention_limit` returns the longest time, in seconds, for which a tenant's request may ask to keep its cached
        blocks. Without `quotas`, tenants have no quotas."""
        intake = Intake(
            step_loop,
            model,
            tokenizer,
            max_pending_calls=max_pending_calls,
            text_limits=text_limits,
            detached=detached,
            quotas=quotas,
            grammars=grammars,
            retention_limit=retention_limit,
        )
        super().__init__(intake, authenticator, self.server_info, self._loads)
        self._step_loop = step_loop
        self._grammars = grammars
        self._info = info
        self._detached = detached
        self._generation_throughput = generation_throughput
        self._latencies = latencies

    # Detached requests

    async def Submit(
        self, request: scheduler_pb2.SubmitRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.SubmitResponse:
        call = replace(self._authenticator.call(context), time_remaining=None)
        parsed = read_submitted(request, call, self.intake.model)
        with self._detached.room(parsed.request.tenant, request.record):
            active = await self.intake.begin(parsed, call, OutputMode.DETACHED)
            self._detached.add(active, request.record)
        return scheduler_pb2.SubmitResponse(request_id=active.request.request_id)

    async def Attach(self, request: scheduler_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        active = self._detached.find(self._tenant(request, context), request.request_id)
        await write_deltas(active, context, first_tokens_of(request, active))

    async def GetResult(
        self, request: scheduler_pb2.GetResultRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetResultResponse:
        record, active = self._detached.kept(self._tenant(request, context), request.request_id)
        ended = scheduler_pb2.GetResultResponse(
            request_id=request.request_id, state=scheduler_pb2.RESULT_STATE_FINISHED
        )
        response = ended if active is None else await result_of(active)
        response.record = record
        return response

    async def KeepRecord(
        self, request: scheduler_pb2.KeepRecordRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.KeepRecordResponse:
        tenant = self._tenant(request, context)
        check_request_id(request.request_id)
        self._detached.add_record(tenant, request.request_id, request.record)
        return scheduler_pb2.KeepRecordResponse()

    async def DeleteResult(
        self, request: scheduler_pb2.DeleteResultRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DeleteResultResponse:
        self._detached.forget(self._tenant(request, context), request.request_id)
        return scheduler_pb2.DeleteResultResponse()

    # The scheduler itself

    async def GetRequest(
        self, request: scheduler_pb2.GetRequestRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetRequestResponse:
        try:
            found = explain.report(self._step_loop.state, self._tenant(request, context), request.request_id)
        except KeyError:
            raise unknown(request.request_id) from None
        return report.encode_report(found, self._step_loop.clock.now())

    async def GetBlocks(
        self, request: scheduler_pb2.GetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetBlocksResponse:
        self._authenticator.call(context).caller.check_operator("the map of blocks")
        found = explain.block_map(self._step_loop.state)
        return scheduler_pb2.GetBlocksResponse(
            owners=found.owners,
            device_blocks=found.device,
            host_blocks=found.host,
            device_states=found.device_states,
            host_states=found.host_states,
        )

    async def SubscribeKvEvents(
        self, request: scheduler_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self._authenticator.call(context).caller.check_operator("the content of the prefix cache")
        await write_all(kv_event_messages(request, self._step_loop.kv_events, self._info.instance_id), context)

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        return self.server_info()

    async def GetLoads(
        self, request: scheduler_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetLoadsResponse:
        return self._loads(self._authenticator.call(context))

    def server_info(self) -> scheduler_pb2.GetServerInfoResponse:
        """Return the current answer to GetServerInfo, with the state of the worker."""
        availability = self._step_loop.availability
        capacity = availability.capacity
        response = scheduler_pb2.GetServerInfoResponse(
            max_sequence_tokens=availability.max_sequence_tokens,
            unavailable_reason=availability.refusal(),
            structured_output_refusal=self._grammars.refusal,
        )
        response.MergeFrom(self._info)
        for name in report.WORKERS_LIMITS if capacity is not None else ():
            setattr(response, name, min(getattr(response, name), getattr(capacity, name)))
        if capacity is not None and self._step_loop.exchange.is_connected:
            response.worker.CopyFrom(report.encode_worker(capacity, self._step_loop.exchange.epoch))
        return response

    def _loads(self, call: Call) -> scheduler_pb2.GetLoadsResponse:
        """Return the current load of the scheduler. Raise RefusedError if the caller is not an operator."""
        call.caller.check_operator("the load of the server")
        return report.encode_loads(
            explain.stats(self._step_loop.state),
            generation_throughput=self._generation_throughput(),
            worker_connected=self._step_loop.exchange.is_connected,
            num_worker_losses=self._step_loop.availability.num_worker_losses,
            **self._latencies(),
        )


async def result_of(active: ActiveRequest) -> scheduler_pb2.GetResultResponse:
    """Build the answer of GetResult for a detached request: the state of the request, its output so far, and its error
    if it has failed."""
    # The state is read first. Tokens may be added to the outputs while the response is built, but a finished request
    # has complete outputs.
    state = scheduler_pb2.RESULT_STATE_FINISHED if active.has_ended else scheduler_pb2.RESULT_STATE_RUNNING
    request_id = active.request.request_id
    outputs = [await whole_response(request_id, output, active.max_delta_tokens) for output in active.outputs]
    response = scheduler_pb2.GetResultResponse(request_id=request_id, state=state, outputs=outputs)
    if (error := active.error) is not None:
        failure = scheduler_pb2.Failure(code=error.reason.grpc_code, message=str(error))
        response.MergeFrom(scheduler_pb2.GetResultResponse(state=scheduler_pb2.RESULT_STATE_FAILED, failure=failure))
    return response


def first_tokens_of(message: scheduler_pb2.AttachRequest, active: ActiveRequest) -> list[int]:
    """Determine where a client that attaches to a detached request begins to read. Return the index of the first output
    token for each sample. Raise RefusedError if an index is after the sample's last token, or if there are more indexes
    than samples."""
    num_samples = len(active.outputs)
    if len(message.from_tokens) > num_samples:
        raise invalid(
            "from_tokens",
            f"from_tokens has {len(message.from_tokens)} entries, but the request has {num_samples} samples; send "
            "at most one for each",
        )
    first_tokens = [*message.from_tokens, *[message.from_token] * (num_samples - len(message.from_tokens))]
    for index, (output, first_token) in enumerate(zip(active.outputs, first_tokens, strict=True)):
        if first_token > output.num_tokens:
            raise RefusedError(
                Reason.OUT_OF_RANGE,
                f"sample {index} has {output.num_tokens} tokens, but the stream was to begin at token "
                f"{first_token}; begin at {output.num_tokens} or before",
                f"from_tokens[{index}]" if index < len(message.from_tokens) else "from_token",
            )
    return first_tokens
