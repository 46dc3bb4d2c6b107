"""Read-only questions about a scheduler's state.

They report metrics, the state of one request and the reason why it waits, and the owner of each block.
"""

from collections import Counter

from scheduler_service.core.cache import Match
from scheduler_service.core.lifecycle import QUEUED, SWAPPED, Lifecycle
from scheduler_service.core.plans import num_missing_blocks
from scheduler_service.core.request import BlockHolder, BlockMap, BlockUse, RequestReport, SchedulerStats
from scheduler_service.core.sequence import GroupState, Sequence, SequenceGroup
from scheduler_service.core.waiting_queue import num_uncached_tokens
from scheduler_service.core.worker_state import WorkerState


def stats(state: Lifecycle) -> SchedulerStats:
    """Return the scheduler's metrics: the current values of gauges, and counters of events since the scheduler
    started."""
    worker, waiting, counters = state.worker, state.waiting, state.counters
    cache = worker.cache
    num_copying, num_host_copying = cache.moves.num_copying()
    num_cached_states, num_cached_host_states = (
        sum(content is not None for content in contents[num_blocks + 1 :])
        for contents, num_blocks in (
            (cache.index.contents, cache.pool.num_blocks),
            (cache.index.host_contents, cache.host_pool.num_blocks),
        )
    )
    return SchedulerStats(
        num_running=worker.rows.num_open,
        # Swapped requests are in the queue too, so they are subtracted.
        num_waiting=waiting.num_sequences - sum(group.num_waiting_sequences for group in state.swapped),
        num_swapped=sum(group.num_unfinished for group in [*state.swapped, *state.loading]),
        num_waiting_tokens=waiting.num_prompt_tokens
        - sum(len(group.request.prompt_token_ids) for group in state.swapped),
        num_device_blocks=cache.pool.num_blocks,
        num_held_blocks=cache.pool.num_blocks - cache.pool.num_free - num_copying,
        num_cached_blocks=cache.index.num_cached_blocks - num_cached_states,
        num_host_blocks=cache.host_pool.num_blocks,
        num_held_host_blocks=cache.host_pool.num_blocks - cache.host_pool.num_free - num_host_copying,
        num_cached_host_blocks=cache.index.num_cached_host_blocks - num_cached_host_states,
        num_preemptions=counters.num_preemptions,
        num_swap_preemptions=counters.num_swap_preemptions,
        num_moved_blocks_out=counters.num_moved_blocks_out + cache.moves.num_moved_out,
        num_moved_blocks_in=counters.num_moved_blocks_in + cache.moves.num_moved_in,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
        num_host_cached_prompt_tokens=counters.num_host_cached_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens,
        num_discarded_tokens=counters.num_discarded_tokens,
        num_admitted_requests=counters.num_admitted_requests,
        num_overdue_requests=counters.num_overdue_requests,
        num_kept_session_tokens=tuple(counters.num_kept_session_tokens),
        num_lost_session_tokens=tuple(counters.num_lost_session_tokens),
        num_device_states=cache.states.num_states,
        num_held_states=cache.states.num_states - cache.tiers.device.states.num_free,
        num_cached_states=num_cached_states,
    )


def report(state: Lifecycle, tenant: str, request_id: str) -> RequestReport:
    """Return a report on one request: its state, and the reason why it waits. Raises KeyError if the tenant has no
    unfinished request with this id."""
    group, worker = state.groups[tenant, request_id], state.worker
    has_place = group.state in QUEUED and group not in state.waiting.held
    position = state.waiting.position(group) if has_place else None
    num_wanted = _num_wanted_blocks(group, worker)
    sequences = group.sequences
    return RequestReport(
        request_id=group.request.request_id,
        tenant=group.request.tenant,
        state=(GroupState.WAITING if group.state is GroupState.PREPARING else group.state).value,
        reason=_reason(group, worker, position, num_wanted),
        queue_position=position,
        num_prompt_tokens=len(group.request.prompt_token_ids),
        num_output_tokens=sum(sequence.num_output_tokens for sequence in sequences),
        num_computed_tokens=sum(sequence.allocation.num_computed_tokens for sequence in sequences),
        num_sequences=group.num_unfinished,
        num_running_sequences=len(group.open_rows) if group.state is GroupState.RUNNING else 0,
        num_held_blocks=len({block for sequence in sequences for block in sequence.allocation.blocks}),
        num_held_host_blocks=len({block for sequence in sequences for block in sequence.allocation.host_blocks}),
        num_wanted_blocks=num_wanted,
        num_free_blocks=worker.cache.pool.num_free,
        num_preemptions=group.num_preemptions,
        holders=_holders(group, [*state.running, *state.loading]),
        arrived_at=group.arrived_at,
    )


def queue_reason(state: Lifecycle) -> str:
    """Return the reason why the first request of the queue waits, as in its report. The result is empty if no request
    waits."""
    group, worker = state.waiting.next(), state.worker
    return "" if group is None else _reason(group, worker, 1, _num_wanted_blocks(group, worker))


