"""Row allocation: chooses the sequences that get rows on the worker in a plan.

These are groups whose blocks have been loaded, further samples of running groups, and waiting groups.
"""

from scheduler_service.core.cache import Match
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.plans import PlanBuilder
from scheduler_service.core.sequence import GroupState, Row, Sequence, SequenceGroup
from scheduler_service.core.waiting_queue import num_uncached_tokens
from scheduler_service.core.worker_state import WorkerState

_MAX_SLOWED_PROMPTS = 8  # started prompts that do not decode yet, in slowed steps


class RowAllocator:
    """The part of the scheduler that decides which sequences start or resume in each plan. Each of them gets a row (the
    worker's state of one running sequence)."""

    def __init__(self, state: Lifecycle, worker: WorkerState) -> None:
        self._state = state
        self._worker = worker
        # The waiting group that last lacked blocks, and the number of free blocks then. The group is not examined again
        # until more blocks are free.
        self._lacking: tuple[SequenceGroup | None, int] = (None, 0)

    def start_loaded(self, builder: PlanBuilder) -> None:
        """Start the requests whose KV cache blocks have arrived on the device after a load from the host."""
        worker = self._worker
        loaded = [group for group in self._state.loading if group.moved_step <= worker.last_moved_step]
        for group in sorted(loaded, key=lambda group: group.order):
            rows = [sequence for sequence in group.live_sequences if sequence.allocation.num_granted_blocks]
            self._state.run(group, rows, worker, builder)

    # Further samples of running groups

    def allocate_samples(self, builder: PlanBuilder) -> bool:
        """Start the remaining parallel samples of running requests. A sample starts after the prompt of its request is
        computed, so that all samples share the prompt's KV cache blocks.

        Return False if a sample could not start for lack of room. The caller must then admit no waiting request, so
        that the sample gets the room first.
        """
        state, worker = self._state, self._worker
        for group in sorted(state.rowless, key=lambda group: group.order):
            if group not in state.rowless:  # it has just been preempted
                continue
            for sequence in group.rowless_sequences:
                relatives = [row for row in group.open_rows if row.allocation.forkable_from]
                if group.open_rows and not any(row.allocation.forkable_from <= builder.step for row in relatives):
                    break
                while not self._allocate_sample(sequence, relatives, builder):
                    # Groups that wait for rows keep their blocks. If the worker is idle and the plan is empty, the last
                    # group is preempted.
                    if not (builder.is_empty and worker.is_idle) or state.running[-1] is group:
                        return False
                    state.preempt(state.running[-1], worker, builder)
            else:
                state.all_rows_open(group)
        return True

    def _allocate_sample(self, sequence: Sequence, relatives: list[Row], builder: PlanBuilder) -> bool:
        """Start another parallel sample of a running request. Return False if there is no free slot, token or block for
        the sample.

        The sample reuses either the prompt blocks of a running sample (one of `relatives`) or a prefix cache hit,
        whichever covers more tokens.
        """
        worker, cache, group = self._worker, self._worker.cache, sequence.group
        has_slot = bool(group.reserved_slots) or worker.rows.slots.num_free > 0
        if not has_slot or not self._may_open(builder) or not builder.can_open(sequence):
            return False
        match = worker.find(sequence).without_host()
        started = [row for row in relatives if row.allocation.forkable_from <= builder.step]
        relative = max(started, key=lambda row: row.allocation.states.fork > 0, default=None)
        num_forked = 0 if relative is None else worker.num_forked_tokens(sequence, relative)
        if relative is None or num_forked <= len(match.nodes) * cache.block_size:
            relative, num_blocks = None, cache.room.num_opening_blocks(sequence.allocation, match)
        else:
            num_blocks = sum(cache.room.num_fork_blocks(sequence.allocation, relative.allocation, num_forked))
        is_alone = worker.rows.num_open == len(group.open_rows) and not self._state.loading
        is_alone = is_alone or (builder.is_empty and worker.is_idle)
        if cache.states.num_states:
            start = match if relative is None else Match()
            if not cache.states.has_room([sequence.allocation], start):
                return False
        if not cache.room.can_allocate(num_blocks, alone=is_alone):
            return False
        if cache.room.is_mixed:
            rows = [row.allocation for row in group.open_rows]
            num_full = num_forked // cache.block_size
            starts = (
                cache.room.matched_blocks(match) if relative is None else relative.allocation.first_blocks(num_full)
            )
            if cache.room.num_final_blocks(rows, sequence.allocation, starts) > cache.pool.num_blocks:
                return False  # it shares too little with the others, and starts when one of them has ended
        if relative is not None:
            builder.copies.extend(cache.fork(sequence.allocation, relative.allocation, num_forked))
        else:
            cache.open(sequence.allocation, match, builder.step)
        self._state.first_scheduled(sequence, 0, builder.now)
        worker.open_row(sequence, builder)
        return True

    # Waiting groups

    def admit(self, builder: PlanBuilder) -> bool:
        """Start or resume the next waiting request. Return False if no waiting request can start or resume now."""
        state, group = self._state, self._next(builder)
        if group is None or self._worker.last_acknowledged_step < group.planned_step:
            return False
        # If the step has no tokens left, the blocks of one group may be loaded ahead of its turn.
        if not self._may_open(builder) and (state.loading or not state.standings.awaits_load(group)):
            return False
        if group.state is GroupState.SWAPPED and group.swapped_allocations:
            return self._swap_in(group, builder)
        if group.state is GroupState.SWAPPED:
            state.return_to_waiting(group)
        return group.state is GroupState.WAITING and self._start(group, builder)

    def _may_open(self, builder: PlanBuilder) -> bool:
        """Return whether another sequence may start in this plan.

        A sequence starts if the step has tokens left. If the step's prompt tokens are limited so that decoding stays
        fast, a few sequences may start without tokens. The next step then divides its tokens among all started prompts.
        So a short prompt need not wait until earlier, long prompts are computed.
        """
        can_wait = builder.is_slowed and len(self._worker.rows.active) < _MAX_SLOWED_PROMPTS
        return builder.num_free_tokens > 0 or can_wait

    def _next(self, builder: PlanBuilder) -> SequenceGroup | None:
        """Return the waiting request that should start or resume next, or None.

        If the step has no tokens left, this method skips a request if a running sequence is about to compute the same
        KV cache block that the request needs next. That request can use the block as a prefix cache hit later.
        """
        state, group = self._state, self._state.next_waiting(builder.now)
        is_early = builder.num_free_tokens <= 0 and self._may_open(builder)
        if group is None or not is_early or not self._is_being_computed(group):
            return group
        groups = [] if state.quarantine.suspects else state.waiting.first(_MAX_SLOWED_PROMPTS)
        return next((each for each in groups if not self._is_being_computed(each)), None)

    def _is_being_computed(self, group: SequenceGroup) -> bool:
        """Return whether a running sequence is about to compute the first KV cache block that a waiting request would
        have to compute.

        The request should then wait. A sequence looks for prefix cache hits only when it starts. If it started now, it
        would compute the same block a second time.
        """
        sequence, cache = group.rowless_sequences[0], self._worker.cache
        own, may_match = sequence.allocation, cache.enable_prefix_caching and sequence.may_match
        others = [row.allocation for row in self._worker.rows.active if row.allocation.root == own.root]
        if not others or not may_match or group.state is not GroupState.WAITING:
            return False
        nodes = self._worker.find(sequence).nodes
        start, past = len(nodes) * cache.block_size, (len(nodes) + 1) * cache.block_size
        last = nodes[-1] if nodes else None
        return past < sequence.num_tokens and any(
            (other.last_node, other.num_published_blocks) == (last, len(nodes))
            and other.num_computed_tokens < past
            and other.token_ids[start:past] == own.token_ids[start:past]
            for other in others
        )

    def num_next_tokens(self, builder: PlanBuilder, at_most: int) -> int:
        """Return how many tokens the current step should reserve for the next waiting request: the number of its
        uncached prompt tokens.

        Return 0 if the number exceeds `at_most`, if the request has run before, or if the request could not start now.
        """
        group = self._state.next_waiting(builder.now)
        if group is None or group.cursor is None or builder.num_free_tokens <= 0:
            return 0
        num_tokens = num_uncached_tokens(group)
        return num_tokens if num_tokens <= at_most and self._startable(group, builder) is not None else 0

    def _start(self, group: SequenceGroup, builder: PlanBuilder) -> bool:
        """Start a waiting request: allocate the KV cache blocks of its first sequence, and reserve the worker slots
        that the request needs at once.

        If some of its blocks must first be loaded from the host, the request starts after the load. Return False if the
        request cannot start now.
        """
        state, worker, cache, sequence = self._state, self._worker, self._worker.cache, group.rowless_sequences[0]
        match = self._startable(group, builder)
        if match is None:
            return False
        cache.open(sequence.allocation, match, builder.step)
        if cache.states.num_states and group.beam is not None:
            for other in group.sequences:
                cache.states.open(other.allocation)
        worker.rows.slots.reserve(group, group.num_first_slots)
        state.first_scheduled(sequence, match.num_loaded_blocks * cache.block_size, builder.now)
        if match.loads:
            state.load(group, builder.step)
        else:
            state.run(group, [sequence], worker, builder)
        return True

    def _startable(self, group: SequenceGroup, builder: PlanBuilder) -> Match | None:
        """Return the prefix cache hit with which a waiting request would start now. The hit may be empty.

        Return None if the request cannot start now: the worker has too few free slots or blocks, the plan's message is
        full, the step has too few tokens left for a prompt that must be computed whole, or the request should wait
        until cached blocks are loaded.
        """
        state, worker, cache, sequence = self._state, self._worker, self._worker.cache, group.rowless_sequences[0]
        if worker.rows.slots.num_free < group.num_first_slots or not builder.can_open(sequence):
            return None
        if worker.capacity.is_bidirectional and sequence.num_tokens > builder.num_free_tokens:
            return None
        is_alone = not state.running and not state.loading
        if not is_alone and self._lacking[0] is group and cache.pool.num_free <= self._lacking[1]:
            return None
        match = worker.match(sequence)
        if match is None:
            return None
        num_blocks = cache.room.num_opening_blocks(sequence.allocation, match)
        if not cache.room.can_allocate(num_blocks, alone=is_alone):
            self._lacking = (group, cache.pool.num_free)
            return None
        if cache.states.num_states:
            sequences = [sequence] if group.beam is None else group.sequences
            return match if cache.states.has_room([each.allocation for each in sequences], match) else None
        return match

    def _swap_in(self, group: SequenceGroup, builder: PlanBuilder) -> bool:
        """Resume a swapped-out request: make the plan load its KV cache blocks from the host to the device.

        Return False if there are too few free slots or device blocks for the request.
        """
        state, worker, cache = self._state, self._worker, self._worker.cache
        num_slots = max(len(group.swapped_allocations), group.num_first_slots)
        if worker.rows.slots.num_free < num_slots:
            return False
        is_alone = not state.running and not state.loading
        if not cache.room.can_allocate(cache.room.num_swap_in_blocks(group.swapped_allocations), alone=is_alone):
            return False
        if not cache.states.can_swap_in(group.swapped_allocations):
            return False
        cache.tiers.swap_in(group.swapped_allocations, builder.step)
        worker.rows.slots.reserve(group, num_slots)
        state.load(group, builder.step)
        return True
