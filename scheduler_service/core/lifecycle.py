"""The life of every request, from its arrival to its end.

Only this module changes the state of a group. The state of a group determines the queue or set that contains the group.
Both change in one function, `_enter`, which checks the change against `TRANSITIONS` in `sequence.py`. `explain.py`
reads a `Lifecycle` to answer questions about the scheduler. Only `scheduler.py` and its parts call methods that change
it.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, groupby
from operator import attrgetter

from scheduler_service.core.beam import BeamSearch
from scheduler_service.core.cache import Allocation, content_root
from scheduler_service.core.plans import PlanBuilder
from scheduler_service.core.policy import Policy
from scheduler_service.core.quarantine import Quarantine
from scheduler_service.core.request import (
    NUM_SESSION_AGES,
    SESSION_AGES_S,
    EndReason,
    Grammar,
    Hypothesis,
    Request,
    SequenceEnd,
    TokenOutputs,
)
from scheduler_service.core.retention import ReturnEstimate
from scheduler_service.core.sequence import TRANSITIONS, BeamGroup, GroupState, Row, Sequence, SequenceGroup
from scheduler_service.core.waiting_queue import WaitingOrder, WaitingQueue
from scheduler_service.core.worker_state import WorkerState

# States of the groups in the waiting queue. SWAPPED: the states of groups that have blocks on the host, or moving
# there.
QUEUED = (GroupState.WAITING, GroupState.PREPARING, GroupState.SWAPPING_OUT, GroupState.SWAPPED)
SWAPPED = (GroupState.SWAPPING_OUT, GroupState.SWAPPED)
# End reasons of samples whose blocks are published for other requests.
_COMPLETE = (EndReason.STOP, EndReason.LENGTH)
# The number of roots, and of stop sets, that are cached for sharing.
_MAX_SHARED = 1024
_order = attrgetter("order")
_tenant = attrgetter("group.request.tenant")


@dataclass(slots=True)
class Counters:
    """The scheduler's counters of events since it started. A counter has the same name as its field in
    `SchedulerStats`."""

    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_host_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0  # computed
    num_discarded_tokens: int = 0  # of these, tokens of beam searches that no returned hypothesis contains
    num_moved_blocks_out: int = 0  # in earlier epochs
    num_moved_blocks_in: int = 0
    num_admitted_requests: int = 0
    num_overdue_requests: int = 0
    num_kept_session_tokens: list[int] = field(default_factory=lambda: [0] * NUM_SESSION_AGES)
    num_lost_session_tokens: list[int] = field(default_factory=lambda: [0] * NUM_SESSION_AGES)

    def count_admission(self, sequence: Sequence) -> None:
        """Count a request that starts to run, and count the tokens of earlier requests of its session: how many are
        still cached, and how many were lost from the KV cache.

        `sequence` is the first sequence of the request. A session is a series of requests in which each prompt starts
        with the previous prompt and output.
        """
        group = sequence.group
        self.num_admitted_requests += 1
        self.num_overdue_requests += group.is_overdue
        age = bisect_left(SESSION_AGES_S, group.session_age_s)
        num_tokens = min(group.num_session_tokens, sequence.num_prompt_tokens - 1)
        num_kept = min(sequence.num_cached_tokens, num_tokens)
        self.num_kept_session_tokens[age] += num_kept
        self.num_lost_session_tokens[age] += num_tokens - num_kept

    def count_search(self, beam: BeamGroup, num_returned: int) -> None:
        """Count the tokens that a finished beam search computed in vain: no returned hypothesis contains them.

        `num_returned` is the number of tokens in the returned hypotheses. The search counts only tokens with which a
        beam continues, so the last token of a hypothesis may be missing. The total is therefore raised to at least
        `num_returned`.
        """
        self.num_generation_tokens += max(0, num_returned - beam.num_tokens)
        self.num_discarded_tokens += max(0, beam.num_tokens - num_returned)


# More than 20 methods, one for each event in a group's life: no other class may change a group's state.
class Lifecycle:
    """The scheduler's state: all unfinished requests, the queues and sets that contain them, and the state of the
    connected worker.

    A request is stored as a `SequenceGroup`. Only this class changes the state of a group.
    """

    def __init__(self, policy: Policy, new_expectation: Callable[[], ReturnEstimate]) -> None:
        self._policy = policy
        self.now = 0.0  # time of the current event, in seconds of the caller's clock
        # Every sequence has a root and a stop set. Most are equal, so equal ones share one object.
        self._shared_root = lru_cache(_MAX_SHARED)(content_root)
        self._stop_set = lru_cache(_MAX_SHARED)(frozenset[int])
        self._arrivals = count(1)
        self._sequence_ids = count()
        self.groups: dict[tuple[str, str], SequenceGroup] = {}  # by tenant and request id
        self.samples: dict[int, Sequence] = {}  # by sequence id
        self.num_tenant_requests: Counter[str] = Counter()
        self.worker = WorkerState.without_worker()
        self.waiting = WaitingQueue(policy)
        self.standings = WaitingOrder(policy, self.waiting, new_expectation)
        self.running: list[SequenceGroup] = []  # in scheduling order
        self.rowless: dict[SequenceGroup, None] = {}  # running groups that have sequences without a row
        self.swapped: dict[SequenceGroup, None] = {}  # swapped out, or being swapped out; also in `waiting`
        self.loading: dict[SequenceGroup, None] = {}  # groups whose blocks are being loaded
        self.quarantine = Quarantine()
        self.counters = Counters()

    def _enter(self, group: SequenceGroup, state: GroupState) -> None:
        """Change the state of a request, and move the request to the queue or set for the new state."""
        before, group.state = group.state, state
        assert (before, state) in TRANSITIONS, f"a request that was {before.value} is {state.value}"
        if before in QUEUED and state not in QUEUED:
            self.waiting.remove(group)
            self.standings.leave(group)
        if before is GroupState.RUNNING:
            index = bisect_left(self.running, group.order, key=_order)
            assert self.running[index] is group
            del self.running[index]
            self.rowless.pop(group, None)
        elif before is GroupState.SWAPPING_IN:
            del self.loading[group]
        elif before is GroupState.PREPARING and state in QUEUED:
            self.waiting.release(group)
        elif before in SWAPPED and state not in SWAPPED:
            del self.swapped[group]
        if state is GroupState.RUNNING:
            insort(self.running, group, key=_order)
        elif state is GroupState.SWAPPING_IN:
            self.loading[group] = None
        elif state is GroupState.PREPARING:
            self.waiting.hold(group)
        elif state in SWAPPED:
            self.swapped[group] = None
        if state in QUEUED and before not in QUEUED:
            self.standings.enter(group)
            self.waiting.add(group)

    # Arrival

    def add(self, request: Request, now: float) -> list[int]:
        """Add a request to the waiting queue, and return the sequence ids of its outputs, one per sample or returned
        hypothesis."""
        arrival = next(self._arrivals)
        group = SequenceGroup(request, arrival, self._policy.running_key(request, arrival), now)
        group.sequences = [self._new_sequence(group, index) for index in range(request.num_rows)]
        output_ids = [sequence.sequence_id for sequence in group.sequences[: request.n]]
        if request.beam is not None:
            stop_token_ids, end_token_ids = group.sequences[0].stop_token_ids, frozenset(group.end_token_ids)
            group.beam = BeamGroup(
                BeamSearch(
                    request.beam, stop_token_ids, request.sampling.min_tokens, request.max_tokens, end_token_ids
                ),
                output_ids,
                beams=group.sequences[:1],
            )
        else:
            self.samples.update((sequence.sequence_id, sequence) for sequence in group.sequences)
        group.num_unfinished = len(group.sequences)
        self.groups[request.tenant, request.request_id] = group
        self.num_tenant_requests[request.tenant] += 1
        if self.num_tenant_requests[request.tenant] == 1:
            self._policy.arrived(request.tenant)
        self.standings.add(group, now)
        self.waiting.add(group)
        self._ask_for_grammar(group)
        return output_ids

    def _new_allocation(self, request: Request, token_ids: list[int]) -> Allocation:
        """Return an empty record for the KV cache blocks that a sequence will get on the connected worker."""
        root = self._shared_root(request.tenant, request.cache_salt, self.worker.capacity.model_digest)
        return self.worker.cache.new_allocation(request, root, token_ids)

    def _new_sequence(self, group: SequenceGroup, sample_index: int) -> Sequence:
        request, token_ids = group.request, list(group.request.prompt_token_ids)
        return Sequence(
            sequence_id=next(self._sequence_ids),
            group=group,
            sample_index=sample_index,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_num_tokens=len(request.prompt_token_ids) + request.max_tokens,
            allocation=self._new_allocation(request, token_ids),
            stop_token_ids=self._stop_set(tuple(sorted({*request.sampling.stop_token_ids, *group.end_token_ids}))),
            num_prompt_logprobs=request.sampling.num_prompt_logprobs if sample_index == 0 else None,
            num_charged_tokens=len(request.prompt_token_ids),
        )

    # Grammars

    def _ask_for_grammar(self, group: SequenceGroup) -> None:
        """Record that a waiting request needs its grammar, if it has one. If the worker has not prepared the grammar
        yet, the request waits in the state PREPARING."""
        grammar = group.request.grammar
        if grammar is not None and not self.worker.grammars.need(grammar):
            self._enter(group, GroupState.PREPARING)

    def grammar_prepared(self, grammar: Grammar, outputs: TokenOutputs, error: str) -> None:
        """Update all requests that wait for `grammar`, after the worker has reported on it.

        If `error` is empty, the grammar is ready, and the requests now wait for admission. Otherwise the worker could
        not prepare the grammar. The requests then end, and their end events are added to `outputs`.
        """
        for group in [group for group in self.waiting.held if group.request.grammar == grammar]:
            if error:
                message = f"the worker cannot read the grammar: {error}"
                self.end_group(group, EndReason.GRAMMAR_FAILED, outputs, message=message)
            else:
                self._enter(group, GroupState.WAITING)

    # On the worker

    def next_waiting(self, now: float) -> SequenceGroup | None:
        """Return the waiting request that should start or resume next, or None if no waiting request is allowed to run
        now."""
        self.standings.update(now)
        if not self.quarantine.suspects:
            return self.waiting.next()
        return next((group for group in self.waiting if self.quarantine.admits(group)), None)

    def first_scheduled(self, sequence: Sequence, num_host_tokens: int, now: float) -> None:
        """Record that a sequence has got KV cache blocks for the first time. The tenant is charged for the prompt
        tokens that were not cached.

        The cached blocks of `num_host_tokens` tokens are loaded from the host. Later calls for the same sequence do
        nothing.
        """
        if sequence.first_scheduled_at is not None:
            return
        sequence.first_scheduled_at = now
        sequence.num_cached_tokens = min(sequence.allocation.num_computed_tokens, sequence.num_prompt_tokens)
        self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_cached_prompt_tokens += sequence.num_cached_tokens
        self.counters.num_host_cached_prompt_tokens += num_host_tokens
        if sequence is sequence.group.sequences[0]:
            self.counters.count_admission(sequence)
        self._policy.charge(sequence.group.request.tenant, sequence.num_prompt_tokens - sequence.num_cached_tokens, 0)

    def load(self, group: SequenceGroup, step: int) -> None:
        """Put a waiting request into the state SWAPPING_IN, while the plan of `step` loads its KV cache blocks from the
        host. The request can run when the worker has reported that the load is finished."""
        self._enter(group, GroupState.SWAPPING_IN)
        group.moved_step = step

    def run(self, group: SequenceGroup, sequences: list[Sequence], worker: WorkerState, builder: PlanBuilder) -> None:
        """Start or resume a request: create a row (the worker's state of one running sequence) for each of `sequences`,
        and add the rows to the plan that `builder` builds.

        The KV cache blocks of these sequences must be on the device.
        """
        self._enter(group, GroupState.RUNNING)
        group.resume(builder.now)
        for sequence in sequences:
            worker.open_row(sequence, builder)
        if group.beam is None:
            worker.rows.slots.give_back_reserved(group)
        if group.rowless_sequences:
            self.rowless[group] = None

    def all_rows_open(self, group: SequenceGroup) -> None:
        """Record that every sequence of a running request now runs on the worker."""
        del self.rowless[group]
        for row in group.open_rows:
            self.worker.cache.states.end_fork(row.allocation)

    def moved(self, step: int) -> None:
        """Mark preempted requests as swapped out if all their KV cache blocks have been copied to the host. The worker
        has finished the copies of all plans up to `step`."""
        for group in [group for group in self.swapped if group.state is GroupState.SWAPPING_OUT]:
            if group.moved_step <= step:
                self._enter(group, GroupState.SWAPPED)

    def preempt(self, group: SequenceGroup, worker: WorkerState, builder: PlanBuilder) -> None:
        """Stop a running request, so that other requests can use its KV cache blocks on the device.

        The KV cache of the request is either swapped out to the host, or discarded and computed again later. The method
        that should take less time is chosen.
        """
        builder.has_preempted = True
        worker.free_unread(group)
        allocations = [row.allocation for row in group.open_rows]
        num_blocks, num_host_blocks = worker.cache.tiers.num_swap_blocks(allocations)
        states = worker.cache.states
        num_state_blocks = states.weight * len(allocations)
        swaps = (
            num_blocks > 0
            and not group.must_compute_all
            and num_host_blocks <= worker.cache.host_pool.num_free
            and states.can_swap(allocations)
            and worker.cost.prefers_swap(num_blocks + num_state_blocks, worker.cache.tiers.num_lost_tokens(allocations))
        )
        if not swaps:
            self.discard(group, worker, builder.now)
            return
        self.counters.num_swap_preemptions += 1
        self._interrupt(group, builder.now)
        is_moving = worker.cache.tiers.swap_out(allocations, builder.step)
        worker.rows.vacate_group(group)
        for allocation in allocations:
            if not allocation.host_blocks:  # the window has passed all its blocks: it is recomputed
                worker.cache.release(allocation)
        group.moved_step = builder.step if is_moving else 0
        self._enter(group, GroupState.SWAPPING_OUT if is_moving else GroupState.SWAPPED)

    def discard(self, group: SequenceGroup, worker: WorkerState, now: float) -> None:
        """Release everything that a request has on the worker, and put the request back into the waiting queue. Its KV
        cache is computed again when it resumes. The request may be in any state."""
        self._interrupt(group, now)
        worker.forget(group)
        self._enter(group, GroupState.WAITING)

    def recompute(self, group: SequenceGroup, worker: WorkerState, now: float) -> None:
        """Make a request compute its KV cache again, because it uses blocks into which a failed computation has written
        bad content. Tokens of the request that are still in flight are ignored."""
        if group.state is not GroupState.WAITING:
            self.discard(group, worker, now)
        for row in group.rows:
            row.drop()

    def _interrupt(self, group: SequenceGroup, now: float) -> None:
        self.counters.num_preemptions += 1
        group.num_preemptions += 1
        group.pause(now)
        for row in group.open_rows:
            if row.is_gated:  # results that were reported or are in flight are forgotten
                row.rewind()

    def return_to_waiting(self, group: SequenceGroup) -> None:
        """Return a swapped-out request to the state WAITING. It has nothing to load from the host, because all its
        sequences with blocks on the host have ended."""
        self._enter(group, GroupState.WAITING)

    # The worker

    def join_worker(self, worker: WorkerState) -> None:
        """Start to schedule on a newly connected worker, whose KV cache is empty."""
        self._begin(worker)
        self.standings.join(worker.cache, list(self.groups.values()), self.now)

    def _begin(self, worker: WorkerState) -> None:
        """Use a new worker state from now on, and reset the KV cache blocks of all sequences to none. All requests must
        be waiting."""
        self.worker = worker
        for group in self.groups.values():
            for sequence in group.sequences:
                sequence.begin_epoch(self._new_allocation(group.request, sequence.token_ids))
            self._ask_for_grammar(group)

    def lose_worker(self, now: float) -> list[SequenceGroup]:
        """Put all requests back into the waiting queue, in order of arrival, after the connection to the worker was
        lost with its KV cache.

        Return the requests that must fail, because the worker has crashed twice while it worked on nothing but this
        request or its grammar. The caller must end these requests.
        """
        worker = self.worker
        preparing = {group for group in self.waiting.held if worker.grammars.is_preparing(group.request.grammar)}
        self.standings.lose(self.groups.values())
        self.counters.num_moved_blocks_out += worker.cache.moves.num_moved_out
        self.counters.num_moved_blocks_in += worker.cache.moves.num_moved_in
        for group in self.groups.values():
            if group.state not in QUEUED:
                group.pause(now)
            worker.rows.vacate_group(group)
            if group.state is not GroupState.WAITING:
                self._enter(group, GroupState.WAITING)
        self._begin(WorkerState.without_worker())
        dispatched = {group for dispatch in worker.unacknowledged for group in dispatch.groups()}
        return self.quarantine.crashed((group for group in dispatched if not group.is_finished), preparing)

    # Ends

    def end(
        self,
        sequence: Sequence,
        reason: EndReason,
        outputs: TokenOutputs,
        *,
        num_output_tokens: int | None = None,
        stop_token_id: int | None = None,
        message: str = "",
        embedding: bytes = b"",
    ) -> None:
        """End one sample of a request, and the request too if it was the last sample. The end event is added to
        `outputs`.

        The sample keeps its first `num_output_tokens` output tokens, or all if this is None. Tokens of the sample that
        are still in flight are ignored.
        """
        group, worker = sequence.group, self.worker
        row = sequence.open_row
        if row is not None:
            if reason in _COMPLETE:
                worker.cache.publish(row.allocation, row.num_settled_tokens)
            worker.rows.vacate(row)
        sequence.finish()
        worker.cache.release(sequence.allocation)
        if num_output_tokens is not None:
            del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
        self.charge((sequence,))
        del self.samples[sequence.sequence_id]
        outputs.ended.append(
            _sequence_end(
                sequence,
                sequence.sequence_id,
                reason,
                sequence.num_output_tokens,
                stop_token_id,
                message=message,
                embedding=embedding,
            )
        )
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self._remove_group(group)

    def end_search(self, group: SequenceGroup, beam: BeamGroup, outputs: TokenOutputs) -> None:
        """End a request whose beam search is finished. Its best hypotheses and the end events of its outputs are added
        to `outputs`."""
        first = group.sequences[0]
        best = beam.search.best(len(beam.output_ids))
        for sequence_id, found in zip(beam.output_ids, best, strict=False):
            outputs.hypotheses.append(Hypothesis(sequence_id, found.token_ids, found.cumulative_logprob))
            reason = EndReason.LENGTH if found.stop_token_id is None else EndReason.STOP
            outputs.ended.append(_sequence_end(first, sequence_id, reason, len(found.token_ids), found.stop_token_id))
        self.counters.count_search(beam, sum(len(found.token_ids) for found in best))
        for sequence_id in beam.output_ids[len(best) :]:  # the vocabulary is smaller than the beam
            outputs.ended.append(_sequence_end(first, sequence_id, EndReason.LENGTH, 0))
        self._remove_group(group)

    def end_group(self, group: SequenceGroup, reason: EndReason, outputs: TokenOutputs, *, message: str = "") -> None:
        """End all unfinished sequences of a request, for example because the client has cancelled it, and add their end
        events to `outputs`. The request may be in any state."""
        if group.beam is None:
            for sequence in group.live_sequences:
                self.end(sequence, reason, outputs, message=message)
            return
        self.counters.count_search(group.beam, 0)
        for sequence_id in group.beam.output_ids:
            outputs.ended.append(_sequence_end(group.sequences[0], sequence_id, reason, 0, message=message))
        self._remove_group(group)

    def _remove_group(self, group: SequenceGroup) -> None:
        """Remove a request whose last sequence has ended, and free everything that the request still uses on the
        worker."""
        tenant = group.request.tenant
        self.worker.forget(group)
        if group.request.grammar is not None:
            self.worker.grammars.give_up(group.request.grammar)
        self._enter(group, GroupState.FINISHED)
        ran = [sequence for sequence in group.sequences if sequence.first_scheduled_at is not None]
        num_tokens = max((sequence.num_tokens - 1 for sequence in ran), default=0)  # the last token is not computed
        self.standings.end(group, num_tokens, self.now)
        group.dissolve()
        del self.groups[tenant, group.request.request_id]
        if self.quarantine.charged:
            self.quarantine.cleared(group)
        self.num_tenant_requests[tenant] -= 1
        if not self.num_tenant_requests[tenant]:
            del self.num_tenant_requests[tenant]
            self._policy.left(tenant)

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Charge tenants for the output tokens of these sequences that were not charged before. A fair scheduling
        policy uses the charges to rank tenants; under other policies, this method does nothing."""
        if not self._policy.ranks_tenants:
            return
        for tenant, served in groupby(sequences, _tenant):  # sequences of one tenant are often adjacent
            num_tokens = 0
            for sequence in served:
                num_new_tokens = len(sequence.token_ids) - sequence.num_charged_tokens
                if num_new_tokens > 0:
                    num_tokens += num_new_tokens
                    sequence.num_charged_tokens += num_new_tokens
            self._policy.charge(tenant, 0, num_tokens)

    def charge_masks(self, times: Iterable[tuple[Row, int]], prefill_rate: float | None) -> None:
        """Charge tenants for the time that the worker has spent on the grammar masks of their requests.

        `times` has the microseconds for each row. The time is converted to prompt tokens: the number that the worker
        computes in this time at `prefill_rate` tokens per second. A fraction of a token is kept for the next charge.
        Nothing is charged if the rate is None (not measured yet) or if the policy does not rank tenants.
        """
        if prefill_rate is None or not self._policy.ranks_tenants:
            return
        for row, us in times:
            group = row.sequence.group
            if not group.is_finished:
                num_tokens, group.uncharged_mask_tokens = divmod(
                    group.uncharged_mask_tokens + us * prefill_rate / 1e6, 1
                )
                self._policy.charge(group.request.tenant, int(num_tokens), 0)

    def charge_search(self, group: SequenceGroup, beam: BeamGroup, num_tokens: int) -> None:
        """Charge the tenant of a beam search for `num_tokens` new tokens of its beams, and add them to the counters."""
        beam.num_tokens += num_tokens
        self.counters.num_generation_tokens += num_tokens
        self._policy.charge(group.request.tenant, 0, num_tokens)


def _sequence_end(
    sequence: Sequence,
    sequence_id: int,
    reason: EndReason,
    num_output_tokens: int,
    stop_token_id: int | None = None,
    *,
    message: str = "",
    embedding: bytes = b"",
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
        pauses=sequence.group.pauses,
        embedding=embedding,
    )
