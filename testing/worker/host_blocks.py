"""The content of a cache's host blocks, which a worker moves and never reads."""

from torch import Tensor

from worker_service.cache.cache_engine import CacheEngine
from worker_service.cache.host_moves import HostMoves


def host_block(cache: CacheEngine, block: int) -> Tensor:
    """Return a host block's content, in the layout of the cache's `storage`."""
    moves = cache._moves
    memory = moves._host_blocks[block] if isinstance(moves, HostMoves) else moves._host(moves._place(block), 1)[0]
    return memory.view(cache.shape.dtype).view(cache.storage.shape[1:])