def block_map(state: Lifecycle) -> BlockMap:
    """Return a map that shows, for each KV cache block of the connected worker, whether it is free or which request
    uses it."""
    cache = state.worker.cache
    device, host = (
        [BlockUse.FREE.value if content is None else BlockUse.CACHED.value for content in contents[1:]]
        for contents in (cache.index.contents, cache.index.host_contents)
    )
    for move in cache.moves:
        device[move.device_block - 1] = host[move.host_block - 1] = BlockUse.MOVING
    for save in [save for dispatch in state.worker.unacknowledged for save in dispatch.saves]:
        device[save.state - 1] = BlockUse.MOVING
    owners: list[str] = []
    for group in state.groups.values():
        use = BlockUse.HELD + len(owners)
        held: list[tuple[list[int], set[int]]] = []
        for allocation in [sequence.allocation for sequence in group.sequences]:
            states = allocation.states
            held.append((device, allocation.blocks.union(states.held)))
            held.append((host, allocation.host_blocks | ({states.host} - {0})))
        for uses, blocks in held:
            for block in blocks:
                is_shared = uses[block - 1] >= BlockUse.SHARED and uses[block - 1] != use
                uses[block - 1] = BlockUse.SHARED if is_shared else use
        if any(blocks for _, blocks in held):
            owners.append(group.request.request_id)
    num_blocks, num_host_blocks = cache.pool.num_blocks, cache.host_pool.num_blocks
    parts = (device[:num_blocks], host[:num_host_blocks], device[num_blocks:], host[num_host_blocks:])
    return BlockMap(tuple(owners), *(tuple(map(int, part)) for part in parts))


def _num_wanted_blocks(group: SequenceGroup, worker: WorkerState) -> int:
    """Return how many KV cache blocks a request still needs in order to start or to continue."""
    cache = worker.cache
    if not worker.has_worker:
        return 0
    if group.state is GroupState.RUNNING:
        lacking = [row for row in group.open_rows if row in worker.rows.active]
        return max(0, num_missing_blocks(cache, [(row, min(1, row.num_uncomputed_tokens)) for row in lacking]))
    if group.state in SWAPPED:
        return cache.room.num_swapped_blocks(group.swapped_allocations)
    if group.state is GroupState.WAITING and group.rowless_sequences:
        first: Sequence = group.rowless_sequences[0]
        return cache.room.num_opening_blocks(first.allocation, worker.find(first).without_host())
    return 0


def _reason(group: SequenceGroup, worker: WorkerState, position: int | None, num_wanted: int) -> str:
    if not worker.has_worker:
        return "no worker is connected"
    if group.state is GroupState.PREPARING:
        return "its grammar is being prepared by the worker"
    num_free = worker.cache.pool.num_free
    if group.state is GroupState.RUNNING:
        return f"it lacks {num_wanted} blocks to continue, {num_free} are free" if num_wanted > num_free else ""
    if group.state is GroupState.SWAPPING_OUT:
        return "it was preempted: its blocks are being moved to the host"
    if group.state is GroupState.SWAPPING_IN:
        return "its blocks are being loaded from the host"
    was = "it was preempted and " if group.num_preemptions else "it "
    if position is not None and position > 1:
        return f"{was}waits behind {position - 1} other requests{_position_reason(group)}"
    if worker.last_acknowledged_step < group.planned_step:
        return f"{was}waits for a token in flight"
    if worker.rows.slots.num_free < group.num_first_slots:
        of_all = f"{group.num_first_slots} of {worker.rows.slots.num_slots}"
        return f"{was}waits for {of_all} rows, {worker.rows.slots.num_free} are free{_position_reason(group)}"
    if worker.cache.states.num_states and not worker.cache.states.has_room(
        [sequence.allocation for sequence in group.sequences[:1]], Match()
    ):
        return f"{was}waits for a state of the model, all {worker.cache.states.num_states} are used"
    if num_wanted > num_free:
        return f"{was}waits for {num_wanted} blocks, {num_free} are free{_position_reason(group)}"
    return f"{was}is next{_position_reason(group)}"


def _position_reason(group: SequenceGroup) -> str:
    """Return a clause for the report of a waiting request that explains its position in the queue: it has waited too
    long, or has a given number of uncached prompt tokens.

    The result is empty if the policy does not use the prefix cache.
    """
    if group.is_overdue:
        return "; it has waited longer than the limit, so only earlier requests that have too are served first"
    if group.cursor is None:
        return ""
    return f"; it would compute {num_uncached_tokens(group)} of its {len(group.request.prompt_token_ids)} prompt tokens"


def _holders(group: SequenceGroup, others: list[SequenceGroup]) -> tuple[BlockHolder, ...]:
    """Return the requests that use KV cache blocks on the device, most blocks first. The requests of other tenants are
    added up in one entry without a request id."""
    counts: Counter[str | None] = Counter()
    for other in others:
        blocks = {block for sequence in other.sequences for block in sequence.allocation.blocks}
        counts[other.request.request_id if other.request.tenant == group.request.tenant else None] += len(blocks)
    return tuple(BlockHolder(name, num_blocks) for name, num_blocks in counts.most_common() if num_blocks)
