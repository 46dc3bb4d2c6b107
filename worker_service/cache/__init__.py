"""The KV cache: the memory of device and host blocks, and the moves and copies of blocks."""

from worker_service.cache.cache_engine import CacheEngine, CacheShape
from worker_service.cache.stream_moves import num_staging_blocks

__all__ = [
    "CacheEngine",
    "CacheShape",
    "num_staging_blocks",
]
