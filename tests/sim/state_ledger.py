"""A comparison of the states that the core takes for cached with the worker's memory."""

from array import array

from pagewire.common.wire.messages import FIRST_STATE_ID
from scheduler_service.core.cache import BlockPool, CacheManager
from scheduler_service.core.plans import Dispatch
from testing.core.simulated_worker import BAD, SimulatedWorker, digest
from tests.sim.scenario import BAD_TOKEN


def check_cached_states(cache: CacheManager, worker: SimulatedWorker) -> int:
    """Assert that each cached state is the state after the tokens of its node, on the device and on the host. Return
    the number of cached states.

    A state of invalid values may be cached until the scheduler has received the result of the row that wrote it.
    """
    device, host, num_cached = cache.tiers.device, cache.tiers.host, 0
    waiting = [(child, 0, 0) for root in cache.index.roots.values() for child in root.children.values()]
    while waiting:
        node, num_tokens, prefix = waiting.pop()
        for token_id in array("I", node.token_bytes):
            num_tokens += 1
            prefix = BAD if prefix == BAD or token_id == BAD_TOKEN else digest(prefix, token_id)
        waiting += [(child, num_tokens, prefix) for child in node.children.values()]
        for content in node.later:
            if not content.is_state:
                continue
            found = [(device.public_id(state), worker.kv) for state in content.blocks]
            found += [(host.public_id(content.host_block), worker.host_kv)] if content.host_block else []
            num_cached += len(found)
            for state, memory in found:
                where = f"{'device' if memory is worker.kv else 'host'} state {state - FIRST_STATE_ID}"
                assert state in memory, f"S7: {where} is cached, and was never written"
                position, value = memory[state]
                assert position == num_tokens, (
                    f"S7: {where} is cached after {num_tokens} tokens, and is after {position}"
                )
                assert BAD in (value, prefix) or value == prefix, f"S7: {where} is cached as that of other tokens"
    return num_cached


def check_saves(cache: CacheManager, dispatch: Dispatch, worker: SimulatedWorker) -> None:
    """Assert that the core does not use a state that a late row did not save in a plan, after the plan's result."""
    for save in dispatch.saves:
        is_ignored = (dispatch.step, cache.states.number(save.state)) in worker.ignored_saves
        assert save.is_void or not is_ignored, f"S7: state {save.state} was not saved in step {dispatch.step}"


def check_free(cache: CacheManager) -> None:
    """Assert that no state is held when nothing runs, except by the moves of cached states."""
    moving = [(move.device_block, move.host_block) for move in cache.moves]
    for number, tier in enumerate((cache.tiers.device, cache.tiers.host)):
        pool: BlockPool = tier.states
        num_moving = len({pair[number] for pair in moving if pair[number] > tier.pool.num_blocks})
        assert pool.num_free == pool.num_blocks - num_moving, (
            f"S8: a state is held by nothing: {pool.num_free} are free"
        )
