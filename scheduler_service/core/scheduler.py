"""The scheduler: a state machine over requests, blocks and one worker. Events go in, plans and tokens come out.

It does no I/O and knows no clock: every event brings its own `now`, in seconds of any monotonic clock.

Each sequence has one counter, `num_computed_tokens`, that chases its tokens known and in flight. Prefill, chunks of it,
prefix hits, resumption and decode are one code path under one token budget (after vLLM V1). Plans are made up to
`pipeline_depth` ahead of their results: a row that reaches its end samples on the worker, so the next plan needs no
token. Compute is in order, so a block that is free when a plan is made may be written by that plan.
"""

from dataclasses import replace

from scheduler_service.core import invariants
from scheduler_service.core.cache_manager import Allocation, CacheManager
from scheduler_service.core.dispatch import (
    Dispatch,
    PlannedRow,
    ProtocolError,
    SampledRow,
    read_prompt_logprobs,
    read_samples,
)
from scheduler_service.core.plan import RowOpening, RowStatus, StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.plan_draft import PlanDraft
from scheduler_service.core.quarantine import Quarantine
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    EndReason,
    Request,
    SchedulerStats,
    SequenceEnd,
    TokenLogprobs,
    TokenOutputs,
)
from scheduler_service.core.row_slots import RowSlots
from scheduler_service.core.sequence import RequestState, Sequence, SequenceQueue, SequenceState

__all__ = ["ProtocolError", "Scheduler"]

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024


class _Worker:
    """What lives and dies with an epoch."""

    def __init__(self, epoch: int, capacity: WorkerCapacity, cache: CacheManager, slots: RowSlots) -> None:
        self.epoch = epoch
        self.capacity = capacity
        self.cache = cache
        self.slots = slots
        self.num_steps = 0
        self.unacknowledged: list[Dispatch] = []


