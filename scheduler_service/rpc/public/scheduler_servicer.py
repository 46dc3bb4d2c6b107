"""The public service. Checks come before the first message; a client that goes away takes its request with it, unless
that is detached."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.core.request import OutputMode
from scheduler_service.rpc.public import report
from scheduler_service.rpc.public.detached import DetachedRequest, DetachedRequests
from scheduler_service.rpc.public.generation import generate, write_all
from scheduler_service.rpc.public.history import History
from scheduler_service.rpc.public.intake import Intake
from scheduler_service.rpc.public.kv_event_stream import kv_event_messages
from scheduler_service.rpc.public.prompt_text import TextLimits
from scheduler_service.rpc.public.shared_call import SharedCalls
from scheduler_service.rpc.public.tokenization import Tokenization
from scheduler_service.rpc.status import RpcError, abort
from scheduler_service.rpc.tenants.authentication import check_operator, tenant_of_call
from scheduler_service.rpc.tenants.quota import Quotas
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.serving.tokenizer import Tokenizer

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What does not change while the server runs."""

    version: str
    served_model_name: str
    instance_id: str
    chat_template: str | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    max_pending_calls: int
    text_limits: TextLimits
    has_tenants: bool
    model_digest: bytes
    special_tokens: Mapping[str, str]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        step_loop: StepLoop,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        info: ServerInfo,
        detached: DetachedRequests,
        generation_throughput: Callable[[], float],
        quotas: Quotas | None = None,
    ) -> None:
        """`generation_throughput` is in output tokens per second. Without `quotas` nobody is held to any."""
        self._step_loop = step_loop
        self._model = model
        self._info = info
        self._detached = detached
        self._generation_throughput = generation_throughput
        self._intake = Intake(
            step_loop,
            lambda request, deliver, _, outlet, label: step_loop.submit(request, deliver, outlet, label),
            model,
            tokenizer,
            max_pending_calls=info.max_pending_calls,
            text_limits=info.text_limits,
            is_taken=detached.has,
            quotas=quotas,
        )
        self._tokenization = Tokenization(tokenizer, self._intake.texts, model)
        self._shared_calls = SharedCalls(self._intake, step_loop, self.server_info, self._loads)

    @property
    def intake(self) -> Intake:
        """For other services of the same server: its limits hold for all of them together."""
        return self._intake

    @property
    def num_unread_failures(self) -> int:
        """Failed submissions that clients of GenerateMany have not been told of. May be asked from any thread."""
        return self._shared_calls.num_unread_failures

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def Generate(self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await generate(request, context, self._intake, self._step_loop)
        except RpcError as error:
            await abort(context, error)

    async def GenerateMany(
        self, requests: AsyncIterator[scheduler_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            await self._shared_calls.serve(requests, context)
        except RpcError as error:
            await abort(context, error)

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        try:
            self._step_loop.abort(tenant_of_call(request.tenant), request.request_id)
        except KeyError:
            await abort(context, _unknown(request.request_id))
        except RpcError as error:
            await abort(context, error)
        return scheduler_pb2.AbortResponse()

    async def Submit(
        self, request: scheduler_pb2.SubmitRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.SubmitResponse:
        try:
            return scheduler_pb2.SubmitResponse(request_id=await self._submit(request.request))
        except RpcError as error:
            await abort(context, error)

    async def Attach(self, request: scheduler_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            detached = self._detached.find(tenant_of_call(request.tenant), request.request_id)
            await write_all(detached.responses(request), context)
        except RpcError as error:
            await abort(context, error)

    async def GetResult(
        self, request: scheduler_pb2.GetResultRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetResultResponse:
        try:
            detached = self._detached.find(tenant_of_call(request.tenant), request.request_id)
            return await detached.result()
        except RpcError as error:
            await abort(context, error)

    async def GetRequest(
        self, request: scheduler_pb2.GetRequestRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetRequestResponse:
        try:
            found = self._step_loop.report(tenant_of_call(request.tenant), request.request_id)
        except KeyError:
            await abort(context, _unknown(request.request_id))
        except RpcError as error:
            await abort(context, error)
        return report.encode_report(found, self._step_loop.now())

    async def GetBlocks(
        self, request: scheduler_pb2.GetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetBlocksResponse:
        try:
            check_operator("the map of blocks")
        except RpcError as error:
            await abort(context, error)
        return report.encode_block_map(self._step_loop.block_map())

    async def SubscribeKvEvents(
        self, request: scheduler_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            check_operator("what is in the prefix cache")
            await write_all(kv_event_messages(request, self._step_loop, self._info.instance_id), context)
        except RpcError as error:
            await abort(context, error)

    async def Tokenize(
        self, request: scheduler_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.TokenizeResponse:
        try:
            return await self._tokenization.tokenize(request)
        except RpcError as error:
            await abort(context, error)

    async def Detokenize(
        self, request: scheduler_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DetokenizeResponse:
        try:
            return await self._tokenization.detokenize(request)
        except RpcError as error:
            await abort(context, error)

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        return self.server_info()

    def announce(self) -> None:
        """The server's state has changed: tell those that share a call."""
        self._shared_calls.announce()

    def close(self) -> None:
        """Let calls of GenerateMany end with their last request."""
        self._shared_calls.close()

    def server_info(self) -> scheduler_pb2.GetServerInfoResponse:
        info, capacity = self._info, self._step_loop.capacity
        response = scheduler_pb2.GetServerInfoResponse(
            version=info.version,
            served_model_name=info.served_model_name,
            instance_id=info.instance_id,
            max_model_len=min(info.max_model_len, capacity.max_model_len if capacity else info.max_model_len),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            has_tokenizer=self._model.has_tokenizer,
            chat_template=info.chat_template,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            pipeline_depth=info.pipeline_depth,
            model_digest=info.model_digest,
            max_sequence_tokens=self._step_loop.max_sequence_tokens,
            unavailable_reason=self._step_loop.unavailable_reason,
            special_tokens=info.special_tokens,
            has_tenants=info.has_tenants,
        )
        if capacity is not None and self._step_loop.is_connected:
            response.worker.CopyFrom(report.encode_worker(capacity, self._step_loop.epoch))
        return response

    async def GetLoads(
        self, request: scheduler_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetLoadsResponse:
        try:
            return self._loads()
        except RpcError as error:
            await abort(context, error)

    def _loads(self) -> scheduler_pb2.GetLoadsResponse:
        """Raises RpcError."""
        check_operator("what the server is doing")
        response = report.encode_loads(self._step_loop.stats())
        response.generation_throughput = self._generation_throughput()
        response.worker_connected = self._step_loop.is_connected
        response.num_worker_losses = self._step_loop.num_worker_losses
        return response

    async def _submit(self, message: scheduler_pb2.GenerateRequest) -> str:
        request = await self._intake.resolve(message, None, OutputMode.DETACHED)
        with_logprobs = request.sampling.num_logprobs is not None
        histories = [
            History(request.request_id, index, transcript, with_logprobs=with_logprobs)
            for index, transcript in enumerate(self._intake.transcripts(message, request))
        ]
        detached = DetachedRequest(request.tenant, request.request_id, histories, self._step_loop)
        try:
            self._intake.submit(request, detached.delivery)
        except RpcError:
            detached.delivery.close()
            raise
        self._detached.add(detached)
        return request.request_id


def _unknown(request_id: str) -> RpcError:
    message = f"no request {request_id!r} is running for this tenant"
    return RpcError(grpc.StatusCode.NOT_FOUND, message, "request_id")
