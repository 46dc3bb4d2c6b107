"""The scheduler: a state machine over requests, blocks and one worker. Events go in, plans and tokens come out.

It does no I/O and knows no clock: every event brings its own `now`, in seconds of any monotonic clock.

Each sequence has one counter, `num_computed_tokens`, that chases its tokens known and in flight. Prefill, chunks of it,
prefix hits, resumption and decode are one code path under one token budget (after vLLM V1). Plans are made up to
`pipeline_depth` ahead of their results: a row that reaches its end samples on the worker, so the next plan needs no
token. Compute is in order, so a block that is free when a plan is made may be written by that plan.

A request is a group of sequences, admitted and preempted as a whole. Rows that decode are not visited from plan to
plan (`plans/decode_batch.py`); all others are planned one by one, in order.

Here is what happens at each event. `lifecycle.py` knows the groups and changes their states, `admission.py` which
requests are taken, `openings.py` who gets rows, `results.py` what comes of a result, `worker_state.py` what is on the
worker.
"""

from collections import Counter
from collections.abc import Callable

from pagewire.common.wire.messages import StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from scheduler_service.core import invariants
from scheduler_service.core.admission import Admission
from scheduler_service.core.cache import CacheManager
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.openings import Openings
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
from scheduler_service.core.retention import EXPECTATIONS, Expectation
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.core.sequence import GroupState, SequenceGroup
from scheduler_service.core.worker_state import WorkerState

# Times that a step takes as long as one that decodes, while none decodes: what steps cost besides their tokens is less
# than a step that decodes, so shorter ones compute prompts about as fast.
_MAX_SLOWDOWN_OF_NONE = 16.0


