"""The KV cache: the memory behind block ids, on the device and on the host, and moves and copies of blocks."""

from worker_service.cache.cache_engine import CacheEngine, CacheShape
from worker_service.cache.stream_moves import num_staging_blocks

__all__ = [
    "CacheEngine",
    "CacheShape",
    "num_staging_blocks",
]
