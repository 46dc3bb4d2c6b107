"""Chooses who gets rows on the worker in a plan: groups whose blocks have come in, samples beside the first, waiting
groups."""

from scheduler_service.core.cache import Match
from scheduler_service.core.epoch import Epoch
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.plans import PlanDraft
from scheduler_service.core.sequence import GroupState, Row, Sequence, SequenceGroup
from scheduler_service.core.waiting import num_uncached_tokens


class Openings:
    """For one epoch."""

    def __init__(self, state: Lifecycle, epoch: Epoch) -> None:
        self._state = state
        self._epoch = epoch
        # The waiting group that last lacked blocks, and how many were free: until more are, it need not be looked at
        # again.
        self._lacking: tuple[SequenceGroup | None, int] = (None, 0)

    def open_loaded(self, draft: PlanDraft) -> None:
        """Open the rows of the groups whose blocks have come in."""
        epoch = self._epoch
        loaded = [group for group in self._state.loading if group.moved_step <= epoch.last_moved_step]
        for group in sorted(loaded, key=lambda group: group.order):
            rows = [sequence for sequence in group.live_sequences if sequence.holding.num_granted_blocks]
            self._state.run(group, rows, epoch, draft)

    # Samples beside the first

    def open_siblings(self, draft: PlanDraft) -> bool:
        """Open the other sequences of groups whose prompt is computed. False if one had no room: no group is admitted
        before it."""
        state, epoch = self._state, self._epoch
        for group in sorted(state.unopened, key=lambda group: group.order):
            if group not in state.unopened:  # it has just given way
                continue
            for sequence in group.unopened_sequences:
                relatives = [row for row in group.open_rows if row.holding.forkable_from]
                if group.open_rows and not any(row.holding.forkable_from <= draft.step for row in relatives):
                    break
                while not self._open_sibling(sequence, relatives, draft):
                    # Groups that wait for siblings hold on to blocks: when nothing else happens, the last gives way.
                    if not (draft.is_empty and epoch.is_idle) or state.running[-1] is group:
                        return False
                    state.preempt(state.running[-1], epoch, draft)
            else:
                state.opened(group)
        return True

    def _open_sibling(self, sequence: Sequence, relatives: list[Row], draft: PlanDraft) -> bool:
        """Open a sample from the prompt of a relative, or from what is cached, whichever is more."""
        epoch, cache, group = self._epoch, self._epoch.cache, sequence.group
        has_slot = bool(group.reserved_slots) or epoch.slots.num_free > 0
        if not has_slot or draft.num_free_tokens <= 0 or not draft.can_open(sequence):
            return False
        match = epoch.find(sequence).without_host()
        relative = next((row for row in relatives if row.holding.forkable_from <= draft.step), None)
        num_forked = 0 if relative is None else epoch.num_forked_tokens(sequence, relative)
        if relative is None or num_forked <= len(match.device) * cache.block_size:
            relative, num_blocks = None, cache.num_opening_blocks(sequence.holding, match)
        else:
            num_blocks = cache.num_fork_blocks(sequence.holding, relative.holding, num_forked)
        is_alone = epoch.num_rows == len(group.open_rows) and not self._state.loading
        is_alone = is_alone or (draft.is_empty and epoch.is_idle)
        if not cache.room.can_allocate(num_blocks, alone=is_alone):
            return False
        if relative is not None:
            draft.copies.extend(cache.fork(sequence.holding, relative.holding, num_forked))
        else:
            cache.open(sequence.holding, match, draft.step)
        self._state.first_scheduled(sequence, 0, draft.now)
        epoch.open_row(sequence, draft)
        return True

    # Waiting groups

    def admit(self, draft: PlanDraft) -> bool:
        """Start the next waiting group, or bring it back, if that is possible now."""
        state, group = self._state, self._state.next_waiting(draft.now)
        if group is None or self._epoch.last_acknowledged_step < group.planned_step:
            return False
        # Where nothing more can be computed, blocks may come in meanwhile, for one group ahead of its turn.
        if draft.num_free_tokens <= 0 and (state.loading or not state.standings.awaits_load(group)):
            return False
        if group.state is GroupState.SWAPPED and group.swapped_holdings:
            return self._swap_in(group, draft)
        if group.state is GroupState.SWAPPED:
            state.lost_its_swap(group)
        return group.state is GroupState.WAITING and self._start(group, draft)

    def num_next_tokens(self, draft: PlanDraft) -> int:
        """Count the tokens that the next group would compute, if it has never run and could begin now; else 0."""
        group = self._state.next_waiting(draft.now)
        if group is None or group.cursor is None or draft.num_free_tokens <= 0:
            return 0
        num_tokens = num_uncached_tokens(group)
        if num_tokens > draft.num_free_tokens:
            return 0
        return num_tokens if self._startable(group, draft) is not None else 0

    def _start(self, group: SequenceGroup, draft: PlanDraft) -> bool:
        """Give the first sequence of a group its blocks, and all the slots it needs at once."""
        state, epoch, cache, sequence = self._state, self._epoch, self._epoch.cache, group.unopened_sequences[0]
        match = self._startable(group, draft)
        if match is None:
            return False
        cache.open(sequence.holding, match, draft.step)
        epoch.reserve_slots(group, group.num_first_slots)
        state.first_scheduled(sequence, len(match.host) * cache.block_size, draft.now)
        if match.host:
            state.load(group, draft.step)
        else:
            state.run(group, [sequence], epoch, draft)
        return True

    def _startable(self, group: SequenceGroup, draft: PlanDraft) -> Match | None:
        """Return what the first sequence of a group would start from. None: it cannot start now."""
        state, epoch, cache, sequence = self._state, self._epoch, self._epoch.cache, group.unopened_sequences[0]
        if epoch.slots.num_free < group.num_first_slots or not draft.can_open(sequence):
            return None
        is_alone = not state.running and not state.loading
        if not is_alone and self._lacking[0] is group and cache.pool.num_free <= self._lacking[1]:
            return None
        match = epoch.match(sequence)
        if match is None:
            return None
        num_blocks = cache.num_opening_blocks(sequence.holding, match)
        if not cache.room.can_allocate(num_blocks, alone=is_alone):
            self._lacking = (group, cache.pool.num_free)
            return None
        return match

    def _swap_in(self, group: SequenceGroup, draft: PlanDraft) -> bool:
        """Order a swapped group's blocks back, if there is room for it to run on."""
        state, epoch, cache = self._state, self._epoch, self._epoch.cache
        num_slots = max(len(group.swapped_holdings), group.num_first_slots)
        if epoch.slots.num_free < num_slots:
            return False
        is_alone = not state.running and not state.loading
        if not cache.room.can_allocate(cache.room.num_swap_in_blocks(group.swapped_holdings), alone=is_alone):
            return False
        cache.tiers.swap_in(group.swapped_holdings, draft.step)
        epoch.reserve_slots(group, num_slots)
        state.load(group, draft.step)
        return True
