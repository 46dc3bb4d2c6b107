"""The block pools of both tiers, the prefix index, and the moves of blocks between the device and the host."""

from scheduler_service.core.cache.block_pool import BlockPool, EvictionOrder, RetentionPriority
from scheduler_service.core.cache.prefix_index import BlockContent, Cursor, Node, PrefixIndex, content_root
from scheduler_service.core.cache.room import Allocation, Match, StepCount
from scheduler_service.core.cache.states import Save
from scheduler_service.core.cache.tables import CacheManager
from scheduler_service.core.cache.tiers import MoveLedger

__all__ = [
    "Allocation",
    "BlockContent",
    "BlockPool",
    "CacheManager",
    "Cursor",
    "EvictionOrder",
    "Match",
    "MoveLedger",
    "Node",
    "PrefixIndex",
    "RetentionPriority",
    "Save",
    "StepCount",
    "content_root",
]
