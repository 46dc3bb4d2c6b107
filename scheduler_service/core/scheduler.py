"""The scheduler: a state machine over requests, blocks and one worker.

Its input is events, and its output is plans and tokens. The scheduler does no I/O and reads no clock. Every event
carries its own `now`, in seconds of any monotonic clock.

Each sequence has one counter, `num_computed_tokens`, which advances towards the number of its tokens known and in
flight. Prefill, chunked prefill, prefix cache hits, resumption and decode share one code path and one token budget
(after vLLM V1). Up to `pipeline_depth` plans are in flight before their results arrive. A row that reaches its end
samples on the worker, so the next plan needs no token. The worker computes plans in order. So a block that is free when
a plan is built may be written by that plan.

A request is a group of sequences, admitted and preempted as a whole. Decoding rows are not visited in each plan
(`plans/decode_batch.py`). All other rows are planned individually, in order.

This module handles the events. `lifecycle.py` stores the groups and changes their states. `admission.py` decides which
requests are admitted. `openings.py` allocates rows, `results.py` processes results, and `worker_state.py` is the state
of the worker.
"""

from collections import Counter
from collections.abc import Callable

from pagewire.common.wire.messages import StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from scheduler_service.core import invariants
from scheduler_service.core.admission import Admission
from scheduler_service.core.cache import CacheManager
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.openings import RowAllocator
from scheduler_service.core.plans import PlanBuilder, Work, num_missing_blocks, read_result
from scheduler_service.core.policy import Policy, create_policy
from scheduler_service.core.request import (
    BlockStored,
    CacheCleared,
    EndReason,
    Grammar,
    KvEvent,
    KvEventCounts,
    Request,
    TokenOutputs,
)
from scheduler_service.core.results import Results
from scheduler_service.core.retention import EXPECTATIONS, ReturnEstimate
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.core.sequence import GroupState, SequenceGroup
from scheduler_service.core.worker_state import WorkerState

# The slowdown limit for a step without decoding rows. The fixed cost of a step is less than the time of a decode step.
# So steps of this length compute prompts about as fast as longer steps.
_MAX_SLOWDOWN_OF_NONE = 16.0