class Scheduler:
    """See the module's text. Limits are the scheduler's own; a worker's tighter ones bind while it is there."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        pipeline_depth: int = 2,
        max_waiting_requests: int = 4096,
        max_waiting_tokens: int = 4_194_304,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.pipeline_depth = pipeline_depth
        self.max_waiting_requests = max_waiting_requests
        self.max_waiting_tokens = max_waiting_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = watermark
        self._worker: _Worker | None = None
        self._last_epoch = 0
        self._model_digest = b""
        self._requests: dict[tuple[str, str], RequestState] = {}
        self._sequences: dict[int, Sequence] = {}
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._quarantine = Quarantine()
        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._num_generation_tokens = 0

    # Requests

    def add(self, request: Request, now: float) -> list[int]:
        """Queue a request; the ids of its sequences, one per sample. Raises AdmissionError."""
        self._check_admission(request)
        self._num_arrivals += 1
        state = RequestState(request, num_unfinished=request.n)
        self._requests[request.tenant, request.request_id] = state
        for sample_index in range(request.n):
            sequence = Sequence(
                sequence_id=self._num_sequences + sample_index,
                owner=state,
                sample_index=sample_index,
                order=(request.priority, self._num_arrivals, sample_index),
                arrived_at=now,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
                root_key=(request.tenant, request.cache_salt, self._model_digest),
                stop_token_ids=frozenset(request.sampling.stop_token_ids),
                num_prompt_logprobs=request.sampling.num_prompt_logprobs if sample_index == 0 else None,
            )
            state.sequences.append(sequence)
            self._sequences[sequence.sequence_id] = sequence
            self._waiting.add(sequence)
        self._num_sequences += request.n
        return [sequence.sequence_id for sequence in state.sequences]

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        """End every sequence of a request that has not ended. Raises KeyError if there is none."""
        outputs = TokenOutputs()
        for sequence in self._requests[tenant, request_id].sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence, EndReason.ABORT, outputs)
        return outputs

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        """A stop text was seen: tokens past `num_output_tokens` are dropped. Nothing happens if it has ended."""
        outputs = TokenOutputs()
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
            self._finish(sequence, EndReason.STOP, outputs)
        return outputs

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None while there is nothing to compute or the pipeline is full."""
        worker = self._worker
        if worker is None or len(worker.unacknowledged) >= self.pipeline_depth:
            return None
        if not self._quarantine.is_empty and not self._isolate_trial(worker):
            return None
        draft = PlanDraft(self.num_step_tokens)
        preempted = False
        for sequence in self._running.snapshot():
            if sequence.state is not SequenceState.RUNNING:
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, draft.num_free_tokens)
            num_missing = worker.cache.num_missing_blocks(sequence, num_tokens) if num_tokens else 0
            while num_missing > worker.cache.pool.num_free and sequence.state is SequenceState.RUNNING:
                # The current sequence has no work in this draft yet, so the last one is itself at the worst.
                self._preempt(self._running.last())
                preempted = True
            if sequence.state is SequenceState.RUNNING:
                if num_missing > 0:
                    draft.append_blocks(sequence.slot, worker.cache.append(sequence, num_missing))
                self._plan_row(draft, worker, sequence, num_tokens)
        while not preempted and draft.num_free_tokens > 0 and self._admit(draft, worker, now):
            pass
        return self._dispatch(draft, worker)

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        """Take the result of the oldest unacknowledged plan. Raises ProtocolError for any other (S9)."""
        worker = self._worker
        if worker is None or not worker.unacknowledged:
            raise ProtocolError(f"a result of step {result.step}, but no plan is unacknowledged")
        dispatch = worker.unacknowledged[0]
        if (result.epoch, result.step) != (worker.epoch, dispatch.step):
            raise ProtocolError(
                f"a result of epoch {result.epoch} step {result.step}, "
                f"but epoch {worker.epoch} step {dispatch.step} is the oldest unacknowledged"
            )
        samples = read_samples(dispatch, result, worker.capacity.vocab_size)
        prompts = list(read_prompt_logprobs(dispatch, result, worker.capacity.vocab_size))
        del worker.unacknowledged[0]
        outputs = TokenOutputs()
        for row, entries in prompts:
            self._take_prompt_logprobs(row, entries, outputs)
        for sample in samples:
            sample.row.sequence.num_in_flight -= 1
        failed = [sample for sample in samples if sample.status is not RowStatus.OK]
        # Who wrote a shared block was planned before those who matched it: the cause is found before its consequences.
        for sample in sorted(failed, key=lambda sample: dispatch.rows.index(sample.row)):
            self._take_failure(sample, outputs)
        for sample in samples:
            if sample.status is RowStatus.OK:
                self._take_sample(sample, now, outputs)
        return outputs

    # The worker

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        """A worker with an empty cache is ready. Requests that cannot fit it end."""
        if self._worker is not None:
            raise RuntimeError("a worker joined while another is there")
        if epoch <= self._last_epoch:
            raise ProtocolError(f"epoch {epoch} is not above {self._last_epoch}")
        self._last_epoch = epoch
        self._model_digest = capacity.model_digest
        cache = CacheManager(
            capacity.num_device_blocks,
            capacity.block_size,
            enable_prefix_caching=self._enable_prefix_caching,
            watermark=self._watermark,
        )
        slots = RowSlots(min(self.max_num_seqs, capacity.max_num_seqs))
        self._worker = _Worker(epoch, capacity, cache, slots)
        outputs = TokenOutputs()
        for sequence in self._waiting.snapshot():
            sequence.root_key = (*sequence.root_key[:2], capacity.model_digest)
            message = self._misfit(sequence.owner.request)
            if message:
                self._finish(sequence, EndReason.NO_LONGER_FITS, outputs, message=message)
        return outputs

    def worker_lost(self, now: float) -> TokenOutputs:
        """The epoch is over: its cache and plans are gone, what ran goes back to waiting in order of arrival."""
        outputs = TokenOutputs()
        worker = self._worker
        if worker is None:
            return outputs
        dispatched = {row.sequence.owner for dispatch in worker.unacknowledged for row in dispatch.rows}
        for dispatch in worker.unacknowledged:
            for row in dispatch.rows:
                row.sequence.num_in_flight = 0
        for sequence in self._running.snapshot():
            self._requeue(sequence)
        self._worker = None
        for request in self._quarantine.crashed(request for request in dispatched if request.num_unfinished):
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED:
                    message = "the worker crashed twice while it computed this request alone"
                    self._finish(sequence, EndReason.CRASHES_WORKER, outputs, message=message)
        return outputs

    def worker_timed_out(self, now: float) -> TokenOutputs:
        """There has been no worker for too long: every request ends."""
        outputs = TokenOutputs()
        if self._worker is None:
            for sequence in self._waiting.snapshot():
                self._finish(sequence, EndReason.NO_WORKER, outputs, message="no worker is connected")
        return outputs

    # What others may ask

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_step_tokens(self) -> int:
        """The token budget of a step."""
        worker = self._worker
        return min(self.max_num_batched_tokens, worker.capacity.max_num_batched_tokens if worker else 2**31)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have: the model's length and the whole pool bound it."""
        if self._worker is None:
            return self.max_model_len
        capacity = self._worker.capacity
        num_positions = capacity.num_device_blocks * capacity.block_size
        return min(self.max_model_len, capacity.max_model_len, num_positions + 1)

    def stats(self) -> SchedulerStats:
        cache = self._worker.cache if self._worker else None
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_prompt_tokens,
            num_device_blocks=cache.pool.num_blocks if cache else 0,
            num_held_blocks=cache.num_held_blocks if cache else 0,
            num_cached_blocks=cache.index.num_cached_blocks if cache else 0,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of the design that is the core's. Costs time in proportion to all state."""
        invariants.check(self)

    # Admission

    def _check_admission(self, request: Request) -> None:
        if (request.tenant, request.request_id) in self._requests:
            raise AdmissionError(
                AdmissionReason.DUPLICATE, "request_id", f"request {request.request_id!r} is running already"
            )
        message = self._misfit(request)
        if message:
            field = "prompt" if len(request.prompt_token_ids) >= self.max_sequence_tokens else "sampling.max_tokens"
            raise AdmissionError(AdmissionReason.INVALID, field, message)
        if len(self._waiting) + request.n > self.max_waiting_requests:
            raise AdmissionError(
                AdmissionReason.QUEUE_FULL,
                "",
                f"{len(self._waiting)} sequences are queued, the limit is {self.max_waiting_requests}; try again later",
            )
        num_tokens = self._waiting.num_prompt_tokens + request.n * len(request.prompt_token_ids)
        if len(self._waiting) and num_tokens > self.max_waiting_tokens:
            raise AdmissionError(
                AdmissionReason.QUEUE_FULL,
                "",
                f"{self._waiting.num_prompt_tokens} prompt tokens are queued, with this request {num_tokens}, "
                f"the limit is {self.max_waiting_tokens}; try again later",
            )

    def _misfit(self, request: Request) -> str:
        """Why a sequence of the request can never run, or nothing."""
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        if num_tokens <= self.max_sequence_tokens:
            return ""
        limit = f"this server allows {self.max_sequence_tokens}"
        if self._worker is not None and self.max_sequence_tokens < self.max_model_len:
            capacity = self._worker.capacity
            limit += f" (the worker has {capacity.num_device_blocks} blocks of {capacity.block_size} tokens)"
        return (
            f"the prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.max_tokens}: together "
            f"{num_tokens}, {limit}; shorten the prompt or lower max_tokens"
        )

    def _admit(self, draft: PlanDraft, worker: _Worker, now: float) -> bool:
        """Open the first waiting sequence if it may run now."""
        sequence = next((waiting for waiting in self._waiting if self._quarantine.admits(waiting.owner)), None)
        if sequence is None or sequence.num_in_flight or not worker.slots.num_free:
            return False
        if draft.num_opening_values and draft.num_opening_values + 2 * sequence.num_tokens > _MAX_OPENING_VALUES:
            return False
        matched = worker.cache.match(sequence)
        if worker.cache.can_allocate(sequence, matched, alone=not self._running) is not Allocation.OK:
            return False
        self._waiting.remove(sequence)
        worker.cache.open(sequence, matched)
        sequence.state = SequenceState.RUNNING
        sequence.slot = worker.slots.take()
        self._running.add(sequence)
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_cached_prompt_tokens += sequence.num_cached_tokens
        draft.open(self._opening(sequence))
        self._plan_row(draft, worker, sequence, min(sequence.num_uncomputed_tokens, draft.num_free_tokens))
        return True

    def _opening(self, sequence: Sequence) -> RowOpening:
        request = sequence.owner.request
        sampling = request.sampling
        sequence.reports_prompt_logprobs = sequence.wants_prompt_logprobs
        if sampling.num_prompt_logprobs is not None and not sequence.reports_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return RowOpening(
            slot=sequence.slot,
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(sequence.block_table),
            sampling=sampling,
            seed=request.seed,
            sample_index=sequence.sample_index,
        )

    # Planning

    def _plan_row(self, draft: PlanDraft, worker: _Worker, sequence: Sequence, num_tokens: int) -> None:
        """Let a running sequence compute `num_tokens` positions for which it has blocks; 0 pauses it."""
        start = sequence.num_computed_tokens
        samples = num_tokens > 0 and num_tokens == sequence.num_uncomputed_tokens
        num_prompt_logprobs = 0
        if sequence.reports_prompt_logprobs:
            num_prompt_logprobs = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        row = PlannedRow(sequence.slot, sequence, sequence.attempt, start, num_tokens, samples, num_prompt_logprobs)
        draft.work(row)
        sequence.num_computed_tokens += num_tokens
        sequence.num_in_flight += samples
        worker.cache.publish(sequence)

    def _isolate_trial(self, worker: _Worker) -> bool:
        """Nobody runs beside a trial. False while others are still on the worker."""
        for sequence in self._running.snapshot():
            if not self._quarantine.admits(sequence.owner):
                self._preempt(sequence)
        rows = (row for dispatch in worker.unacknowledged for row in dispatch.rows)
        return all(self._quarantine.admits(row.sequence.owner) for row in rows)

    def _dispatch(self, draft: PlanDraft, worker: _Worker) -> StepPlan | None:
        if not draft.num_tokens:
            return None
        worker.num_steps += 1
        released_slots = worker.slots.take_released()
        patches = worker.slots.patch(draft.rows)
        rows = tuple(row for row in draft.rows if row.num_tokens)
        worker.unacknowledged.append(Dispatch(worker.num_steps, rows, draft.num_tokens))
        return StepPlan(
            epoch=worker.epoch,
            step=worker.num_steps,
            released_slots=released_slots,
            openings=tuple(draft.openings),
            append_slots=tuple(draft.append_slots),
            append_block_ids=tuple(draft.append_block_ids),
            work_slots=tuple(slot for slot, _ in patches),
            work_num_tokens=tuple(num_tokens for _, num_tokens in patches),
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; it will be computed again."""
        self._num_preemptions += 1
        self._vacate(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.state = SequenceState.WAITING
        sequence.forget_cache()
        self._waiting.add(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """A running sequence gives back its blocks and its slot."""
        assert self._worker is not None
        self._worker.slots.release(sequence.slot)
        self._worker.cache.release(sequence)

    # Results

    def _take_sample(self, sample: SampledRow, now: float, outputs: TokenOutputs) -> None:
        sequence, token_id = sample.row.sequence, sample.token_id
        if sequence.state is SequenceState.FINISHED or sample.row.attempt != sequence.attempt:
            return
        self._quarantine.cleared(sequence.owner)
        self._num_generation_tokens += 1
        sequence.token_ids.append(token_id)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        outputs.sequence_ids.append(sequence.sequence_id)
        outputs.token_ids.append(token_id)
        if sample.logprobs is not None:
            outputs.logprobs[sequence.sequence_id] = sample.logprobs
        if (
            token_id in sequence.stop_token_ids
            and sequence.num_output_tokens > sequence.owner.request.sampling.min_tokens
        ):
            self._finish(sequence, EndReason.STOP, outputs, stop_token_id=token_id)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._finish(sequence, EndReason.LENGTH, outputs)
        elif sequence.state is SequenceState.RUNNING:
            assert self._worker is not None
            self._worker.cache.publish(sequence)

    def _take_failure(self, sample: SampledRow, outputs: TokenOutputs) -> None:
        """Logits were not numbers: the request ends, and whatever was computed on top of its blocks is redone. They are
        no better if the request has ended by itself meanwhile."""
        sequence = sample.row.sequence
        if sample.row.attempt != sequence.attempt:
            return
        assert self._worker is not None
        self._worker.cache.unpublish(sequence)
        for other in list(self._sequences.values()):
            if other is not sequence and self._worker.cache.stands_on(other, sequence):
                other.attempt += 1
                if other.state is SequenceState.RUNNING:
                    self._preempt(other)
        if sequence.state is SequenceState.FINISHED:
            return
        for sibling in sequence.owner.sequences:
            if sibling.state is not SequenceState.FINISHED:
                self._finish(sibling, EndReason.NAN_LOGITS, outputs, message="the model's logits are not numbers")

    def _take_prompt_logprobs(self, row: PlannedRow, entries: list[TokenLogprobs], outputs: TokenOutputs) -> None:
        sequence = row.sequence
        if sequence.state is SequenceState.FINISHED or row.attempt != sequence.attempt:
            return
        new = entries[max(0, sequence.num_prompt_logprobs_sent - row.start) :]
        if new:
            sequence.num_prompt_logprobs_sent += len(new)
            outputs.prompt_logprobs.setdefault(sequence.sequence_id, []).extend(new)

    def _finish(
        self,
        sequence: Sequence,
        reason: EndReason,
        outputs: TokenOutputs,
        *,
        stop_token_id: int | None = None,
        message: str = "",
    ) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._vacate(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        request = sequence.owner
        request.num_unfinished -= 1
        del self._sequences[sequence.sequence_id]
        if request.num_unfinished == 0:
            del self._requests[request.request.tenant, request.request.request_id]
            self._quarantine.cleared(request)
        outputs.ended.append(
            SequenceEnd(
                sequence_id=sequence.sequence_id,
                reason=reason,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                num_output_tokens=sequence.num_output_tokens,
                stop_token_id=stop_token_id,
                message=message,
                arrived_at=sequence.arrived_at,
                first_scheduled_at=sequence.first_scheduled_at,
                first_token_at=sequence.first_token_at,
            )
        )
