"""The way of a GenerateRequest into the scheduler: checked, tokenized, admitted."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import grpc

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import AdmissionError, AdmissionReason, OutputMode, Request
from scheduler_service.rpc.public.delivery import Delivery
from scheduler_service.rpc.public.generate_request import check_before_tokenizing, resolve_request, text_options
from scheduler_service.rpc.public.prompt_text import PromptTexts, TextLimits
from scheduler_service.rpc.public.transcript import Transcript
from scheduler_service.rpc.status import RpcError
from scheduler_service.rpc.tenants.authentication import tenant_of_call
from scheduler_service.rpc.tenants.quota import Claim, Quotas
from scheduler_service.serving.engine import RequestEngine
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.token_stream import Delta, Outlet
from scheduler_service.serving.tokenizer import Tokenizer

_ADMISSION_CODES = {
    AdmissionReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    AdmissionReason.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    AdmissionReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

# Queues a request: what takes its deltas, what takes the error if it is refused later, an outlet for plain tokens and
# the label of its first sample there. The ids of its sequences. Raises AdmissionError, RpcError.
Submit = Callable[[Request, Callable[[Delta], None], Callable[[RpcError], None], Outlet | None, int], list[int]]


class Intake:
    def __init__(
        self,
        engine: RequestEngine,
        submit: Submit,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        max_pending_calls: int,
        text_limits: TextLimits,
        is_taken: Callable[[str, str], bool],
        quotas: Quotas | None = None,
    ) -> None:
        """`is_taken` says of a tenant and a request id whether a request that has ended still bears that name. Without
        `quotas` tenants are held to none."""
        self._engine = engine
        self._submit = submit
        self._model = model
        self._tokenizer = tokenizer
        self.texts = PromptTexts(tokenizer, text_limits) if tokenizer is not None else None
        self._max_pending_calls = max_pending_calls
        self._is_taken = is_taken
        self._quotas = quotas
        self._num_pending = 0  # calls whose request is not in the scheduler yet

    async def resolve(
        self,
        message: scheduler_pb2.GenerateRequest,
        time_remaining: float | None,
        output_mode: OutputMode = OutputMode.STREAMED,
    ) -> Request:
        """The request in full, which must be done within so many seconds. Raises RpcError."""
        deadline = None if time_remaining is None else self._engine.now() + time_remaining
        message.tenant = tenant_of_call(message.tenant)
        check_before_tokenizing(message, self._model)
        self._check_available(output_mode)
        if self._num_pending >= self._max_pending_calls:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._num_pending} calls wait to be queued, the limit is {self._max_pending_calls}; try again later",
            )
        with contextlib.nullcontext() if self._quotas is None else self._quotas.pending(message.tenant):
            prompt_token_ids = await self._tokenize(message, output_mode)
        limit = self._engine.max_sequence_tokens
        request = resolve_request(message, prompt_token_ids, self._model, limit, deadline)
        return replace(request, output_mode=output_mode)

    async def _tokenize(self, message: scheduler_pb2.GenerateRequest, output_mode: OutputMode) -> list[int]:
        """The tokens of the prompt, once it is known what fits."""
        self._num_pending += 1
        try:
            await self._engine.wait_for_first_worker(output_mode)
            if message.WhichOneof("prompt") == "text" and self.texts is not None:
                limit = self._engine.max_sequence_tokens
                return await self.texts.encode(message.text, message.tenant, limit)
            return list(message.token_ids.ids)
        finally:
            self._num_pending -= 1

    def transcripts(
        self, message: scheduler_pb2.GenerateRequest, request: Request, *, with_text: bool = True
    ) -> list[Transcript]:
        """One for each sample. Without text there is nothing to watch for stop texts in either."""
        options = text_options(message)
        transcripts = []
        for _ in range(request.n):
            decoder = None
            if with_text and self._tokenizer is not None:
                decoder = self._tokenizer.text_decoder(
                    request.prompt_token_ids,
                    stop=options.stop,
                    min_tokens=request.sampling.min_tokens,
                    include_stop_text=options.include_stop_text,
                    skip_special_tokens=options.skip_special_tokens,
                )
            transcripts.append(Transcript(decoder, keep_stop_token_text=options.include_stop_text))
        return transcripts

    def submit(self, request: Request, delivery: Delivery, outlet: Outlet | None = None, label: int = 0) -> None:
        """Queue a request whose output goes this way, or waits in an outlet of the step loop's. Raises RpcError."""
        self._check_available(request.output_mode)
        if self._is_taken(request.tenant, request.request_id):
            raise RpcError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"the result of a detached request {request.request_id!r} is kept; choose another request_id",
                "request_id",
            )
        claim = self._quotas.claim(request) if self._quotas is not None else None
        try:
            deliver: Callable[[Delta], None] = delivery.deliver
            if claim is not None:
                # What waits in an outlet is not delivered, and would not be counted.
                deliver, outlet = _deliver_and_count(delivery, claim), None
            delivery.sequence_ids = self._submit(request, deliver, delivery.fail, outlet, label)
        except AdmissionError as error:
            if claim is not None:
                claim.release()
            raise RpcError(_ADMISSION_CODES[error.reason], str(error), error.field) from error

    def _check_available(self, output_mode: OutputMode) -> None:
        reason = self._engine.refusal(output_mode)
        if reason:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, reason)


def _deliver_and_count(delivery: Delivery, claim: Claim) -> Callable[[Delta], None]:
    def deliver(delta: Delta) -> None:
        claim.take_news(delta)
        delivery.deliver(delta)

    return deliver
