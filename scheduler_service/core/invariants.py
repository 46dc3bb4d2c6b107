"""The invariants of the core's design, as one check over all its state.

S6 is kept by the streams, S9 by `Scheduler.complete` itself, and S4 follows from S3: a group is swapped in only when it
is SWAPPED, and then no move names its host blocks.
"""

from array import array
from collections import Counter
from itertools import pairwise

from scheduler_service.core.cache import Allocation, BlockContent, BlockPool, CacheManager
from scheduler_service.core.lifecycle import QUEUED, SWAPPED, Lifecycle
from scheduler_service.core.sequence import GroupState, Row, Sequence, SequenceGroup
from scheduler_service.core.worker_state import WorkerState

LiveGroups = list[tuple[SequenceGroup, list[Sequence]]]  # each group with its live sequences


def check(state: Lifecycle, pipeline_depth: int, num_step_tokens: int) -> None:
    """Assert all invariants of the scheduler's state: S1 to S5, S7, S8 and S10 to S12 in ARCHITECTURE.md. A simulation
    calls this function after every event.

    Raises AssertionError if an invariant does not hold.
    """
    worker = state.worker
    groups = [(group, group.live_sequences) for group in state.groups.values()]
    _check_queues(state, groups)
    for group, _ in groups:
        _check_group(group, worker)
    in_flight = _check_dispatches(worker, pipeline_depth, num_step_tokens)
    _check_rows(worker, groups, in_flight)
    _check_windows(worker, pipeline_depth, num_step_tokens)
    _check_blocks(worker, groups)
    _check_content(worker.cache)
    _check_cursors(state, worker.cache)
    for sequence in _running(groups):
        if sequence.allocation.num_published_blocks:
            _check_published(worker.cache.block_size, sequence.allocation)


def check_sample(state: Lifecycle, pipeline_depth: int, num_step_tokens: int) -> None:
    """Assert the invariants that are cheap enough to check in production: the numbers of KV cache blocks, running
    sequences and plans. The time does not grow with the number of blocks.

    Raises AssertionError if an invariant does not hold.
    """
    worker = state.worker
    pool = worker.cache.pool
    assert 0 <= pool.num_idle_cached <= pool.num_free <= pool.num_blocks, "S1"
    assert worker.rows.num_open + worker.rows.slots.num_free <= worker.rows.slots.num_slots, "S11"
    assert worker.num_plans <= pipeline_depth, "S11"
    for dispatch in worker.unacknowledged:
        assert dispatch.num_tokens <= num_step_tokens, f"S11: step {dispatch.step}"
    for row in worker.rows.active:
        assert row.num_in_flight >= 0, f"S5: {row}"
        num_positions = row.allocation.num_granted_blocks * worker.cache.block_size
        assert row.allocation.num_computed_tokens <= num_positions, f"S5: {row}"


def _running(groups: LiveGroups) -> list[Sequence]:
    return [sequence for group, _ in groups if group.state is GroupState.RUNNING for sequence in group.sequences]


def _check_queues(state: Lifecycle, groups: LiveGroups) -> None:
    for earlier, later in pairwise(state.running):
        assert earlier.order < later.order
    waiting = set(state.waiting.held).union(*state.waiting._groups.values())
    places = (
        (waiting, QUEUED),
        (state.waiting.held, (GroupState.PREPARING,)),
        (state.running, (GroupState.RUNNING,)),
        (state.loading, (GroupState.SWAPPING_IN,)),
        (state.swapped, SWAPPED),
    )
    for place, states in places:
        assert set(place) == {group for group, _ in groups if group.state in states}, f"{states} and the place disagree"
    assert len(waiting) + len(state.running) + len(state.loading) == len(groups), "S8"
    assert len(waiting) == len(state.waiting), "S8: the queue is counted wrong"
    for group, live in groups:
        assert group.num_lone_crashes < 2, "S10: a request that must fail is still there"
        assert group.num_unfinished > 0, "S8: a request outlived itself"
        assert group.beam is not None or len(live) == group.num_unfinished
    _check_grammars(state, groups)
    num_samples = sum(len(live) for group, live in groups if group.beam is None)
    assert len(state.samples) == num_samples, "S8: a sequence is in no request, or in one too many"
    assert sum(state.num_tenant_requests.values()) == len(groups), "S8: a tenant is counted wrong"


