"""The invariants of the design that are the core's, as one check over all its state.

S6 is kept by the streams, S9 by `Scheduler.complete` itself, and S4 follows from S3: a group is swapped in only when it
is SWAPPED, and then no move names its host blocks.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.epoch import Epoch
from scheduler_service.core.prefix_index import Node
from scheduler_service.core.sequence import GroupState, Sequence, SequenceGroup

if TYPE_CHECKING:
    from scheduler_service.core.scheduler import Scheduler

_QUEUED = (GroupState.WAITING, GroupState.SWAPPING_OUT, GroupState.SWAPPED)


def check(scheduler: Scheduler) -> None:
    """Assert S1 to S5, S7, S8 and S10 to S12."""
    epoch = scheduler._epoch
    groups = list(scheduler._groups.values())
    _check_queues(scheduler, groups)
    for group in groups:
        _check_group(group, epoch)
    if epoch is None:
        assert not len(scheduler._running), "requests run without a worker"
        return
    _check_rows(epoch, groups)
    _check_dispatches(scheduler, epoch)
    _check_blocks(epoch, groups)
    _check_content(epoch, groups)


def check_sample(scheduler: Scheduler) -> None:
    """A few of them, in time that does not grow with the pools: the counts of blocks, rows and plans."""
    epoch = scheduler._epoch
    if epoch is None:
        return
    pool = epoch.cache.pool
    assert 0 <= pool.num_idle_cached <= pool.num_free <= pool.num_blocks, "S1"
    assert epoch.num_rows + epoch.slots.num_free <= epoch.slots.num_slots, "S11"
    assert len(epoch.unacknowledged) <= scheduler.pipeline_depth, "S11"
    for dispatch in epoch.unacknowledged:
        assert dispatch.num_tokens <= scheduler.num_step_tokens, f"S11: step {dispatch.step}"
    for sequence in epoch.active:
        assert sequence.num_in_flight >= 0, f"S5: {sequence.sequence_id}"
        num_positions = len(sequence.block_table) * epoch.cache.block_size
        assert sequence.num_computed_tokens <= num_positions, f"S5: {sequence.sequence_id}"


def _check_queues(scheduler: Scheduler, groups: list[SequenceGroup]) -> None:
    running = list(scheduler._running)
    assert all(a.order < b.order for a, b in pairwise(running))
    waiting = set(scheduler._waiting)
    for group in groups:
        assert (group in waiting) == (group.state in _QUEUED), f"{group.state} and the queue disagree"
        assert group.num_lone_crashes < 2, "S10: a request that must fail is still there"
        assert group.num_unfinished > 0, "S8: a request outlived itself"
    assert len(waiting) + len(running) + sum(g.state is GroupState.SWAPPING_IN for g in groups) == len(groups), "S8"
    assert set(running) == {group for group in groups if group.state is GroupState.RUNNING}
    num_samples = sum(len(group.live_sequences) for group in groups if group.beam is None)
    assert len(scheduler._sequences) == num_samples, "S8: a sequence is in no request, or in one too many"
    assert sum(scheduler._num_tenant_requests.values()) == len(groups), "S8: a tenant is counted wrong"


def _check_group(group: SequenceGroup, epoch: Epoch | None) -> None:
    state = group.state
    for sequence in group.sequences:
        if state is not GroupState.RUNNING:
            assert sequence.slot < 0, f"S8: a sequence of a request that is {state.value} has a row"
        if state not in (GroupState.RUNNING, GroupState.SWAPPING_IN):
            assert not sequence.block_table, f"S8: a request that is {state.value} holds blocks"
        if state not in (GroupState.SWAPPING_OUT, GroupState.SWAPPED):
            assert not sequence.host_table, f"S8: a request that is {state.value} holds host blocks"
        if sequence.slot < 0 and state is GroupState.RUNNING:
            assert not sequence.block_table, "S8: a sequence without a row holds blocks"
    if state not in (GroupState.RUNNING, GroupState.SWAPPING_IN):
        assert not group.reserved_slots
    if epoch is not None:
        assert (group in epoch.loading) == (state is GroupState.SWAPPING_IN)
        assert (group in epoch.swapped) == (state in (GroupState.SWAPPING_OUT, GroupState.SWAPPED))
        if state is GroupState.SWAPPED:
            assert group.moved_step <= epoch.last_moved_step, "S4: swapped before it was moved"
    if group.beam is None:
        assert len(group.live_sequences) == group.num_unfinished


def _check_rows(epoch: Epoch, groups: list[SequenceGroup]) -> None:
    block_size = epoch.cache.block_size
    slots = list(epoch.slots._free)
    num_rows = 0
    for group in groups:
        slots.extend(group.reserved_slots)
        unborn = group.beam.unborn_slots if group.beam else ()
        live = group.live_sequences
        for sequence in group.sequences:
            if sequence.slot < 0:
                continue
            slots.append(sequence.slot)
            num_rows += sequence.slot not in unborn
            if sequence not in live:
                continue
            num_computed, num_expected = sequence.num_computed_tokens, sequence.num_tokens + sequence.num_in_flight
            assert num_computed <= len(sequence.block_table) * block_size, f"S5: {sequence}"
            assert num_computed <= num_expected <= sequence.max_num_tokens, f"S5, planned too far: {sequence}"
            assert (sequence in epoch.active) == (not sequence.is_decoding and sequence.num_uncomputed_tokens > 0)
            assert sequence.is_decoding == (epoch.decoding._rows.get(sequence.slot) is sequence)
            if sequence.is_decoding:
                assert num_computed == num_expected - 1, f"S5: a decoding row is not at its end: {sequence}"
                assert sequence.due_step > epoch.num_steps, "a decoding row was not looked at when it was due"
    assert num_rows == epoch.num_rows
    slots.sort()
    assert slots == list(range(epoch.slots.num_slots)), "a slot is lost, or has two owners"


def _check_dispatches(scheduler: Scheduler, epoch: Epoch) -> None:
    dispatches = epoch.unacknowledged
    assert len(dispatches) <= scheduler.pipeline_depth, "S11"
    in_flight: dict[Sequence, int] = {}
    for dispatch in dispatches:
        assert dispatch.num_tokens <= scheduler.num_step_tokens, f"S11: step {dispatch.step}"
        num_row_tokens = sum(row.num_tokens for row in dispatch.rows)
        assert dispatch.num_tokens == num_row_tokens + len(dispatch.columns.slots)
        slots = [row.slot for row in dispatch.rows] + dispatch.columns.slots
        assert len(slots) == len(set(slots)), f"two rows of step {dispatch.step} share a slot"
        sampled = [row.sequence for row in dispatch.rows if row.samples] + dispatch.columns.sequences
        for sequence in sampled:
            if sequence not in dispatch.dropped:
                in_flight[sequence] = in_flight.get(sequence, 0) + 1
    for group in scheduler._groups.values():
        for sequence in group.live_sequences:
            assert sequence.num_in_flight == in_flight.get(sequence, 0), f"S5: {sequence.num_in_flight} {in_flight}"


def _check_blocks(epoch: Epoch, groups: list[SequenceGroup]) -> None:
    cache = epoch.cache
    holders, host_holders = [0] * (cache.pool.num_blocks + 1), [0] * (cache.host_pool.num_blocks + 1)
    for group in groups:
        for sequence in group.sequences:
            for block in sequence.block_table:
                holders[block] += 1
            for block in sequence.host_table:
                host_holders[block] += 1
    for group in groups:
        for sequence in group.open_sequences:
            _check_writable(epoch, sequence, holders)
    for move in cache.moves:
        assert move.step > epoch.last_moved_step, "S3: an acknowledged move is still pending"
        holders[move.device_block] += 1
        host_holders[move.host_block] += 1
    _check_pool(cache.pool, holders)
    _check_pool(cache.host_pool, host_holders)


def _check_writable(epoch: Epoch, sequence: Sequence, holders: list[int]) -> None:
    """S12. A beam's tail may be shared until the plan that writes it."""
    cache = epoch.cache
    first = sequence.num_computed_tokens // cache.block_size
    for i in range(first, len(sequence.block_table)):
        block = sequence.block_table[i]
        is_beam = sequence.group.beam is not None
        assert is_beam or holders[block] == 1, f"S12: block {block} will be written and is shared"
        assert not cache.index.is_cached(block), f"S12: block {block} will be written and is published"