# More than 20 methods: it is the only entrance to the core, with one for each event and for each answer.
class Scheduler:
    """Takes events and makes plans. Limits are its own; a worker's tighter ones bind while it is there."""

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        policy: Policy | None = None,
        new_expectation: Callable[[], Expectation] | None = None,
    ) -> None:
        """A trace may be driven by a policy of its own, or by what it knows of the return of sessions, in place of what
        the options name: `new_expectation` makes that for each worker's cache. Raises ValueError for what they name and
        there is not."""
        if options.retention not in EXPECTATIONS:
            raise ValueError(f"retention is {options.retention!r}, choose one of {', '.join(EXPECTATIONS)}")
        self._options = options
        self._policy = policy or create_policy(options.policy, options.max_wait)
        self._state = Lifecycle(self._policy, new_expectation or EXPECTATIONS[options.retention])
        self._admission = Admission(self._state, options)
        self._results = Results(self._state)
        self._openings: Openings | None = None  # of the epoch; None: there is no worker
        self._last_epoch = 0
        self._events: list[KvEvent] = []  # of earlier epochs

    # Requests

    def add(self, request: Request, now: float) -> list[int]:
        """Queue a request; the ids of its outputs, one per sample or hypothesis. Raises AdmissionError."""
        self._state.now = now
        self._admission.check(request)
        return self._state.add(request, now)

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        """End every sequence of a request that has not ended. Raises KeyError if there is none."""
        self._state.now = now
        outputs = TokenOutputs()
        self._state.end_group(self._state.groups[tenant, request_id], EndReason.ABORT, outputs)
        return outputs

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        """A stop text was seen: tokens past `num_output_tokens` are dropped. Nothing happens if it has ended."""
        self._state.now = now
        outputs = TokenOutputs()
        sequence = self._state.samples.get(sequence_id)
        if sequence is not None:
            self._state.end(sequence, EndReason.STOP, outputs, num_output_tokens=num_output_tokens)
        return outputs

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """Make the next plan, or none while there is nothing to do or the pipeline is full."""
        self._state.now = now
        state, worker, openings = self._state, self._state.worker, self._openings
        if openings is None or len(worker.unacknowledged) >= self._options.pipeline_depth:
            return None
        if state.quarantine.suspects and not self._isolate_trial(worker, now):
            return None
        builder = PlanBuilder(worker.steps.num_steps + 1, self._token_budget(worker), worker.rows, worker.cache, now)
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
                builder.tell_branches(group.beam)
            builder.compute(work)
        openings.open_loaded(builder)  # only now: what a plan opens is never its victim
        # What was preempted makes room for what runs, unless nothing does.
        if (builder.is_empty or not builder.has_preempted) and openings.open_siblings(builder):
            while openings.admit(builder):
                pass
        worker.cache.tiers.promote(builder.step)
        if builder.num_tokens:
            worker.cache.tiers.demote(builder.step, builder.num_tokens)
        return worker.dispatch(builder)

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        """Take the result of the oldest unacknowledged plan. Raises WorkerProtocolError for any other (S9)."""
        self._state.now = now
        state, worker = self._state, self._state.worker
        if not worker.unacknowledged:
            raise WorkerProtocolError(f"a result of step {result.step}, but no plan is unacknowledged")
        dispatch = worker.unacknowledged[0]
        if (result.epoch, result.step) != (worker.epoch, dispatch.step):
            raise WorkerProtocolError(
                f"a result of epoch {result.epoch} step {result.step}, "
                f"but epoch {worker.epoch} step {dispatch.step} is the oldest unacknowledged"
            )
        resolved = read_result(dispatch, result, worker.capacity.vocab_size)
        del worker.unacknowledged[0]
        if not dispatch.has_moves:  # a worker may do them in the time of the step
            worker.cost.observe_step(dispatch.num_tokens, dispatch.num_prompt_tokens, result.duration_us / 1e6)
        outputs = self._results.take(worker, dispatch, resolved, now)
        began_block = [row for row in dispatch.began_block if row.slot >= 0]
        for row in began_block:
            worker.cache.publish(row.holding, row.num_settled_tokens)
        state.charge(row.sequence for row in began_block)
        state.charge_masks(resolved.mask_times, worker.cost.prefill_rate)
        return outputs

    def moved(self, step: int, now: float) -> None:
        """The moves of all plans up to `step` are done. Raises WorkerProtocolError if there is no such plan."""
        self._state.now = now
        worker = self._state.worker
        if step > worker.steps.num_steps:
            raise WorkerProtocolError(f"moves of step {step} are done, but no such step was planned")
        if step > worker.last_moved_step:
            worker.last_moved_step = step
            worker.cache.moves.acknowledge(step)
            self._state.moved(step)

    def grammar_ready(self, grammar_id: int, error: str, now: float) -> TokenOutputs:
        """The worker has prepared a grammar of the epoch, or says why it cannot: then those that need it end. Raises
        WorkerProtocolError if there is no such grammar."""
        self._state.now = now
        outputs, worker = TokenOutputs(), self._state.worker
        if not 1 <= grammar_id <= worker.grammars.last_id:
            raise WorkerProtocolError(f"grammar {grammar_id} is reported, but none was added by this number")
        grammar = worker.grammars.report(grammar_id, is_ready=not error)
        if grammar is not None:
            self._state.prepared(grammar, outputs, error)
        return outputs

    # Planning

    def _token_budget(self, worker: WorkerState) -> int:
        """Choose the token budget of the next step: where rows decode, prompts slow them down by no more than they
        may, and where none does, by no more than what comes next can wait for."""
        num_step_tokens, max_slowdown = self._admission.limits.num_step_tokens, self._options.max_decode_slowdown
        if max_slowdown is None:
            return num_step_tokens
        if not len(worker.rows.decoding):
            max_slowdown = max(max_slowdown, _MAX_SLOWDOWN_OF_NONE)
        max_prompt_tokens = worker.cost.max_prompt_tokens(max_slowdown)
        if max_prompt_tokens is None:
            return num_step_tokens
        return min(num_step_tokens, len(worker.rows.decoding) + max_prompt_tokens)

    def _make_room(self, worker: WorkerState, builder: PlanBuilder, group: SequenceGroup, work: Work) -> bool:
        """Have the blocks for a group's work free, if need be by preempting the last groups, which first give what
        their windows have passed. False: it waits.

        Groups are planned in order, so the last one has no work in this plan unless it is this one.
        """
        state, pool, moves = self._state, worker.cache.pool, worker.cache.moves
        num_missing = num_missing_blocks(worker.cache, work)
        if num_missing > pool.num_free:
            worker.slide_wholly(group)
        while num_missing > pool.num_free and group.state is GroupState.RUNNING:
            if num_missing <= pool.num_free + moves.num_returning:
                break
            if worker.cache.window and state.loading and state.running[-1] is group:
                break  # who is being loaded will run, and gives way if it comes later in order
            if not worker.slide_wholly(state.running[-1]):
                state.preempt(state.running[-1], worker, builder)
        if num_missing <= pool.num_free and group.state is GroupState.RUNNING:
            return True
        for row, _ in work:
            if row.is_decoding:
                worker.rows.pause(row)
        return False

    def _may_prepare(self, grammar: Grammar) -> bool:
        """Whether a request that may run needs the grammar."""
        quarantine = self._state.quarantine
        return not quarantine.suspects or any(
            group.request.grammar == grammar and quarantine.admits(group) for group in self._state.waiting.held
        )

    def _isolate_trial(self, worker: WorkerState, now: float) -> bool:
        """Let no other group run beside a trial. False while others are still on the worker."""
        state, admits = self._state, self._state.quarantine.admits
        for group in [*state.running, *state.loading]:
            if not admits(group):
                state.discard(group, worker, now)
        return all(admits(group) for dispatch in worker.unacknowledged for group in dispatch.groups())

    # The worker

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        """A worker with an empty cache is ready. Requests that cannot fit it end."""
        self._state.now = now
        if self._state.worker.has_worker:
            raise RuntimeError("a worker joined while another is there")
        if epoch <= self._last_epoch:
            raise WorkerProtocolError(f"epoch {epoch} is not above {self._last_epoch}")
        self._last_epoch = epoch
        cache = CacheManager(
            capacity,
            num_step_tokens=min(self._admission.limits.num_step_tokens, capacity.max_num_batched_tokens),
            enable_prefix_caching=self._options.enable_prefix_caching,
            watermark=self._options.watermark,
        )
        cost = CostModel(PreemptionMode(self._options.preemption), capacity.block_bytes, capacity.swap_bandwidth)
        joined = WorkerState(epoch, capacity, cache, self._admission.num_slots(capacity), cost)
        self._admission.join(joined)
        self._state.join_worker(joined)
        self._openings = Openings(self._state, joined)
        outputs = TokenOutputs()
        for group in [*self._state.waiting, *self._state.waiting.held]:
            _, message = self._admission.misfit(group.request)
            if message:
                self._state.end_group(group, EndReason.NO_LONGER_FITS, outputs, message=message)
        return outputs

    def worker_lost(self, now: float) -> TokenOutputs:
        """The epoch is over: its cache and plans are gone, what ran goes back to waiting in order of arrival."""
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
        """There has been no worker for a while: requests end that another server could as well begin."""
        return self._end_without_worker(lambda group: not group.is_bound, now)

    def worker_timed_out(self, now: float) -> TokenOutputs:
        """There has been no worker for too long: every request ends."""
        return self._end_without_worker(lambda group: True, now)

    def _end_without_worker(self, ends: Callable[[SequenceGroup], bool], now: float) -> TokenOutputs:
        self._state.now = now
        outputs = TokenOutputs()
        if not self._state.worker.has_worker:
            for group in filter(ends, list(self._state.waiting)):  # without a worker no grammar is being prepared
                self._state.end_group(group, EndReason.NO_WORKER, outputs, message="no worker is connected")
        return outputs

    def flush_cache(self, now: float) -> None:
        """Forget all cached content. Nothing happens while there are requests: their caches are built on it."""
        if not self._state.groups:
            self._state.worker.cache.tiers.flush()

    # What others may ask

    @property
    def state(self) -> Lifecycle:
        """The state about which `explain` answers questions. Only the scheduler changes it."""
        return self._state

    @property
    def has_requests(self) -> bool:
        return bool(self._state.groups)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have."""
        return self._admission.limits.max_sequence_tokens

    def take_kv_events(self) -> list[KvEvent]:
        """Say what changed in the cache since the last call."""
        events, self._events = self._events, []
        return [*events, *self._state.worker.cache.index.take_events()]

    def drop_kv_events(self) -> KvEventCounts:
        """Forget what `take_kv_events` would say, where there is no subscriber, and return how many events these
        were."""
        events, self._events = self._events, []
        return Counter(map(type, events)) + self._state.worker.cache.index.drop_events()

    def kv_snapshot(self) -> list[BlockStored]:
        """Say what is cached, parents first."""
        return self._state.worker.cache.index.snapshot()

    def check(self) -> None:
        """Assert every invariant of the design that is the core's. Costs time in proportion to all state."""
        invariants.check(self._state, self._options.pipeline_depth, self._admission.limits.num_step_tokens)

    def check_sample(self) -> None:
        """Assert a few invariants, cheaply enough for production."""
        invariants.check_sample(self._state, self._options.pipeline_depth, self._admission.limits.num_step_tokens)