def _check_grammars(state: Lifecycle, groups: LiveGroups) -> None:
    """Assert that a request is in the state PREPARING if and only if the worker has not prepared its grammar yet. Also
    assert that the number of requests that use each grammar is right."""
    grammars = state.worker.grammars
    num_needing = Counter(group.request.grammar for group, _ in groups if group.request.grammar is not None)
    counted = {grammar: need.num_requests for grammar, need in grammars._needs.items()}
    assert counted == num_needing, "S8: a grammar is counted wrong"
    for group, _ in groups:
        grammar = group.request.grammar
        if grammar is not None:
            assert (group.state is GroupState.PREPARING) != grammars.is_ready(grammar), (
                "S8: a group and its grammar disagree"
            )


def _check_group(group: SequenceGroup, worker: WorkerState) -> None:
    state = group.state
    for sequence in group.sequences:
        if state is GroupState.RUNNING:
            assert sequence.open_row or not sequence.allocation.num_granted_blocks, (
                "S8: a sequence without a row holds blocks"
            )
        else:
            assert sequence.open_row is None, f"S8: a sequence of a request that is {state.value} has a row"
            if sequence.allocation.num_granted_blocks:
                assert state is GroupState.SWAPPING_IN, (
                    f"S8: a request that is {state.value} holds {sequence.allocation}"
                )
        if sequence.allocation.host_blocks or sequence.allocation.states.host:
            assert state in SWAPPED, f"S8: a request that is {state.value} holds {sequence.allocation}"
        if sequence.allocation.states.held:
            assert state in (GroupState.RUNNING, GroupState.SWAPPING_IN), f"S8: a request {state.value} holds states"
    if group.reserved_slots:
        assert state in (GroupState.RUNNING, GroupState.SWAPPING_IN)
    if state is GroupState.SWAPPED:
        assert group.moved_step <= worker.last_moved_step, "S4: swapped before it was moved"


def _check_rows(worker: WorkerState, groups: LiveGroups, in_flight: dict[Row, int]) -> None:
    block_size = worker.cache.block_size
    slots = worker.rows.slots._free.copy()
    num_rows = 0
    for group, live in groups:
        slots += group.reserved_slots
        assert all(sequence.allocation.num_computed_tokens >= 0 for sequence in live), f"S5: {group}"
        for row in [sequence.row for sequence in live if sequence.row is not None]:
            sequence, num_in_flight, num_computed = row.sequence, row.num_in_flight, row.allocation.num_computed_tokens
            assert num_in_flight == in_flight.get(row, 0), f"S5: {row}"
            if row.slot < 0:
                continue
            num_expected = len(sequence.token_ids) + num_in_flight
            assert num_computed <= row.allocation.num_granted_blocks * block_size, f"S5: {row}"
            max_expected = max(sequence.max_num_tokens, sequence.num_prompt_tokens + 1)  # an embedding counts too
            assert num_computed <= num_expected <= max_expected, f"S5, planned too far: {row}"
            assert (row in worker.rows.active) == (not row.is_decoding and row.num_uncomputed_tokens > 0)
            assert row.is_decoding == (worker.rows.decoding._rows.get(row.slot) is row)
            if row.is_decoding:
                assert num_computed == num_expected - 1, f"S5: a decoding row is not at its end: {row}"
                assert row.due_step > worker.steps.num_steps, "a decoding row was not looked at when it was due"
        if group.state is GroupState.RUNNING:
            opened = [row.slot for row in group.open_rows]
            slots += opened
            num_rows += len(opened) - (0 if group.beam is None else len(group.beam.new_slots))
    assert num_rows == worker.rows.num_open
    slots.sort()
    assert slots == list(range(worker.rows.slots.num_slots)), "a slot is lost, or has two owners"


def _check_windows(worker: WorkerState, pipeline_depth: int, num_step_tokens: int) -> None:
    """Assert that a running sequence holds no more blocks of a layer group with a sliding window than the window, one
    step, the tokens in flight and the last published block need."""
    room = worker.cache.room
    num_late = (pipeline_depth + worker.capacity.max_leased_steps) // room.block_size + 3
    for row in [row for rows in (worker.rows.active, worker.rows.decoding.columns().rows) for row in rows]:
        for table in row.allocation.tables:
            if table.window:
                most = room.num_chunk_blocks(table.window, max(table.window, num_step_tokens)) + num_late
                assert len(table.blocks) - table.num_freed <= most, f"S2: blocks behind the window are kept: {row}"