def _check_pool(pool: BlockPool, holders: list[int]) -> None:
    num_free = 0
    for block in pool.free_blocks():
        assert holders[block] == 0, f"S1: block {block} is free and held"
        num_free += 1
        assert num_free <= pool.num_free, "S1: the free list is a loop"
    assert num_free == pool.num_free, "S1: the free list is cut"
    num_held = 0
    for block in range(1, pool.num_blocks + 1):
        assert pool._ref_counts[block] == holders[block], f"S2: block {block}"
        num_held += holders[block] > 0
    assert num_held + num_free == pool.num_blocks, "S1: a block is lost"
    assert pool.num_idle_cached == sum(pool._is_idle_cached)


def _check_content(epoch: Epoch, groups: list[SequenceGroup]) -> None:
    cache = epoch.cache
    index = cache.index
    num_copies = num_host_copies = 0
    for cached in index.nodes():
        assert cached.blocks or cached.host_block or cached.children, "S8: a node outlived its copies and descendants"
        num_copies += len(cached.blocks)
        for block in cached.blocks:
            assert index.node_of(block) is cached
            assert (cache.pool.ref_count(block) == 0) == bool(cache.pool._is_idle_cached[block]), f"S1: block {block}"
        if cached.host_block:
            num_host_copies += 1
            assert index.node_of_host(cached.host_block) is cached
    assert num_copies == index.num_cached_blocks, "a block holds two contents"
    assert num_host_copies == index.num_cached_host_blocks
    for group in groups:
        for sequence in group.open_sequences:
            _check_published(epoch, sequence)


def _check_published(epoch: Epoch, sequence: Sequence) -> None:
    """S7: what it has published or matched is what its tokens say."""
    block_size = epoch.cache.block_size
    node: Node | None = sequence.node
    for i in reversed(range(sequence.num_published_blocks)):
        assert node is not None
        assert node.root_key == sequence.root_key, "S7: another tenant's, salt's or model's block"
        tokens = array("I", sequence.token_ids[i * block_size : (i + 1) * block_size]).tobytes()
        assert node.token_bytes == tokens, "S7: the block's tokens are others"
        assert i < sequence.num_freed_blocks or sequence.block_table[i] in node.blocks, "S7: not that content"
        node = node.parent
    assert node is None or node.parent is None
