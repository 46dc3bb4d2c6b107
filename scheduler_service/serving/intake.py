"""The one way of a request into the engine: checked, tokenized, held against quotas, queued."""

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

# What answers may hold in memory until they are sent, by what their requests ask for: of one tenant, and of all.
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
        """The names of `detached` requests are taken as long as those are kept. Without `quotas` tenants are held to
        none. Without `grammars` those of requests are checked behind the engine, and without `retention_limit`, a
        tenant's in seconds, their hints are bounded there. `abort_elsewhere` ends what came by another door."""
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
        self._num_pending = 0  # calls whose request is not in the engine yet
        self._active: weakref.WeakSet[ActiveRequest] = weakref.WeakSet()  # those that were queued, and are not freed

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
        """Queue what a request asks for that came with a call, as `start` does. Raises RefusedError."""
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
        """Queue a request that is resolved.

        Without text there is nothing to watch for stop texts in either. If there are only tokens to tell, they wait in
        the `ready_list`, under labels from `label` on; what has more goes through its outputs, so that nothing
        overtakes. `is_relayed`: the client watches for stop texts itself, and tells how much of each sample it has
        kept. Raises RefusedError.
        """
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
        """Return the tokens of the prompt, once it is known what fits. Raises RefusedError."""
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
        """Return the id of a request for an embedding, and its end, which has what is made of its prompt. Leaving early
        aborts the request. Raises RefusedError."""
        active = await self.begin(parsed, call, OutputMode.WHOLE, with_text=False)
        try:
            return active.request.request_id, await embedding_end(active)
        finally:
            active.cancel()

    async def abort(self, tenant: str, request_id: str, call: Call) -> None:
        """Let a request end with ABORT, by whatever door it came. Raises RefusedError, also if there is none."""
        try:
            self.engine.abort(tenant, request_id)
        except KeyError:
            if self._abort_elsewhere is None:
                raise unknown(request_id) from None
            await self._abort_elsewhere(tenant, request_id, call)

    def revoke(self, tenants: frozenset[str]) -> None:
        """End what runs for tenants that are none any more, also for front ends and for clients that have
        left."""
        for active in list(self._active):
            tenant = active.request.tenant
            if tenant in tenants and not active.has_ended:
                active.fail(
                    RefusedError(
                        Reason.UNAUTHENTICATED, f"tenant {tenant!r} is no longer in the server's file of tenants"
                    )
                )
                active.abort()

    async def resolve(self, parsed: ParsedRequest, call: Call, output_mode: OutputMode) -> Request:
        """Make the request in full, in which every value is set. A call says how long it may take. Raises
        RefusedError."""
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
        if retention is not None and self._retention_limit is not None:  # a limit of 0 leaves none
            retention = min(retention, self._retention_limit(request.tenant)) or None
        return replace(request, output_mode=output_mode, retention_seconds=retention)

    @contextlib.contextmanager
    def _pending(self, tenant: str) -> Iterator[None]:
        """Count the call inside the block, in which its request is made ready. Raises RefusedError."""
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
        """Make an output for each sample. The outputs of a detached request are kept."""
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
        """Hold the request against what is kept, its tenant's quota and the engine, and queue it. Raises
        RefusedError."""
        request = active.request
        if request.grammar is not None and self._grammars is not None:
            self._grammars.check_served(request.grammar)  # another worker may have come since
        if self._detached is not None and (request.tenant, request.request_id) in self._detached.by_name:
            raise name_taken(request.request_id)
        claim = self._quotas.claim(request) if self._quotas is not None else None
        if claim is not None:
            # What waits in a ready list is not taken in, and would not be counted.
            active.on_news, active.ready_list = claim.take_news, None
        try:
            self.engine.submit(active, trace)
        except AdmissionError as error:
            if claim is not None:
                claim.release()
            raise RefusedError(OF_ADMISSION[error.reason], str(error), error.field) from error
        self._active.add(active)


async def embedding_end(active: ActiveRequest) -> SequenceEnd:
    """Return the end of a request for an embedding, which has it. Raises RefusedError."""
    await active.wait_for_end()
    end = active.outputs[0].end
    if end is None or not end.embedding:
        raise RefusedError(Reason.CANCELLED, "the request was aborted before its embedding was made")
    return end
