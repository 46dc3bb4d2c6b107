"""Blocks and what they hold: who has which, which content can be found again, what is on its way between the tiers."""

from scheduler_service.core.cache.block_pool import BlockPool
from scheduler_service.core.cache.eviction import EvictionOrder, RetentionPriority, equal_priority, no_owner
from scheduler_service.core.cache.moves import Move, MoveLedger
from scheduler_service.core.cache.prefix_index import Cursor, Node, PrefixIndex, Root, content_root

__all__ = [
    "BlockPool",
    "Cursor",
    "EvictionOrder",
    "Move",
    "MoveLedger",
    "Node",
    "PrefixIndex",
    "RetentionPriority",
    "Root",
    "content_root",
    "equal_priority",
    "no_owner",
]
