"""The one way of a request into the engine: checked, tokenized, held against quotas, queued."""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import AdmissionError, AdmissionReason, Grammar, OutputMode, Request
from scheduler_service.rpc.entrance import session_of_call
from scheduler_service.rpc.public.detached import DetachedRequests
from scheduler_service.rpc.public.generate_request import check_before_tokenizing, resolve_request
from scheduler_service.rpc.public.generation import Generation
from scheduler_service.rpc.public.output import OutputBuffer
from scheduler_service.rpc.public.prompt_text import PromptTexts, TextLimits
from scheduler_service.rpc.status import RpcError, invalid
from scheduler_service.rpc.tenants.authentication import tenant_of_call
from scheduler_service.rpc.tenants.quota import Quotas
from scheduler_service.serving.engine import RequestEngine
from scheduler_service.serving.grammars import (
    GrammarChecks,
    GrammarRefusedError,
    GrammarsNotServedError,
    TooManyGrammarsError,
)
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.token_stream import ReadyList
from scheduler_service.serving.tokenizer import Tokenizer

_ADMISSION_CODES = {
    AdmissionReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    AdmissionReason.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    AdmissionReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Intake:
    def __init__(
        self,
        engine: RequestEngine,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        max_pending_calls: int,
        text_limits: TextLimits,
        detached: DetachedRequests | None = None,
        quotas: Quotas | None = None,
        grammars: GrammarChecks | None = None,
        retention_limit: Callable[[str], int] | None = None,
    ) -> None:
        """The names of `detached` requests are taken as long as those are kept. Without `quotas` tenants are held to
        none. Without `grammars` those of requests are checked behind the engine, and without `retention_limit`, a
        tenant's in seconds, their hints are bounded there."""
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.texts = PromptTexts(tokenizer, text_limits) if tokenizer is not None else None
        self._max_pending_calls = max_pending_calls
        self._detached = detached
        self._quotas = quotas
        self._grammars = grammars
        self._retention_limit = retention_limit
        self._num_pending = 0  # calls whose request is not in the engine yet
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()  # those that were queued, and are not freed

    async def begin(
        self,
        message: scheduler_pb2.GenerateRequest,
        time_remaining: float | None,
        output_mode: OutputMode = OutputMode.STREAMED,
        *,
        with_text: bool = True,
        ready_list: ReadyList | None = None,
        label: int = 0,
        is_relayed: bool = False,
    ) -> Generation:
        """Queue what the message asks for, to be done within so many seconds.

        Without text there is nothing to watch for stop texts in either. If there are only tokens to tell, they wait in
        the `ready_list`, under labels from `label` on; what has more goes through its outputs, so that nothing
        overtakes. `is_relayed`: the client watches for stop texts itself, and tells how much of each sample it has
        kept. Raises RpcError.
        """
        request = await self._resolve(message, time_remaining, output_mode)
        outputs = self._outputs(message, request, with_text=with_text)
        generation = Generation(
            request,
            outputs,
            self.engine,
            ready_list if _is_plain(request) else None,
            label,
            keeps_all=request.beam is not None or not message.sampling.stop,
            is_relayed=is_relayed and request.beam is None,
        )
        self._submit(generation)
        return generation

    async def embed(
        self, message: scheduler_pb2.GenerateRequest, time_remaining: float | None
    ) -> scheduler_pb2.GenerateResponse:
        """Return the one response to a request for an embedding, whose prompt is computed and pooled. Leaving early
        aborts the request. Raises RpcError."""
        generation = await self.begin(message, time_remaining, OutputMode.WHOLE, with_text=False)
        try:
            await generation.wait_for_end()
            (output,) = generation.outputs
            response = output.response(0, 0)
        finally:
            generation.cancel()
        if not response.embedding:
            raise RpcError(grpc.StatusCode.CANCELLED, "the request was aborted before its embedding was made")
        return response

    def settle(self, stream_id: int, num_computed: int, num_kept: int) -> None:
        """Take note of how much of a relayed sample its client got."""
        self.engine.settle(stream_id, num_computed, min(num_kept, num_computed))

    def revoke(self, tenants: frozenset[str]) -> None:
        """End what runs for tenants that are none any more, also for front ends and for clients that have
        left."""
        for generation in list(self._generations):
            tenant = generation.request.tenant
            if tenant in tenants and not generation.has_ended:
                message = f"tenant {tenant!r} is no longer in the server's file of tenants"
                generation.fail(grpc.StatusCode.UNAUTHENTICATED.value[0], message)
                generation.abort()

    async def _resolve(
        self, message: scheduler_pb2.GenerateRequest, time_remaining: float | None, output_mode: OutputMode
    ) -> Request:
        """Make the request in full, in which every value is set. Raises RpcError."""
        deadline = None if time_remaining is None else time.monotonic() + time_remaining
        message.tenant = tenant_of_call(message.tenant)
        message.session_id = message.session_id or session_of_call()
        check_before_tokenizing(message, self.model)
        if message.embed and output_mode is OutputMode.DETACHED:
            raise invalid("request.embed", "an embedding cannot be detached; call Embed and wait for it")
        self._check_available(output_mode)
        with self._pending(message.tenant):
            prompt_token_ids = await self._tokenize(message, output_mode)
            limit = self.engine.availability.max_sequence_tokens
            request = resolve_request(message, prompt_token_ids, self.model, limit, deadline)
            if request.grammar is not None and self._grammars is not None:
                await _check_grammar(self._grammars, request.grammar, request.tenant)
        retention = request.retention_seconds
        if retention is not None and self._retention_limit is not None:  # a limit of 0 leaves none
            retention = min(retention, self._retention_limit(request.tenant)) or None
        return replace(request, output_mode=output_mode, retention_seconds=retention)

    @contextlib.contextmanager
    def _pending(self, tenant: str) -> Iterator[None]:
        """Count the call inside the block, in which its request is made ready. Raises RpcError."""
        if self._num_pending >= self._max_pending_calls:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._num_pending} calls wait to be queued, the limit is {self._max_pending_calls}; try again later",
            )
        with contextlib.nullcontext() if self._quotas is None else self._quotas.pending(tenant):
            self._num_pending += 1
            try:
                yield
            finally:
                self._num_pending -= 1

    async def _tokenize(self, message: scheduler_pb2.GenerateRequest, output_mode: OutputMode) -> list[int]:
        """Return the tokens of the prompt, once it is known what fits."""
        await self.engine.availability.wait_for_first_worker(output_mode)
        if message.WhichOneof("prompt") == "text" and self.texts is not None:
            limit = self.engine.availability.max_sequence_tokens
            return await self.texts.encode(message.text, message.tenant, limit)
        return list(message.token_ids.ids)

    def _outputs(
        self, message: scheduler_pb2.GenerateRequest, request: Request, *, with_text: bool
    ) -> list[OutputBuffer]:
        """Make an output for each sample. The outputs of a detached request are kept."""
        options = message.sampling
        outputs = []
        for index in range(request.n):
            decoder = None
            if with_text and self.tokenizer is not None and not message.embed:
                decoder = self.tokenizer.text_decoder(
                    request.prompt_token_ids,
                    stop=options.stop,
                    min_tokens=request.sampling.min_tokens,
                    include_stop_text=options.include_stop_str_in_output,
                    skip_special_tokens=not options.HasField("skip_special_tokens") or options.skip_special_tokens,
                )
            outputs.append(
                OutputBuffer(
                    request.request_id,
                    index,
                    decoder,
                    with_logprobs=request.sampling.num_logprobs is not None,
                    keep_stop_token_text=options.include_stop_str_in_output,
                    is_kept=request.output_mode is OutputMode.DETACHED,
                )
            )
        return outputs

    def _submit(self, generation: Generation) -> None:
        """Hold the request against what is kept, its tenant's quota and the engine, and queue it. Raises RpcError."""
        request = generation.request
        self._check_available(request.output_mode)
        if request.grammar is not None and self._grammars is not None:
            _check_grammars_served(self._grammars, request.grammar)
        if self._detached is not None and self._detached.has(request.tenant, request.request_id):
            raise RpcError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"the result of a detached request {request.request_id!r} is kept; choose another request_id",
                "request_id",
            )
        claim = self._quotas.claim(request) if self._quotas is not None else None
        if claim is not None:
            # What waits in a ready list is not delivered, and would not be counted.
            generation.claim, generation.ready_list = claim, None
        try:
            generation.sequence_ids = self.engine.submit(request, generation)
        except AdmissionError as error:
            if claim is not None:
                claim.release()
            raise RpcError(_ADMISSION_CODES[error.reason], str(error), error.field) from error
        self._generations.add(generation)

    def _check_available(self, output_mode: OutputMode) -> None:
        reason = self.engine.availability.refusal(output_mode)
        if reason:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, reason)


def _is_plain(request: Request) -> bool:
    """Say whether a request's outputs have nothing but tokens to tell."""
    sampling = request.sampling
    return request.beam is None and sampling.num_logprobs is None and sampling.num_prompt_logprobs is None


async def _check_grammar(grammars: GrammarChecks, grammar: Grammar, tenant: str) -> None:
    """Return if the grammar can be read and is served. Raises RpcError."""
    try:
        await grammars.check(grammar, tenant)
    except GrammarRefusedError as error:
        raise invalid(_field_of(grammar), f"{grammar.kind.name.lower()} cannot be used: {error}") from None
    except GrammarsNotServedError as error:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(error), _field_of(grammar)) from None
    except TooManyGrammarsError as error:
        raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None


def _check_grammars_served(grammars: GrammarChecks, grammar: Grammar) -> None:
    """Return if grammars are served still: another worker may have come since this one was checked. Raises RpcError."""
    if grammars.refusal:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, grammars.refusal, _field_of(grammar))


def _field_of(grammar: Grammar) -> str:
    """Return the path of the field that a request's grammar stood in."""
    return f"sampling.{grammar.kind.name.lower()}"