def _check_dispatches(worker: WorkerState, pipeline_depth: int, num_step_tokens: int) -> dict[Row, int]:
    """Assert invariant S11 for the plans in flight: limits on the tokens of a plan and on the number of plans.

    Return, for each running sequence, how many of its tokens in flight the scheduler will use.
    """
    dispatches = worker.unacknowledged
    assert worker.num_plans <= pipeline_depth, "S11"
    in_flight: Counter[Row] = Counter()
    for dispatch in dispatches:
        assert dispatch.num_tokens <= num_step_tokens, f"S11: step {dispatch.step}"
        slots = [*dispatch.columns.slots, *(planned.slot for planned in dispatch.rows)]
        sampled = [*dispatch.columns.rows, *(planned.row for planned in dispatch.rows if planned.samples)]
        assert dispatch.num_tokens == len(dispatch.columns.slots) + sum(planned.num_tokens for planned in dispatch.rows)
        assert len(slots) == len(set(slots)), f"two rows of step {dispatch.step} share a slot"
        in_flight.update(row for row in sampled if not row.is_dropped)
    assert all(row.sequence.row is row for row in in_flight), "S5: a row that counts is not the last of its sequence"
    return in_flight


def _check_blocks(worker: WorkerState, groups: LiveGroups) -> None:
    cache = worker.cache
    holders, host_holders = [0] * len(cache.index.contents), [0] * len(cache.index.host_contents)
    for state in [save.state for dispatch in worker.unacknowledged for save in dispatch.saves]:
        holders[state] += 1
    for allocation in [sequence.allocation for group, _ in groups for sequence in group.sequences]:
        for block in (*allocation.blocks, *allocation.states.held):
            holders[block] += 1
        for block in (*allocation.host_blocks, allocation.states.host):
            host_holders[block] += 1
    for row in [row for group, _ in groups for row in group.open_rows]:
        _check_writable(cache, row, holders)
    for move in cache.moves:
        assert move.step > worker.last_moved_step, "S3: an acknowledged move is still pending"
        if move.is_out:
            assert cache.index.host_contents[move.host_block] is None, "S4: content is found before it was moved"
        else:
            assert cache.index.contents[move.device_block] is None, "S4: content is found before it was moved"
        holders[move.device_block] += 1
        host_holders[move.host_block] += 1
    for tier, held in ((cache.tiers.device, holders), (cache.tiers.host, host_holders)):
        _check_pool(tier.pool, held[: tier.pool.num_blocks + 1])
        _check_pool(tier.states, [0] * (tier.pool.num_blocks + 1) + held[tier.pool.num_blocks + 1 :])


def _check_writable(cache: CacheManager, row: Row, holders: list[int]) -> None:
    """Assert invariant S12: a KV cache block that a sequence may still write is used by no other sequence and is not in
    the prefix index.

    There is one exception: beams may share their last block until a plan writes to it.
    """
    is_beam = row.sequence.group.beam is not None
    index = row.next_position // cache.block_size
    for block in [block for table in row.allocation.tables for block in table.blocks[index:]]:
        assert is_beam or holders[block] == 1, f"S12: block {block} will be written and is shared"
        assert cache.index.contents[block] is None, f"S12: block {block} will be written and is published"


def _check_pool(pool: BlockPool, holders: list[int]) -> None:
    holders[0] = 0  # block 0: holes that a sliding window leaves in a table
    if pool._ref_counts.tolist() != holders:
        wrong = [block for block, num_holders in enumerate(holders) if pool.ref_count(block) != num_holders]
        raise AssertionError(f"S2: the reference counts of blocks {wrong}")
    num_lost = holders.count(0) - 1 - (pool._last - pool.num_blocks)
    assert num_lost == pool.num_free, "S1: a block is lost, or counted twice"
    for block in pool.free_blocks():
        assert holders[block] == 0, "S1: a block is free and held, or the free list is a loop"
        holders[block] = -1
        num_lost -= 1
    assert num_lost == 0, "S1: the free list is cut"
    assert pool.num_idle_cached == pool._is_idle_cached.count(1)
    owned = {owner.name: owner.num_blocks for owner in pool.order._owners.values()}
    assert owned == Counter(pool.order.owner_of(free_list) for free_list, _ in pool.idle_blocks()), (
        "S1: a tenant's blocks"
    )


