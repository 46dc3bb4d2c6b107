"""The invariants of the design that are the core's, as one check over all its state.

S3 and S4 speak of moves, which do not exist yet. S6 is kept by the streams, S9 by `Scheduler.complete` itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from scheduler_service.core.cache_manager import CacheManager
from scheduler_service.core.prefix_index import Node
from scheduler_service.core.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from scheduler_service.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert S1, S2, S5, S7, S8, S10, S11 and S12."""
    worker = scheduler._worker
    waiting, running = list(scheduler._waiting), list(scheduler._running)
    _check_sequences(scheduler, waiting, running)
    _check_requests(scheduler)
    if worker is None:
        assert not running, "sequences run without a worker"
        return
    dispatches = worker.unacknowledged
    _check_blocks(worker.cache, running)
    _check_content(worker.cache, running)
    in_flight = Counter(row.sequence.sequence_id for dispatch in dispatches for row in dispatch.rows if row.samples)
    for sequence in scheduler._sequences.values():
        assert sequence.num_in_flight == in_flight[sequence.sequence_id], f"S5: {sequence}"
    assert len(dispatches) <= scheduler.pipeline_depth
    for dispatch in dispatches:
        assert 0 < dispatch.num_tokens <= scheduler.num_step_tokens, f"S11: step {dispatch.step}"
        assert dispatch.num_tokens == sum(row.num_tokens for row in dispatch.rows)
        slots = [row.slot for row in dispatch.rows]
        assert len(slots) == len(set(slots)), f"two rows of step {dispatch.step} share a slot"
    held_slots = [sequence.slot for sequence in running]
    assert len(held_slots) == len(set(held_slots))
    assert sorted(held_slots + worker.slots._free) == list(range(len(worker.slots._work))), "a slot is lost"


def _check_sequences(scheduler: Scheduler, waiting: list[Sequence], running: list[Sequence]) -> None:
    assert [s.order for s in waiting] == sorted(s.order for s in waiting)
    assert [s.order for s in running] == sorted(s.order for s in running)
    by_id = {sequence.sequence_id: sequence for sequence in waiting + running}
    assert by_id == scheduler._sequences, "a sequence is in no queue, or in one too many"
    for sequence in waiting:
        assert sequence.state is SequenceState.WAITING
        assert not sequence.block_table, f"S8: a waiting sequence holds blocks: {sequence}"
        assert not sequence.num_computed_tokens
    block_size = scheduler._worker.cache.block_size if scheduler._worker else 0
    for sequence in running:
        assert sequence.state is SequenceState.RUNNING
        assert sequence.num_computed_tokens <= len(sequence.block_table) * block_size, f"S5: {sequence}"
        assert sequence.num_computed_tokens <= sequence.num_tokens + sequence.num_in_flight, f"S5: {sequence}"
        assert sequence.num_tokens + sequence.num_in_flight <= sequence.max_num_tokens, f"planned too far: {sequence}"


def _check_requests(scheduler: Scheduler) -> None:
    owners = {id(sequence.owner): sequence.owner for sequence in scheduler._sequences.values()}
    assert {id(request) for request in scheduler._requests.values()} == set(owners), "S8: a request outlived itself"
    for request in owners.values():
        unfinished = [s for s in request.sequences if s.state is not SequenceState.FINISHED]
        assert request.num_unfinished == len(unfinished) > 0
        assert request.num_lone_crashes < 2, "S10: a request that must fail is still there"


def _check_blocks(cache: CacheManager, running: list[Sequence]) -> None:
    pool = cache.pool
    free = pool.free_blocks()
    assert len(free) == len(set(free)) == pool.num_free, "S1: the free list holds a block twice"
    holders = Counter(block for sequence in running for block in sequence.block_table)
    assert 0 not in holders, "block 0 is held"
    for block in range(1, pool.num_blocks + 1):
        assert pool.ref_count(block) == holders[block], f"S2: block {block}"
    assert set(free) == set(range(1, pool.num_blocks + 1)) - set(holders), "S1: a block is free and held, or lost"
    for sequence in running:
        assert len(sequence.block_table) == len(set(sequence.block_table))
        for block in sequence.block_table[sequence.num_computed_tokens // cache.block_size :]:
            assert holders[block] == 1, f"S12: block {block} will be written and is shared"
            assert not cache.index.is_cached(block), f"S12: block {block} will be written and is published"


def _check_content(cache: CacheManager, running: list[Sequence]) -> None:
    nodes = cache.index.nodes()
    copies = Counter(block for node in nodes for block in node.blocks)
    assert sum(copies.values()) == cache.index.num_cached_blocks == len(copies), "a block holds two contents"
    for cached in nodes:
        assert cached.blocks or cached.children, "S8: a node outlived its copies and descendants"
        for block in cached.blocks:
            assert cache.index.node_of(block) is cached
    for sequence in running:
        node: Node | None = sequence.node
        for i in reversed(range(sequence.num_published_blocks)):
            tokens = sequence.token_ids[i * cache.block_size : (i + 1) * cache.block_size]
            assert node is not None
            assert node.root_key == sequence.root_key, "S7: another tenant's, salt's or model's block"
            assert node.token_bytes == array("I", tokens).tobytes(), "S7: the block's tokens are others"
            assert sequence.block_table[i] in node.blocks, "S7: the block does not hold that content"
            node = node.parent
        assert node is None or node.parent is None