# More than 20 methods: this class is the core's only interface, with one method for each event and each question.
class Scheduler:
    """The scheduler of one worker. It receives events (new requests, step results, worker connections), and decides
    what the worker computes in each step.

    The scheduler's own limits apply to all requests. While a worker is connected, the worker's tighter limits apply
    too.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        policy: Policy | None = None,
        new_expectation: Callable[[], ReturnEstimate] | None = None,
    ) -> None:
        """Create a scheduler that has no worker yet.

        Two arguments replace what the options configure, for simulations: `policy` replaces the scheduling policy.
        `new_expectation` creates, for each worker's cache, the estimate of when sessions return, and so replaces the
        retention. Raises ValueError if the options name an unknown policy or retention.
        """
        if options.retention not in EXPECTATIONS:
            raise ValueError(f"retention is {options.retention!r}, choose one of {', '.join(EXPECTATIONS)}")
        self._options = options
        self._policy = policy or create_policy(options.policy, options.max_wait)
        self._state = Lifecycle(self._policy, new_expectation or EXPECTATIONS[options.retention])
        self._admission = Admission(self._state, options)
        self._results = Results(self._state)
        self._openings: RowAllocator | None = None  # of the current epoch; None: no worker is connected
        self._last_epoch = 0
        self._events: list[KvEvent] = []  # from earlier epochs

    # Requests

    def add(self, request: Request, now: float) -> list[int]:
        """Add a request to the waiting queue, and return the sequence ids of its outputs, one per sample or returned
        hypothesis.

        Raises AdmissionError if the request is rejected.
        """
        self._state.now = now
        self._admission.check(request)
        return self._state.add(request, now)

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        """End every unfinished sequence of a request, and return the end events. Raises KeyError if the tenant has no
        unfinished request with this id."""
        self._state.now = now
        outputs = TokenOutputs()
        self._state.end_group(self._state.groups[tenant, request_id], EndReason.ABORT, outputs)
        return outputs

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        """End a sample whose text contains a stop string. The sample keeps its first `num_output_tokens` output tokens.

        Return the end event, or empty outputs if the sample has already ended.
        """
        self._state.now = now
        outputs = TokenOutputs()
        sequence = self._state.samples.get(sequence_id)
        if sequence is not None:
            self._state.end(sequence, EndReason.STOP, outputs, num_output_tokens=num_output_tokens)
        return outputs

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """Return the plan of the next step for the worker.

        Return None if the worker has nothing to do, or if `pipeline_depth` plans are already in flight. After repeated
        worker crashes, the suspected requests run alone. The result is then also None until the worker has finished all
        other requests' plans.
        """
        self._state.now = now
        state, worker, openings = self._state, self._state.worker, self._openings
        num_plans, num_steps = worker.num_plans, len(worker.unacknowledged)
        if openings is None or num_plans >= self._options.pipeline_depth:
            return None
        ends_lease = num_steps >= self._options.pipeline_depth
        if ends_lease and self._is_calm(worker):
            if num_steps > self._options.pipeline_depth or not worker.is_followed_early:
                return None
            ends_lease = False
        if state.quarantine.suspects and not self._isolate_trial(worker, now):
            return None
        builder = PlanBuilder(
            worker.steps.num_steps + 1,
            self._token_budget(worker),
            worker.rows,
            worker.cache,
            now,
            ends_lease=ends_lease,
            follows_lease=num_steps > num_plans,
        )
        if worker.grammars.num_unreported:
            builder.added_grammars.extend(worker.grammars.take_added(self._may_prepare))
        max_wait_s, num_step_tokens = self._policy.max_wait_s, self._admission.limits.num_step_tokens
        builder.is_slowed = self._policy.moves_keys and builder.max_tokens < num_step_tokens
        if self._policy.moves_keys and worker.rows.active:
            num_next_tokens = openings.num_next_tokens(builder, num_step_tokens)
            builder.share_prompts(num_next_tokens, lambda group: now - group.arrived_at >= max_wait_s)
        for group, rows in builder.rows_to_plan():
            if group.state is not GroupState.RUNNING:
                continue
            work = builder.share_tokens(rows)
            if not self._make_room(worker, builder, group, work):
                continue
            if group.beam is not None:
                builder.add_beam_changes(group.beam)
            builder.compute(work)
        openings.start_loaded(builder)  # only now: a plan never preempts a group that it has started
        # Blocks of preempted groups are for running groups. Admit no other group, unless the plan is empty.
        if (builder.is_empty or not builder.has_preempted) and openings.allocate_samples(builder):
            while openings.admit(builder):
                pass
        worker.cache.tiers.promote(builder.step)
        if builder.num_tokens:
            worker.cache.tiers.demote(builder.step, builder.num_tokens)
        if not builder.rows and self._is_calm(worker) and not worker.cache.moves.ordered_by(builder.step):
            builder.lease(self._num_leasable_steps(worker))
        return worker.dispatch(builder)

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        """Process the worker's result for the oldest plan in flight. Return the new tokens and the end events of
        sequences.

        Raises WorkerProtocolError if the result is for any other plan (invariant S9), or if the result does not fit the
        plan.
        """
        self._state.now = now
        state, worker = self._state, self._state.worker
        if not worker.unacknowledged:
            raise WorkerProtocolError(f"received a result of step {result.step}, but no plan is in flight")
        dispatch = worker.unacknowledged[0]
        if (result.epoch, result.step) != (worker.epoch, dispatch.step):
            raise WorkerProtocolError(
                f"received a result of epoch {result.epoch} step {result.step}, "
                f"but epoch {worker.epoch} step {dispatch.step} is the oldest plan in flight"
            )
        resolved = read_result(dispatch, result, worker.capacity.vocab_size)
        if result.num_dropped_steps not in (0, dispatch.num_later_steps):
            raise WorkerProtocolError(
                f"step {dispatch.step} drops {result.num_dropped_steps} steps; its lease has {dispatch.num_later_steps}"
            )
        del worker.unacknowledged[0]
        if not dispatch.has_moves:  # a worker may do the moves during the step, which distorts its duration
            worker.cost.observe_step(dispatch.num_tokens, dispatch.num_prompt_tokens, result.duration_us / 1e6)
        outputs = self._results.process(worker, dispatch, resolved, now)
        began_block = [row for row in dispatch.began_block if row.slot >= 0]
        for row in began_block:
            worker.cache.publish(row.allocation, row.num_settled_tokens)
        for save in dispatch.saves:
            worker.cache.states.confirm(save)
        if result.num_dropped_steps:
            worker.drop_steps(dispatch)
        state.charge(row.sequence for row in began_block)
        state.charge_masks(resolved.mask_times, worker.cost.prefill_rate)
        return outputs

    def moved(self, step: int, now: float) -> None:
        """Record that the worker has finished the block transfers between device and host of all plans up to `step`.

        Raises WorkerProtocolError if no such step was planned.
        """
        self._state.now = now
        worker = self._state.worker
        if step > worker.steps.num_steps:
            raise WorkerProtocolError(f"the worker reported the moves of step {step}, but no such step was planned")
        if step > worker.last_moved_step:
            worker.last_moved_step = step
            worker.cache.moves.acknowledge(step)
            self._state.moved(step)

    def grammar_ready(self, grammar_id: int, error: str, now: float) -> TokenOutputs:
        """Process the worker's message that a grammar is prepared, or that the preparation failed with the message
        `error`.

        If the preparation failed, all requests with this grammar end. Return their end events. Raises
        WorkerProtocolError if no plan to this worker has sent a grammar with this id.
        """
        self._state.now = now
        outputs, worker = TokenOutputs(), self._state.worker
        if not 1 <= grammar_id <= worker.grammars.last_id:
            raise WorkerProtocolError(f"grammar {grammar_id} is reported, but no plan added a grammar with this id")
        grammar = worker.grammars.report(grammar_id, is_ready=not error)
        if grammar is not None:
            self._state.grammar_prepared(grammar, outputs, error)
        return outputs

    # Planning

    def _token_budget(self, worker: WorkerState) -> int:
        """Return the largest number of tokens that the next step may compute, so that long prompts do not delay
        decoding sequences too much.

        If any sequence decodes, prompts may make the step at most `max_decode_slowdown` times as long as a decode step.
        If none decodes, the step may be longer, up to a fixed factor. Without this option, before the worker's speed is
        measured, or if prompts are computed whole, only the limit on tokens in a step applies.
        """
        num_step_tokens, max_slowdown = self._admission.limits.num_step_tokens, self._options.max_decode_slowdown
        if max_slowdown is None or worker.capacity.is_bidirectional:
            return num_step_tokens
        if not len(worker.rows.decoding):
            max_slowdown = max(max_slowdown, _MAX_SLOWDOWN_OF_NONE)
        max_prompt_tokens = worker.cost.max_prompt_tokens(max_slowdown)
        if max_prompt_tokens is None:
            return num_step_tokens
        return min(num_step_tokens, len(worker.rows.decoding) + max_prompt_tokens)

    def _is_calm(self, worker: WorkerState) -> bool:
        """Return whether the worker accepts leases, no request waits, and each row on the worker decodes."""
        if not worker.capacity.max_leased_steps:
            return False
        state = self._state
        waits = len(state.waiting) or state.loading or state.swapped or state.rowless or state.quarantine.suspects
        return not waits and worker.is_calm

    def _num_leasable_steps(self, worker: WorkerState) -> int:
        """Return how many steps the worker may compute after the next step without a further plan."""
        # With one plan in flight, no plan could end a lease. With three, leased steps are always in flight when a row
        # is to save its state, and a lease may end before the position that it would save.
        max_depth = 2 if worker.cache.states.num_states else self._options.pipeline_depth
        if not 2 <= self._options.pipeline_depth <= max_depth or not len(worker.rows.decoding):
            return 0
        num_steps = worker.cost.num_steps_in(self._options.max_lease_ms / 1e3)
        return min(num_steps - 1, worker.capacity.max_leased_steps)

    def _make_room(self, worker: WorkerState, builder: PlanBuilder, group: SequenceGroup, work: Work) -> bool:
        """Free the KV cache blocks that a request needs for its work in this plan, if necessary by preempting other
        requests, last in order first.

        Return False if the request must wait for blocks. A request is preempted only after it has freed the blocks that
        its sliding window has passed. Requests are planned in order. So the last request has no work in this plan,
        unless it is `group` itself.
        """
        state, pool, moves = self._state, worker.cache.pool, worker.cache.moves
        num_missing = num_missing_blocks(worker.cache, work)
        if num_missing > pool.num_free:
            worker.free_unread(group)
        while num_missing > pool.num_free and group.state is GroupState.RUNNING:
            if builder.ends_lease:
                break  # the group may need no block yet: it has fewer tokens than it seems to have
            if num_missing <= pool.num_free + moves.num_returning:
                break
            if worker.cache.has_windows and state.running[-1] is group:
                if state.loading:
                    break  # the loading group will run, and is preempted if it is later in order
                if any(row.next_position < row.allocation.num_computed_tokens for row, _ in work):
                    break  # the windows will pass more blocks when results in flight have arrived
            if not worker.free_unread(state.running[-1]):
                state.preempt(state.running[-1], worker, builder)
        if num_missing <= pool.num_free and group.state is GroupState.RUNNING:
            return True
        for row, _ in work:
            if row.is_decoding:
                worker.rows.pause(row)
        return False

    def _may_prepare(self, grammar: Grammar) -> bool:
        """Return whether the worker may prepare this grammar now.

        After repeated crashes, the scheduler searches for the request that crashes the worker. During the search, the
        worker prepares only the grammars of the suspected requests that may run.
        """
        quarantine = self._state.quarantine
        return not quarantine.suspects or any(
            group.request.grammar == grammar and quarantine.admits(group) for group in self._state.waiting.held
        )

    def _isolate_trial(self, worker: WorkerState, now: float) -> bool:
        """Let the requests that are suspected of crashing the worker run alone. All other running requests lose their
        KV cache and return to the waiting queue.

        Return False while a plan in flight still computes one of these other requests.
        """
        state, admits = self._state, self._state.quarantine.admits
        for group in [*state.running, *state.loading]:
            if not admits(group):
                state.discard(group, worker, now)
        return all(admits(group) for dispatch in worker.unacknowledged for group in dispatch.groups())

    # The worker

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        """Start to schedule on a newly connected worker, whose KV cache is empty. `epoch` is the number of this
        connection.

        Return the end events of requests that can never fit on this worker. Raises RuntimeError if a worker is
        connected already. Raises WorkerProtocolError if the epoch is not above all earlier epochs.
        """
        self._state.now = now
        if self._state.worker.has_worker:
            raise RuntimeError("a worker joined while another worker is connected")
        if epoch <= self._last_epoch:
            raise WorkerProtocolError(f"epoch {epoch} is not above the last epoch, {self._last_epoch}")
        self._last_epoch = epoch
        cache = CacheManager(
            capacity,
            num_step_tokens=min(self._admission.limits.num_step_tokens, capacity.max_num_batched_tokens),
            enable_prefix_caching=self._options.enable_prefix_caching and not capacity.is_bidirectional,
            watermark=self._options.watermark,
        )
        cost = CostModel(PreemptionMode(self._options.preemption), capacity.block_bytes, capacity.swap_bandwidth)
        joined = WorkerState(epoch, capacity, cache, self._admission.num_slots(capacity), cost)
        self._admission.join(joined)
        self._state.join_worker(joined)
        self._openings = RowAllocator(self._state, joined)
        outputs = TokenOutputs()
        for group in [*self._state.waiting, *self._state.waiting.held]:
            _, message = self._admission.rejection(group.request)
            if message:
                self._state.end_group(group, EndReason.NO_LONGER_FITS, outputs, message=message)
        return outputs

    def worker_lost(self, now: float) -> TokenOutputs:
        """Return all requests to the waiting queue, in order of arrival, after the worker was lost with its KV cache
        and the plans in flight.

        A request fails if a worker has crashed twice while it worked on nothing but this request or its grammar. Return
        the end events of these requests. Does nothing if no worker is connected.
        """
        self._state.now = now
        outputs, worker = TokenOutputs(), self._state.worker
        if not worker.has_worker:
            return outputs
        self._openings = None
        self._admission.lose()
        self._events.extend(worker.cache.index.take_events())
        self._events.append(CacheCleared())
        worker.cache.tiers.dissolve()
        for group in self._state.lose_worker(now):
            message = "the worker crashed twice while it computed this request, or prepared its grammar, alone"
            self._state.end_group(group, EndReason.CRASHES_WORKER, outputs, message=message)
        return outputs

    def worker_grace_ended(self, now: float) -> TokenOutputs:
        """End the requests that could equally well start again on another server. Call this if no worker has connected
        during the grace period.

        Return the end events. Does nothing if a worker is connected.
        """
        return self._end_without_worker(lambda group: not group.is_bound, now)

    def worker_timed_out(self, now: float) -> TokenOutputs:
        """End every request, because no worker has connected within the timeout. Return the end events.

        Does nothing if a worker is connected.
        """
        return self._end_without_worker(lambda group: True, now)

    def _end_without_worker(self, ends: Callable[[SequenceGroup], bool], now: float) -> TokenOutputs:
        self._state.now = now
        outputs = TokenOutputs()
        if not self._state.worker.has_worker:
            for group in filter(ends, list(self._state.waiting)):  # without a worker no group is PREPARING
                self._state.end_group(group, EndReason.NO_WORKER, outputs, message="no worker is connected")
        return outputs

    def flush_cache(self, now: float) -> None:
        """Remove all content from the prefix cache. Does nothing while the scheduler has any unfinished requests,
        because they use KV cache blocks."""
        if not self._state.groups:
            self._state.worker.cache.tiers.flush()

    # Queries

    @property
    def state(self) -> Lifecycle:
        """The scheduler's requests and worker state. The functions of `explain.py` read this state for reports, but
        only the scheduler changes it."""
        return self._state

    @property
    def has_requests(self) -> bool:
        return bool(self._state.groups)

    @property
    def max_sequence_tokens(self) -> int:
        """The largest number of tokens that a sequence may have, prompt and output together."""
        return self._admission.limits.max_sequence_tokens

    def take_kv_events(self) -> list[KvEvent]:
        """Return the prefix cache events since the last call, in order: blocks stored, blocks removed, and caches
        cleared."""
        events, self._events = self._events, []
        return [*events, *self._state.worker.cache.index.take_events()]

    def drop_kv_events(self) -> KvEventCounts:
        """Discard the pending prefix cache events, and return the number of discarded events of each type. This is for
        servers without a subscriber."""
        events, self._events = self._events, []
        return Counter(map(type, events)) + self._state.worker.cache.index.drop_events()

    def kv_snapshot(self) -> list[BlockStored]:
        """Return a `BlockStored` event for all content of the prefix cache, so that a new subscriber learns the present
        state. The event of a block comes after the event of its parent block."""
        return self._state.worker.cache.index.snapshot()

    def check(self) -> None:
        """Assert every invariant of the scheduler's state, for tests and simulations. The time is proportional to the
        size of the state.

        Raises AssertionError if an invariant does not hold.
        """
        invariants.check(self._state, self._options.pipeline_depth, self._admission.limits.num_step_tokens)

    def check_sample(self) -> None:
        """Assert a few invariants of the scheduler's state that are cheap enough to check in production. Raises
        AssertionError if one does not hold."""
        invariants.check_sample(self._state, self._options.pipeline_depth, self._admission.limits.num_step_tokens)