def _check_content(cache: CacheManager) -> None:
    index = cache.index
    contents, host_contents = index.contents, index.host_contents
    num_copies = num_host_copies = 0
    for node in index.nodes():
        for content in node.contents:
            for block in content.blocks:
                assert contents[block] is content, "a block holds two contents"
                num_copies += 1
            if content.host_block:
                assert host_contents[content.host_block] is content, "a host block holds two contents"
                num_host_copies += 1
        is_cached = any(content.blocks or content.host_block for content in node.contents)
        assert is_cached or node.children or node.cursors, "S8: a node outlived its copies, descendants and cursors"
    assert num_copies == index.num_cached_blocks == len(contents) - contents.count(None), "a block holds two contents"
    assert num_host_copies == index.num_cached_host_blocks == len(host_contents) - host_contents.count(None)
    for tier, cached in ((cache.tiers.device, contents), (cache.tiers.host, host_contents)):
        num_blocks = tier.pool.num_blocks
        _check_idle(tier.pool, cached[: num_blocks + 1])
        _check_idle(tier.states, [None] * (num_blocks + 1) + cached[num_blocks + 1 :])


def _check_cursors(state: Lifecycle, cache: CacheManager) -> None:
    """Assert that each waiting prompt's cursor in the prefix index is at the end of the prompt's cached blocks, and
    that the waiting requests are in the policy's order."""
    state.standings.update(state.now)
    followed = {group.cursor: group for group in state.groups.values() if group.cursor is not None}
    standing = [cursor for node in cache.index.nodes() for same in (node.cursors or {}).values() for cursor in same]
    assert followed.keys() == set(standing), "S8: a cursor is lost, or outlived its request"
    assert len(standing) == len(followed) == cache.index.cursors.number, "S8: a cursor stands in two places"
    passed = Counter(node for cursor in standing for node in cursor.chain())
    assert all(node.num_cursors == passed[node] for node in cache.index.nodes()), "S8: cursors are counted wrong"
    for cursor, group in followed.items():
        sequence = group.sequences[0]
        assert group.state in QUEUED, "S8: a request that does not wait has a cursor"
        chain = cache.index.match(sequence.allocation.root, sequence.token_ids, cursor.max_blocks)
        assert cursor.chain() == chain, "S8: a cursor is not where its prompt's cached blocks end"
        assert cursor.num_usable_blocks == cache.index.windows.num_usable(chain), (
            "S8: a cursor does not know its windows"
        )
        assert group.waiting_order == state.standings.order(group), "S8: a request waits in another place than its own"


def _check_idle(pool: BlockPool, contents: list[BlockContent | None]) -> None:
    idle = [block for block, content in enumerate(contents) if content is not None and pool._ref_counts[block] == 0]
    assert all(pool._is_idle_cached[block] for block in idle), "S1: an idle block is not taken for cached"
    assert len(idle) == pool.num_idle_cached, "S1: a block is taken for idle and cached, and is not"


def _check_published(block_size: int, allocation: Allocation) -> None:
    """Assert invariant S7: each block that a sequence has added to the prefix index, or got from it, contains the
    sequence's own tokens."""
    node, num_published = allocation.last_node, allocation.num_published_blocks
    token_bytes = []
    for i in range(num_published - 1, -1, -1):
        assert node is not None
        token_bytes.append(node.token_bytes)
        for content, table in zip(node.contents, allocation.tables, strict=False):  # without the state
            assert i < table.num_freed or table.blocks[i] in content.blocks, "S7: not that content"
        node = node.parent
    assert node is not None
    assert node.parent is None
    assert node.root == allocation.root, "S7: another tenant's, salt's or model's block"
    token_bytes.reverse()
    tokens = array("I", allocation.token_ids[: num_published * block_size]).tobytes()
    assert b"".join(token_bytes) == tokens, "S7: the block's tokens are others"
