"""The public service. Checks come before the first message; a client that goes away takes its request with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.core.plan import WorkerCapacity
from scheduler_service.core.request import AdmissionError, AdmissionReason, Request, SchedulerStats
from scheduler_service.rpc.call import Call, Delta
from scheduler_service.rpc.generate_request import (
    ServedModel,
    check_before_tokenizing,
    resolve_request,
    text_options,
)
from scheduler_service.rpc.sample import Decoder, Sample
from scheduler_service.rpc.status import RpcError, abort

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

_ADMISSION_CODES = {
    AdmissionReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    AdmissionReason.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    AdmissionReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class StepLoop(Protocol):
    """What the service needs of the step loop."""

    @property
    def unavailable_reason(self) -> str: ...

    @property
    def max_sequence_tokens(self) -> int: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    @property
    def capacity(self) -> WorkerCapacity | None: ...

    @property
    def num_worker_losses(self) -> int: ...

    async def wait_for_first_worker(self) -> None: ...

    def submit(self, request: Request, deliver: Callable[[Delta], None]) -> list[int]: ...

    def cancel(self, sequence_ids: list[int]) -> None: ...

    def abort(self, tenant: str, request_id: str) -> None: ...

    def stop(self, sequence_id: int, num_output_tokens: int) -> None: ...

    def stats(self) -> SchedulerStats: ...


class Tokenizer(Protocol):
    async def encode(self, text: str) -> list[int]: ...

    def text_decoder(
        self,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str],
        min_tokens: int,
        include_stop_text: bool,
        skip_special_tokens: bool,
    ) -> Decoder: ...


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


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        step_loop: StepLoop,
        model: ServedModel,
        tokenizer: Tokenizer | None,
        info: ServerInfo,
        generation_throughput: Callable[[], float],
    ) -> None:
        """`generation_throughput` is in output tokens per second."""
        self._step_loop = step_loop
        self._model = model
        self._tokenizer = tokenizer
        self._info = info
        self._generation_throughput = generation_throughput
        self._num_pending = 0  # calls whose request is not in the scheduler yet

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def Generate(self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await self._generate(request, context)
        except RpcError as error:
            await abort(context, error)

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        try:
            self._step_loop.abort(request.tenant, request.request_id)
        except KeyError:
            message = f"no request {request.request_id!r} is running for this tenant"
            await abort(context, RpcError(grpc.StatusCode.NOT_FOUND, message, "request_id"))
        return scheduler_pb2.AbortResponse()

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
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
        )
        if capacity is not None and self._step_loop.is_connected:
            response.worker.CopyFrom(
                scheduler_pb2.WorkerInfo(
                    worker_id=capacity.worker_id,
                    epoch=self._step_loop.epoch,
                    device=capacity.device,
                    dtype=capacity.dtype,
                    attention_backend=capacity.attention_backend,
                    block_size=capacity.block_size,
                    num_device_blocks=capacity.num_device_blocks,
                    block_bytes=capacity.block_bytes,
                )
            )
        return response

    async def GetLoads(
        self, request: scheduler_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetLoadsResponse:
        stats = self._step_loop.stats()
        return scheduler_pb2.GetLoadsResponse(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_device_blocks=stats.num_device_blocks,
            num_held_blocks=stats.num_held_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_preemptions=stats.num_preemptions,
            num_generation_tokens=stats.num_generation_tokens,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_prompt_tokens=stats.num_cached_prompt_tokens,
            generation_throughput=self._generation_throughput(),
            worker_connected=self._step_loop.is_connected,
            num_worker_losses=self._step_loop.num_worker_losses,
        )

    async def _generate(self, message: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        request = await self._resolve(message)
        self._check_available()
        call = self._call(message, request)
        try:
            call.sequence_ids = self._step_loop.submit(request, call.deliver)
        except AdmissionError as error:
            raise RpcError(_ADMISSION_CODES[error.reason], str(error), error.field) from error
        try:
            async for response in call.responses():
                await context.write(response)
        finally:
            self._step_loop.cancel(call.sequence_ids)

    async def _resolve(self, message: scheduler_pb2.GenerateRequest) -> Request:
        check_before_tokenizing(message, self._model)
        self._check_available()
        if self._num_pending >= self._info.max_pending_calls:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._num_pending} calls wait to be queued, the limit is {self._info.max_pending_calls}; "
                "try again later",
            )
        self._num_pending += 1
        try:
            await self._step_loop.wait_for_first_worker()
            if message.WhichOneof("prompt") == "text" and self._tokenizer is not None:
                prompt_token_ids = await self._tokenizer.encode(message.text)
            else:
                prompt_token_ids = list(message.token_ids.ids)
        finally:
            self._num_pending -= 1
        return resolve_request(message, prompt_token_ids, self._model, self._step_loop.max_sequence_tokens)

    def _check_available(self) -> None:
        reason = self._step_loop.unavailable_reason
        if reason:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, reason)

    def _call(self, message: scheduler_pb2.GenerateRequest, request: Request) -> Call:
        options = text_options(message)
        samples = []
        for index in range(request.n):
            decoder = None
            if self._tokenizer is not None:
                decoder = self._tokenizer.text_decoder(
                    request.prompt_token_ids,
                    stop=options.stop,
                    min_tokens=request.sampling.min_tokens,
                    include_stop_text=options.include_stop_text,
                    skip_special_tokens=options.skip_special_tokens,
                )
            samples.append(
                Sample(
                    request.request_id,
                    index,
                    decoder,
                    with_logprobs=request.sampling.num_logprobs is not None,
                    keep_stop_token_text=options.include_stop_text,
                )
            )
        return Call(samples, self._step_loop)
