"""The scheduler: a state machine over requests, blocks and one worker. Events go in, plans and tokens come out.

It does no I/O and knows no clock: every event brings its own `now`, in seconds of any monotonic clock.

Each sequence has one counter, `num_computed_tokens`, that chases its tokens known and in flight. Prefill, chunks of it,
prefix hits, resumption and decode are one code path under one token budget (after vLLM V1). Plans are made up to
`pipeline_depth` ahead of their results: a row that reaches its end samples on the worker, so the next plan needs no
token. Compute is in order, so a block that is free when a plan is made may be written by that plan.

A request is a group of sequences, admitted and preempted as a whole. Rows that decode are not visited from plan to
plan (`decode_batch.py`); all others are planned one by one, in order.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from scheduler_service.core import explain, invariants
from scheduler_service.core.beam import BeamSearch, BeamState, Child
from scheduler_service.core.cache_manager import Allocation, CacheManager, Match
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.dispatch import (
    Dispatch,
    PlannedRow,
    ProtocolError,
    Reading,
    SampledRow,
    read_result,
)
from scheduler_service.core.epoch import Epoch
from scheduler_service.core.plan import RowStatus, StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.plan_draft import PlanDraft
from scheduler_service.core.policy import Policy, create_policy
from scheduler_service.core.quarantine import Quarantine
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    BlockMap,
    BlockStored,
    CacheCleared,
    EndReason,
    Hypothesis,
    KvEvent,
    KvEventCounts,
    Request,
    RequestReport,
    SchedulerStats,
    SequenceEnd,
    TokenLogprobs,
    TokenOutputs,
    count_kv_events,
)
from scheduler_service.core.sequence import BeamGroup, GroupQueue, GroupState, Sequence, SequenceGroup
from scheduler_service.core.waiting_queue import WaitingQueue

__all__ = ["ProtocolError", "Scheduler"]

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024
# How a request ends of which the worker could not compute a row.
_FAILURES = {
    RowStatus.NAN_LOGITS: (EndReason.NAN_LOGITS, "the model's logits are not numbers"),
    RowStatus.OUT_OF_MEMORY: (
        EndReason.OUT_OF_MEMORY,
        "the worker's memory does not suffice to compute this request, even alone and a token at a time: shorten it, "
        "or lower the worker's --gpu-memory-utilization",
    ),
}


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
        max_tenant_waiting_requests: int | None = None,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        policy: Policy | None = None,
        preemption: PreemptionMode = PreemptionMode.AUTO,
        max_decode_slowdown: float | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.pipeline_depth = pipeline_depth
        self.max_waiting_requests = max_waiting_requests
        self.max_waiting_tokens = max_waiting_tokens
        self.max_tenant_waiting_requests = max_tenant_waiting_requests
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = watermark
        self._policy = policy or create_policy("priority")
        self._preemption = preemption
        self._max_decode_slowdown = max_decode_slowdown
        self._epoch: Epoch | None = None
        self._last_epoch = 0
        self._model_digest = b""
        self._groups: dict[tuple[str, str], SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}  # samples, by id
        self._num_tenant_requests: dict[str, int] = {}
        self._waiting: WaitingQueue[SequenceGroup] = WaitingQueue(self._policy)
        self._running = GroupQueue()
        self._quarantine = Quarantine()
        self._events: list[KvEvent] = []
        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_preemptions = 0
        self._num_swap_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._num_host_cached_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_moved_out = self._num_moved_in = 0  # of earlier epochs

    # Requests

    def add(self, request: Request, now: float) -> list[int]:
        """Queue a request; the ids of its outputs, one per sample or hypothesis. Raises AdmissionError."""
        self._check_admission(request)
        self._num_arrivals += 1
        keys = self._policy.key(request, self._num_arrivals), self._policy.running_key(request, self._num_arrivals)
        group = SequenceGroup(request, *keys, now)
        group.sequences = [self._new_sequence(group, index) for index in range(group.num_rows)]
        output_ids = [sequence.sequence_id for sequence in group.sequences[: request.n]]
        if request.beam is not None:
            search = BeamSearch(
                request.beam,
                frozenset(request.sampling.stop_token_ids),
                request.sampling.min_tokens,
                request.max_tokens,
            )
            group.beam = BeamGroup(search, output_ids, beams=group.sequences[:1])
        else:
            self._sequences.update((sequence.sequence_id, sequence) for sequence in group.sequences)
        group.num_unfinished = len(group.sequences)
        self._groups[request.tenant, request.request_id] = group
        num_requests = self._num_tenant_requests.get(request.tenant, 0)
        self._num_tenant_requests[request.tenant] = num_requests + 1
        self._policy.arrived(request.tenant, num_requests == 0)
        self._enqueue(group)
        return output_ids

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        """End every sequence of a request that has not ended. Raises KeyError if there is none."""
        outputs = TokenOutputs()
        self._finish_group(self._groups[tenant, request_id], EndReason.ABORT, outputs)
        return outputs

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        """A stop text was seen: tokens past `num_output_tokens` are dropped. Nothing happens if it has ended."""
        outputs = TokenOutputs()
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._keep_content(sequence)
            self._take_down(sequence)
            del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
            self._finish(sequence, EndReason.STOP, outputs)
        return outputs

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None while there is nothing to do or the pipeline is full."""
        epoch = self._epoch
        if epoch is None or len(epoch.unacknowledged) >= self.pipeline_depth:
            return None
        if not self._quarantine.is_empty and not self._isolate_trial(epoch, now):
            return None
        draft = PlanDraft(epoch.num_steps + 1, self._draft_tokens(epoch), epoch.decoding, now)
        for group, rows in self._rows_to_plan(epoch, draft):
            if group.state is not GroupState.RUNNING:
                continue
            work = self._share_budget(epoch, draft, rows)
            if not self._make_room(epoch, draft, group, work):
                continue
            epoch.tell_beams(group, draft)
            epoch.give_blocks(work, draft)
            for sequence, num_tokens in work:
                if sequence.is_decoding:
                    epoch.decoding.extended(sequence, draft.step)
                    draft.extended.append(sequence)
                else:
                    epoch.plan_row(sequence, num_tokens, draft)
        self._open_loaded(epoch, draft)  # only now: what a plan opens is never its victim
        # What was preempted makes room for what runs, unless nothing does.
        if (draft.is_empty or not draft.has_preempted) and self._open_siblings(epoch, draft, now):
            while self._admit(epoch, draft, now):
                pass
        if draft.num_tokens:
            draft.swaps_out.extend(epoch.cache.demote(draft.step, draft.num_tokens))
        return epoch.dispatch(draft)

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        """Take the result of the oldest unacknowledged plan. Raises ProtocolError for any other (S9)."""
        epoch = self._epoch
        if epoch is None or not epoch.unacknowledged:
            raise ProtocolError(f"a result of step {result.step}, but no plan is unacknowledged")
        dispatch = epoch.unacknowledged[0]
        if (result.epoch, result.step) != (epoch.number, dispatch.step):
            raise ProtocolError(
                f"a result of epoch {result.epoch} step {result.step}, "
                f"but epoch {epoch.number} step {dispatch.step} is the oldest unacknowledged"
            )
        reading = read_result(dispatch, result, epoch.capacity.vocab_size)
        if not dispatch.has_moves:  # a worker may do them in the time of the step
            epoch.cost.observe_step(dispatch.num_tokens, dispatch.num_prompt_tokens, result.duration_us / 1e6)
        outputs = TokenOutputs()
        for row, entries in reading.prompt_logprobs:
            if row.sequence not in dispatch.dropped:
                self._take_prompt_logprobs(row, entries, outputs)
        self._take_failures(epoch, dispatch, reading, outputs, now)
        del epoch.unacknowledged[0]
        for sample in reading.samples:
            if sample.status is RowStatus.OK and sample.sequence not in dispatch.dropped:
                self._take_sample(epoch, sample, now, outputs)
        self._take_decoded(dispatch, reading.decoded, outputs)
        for sequence in dispatch.extended:
            if sequence.slot >= 0 and sequence not in dispatch.dropped:
                epoch.cache.publish(sequence)
                self._charge(sequence)
        return outputs

    def moved(self, step: int, now: float) -> None:
        """The moves of all plans up to `step` are done. Raises ProtocolError if there is no such plan."""
        epoch = self._epoch
        if epoch is None or step > epoch.num_steps:
            raise ProtocolError(f"moves of step {step} are done, but no such step was planned")
        if step <= epoch.last_moved_step:
            return
        epoch.last_moved_step = step
        epoch.cache.moves.acknowledge(step)
        for group in epoch.swapped:
            if group.moved_step <= step:
                group.state = GroupState.SWAPPED

    # The worker

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        """A worker with an empty cache is ready. Requests that cannot fit it end."""
        if self._epoch is not None:
            raise RuntimeError("a worker joined while another is there")
        if epoch <= self._last_epoch:
            raise ProtocolError(f"epoch {epoch} is not above {self._last_epoch}")
        self._last_epoch = epoch
        self._model_digest = capacity.model_digest
        cache = CacheManager(capacity, enable_prefix_caching=self._enable_prefix_caching, watermark=self._watermark)
        # A decoding row takes a token of every step: with more rows than that, some would never have their turn.
        num_slots = min(
            self.max_num_seqs, capacity.max_num_seqs, self.max_num_batched_tokens, capacity.max_num_batched_tokens
        )
        cost = CostModel(self._preemption, capacity.block_bytes, capacity.swap_bandwidth)
        self._epoch = Epoch(epoch, capacity, cache, num_slots, cost)
        outputs = TokenOutputs()
        for group in list(self._waiting):
            for sequence in group.sequences:
                sequence.root_key = (*sequence.root_key[:2], capacity.model_digest)
            _, message = self._misfit(group.request)
            if message:
                self._finish_group(group, EndReason.NO_LONGER_FITS, outputs, message=message)
        return outputs

    def worker_lost(self, now: float) -> TokenOutputs:
        """The epoch is over: its cache and plans are gone, what ran goes back to waiting in order of arrival."""
        outputs = TokenOutputs()
        epoch = self._epoch
        if epoch is None:
            return outputs
        self._epoch = None
        dispatched = {group for dispatch in epoch.unacknowledged for group in dispatch.groups()}
        self._events.extend(epoch.cache.index.take_events())
        self._events.append(CacheCleared())
        self._num_moved_out += epoch.cache.moves.num_moved_out
        self._num_moved_in += epoch.cache.moves.num_moved_in
        epoch.cache.index.dissolve()
        self._running = GroupQueue()
        for group in self._groups.values():
            is_queued = group.state not in (GroupState.RUNNING, GroupState.SWAPPING_IN)
            if not is_queued:
                group.pause(now)
            group.reset()
            if not is_queued:
                self._enqueue(group)
        for group in self._quarantine.crashed(group for group in dispatched if group.num_unfinished):
            message = "the worker crashed twice while it computed this request alone"
            self._finish_group(group, EndReason.CRASHES_WORKER, outputs, message=message)
        return outputs

    def worker_grace_ended(self, now: float) -> TokenOutputs:
        """There has been no worker for a while: requests end that another server could as well begin."""
        return self._end_without_worker(group for group in self._waiting if not group.is_bound)

    def worker_timed_out(self, now: float) -> TokenOutputs:
        """There has been no worker for too long: every request ends."""
        return self._end_without_worker(self._waiting)

    def flush_cache(self, now: float) -> None:
        """Forget all cached content. Nothing happens while there are requests: their caches are built on it."""
        if self._epoch is not None and not self._groups:
            self._epoch.cache.flush()

    # What others may ask

    @property
    def has_requests(self) -> bool:
        return bool(self._groups)

    @property
    def num_step_tokens(self) -> int:
        """The token budget of a step."""
        epoch = self._epoch
        return min(self.max_num_batched_tokens, epoch.capacity.max_num_batched_tokens if epoch else 2**31)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have: the model's length and the whole pool bound it."""
        if self._epoch is None:
            return self.max_model_len
        capacity = self._epoch.capacity
        num_positions = capacity.num_device_blocks * capacity.block_size
        return min(self.max_model_len, capacity.max_model_len, num_positions + 1)

    @property
    def state(self) -> "Scheduler":
        return self

    def stats(self) -> SchedulerStats:
        epoch = self._epoch
        cache = epoch.cache if epoch else None
        swapped = [*epoch.swapped, *epoch.loading] if epoch else []
        queued = list(epoch.swapped) if epoch else []  # they stand in the queue too
        return SchedulerStats(
            num_running=epoch.num_rows if epoch else 0,
            num_waiting=self._waiting.num_sequences - sum(group.num_waiting_sequences for group in queued),
            num_swapped=sum(group.num_unfinished for group in swapped),
            num_waiting_tokens=self._waiting.num_prompt_tokens - sum(group.num_waiting_tokens for group in queued),
            num_device_blocks=cache.pool.num_blocks if cache else 0,
            num_held_blocks=cache.num_held_blocks if cache else 0,
            num_cached_blocks=cache.index.num_cached_blocks if cache else 0,
            num_host_blocks=cache.host_pool.num_blocks if cache else 0,
            num_held_host_blocks=cache.host_pool.num_blocks - cache.host_pool.num_free if cache else 0,
            num_cached_host_blocks=cache.index.num_cached_host_blocks if cache else 0,
            num_preemptions=self._num_preemptions,
            num_swap_preemptions=self._num_swap_preemptions,
            num_moved_blocks_out=self._num_moved_out + (cache.moves.num_moved_out if cache else 0),
            num_moved_blocks_in=self._num_moved_in + (cache.moves.num_moved_in if cache else 0),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            num_host_cached_prompt_tokens=self._num_host_cached_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )

    def report(self, tenant: str, request_id: str) -> RequestReport:
        """What a request does and why it waits. Raises KeyError if there is none."""
        return explain.group_report(self._groups[tenant, request_id], self._epoch, self._waiting, self._running)

    def block_map(self) -> BlockMap:
        """Who holds which block."""
        return explain.epoch_blocks(self._epoch, self._groups.values())

    def take_kv_events(self) -> list[KvEvent]:
        """What changed in the cache since the last call."""
        events, self._events = self._events, []
        if self._epoch is not None:
            events.extend(self._epoch.cache.index.take_events())
        return events

    def drop_kv_events(self) -> KvEventCounts:
        """Forget what `take_kv_events` would tell, where nobody wants to know; how many events these were."""
        events, self._events = self._events, []
        counts = count_kv_events(events)
        if self._epoch is None:
            return counts
        num_stored, num_removed = self._epoch.cache.index.drop_events()
        return counts._replace(num_stored=counts.num_stored + num_stored, num_removed=counts.num_removed + num_removed)

    def kv_snapshot(self) -> list[BlockStored]:
        """What is cached, parents first."""
        return self._epoch.cache.index.snapshot() if self._epoch else []

    def check(self) -> None:
        """Assert every invariant of the design that is the core's. Costs time in proportion to all state."""
        invariants.check(self)

    def check_sample(self) -> None:
        """Assert a few of them, cheaply enough for production."""
        invariants.check_sample(self)

    # Admission

    def _check_admission(self, request: Request) -> None:
        if (request.tenant, request.request_id) in self._groups:
            raise AdmissionError(
                AdmissionReason.DUPLICATE, "request_id", f"request {request.request_id!r} is running already"
            )
        field, message = self._misfit(request)
        if message:
            raise AdmissionError(AdmissionReason.INVALID, field, message)
        num_sequences, waiting = _num_queued_sequences(request), self._waiting
        limits = [("", waiting.num_sequences, self.max_waiting_requests)]
        if self.max_tenant_waiting_requests is not None:
            num_waiting = waiting.num_tenant_sequences(request.tenant)
            limits.append((" of this tenant", num_waiting, self.max_tenant_waiting_requests))
        for whose, num_waiting, limit in limits:
            if num_waiting + num_sequences > limit:
                raise AdmissionError(
                    AdmissionReason.QUEUE_FULL,
                    "",
                    f"{num_waiting} sequences{whose} are queued, the limit is {limit}; try again later",
                )
        num_tokens = waiting.num_prompt_tokens + len(request.prompt_token_ids)
        if len(waiting) and num_tokens > self.max_waiting_tokens:
            raise AdmissionError(
                AdmissionReason.QUEUE_FULL,
                "",
                f"{waiting.num_prompt_tokens} prompt tokens are queued, with this request {num_tokens}, "
                f"the limit is {self.max_waiting_tokens}; try again later",
            )

    def _misfit(self, request: Request) -> tuple[str, str]:
        """Why the request can never run: the field at fault and the message. Empty if it can."""
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + request.max_tokens
        if num_tokens > self.max_sequence_tokens:
            limit = f"this server allows {self.max_sequence_tokens}"
            if self._epoch is not None and self.max_sequence_tokens < self.max_model_len:
                capacity = self._epoch.capacity
                limit += f" (the worker has {capacity.num_device_blocks} blocks of {capacity.block_size} tokens)"
            return (
                "prompt" if num_prompt_tokens >= self.max_sequence_tokens else "sampling.max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {request.max_tokens}: together "
                f"{num_tokens}, {limit}; shorten the prompt or lower max_tokens",
            )
        width = request.beam.beam_width if request.beam else 1
        max_width = self._epoch.slots.num_slots if self._epoch else self.max_num_seqs
        if width > max_width:
            return (
                "sampling.beam_width",
                f"beam_width is {width}, but this server runs at most {max_width} sequences at a time; lower it",
            )
        cache = self._epoch.cache if self._epoch else None
        num_blocks = cache.num_most_blocks(request) if cache else 0
        if cache is None or cache.can_allocate(0, num_blocks, alone=True) is not Allocation.NEVER:
            return "", ""
        what = "beam_width" if request.beam else "n"
        return (
            f"sampling.{what}",
            f"with {what} {width if request.beam else request.n} the request may need {num_blocks} blocks of "
            f"{cache.block_size} tokens, the worker has {cache.pool.num_blocks}; lower {what} or max_tokens",
        )

    def _new_sequence(self, group: SequenceGroup, sample_index: int) -> Sequence:
        request = group.request
        self._num_sequences += 1
        sequence = Sequence(
            sequence_id=self._num_sequences - 1,
            group=group,
            sample_index=sample_index,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
            root_key=(request.tenant, request.cache_salt, self._model_digest),
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
            num_prompt_logprobs=request.sampling.num_prompt_logprobs if sample_index == 0 else None,
        )
        sequence.start_from(0)
        return sequence

    def _enqueue(self, group: SequenceGroup) -> None:
        group.num_waiting_sequences = group.num_unfinished if group.beam is None else 1
        group.num_waiting_tokens = len(group.request.prompt_token_ids)
        self._waiting.add(group)

    def _next_waiting(self) -> SequenceGroup | None:
        if self._quarantine.is_empty:
            return self._waiting.next(lambda group: True)
        return next((group for group in self._waiting if self._quarantine.admits(group)), None)

    def _admit(self, epoch: Epoch, draft: PlanDraft, now: float) -> bool:
        """Start the next waiting group, or bring it back, if that is possible now."""
        group = self._next_waiting()
        if group is None or draft.num_free_tokens <= 0 or epoch.last_acknowledged_step < group.resume_step:
            return False
        if group.state is GroupState.SWAPPED and any(sequence.host_table for sequence in group.live_sequences):
            return self._swap_in(epoch, draft, group)
        if group.state is GroupState.SWAPPED:  # what was swapped of it has ended meanwhile
            del epoch.swapped[group]
            group.state = GroupState.WAITING
        return group.state is GroupState.WAITING and self._start(epoch, draft, group, now)

    def _start(self, epoch: Epoch, draft: PlanDraft, group: SequenceGroup, now: float) -> bool:
        """Give the first sequence of a group its blocks, and all the slots it needs at once."""
        cache, sequence = epoch.cache, group.unopened_sequences[0]
        num_slots = 1 if group.beam is None else group.num_rows
        if epoch.slots.num_free < num_slots or not _fits_openings(draft, sequence):
            return False
        is_alone = not self._running and not epoch.loading
        if not is_alone and epoch.blocked[0] is group and cache.pool.num_free <= epoch.blocked[1]:
            return False
        match = self._match(epoch, sequence)
        if match is None:
            return False
        num_blocks = cache.num_opening_blocks(sequence, match)
        num_most_blocks = cache.num_most_blocks(group.request)
        if cache.can_allocate(num_blocks, num_most_blocks, alone=is_alone) is not Allocation.OK:
            epoch.blocked = (group, cache.pool.num_free)
            return False
        self._waiting.remove(group)
        loads = cache.open(sequence, match, draft.step)
        epoch.reserve_slots(group, num_slots)
        self._first_scheduled(sequence, len(match.host) * cache.block_size, now)
        if loads:
            draft.swaps_in.extend(loads)
            group.state, group.moved_step = GroupState.SWAPPING_IN, draft.step
            epoch.loading[group] = None
        else:
            self._run(epoch, draft, group, [sequence])
        return True

    def _match(self, epoch: Epoch, sequence: Sequence) -> Match | None:
        """What the sequence would start from. None: it waits for somebody else's load of the same content."""
        match = epoch.cache.match(sequence)
        if match.is_loading:
            return None
        if match.host and epoch.cost.prefers_load(len(match.host), len(match.host) * epoch.cache.block_size):
            return match
        return match.without_host()

    def _first_scheduled(self, sequence: Sequence, num_host_tokens: int, now: float) -> None:
        if sequence.first_scheduled_at is not None:
            return
        sequence.first_scheduled_at = now
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._num_cached_prompt_tokens += sequence.num_cached_tokens
        self._num_host_cached_prompt_tokens += num_host_tokens
        num_computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
        self._policy.charge(sequence.group.request.tenant, num_computed, 0)

    def _run(self, epoch: Epoch, draft: PlanDraft, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Open the rows of a group whose blocks are there."""
        group.state = GroupState.RUNNING
        group.resume(draft.now)
        self._running.add(group)
        for sequence in sequences:
            self._open(epoch, draft, sequence)
        if group.beam is None:
            epoch.give_back_reserved(group)
        if group.unopened_sequences:
            epoch.partial[group] = None

    def _open(self, epoch: Epoch, draft: PlanDraft, sequence: Sequence) -> None:
        epoch.open_row(sequence, draft)
        work = self._share_budget(epoch, draft, [sequence])
        epoch.cache.slide(sequence)
        num_missing = epoch.num_missing_blocks(work)
        if num_missing <= epoch.cache.pool.num_free:
            epoch.give_blocks(work, draft)
            epoch.plan_row(*work[0], draft)

    def _open_siblings(self, epoch: Epoch, draft: PlanDraft, now: float) -> bool:
        """Open the other sequences of groups whose prompt is computed. False if one had no room: nobody is admitted
        before it."""
        for group in sorted(epoch.partial, key=lambda group: group.order):
            if group not in epoch.partial:  # it has just given way
                continue
            for sequence in group.unopened_sequences:
                relatives = [row for row in group.open_sequences if row.forkable_from]
                if group.open_sequences and not any(row.forkable_from <= draft.step for row in relatives):
                    break
                while not self._open_sibling(epoch, draft, sequence, relatives, now):
                    # Groups that wait for siblings hold on to blocks: when nothing else happens, the last gives way.
                    if not (draft.is_empty and epoch.is_idle) or self._running.last() is group:
                        return False
                    self._preempt(epoch, draft, self._running.last())
            else:
                del epoch.partial[group]
        return True

    def _open_sibling(
        self, epoch: Epoch, draft: PlanDraft, sequence: Sequence, relatives: list[Sequence], now: float
    ) -> bool:
        """From the prompt of a relative, or from what is cached, whichever is more."""
        cache, group = epoch.cache, sequence.group
        has_slot = bool(group.reserved_slots) or epoch.slots.num_free > 0
        if not has_slot or draft.num_free_tokens <= 0 or not _fits_openings(draft, sequence):
            return False
        match = cache.match(sequence).without_host()
        relative = next((row for row in relatives if row.forkable_from <= draft.step), None)
        forks = (
            relative is not None and cache.num_forked_tokens(sequence, relative) > match.num_blocks * cache.block_size
        )
        if forks and relative is not None:
            num_blocks = cache.num_fork_blocks(sequence, relative)
        else:
            num_blocks = cache.num_opening_blocks(sequence, match)
        is_alone = epoch.num_rows == len(group.open_sequences) and not epoch.loading
        is_alone = is_alone or (draft.is_empty and epoch.is_idle)
        if cache.can_allocate(num_blocks, 0, alone=is_alone) is not Allocation.OK:
            return False
        if forks and relative is not None:
            draft.copies.extend(cache.fork(sequence, relative))
        else:
            cache.open(sequence, match, draft.step)
        self._first_scheduled(sequence, 0, now)
        self._open(epoch, draft, sequence)
        return True

    # Planning

    def _rows_to_plan(self, epoch: Epoch, draft: PlanDraft) -> Iterator[tuple[SequenceGroup, list[Sequence]]]:
        """The rows that need a look, by group, in order: those with tokens to compute, and decoding ones that need a
        block or come to their last token."""
        due = epoch.decoding.take_due(draft.step)
        for sequence in due:
            if sequence.last_step == draft.step:
                epoch.pause(sequence)
        due = [sequence for sequence in due if sequence.is_decoding]
        if epoch.has_ample_blocks(len(due), draft.max_tokens):
            epoch.extend_decoding(due, draft)
            due.clear()
        rows = {**epoch.active, **dict.fromkeys(due)}
        for _, sequences in groupby(sorted(rows, key=lambda row: row.order), key=lambda row: row.group.order):
            group_rows = list(sequences)
            yield group_rows[0].group, group_rows

    def _draft_tokens(self, epoch: Epoch) -> int:
        """The token budget of the next step: where rows decode, prompts slow them down by no more than they may."""
        if self._max_decode_slowdown is None or not len(epoch.decoding):
            return self.num_step_tokens
        max_prompt_tokens = epoch.cost.max_prompt_tokens(self._max_decode_slowdown)
        if max_prompt_tokens is None:
            return self.num_step_tokens
        return min(self.num_step_tokens, len(epoch.decoding) + max_prompt_tokens)

    def _share_budget(self, epoch: Epoch, draft: PlanDraft, rows: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """How many tokens each row computes. A decoding row has its one already."""
        num_free = draft.num_free_tokens
        work = []
        for sequence in rows:
            num_tokens = 1 if sequence.is_decoding else min(sequence.num_uncomputed_tokens, num_free)
            num_free -= 0 if sequence.is_decoding else num_tokens
            work.append((sequence, num_tokens))
        return work

    def _make_room(
        self, epoch: Epoch, draft: PlanDraft, group: SequenceGroup, work: list[tuple[Sequence, int]]
    ) -> bool:
        """Have the blocks for a group's work free, if need be by preempting the last groups. False: it waits.

        Groups are planned in order, so the last one has no work in this draft unless it is this one.
        """
        pool, moves = epoch.cache.pool, epoch.cache.moves
        for sequence, _ in work:
            epoch.cache.slide(sequence)
        num_missing = epoch.num_missing_blocks(work)
        while num_missing > pool.num_free and group.state is GroupState.RUNNING:
            if num_missing <= pool.num_free + moves.num_returning:
                break
            self._preempt(epoch, draft, self._running.last())
        if num_missing <= pool.num_free and group.state is GroupState.RUNNING:
            return True
        for sequence, _ in work:
            if sequence.is_decoding:
                epoch.pause(sequence)
        return False

    def _isolate_trial(self, epoch: Epoch, now: float) -> bool:
        """Nobody runs beside a trial. False while others are still on the worker."""
        for group in [*self._running, *epoch.loading]:
            if not self._quarantine.admits(group):
                self._discard(epoch, group, now)
        return all(self._quarantine.admits(group) for dispatch in epoch.unacknowledged for group in dispatch.groups())

    # Preemption

    def _preempt(self, epoch: Epoch, draft: PlanDraft, group: SequenceGroup) -> None:
        """Take the blocks of a running group: it will be swapped in, or computed again, whichever is cheaper."""
        draft.has_preempted = True
        num_blocks = epoch.cache.num_computed_blocks(group)
        num_host_blocks = epoch.cache.num_swap_blocks(group)
        swaps = (
            num_blocks > 0
            and num_host_blocks <= epoch.cache.host_pool.num_free
            and epoch.cost.prefers_swap(num_blocks, num_blocks * epoch.cache.block_size)
        )
        if not swaps:
            self._discard(epoch, group, draft.now)
            return
        self._num_preemptions += 1
        self._num_swap_preemptions += 1
        group.num_preemptions += 1
        group.pause(draft.now)
        self._stop_beams(epoch, group)
        moves = epoch.cache.swap_out(group, draft.step)
        draft.swaps_out.extend(moves)
        epoch.vacate_group(group)
        self._running.remove(group)
        group.state = GroupState.SWAPPING_OUT if moves else GroupState.SWAPPED
        group.moved_step = draft.step if moves else 0
        group.resume_step = epoch.num_steps
        epoch.swapped[group] = None
        self._enqueue(group)

    def _discard(self, epoch: Epoch, group: SequenceGroup, now: float) -> None:
        """Take everything a group has on the worker, in whatever state: it will be computed again."""
        self._num_preemptions += 1
        group.num_preemptions += 1
        group.pause(now)
        self._stop_beams(epoch, group)
        if group.state is GroupState.RUNNING:
            self._running.remove(group)
        is_queued = group.state in (GroupState.SWAPPING_OUT, GroupState.SWAPPED)
        epoch.forget(group)
        group.state, group.resume_step = GroupState.WAITING, epoch.num_steps
        if not is_queued:
            self._enqueue(group)

    def _stop_beams(self, epoch: Epoch, group: SequenceGroup) -> None:
        """Candidates of a search that is preempted are lost: each beam computes its last token again."""
        if group.beam is None:
            return
        for sequence in group.sequences:
            epoch.drop(sequence)
            sequence.start_from(min(sequence.num_computed_tokens, sequence.num_tokens - 1))

    def _swap_in(self, epoch: Epoch, draft: PlanDraft, group: SequenceGroup) -> bool:
        """Order a swapped group's blocks back, if there is room for it to run on."""
        cache = epoch.cache
        rows = [sequence for sequence in group.live_sequences if sequence.host_table]
        num_slots = len(rows) if group.beam is None else group.num_rows
        num_blocks = cache.num_swapped_blocks(group) + sum(
            max(0, cache.num_blocks_for(row.num_tokens) - len(row.host_table)) for row in rows
        )
        is_alone = not self._running and not epoch.loading
        if epoch.slots.num_free < num_slots:
            return False
        if cache.can_allocate(num_blocks, 0, alone=is_alone) is not Allocation.OK:
            return False
        self._waiting.remove(group)
        del epoch.swapped[group]
        draft.swaps_in.extend(cache.swap_in(group, draft.step))
        epoch.reserve_slots(group, num_slots)
        for row in rows:
            row.start_from(min(row.num_computed_tokens, row.num_tokens - 1))
        group.state, group.moved_step = GroupState.SWAPPING_IN, draft.step
        epoch.loading[group] = None
        return True

    def _open_loaded(self, epoch: Epoch, draft: PlanDraft) -> None:
        """Open the rows of the groups whose blocks have come in."""
        loaded = [group for group in epoch.loading if group.moved_step <= epoch.last_moved_step]
        for group in sorted(loaded, key=lambda group: group.order):
            del epoch.loading[group]
            self._run(epoch, draft, group, [sequence for sequence in group.live_sequences if sequence.block_table])

    # Results

    def _take_sample(self, epoch: Epoch, sample: SampledRow, now: float, outputs: TokenOutputs) -> None:
        sequence, token_id = sample.sequence, sample.token_id
        group = sequence.group
        self._quarantine.cleared(group)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if group.beam is not None:
            sequence.forget_in_flight()
            group.beam.candidates[sequence] = sample.candidates
            if len(group.beam.candidates) == len(group.beam.beams):
                self._select(epoch, group, outputs)
            return
        self._num_generation_tokens += 1
        sequence.token_ids.append(token_id)
        outputs.sequence_ids.append(sequence.sequence_id)
        outputs.token_ids.append(token_id)
        if sample.logprobs is not None:
            outputs.logprobs[sequence.sequence_id] = sample.logprobs
        if token_id in sequence.stop_token_ids and sequence.num_output_tokens > group.request.sampling.min_tokens:
            self._end(sequence, EndReason.STOP, outputs, stop_token_id=token_id)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._end(sequence, EndReason.LENGTH, outputs)
        elif sequence.slot >= 0:
            epoch.cache.publish(sequence)

    def _take_decoded(self, dispatch: Dispatch, token_ids: list[int], outputs: TokenOutputs) -> None:
        """One token for each decoding row. The hot loop of the scheduler: nothing but the token and its stop set."""
        columns = dispatch.columns
        if not token_ids:
            return
        if dispatch.dropped or self._quarantine.has_charges:
            kept = [i for i, sequence in enumerate(columns.sequences) if sequence not in dispatch.dropped]
            columns, token_ids = columns.take(kept), [token_ids[i] for i in kept]
            for sequence in columns.sequences:
                self._quarantine.cleared(sequence.group)
        for output, token_id in zip(columns.token_lists, token_ids, strict=True):
            output.append(token_id)
        self._num_generation_tokens += len(token_ids)
        outputs.sequence_ids.extend(columns.sequence_ids)
        outputs.token_ids.extend(token_ids)
        if columns.any_stop.isdisjoint(token_ids):
            return
        for i in [i for i, stops in enumerate(columns.stop_sets) if token_ids[i] in stops]:
            sequence = columns.sequences[i]
            if sequence.num_output_tokens > sequence.group.request.sampling.min_tokens:
                self._end(sequence, EndReason.STOP, outputs, stop_token_id=token_ids[i])

    def _take_failures(
        self, epoch: Epoch, dispatch: Dispatch, reading: Reading, outputs: TokenOutputs, now: float
    ) -> None:
        """Rows were not computed, or their logits are not numbers: the request ends, and whatever was computed on top
        of its blocks is redone. They are no better if the sequence has ended by itself meanwhile."""
        failed = {sample.sequence: sample.status for sample in reading.samples if sample.status is not RowStatus.OK}
        # Who wrote a shared block was planned before those who matched it: the cause is found before its consequences.
        planned = {row.sequence: i for i, row in enumerate(dispatch.rows)}
        for sequence in sorted(failed, key=lambda sequence: planned.get(sequence, -1)):
            if sequence.has_failed:
                continue
            # One that was preempted, and computes this row again, may do better; what it wrote is bad all the same.
            group, ends = sequence.group, not sequence.is_finished and sequence not in dispatch.dropped
            written = group.sequences if ends else [sequence]
            for bad in written:
                # Others may write the same content before its next row comes back.
                bad.has_failed = ends or bad.is_finished
                epoch.cache.unpublish(bad)
            for other in list(self._groups.values()):
                if (other is not group or not ends) and any(
                    epoch.cache.stands_on(row, bad) for row in other.sequences for bad in written
                ):
                    self._redo(epoch, other, now)
            if ends:
                reason, message = _FAILURES[failed[sequence]]
                self._finish_group(group, reason, outputs, message=message)

    def _redo(self, epoch: Epoch, group: SequenceGroup, now: float) -> None:
        """What a group has computed is bad, and so are its samples on their way."""
        for sequence in group.sequences:
            epoch.drop(sequence)
        if group.state is GroupState.WAITING:
            group.resume_step = epoch.num_steps
        else:
            self._discard(epoch, group, now)

    def _take_prompt_logprobs(self, row: PlannedRow, entries: list[TokenLogprobs], outputs: TokenOutputs) -> None:
        sequence = row.sequence
        new = entries[max(0, sequence.num_prompt_logprobs_sent - row.start) :]
        if new:
            sequence.num_prompt_logprobs_sent += len(new)
            outputs.prompt_logprobs.setdefault(sequence.sequence_id, []).extend(new)

    # Beams

    def _select(self, epoch: Epoch, group: SequenceGroup, outputs: TokenOutputs) -> None:
        """All beams have reported: choose those that go on."""
        beam = group.beam
        assert beam is not None
        states = [
            BeamState(sequence.cumulative_logprob, sequence.token_ids[sequence.num_prompt_tokens :])
            for sequence in beam.beams
        ]
        step = beam.search.advance(states, [beam.candidates[sequence] for sequence in beam.beams])
        beam.candidates.clear()
        if step.is_done:
            self._finish_search(group, outputs)
        else:
            self._num_generation_tokens += len(step.children)
            self._policy.charge(group.request.tenant, 0, len(step.children))
            self._branch(epoch, group, beam, step.children)

    def _branch(self, epoch: Epoch, group: SequenceGroup, beam: BeamGroup, children: list[Child]) -> None:
        """Let the rows of the search hold the children: the first child of a beam stays in its row, the others move to
        rows whose beam has none."""
        parents = beam.beams
        used = {parents[child.parent] for child in children}
        spare = [sequence for sequence in group.sequences if sequence not in used]
        for sequence in spare:
            epoch.active.pop(sequence, None)
            epoch.cache.release(sequence)
        beam.beams = []
        for child in children:
            parent = parents[child.parent]
            row = parent
            if parent in beam.beams:
                row = spare.pop(0)
                row.token_ids = parent.token_ids.copy()
                epoch.cache.branch(row, parent)
                if row.slot < 0:
                    row.slot = group.reserved_slots.pop(0)
                    beam.unborn_slots.add(row.slot)
                beam.forks.append((parent.slot, row.slot))
            beam.beams.append(row)
        for row, child in zip(beam.beams, children, strict=True):
            row.select(child.token_id)
            row.cumulative_logprob = child.cumulative_logprob
            beam.appended.append((row.slot, child.token_id))
            epoch.active[row] = None
            epoch.cache.publish(row)

    def _finish_search(self, group: SequenceGroup, outputs: TokenOutputs) -> None:
        beam = group.beam
        assert beam is not None
        first = group.sequences[0]
        best = beam.search.best(len(beam.output_ids))
        for sequence_id, found in zip(beam.output_ids, best, strict=False):
            outputs.hypotheses.append(Hypothesis(sequence_id, found.token_ids, found.cumulative_logprob))
            reason = EndReason.LENGTH if found.stop_token_id is None else EndReason.STOP
            end = _sequence_end(first, sequence_id, reason, len(found.token_ids), found.stop_token_id, "")
            outputs.ended.append(end)
        for sequence_id in beam.output_ids[len(best) :]:  # a vocabulary smaller than the beam
            outputs.ended.append(_sequence_end(first, sequence_id, EndReason.LENGTH, 0, None, ""))
        self._leave(group)

    # Ends

    def _end_without_worker(self, groups: Iterable[SequenceGroup]) -> TokenOutputs:
        """Nothing happens while a worker is there."""
        outputs = TokenOutputs()
        if self._epoch is None:
            for group in list(groups):
                self._finish_group(group, EndReason.NO_WORKER, outputs, message="no worker is connected")
        return outputs

    def _end(
        self, sequence: Sequence, reason: EndReason, outputs: TokenOutputs, *, stop_token_id: int | None = None
    ) -> None:
        self._keep_content(sequence)
        self._take_down(sequence)
        self._finish(sequence, reason, outputs, stop_token_id=stop_token_id)

    def _keep_content(self, sequence: Sequence) -> None:
        """What a row has computed may serve others after its end."""
        if self._epoch is not None and sequence.slot >= 0:
            self._epoch.cache.publish(sequence)

    def _take_down(self, sequence: Sequence) -> None:
        """A sample lets go of its row and its blocks; what is on its way no longer counts."""
        epoch = self._epoch
        if epoch is None:
            return
        epoch.drop(sequence)
        if sequence.slot >= 0:
            epoch.vacate(sequence)
        epoch.cache.release(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: EndReason,
        outputs: TokenOutputs,
        *,
        stop_token_id: int | None = None,
        message: str = "",
    ) -> None:
        """A sample that was taken down ends, and its request with the last one."""
        group = sequence.group
        self._charge(sequence)
        sequence.is_finished = True
        del self._sequences[sequence.sequence_id]
        num_output_tokens = sequence.num_output_tokens
        outputs.ended.append(
            _sequence_end(sequence, sequence.sequence_id, reason, num_output_tokens, stop_token_id, message)
        )
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self._leave(group)

    def _finish_group(
        self, group: SequenceGroup, reason: EndReason, outputs: TokenOutputs, *, message: str = ""
    ) -> None:
        if group.beam is None:
            for sequence in group.live_sequences:
                self._take_down(sequence)
                self._finish(sequence, reason, outputs, message=message)
            return
        for sequence in group.sequences:
            if self._epoch is not None:
                self._epoch.drop(sequence)
        for sequence_id in group.beam.output_ids:
            outputs.ended.append(_sequence_end(group.sequences[0], sequence_id, reason, 0, None, message))
        self._leave(group)

    def _leave(self, group: SequenceGroup) -> None:
        """The group's last sequence has ended: nothing remembers it."""
        tenant = group.request.tenant
        if group.state is GroupState.RUNNING:
            self._running.remove(group)
        elif group.state is not GroupState.SWAPPING_IN:
            self._waiting.remove(group)
        if self._epoch is not None:
            self._epoch.forget(group)
        group.dissolve()
        del self._groups[tenant, group.request.request_id]
        self._quarantine.cleared(group)
        self._num_tenant_requests[tenant] -= 1
        if not self._num_tenant_requests[tenant]:
            del self._num_tenant_requests[tenant]
            self._policy.left(tenant)

    def _charge(self, sequence: Sequence) -> None:
        """Tell the policy of the output since the last time."""
        if not self._policy.ranks_tenants:
            return
        num_tokens = sequence.num_output_tokens - sequence.num_charged_tokens
        if num_tokens > 0:
            sequence.num_charged_tokens += num_tokens
            self._policy.charge(sequence.group.request.tenant, 0, num_tokens)


def _num_queued_sequences(request: Request) -> int:
    return 1 if request.beam else request.n


def _fits_openings(draft: PlanDraft, sequence: Sequence) -> bool:
    return not draft.num_opening_values or draft.num_opening_values + 2 * sequence.num_tokens <= _MAX_OPENING_VALUES


def _sequence_end(
    sequence: Sequence,
    sequence_id: int,
    reason: EndReason,
    num_output_tokens: int,
    stop_token_id: int | None,
    message: str,
) -> SequenceEnd:
    return SequenceEnd(
        sequence_id=sequence_id,
        reason=reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        stop_token_id=stop_token_id,
        message=message,
        arrived_at=sequence.group.arrived_at,
        first_scheduled_at=sequence.first_scheduled_at,
        first_token_at=sequence.first_token_at,
        pauses=tuple(sequence.group.pauses),
    )
