"""The admission of requests into an engine: every request is validated, tokenized, checked against quotas and queued
here."""

import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pagewire.common.chat.chat_output import ChatRules
from scheduler_service.core.request import AdmissionError, OutputMode, Request, SequenceEnd
from scheduler_service.serving.active_request import ActiveRequest, RequestEngine
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.detached import DetachedRequests, name_taken
from scheduler_service.serving.grammar_checks import GrammarChecks
from scheduler_service.serving.output import ReadyList, SampleRecord
from scheduler_service.serving.parsed_request import ParsedRequest, all_logprobs_bytes
from scheduler_service.serving.prompt_text import ANY_NUMBER, PromptTexts, TextLimits
from scheduler_service.serving.refusal import OF_ADMISSION, Reason, RefusedError, invalid, unknown
from scheduler_service.serving.tenants.caller import Call
from scheduler_service.serving.tenants.quota import Quotas
from scheduler_service.serving.turns import TenantBytes

# Limits on the memory of responses that were not sent yet, as estimated from their requests: per tenant and in total.
MAX_TENANT_ANSWER_BYTES = 64 << 20
MAX_ANSWERS_BYTES = 256 << 20
_NO_RULES = ChatRules()


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
        abort_elsewhere: Callable[[str, str, Call], Awaitable[None]] | None = None,
        chats: ChatRules = _NO_RULES,
    ) -> None:
        """Prepare to accept requests for an engine. `detached` contains the detached requests (which run without a
        connected client); their ids cannot be used again while they are kept. Without `quotas`, tenants have no quotas
        here. Without `grammars`, the engine checks the grammars of requests. `retention_limit` returns the longest
        time, in seconds, for which a tenant's request may ask to keep its cached blocks. Without `retention_limit`, the
        engine limits this time. `abort_elsewhere` is called to abort a request that this engine does not have."""
        self.chats = chats
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.turns = text_limits.turns()
        self.answers = TenantBytes("answers", MAX_ANSWERS_BYTES, MAX_TENANT_ANSWER_BYTES)
        self.texts = PromptTexts(tokenizer, text_limits, self.turns) if tokenizer is not None else None
        self._max_pending_calls = max_pending_calls
        self._detached = detached
        self._quotas = quotas
        self._grammars = grammars
        self._retention_limit = retention_limit
        self._abort_elsewhere = abort_elsewhere
        self._num_pending = 0  # calls whose request is being prepared
        self._active: weakref.WeakSet[ActiveRequest] = weakref.WeakSet()  # queued and not freed yet

    async def begin(
        self,
        parsed: ParsedRequest,
        call: Call,
        output_mode: OutputMode = OutputMode.STREAMED,
        *,
        with_text: bool = True,
        ready_list: ReadyList | None = None,
        label: int = 0,
        is_relayed: bool = False,
    ) -> ActiveRequest:
        """Prepare a client's request and queue it in the engine, by a call of `resolve` and then of `start`. `call` is
        the HTTP request or RPC that contained the request. Raise RefusedError if the request is invalid or refused."""
        request = await self.resolve(parsed, call, output_mode)
        return self.start(
            parsed, request, call, with_text=with_text, ready_list=ready_list, label=label, is_relayed=is_relayed
        )

    def start(
        self,
        parsed: ParsedRequest,
        request: Request,
        call: Call,
        *,
        with_text: bool = True,
        ready_list: ReadyList | None = None,
        label: int = 0,
        is_relayed: bool = False,
    ) -> ActiveRequest:
        """Queue a request that `resolve` returned. Raise RefusedError if it is refused.

        Without `with_text`, the output has no text and stop texts are not detected. If the request asks for tokens
        only, its samples are added to `ready_list` when they have new tokens. They are labelled with consecutive
        numbers from `label` on. A request with log-probabilities or a beam search does not use the list. With
        `is_relayed`, the client detects stop texts itself, and reports how many tokens of each sample it kept.
        """
        request = replace(request, has_stop_texts=is_relayed or bool(parsed.stop))
        sampling = request.sampling
        is_plain = request.beam is None and sampling.num_logprobs is None and sampling.num_prompt_logprobs is None
        active = ActiveRequest(
            request,
            self._outputs(parsed, request, label, with_text=with_text),
            self.engine,
            ready_list if is_plain else None,
            keeps_all=request.beam is not None or not parsed.stop,
            is_relayed=is_relayed and request.beam is None,
        )
        if size := sum(all_logprobs_bytes(request).values()):
            self.answers.add(request.tenant, size)
            weakref.finalize(active, self.answers.remove, request.tenant, size)
        self._submit(active, call.trace)
        return active

    async def tokenize(self, parsed: ParsedRequest, output_mode: OutputMode = OutputMode.STREAMED) -> Sequence[int]:
        """Return the token ids of a request's prompt, truncated if the request asks for truncation. First wait for the
        first worker, which determines the maximum length of a sequence. Raise RefusedError if the prompt is too long or
        cannot be tokenized."""
        await self.engine.availability.wait_for_first_worker(output_mode)
        limit, truncation = self.engine.availability.max_sequence_tokens, parsed.truncation
        token_ids: Sequence[int]
        if isinstance(parsed.prompt, str):
            assert self.texts is not None, "no text is read where there is no tokenizer"
            token_ids = await self.texts.encode(
                parsed.prompt,
                parsed.request.tenant,
                limit if truncation is None else ANY_NUMBER,
                add_special_tokens=parsed.add_special_tokens,
            )
        else:
            token_ids = parsed.prompt
        return token_ids if truncation is None else truncation.cut(token_ids, limit)

    async def embed(self, parsed: ParsedRequest, call: Call) -> tuple[str, SequenceEnd]:
        """Run a request for an embedding. Return a tuple: the request's id, and the end of its sequence, which contains
        the embedding. If the calling task is cancelled, the request is aborted. Raise RefusedError if the request
        fails."""
        active = await self.begin(parsed, call, OutputMode.WHOLE, with_text=False)
        try:
            return active.request.request_id, await embedding_end(active)
        finally:
            active.cancel()

    async def abort(self, tenant: str, request_id: str, call: Call) -> None:
        """End a tenant's request with the end reason ABORT, whichever API received the request. Raise RefusedError if
        the request does not exist."""
        try:
            self.engine.abort(tenant, request_id)
        except KeyError:
            if self._abort_elsewhere is None:
                raise unknown(request_id) from None
            await self._abort_elsewhere(tenant, request_id, call)

    def unfinished(self) -> list[ActiveRequest]:
        """Return the requests that were queued and have not ended."""
        return [active for active in self._active if not active.has_ended]

    def revoke(self, tenants: frozenset[str]) -> None:
        """End all requests of tenants that were removed from the file of tenants. This includes requests from front
        ends and requests without a connected client."""
        for active in self.unfinished():
            tenant = active.request.tenant
            if tenant in tenants:
                active.fail(
                    RefusedError(
                        Reason.UNAUTHENTICATED,
                        f"tenant {tenant!r} is no longer in the server's file of tenants; use another key",
                    )
                )
                active.abort()

    async def resolve(self, parsed: ParsedRequest, call: Call, output_mode: OutputMode) -> Request:
        """Validate and tokenize a request, and check its grammar. Return the complete request for the engine, with
        prompt tokens and a value for every option. Its deadline is derived from the remaining time of `call`. Raise
        RefusedError if the request is invalid, or if the engine accepts no requests now."""
        deadline = None if call.time_remaining is None else self.engine.clock.now() + call.time_remaining
        if parsed.is_embedding and output_mode is OutputMode.DETACHED:
            raise invalid("request.embed", "an embedding cannot be detached; call Embed and wait for it")
        if reason := self.engine.availability.refusal(output_mode):
            raise RefusedError(Reason.UNAVAILABLE, reason)
        with self._pending(parsed.request.tenant):
            token_ids = await self.tokenize(parsed, output_mode)
            request = parsed.fit(token_ids, self.model, self.engine.availability.max_sequence_tokens, deadline)
            if request.grammar is not None and self._grammars is not None:
                await self._grammars.check(request.grammar, request.tenant)
        retention = request.retention_seconds
        if retention is not None and self._retention_limit is not None:  # a limit of 0 removes the hint
            retention = min(retention, self._retention_limit(request.tenant)) or None
        return replace(request, output_mode=output_mode, retention_seconds=retention)

    @contextlib.contextmanager
    def _pending(self, tenant: str) -> Iterator[None]:
        """A context manager for the block in which a request is tokenized and checked. The request counts as pending
        for its tenant until the block ends. Raise RefusedError if too many requests are pending already."""
        if self._num_pending >= self._max_pending_calls:
            raise RefusedError(
                Reason.RESOURCE_EXHAUSTED,
                f"{self._num_pending} calls wait to be queued, the limit is {self._max_pending_calls}; try again later",
            )
        with contextlib.nullcontext() if self._quotas is None else self._quotas.pending(tenant):
            self._num_pending += 1
            try:
                yield
            finally:
                self._num_pending -= 1

    def _outputs(self, parsed: ParsedRequest, request: Request, label: int, *, with_text: bool) -> list[SampleRecord]:
        """Return a new output record for each sample of the request. A detached request, which runs without a connected
        client, keeps its outputs after they are read."""
        tokenizer = self.tokenizer if with_text and not parsed.is_embedding else None
        return [
            SampleRecord(
                index,
                None
                if tokenizer is None
                else tokenizer.text_decoder(
                    request.prompt_token_ids,
                    stop=parsed.stop,
                    min_tokens=request.sampling.min_tokens,
                    include_stop_text=parsed.include_stop_text,
                    skip_special_tokens=parsed.skip_special_tokens,
                ),
                label=label + index,
                with_logprobs=request.sampling.num_logprobs is not None,
                is_hypothesis=request.beam is not None,
                keep_stop_token_text=parsed.include_stop_text,
                is_kept=request.output_mode is OutputMode.DETACHED,
                is_whole=request.output_mode is OutputMode.WHOLE,
            )
            for index in range(request.n)
        ]

    def _submit(self, active: ActiveRequest, trace: Mapping[str, str]) -> None:
        """Queue a request in the engine, after a check of its id and of the tenant's quota. Raise RefusedError if the
        id is in use, if the quota is exceeded, or if the engine refuses the request."""
        request = active.request
        if request.grammar is not None and self._grammars is not None:
            self._grammars.check_served(request.grammar)  # another worker may have joined since the check
        if self._detached is not None and (request.tenant, request.request_id) in self._detached.by_name:
            raise name_taken(request.request_id)
        claim = self._quotas.claim(request) if self._quotas is not None else None
        if claim is not None:
            # The quota is updated when output is processed. Output in a ready list is not processed.
            active.on_news, active.ready_list = claim.record_output, None
        try:
            self.engine.submit(active, trace)
        except AdmissionError as error:
            if claim is not None:
                claim.release()
            raise RefusedError(OF_ADMISSION[error.reason], str(error), error.field) from error
        self._active.add(active)


async def embedding_end(active: ActiveRequest) -> SequenceEnd:
    """Wait for the end of a request for an embedding. Return the end of its sequence, which contains the embedding.
    Raise RefusedError if the request fails or is aborted."""
    await active.wait_for_end()
    end = active.outputs[0].end
    if end is None or not end.embedding:
        raise RefusedError(Reason.CANCELLED, "the request was aborted before its embedding was computed")
    return end
