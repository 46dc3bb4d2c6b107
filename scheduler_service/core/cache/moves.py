"""Blocks that are on their way between device and host.

A move holds both its ends with references of its own, from the plan that orders it until the worker acknowledges it,
whatever else lets go of them meanwhile (S3). So nothing else needs to remember what must not be used yet.
"""

from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from scheduler_service.core.cache.block_pool import BlockPool
from scheduler_service.core.cache.prefix_index import Node, PrefixIndex


class Move(NamedTuple):
    """A block's bytes on their way, ordered by the plan of `step`."""

    step: int
    device_block: int
    host_block: int
    is_out: bool  # device to host
    node: Node | None  # whose content gets a copy in the other tier; None: a swap
    free_list: int = 0  # where the blocks stand that are not held when it is done


class MoveLedger:
    """The moves that no worker has acknowledged yet, and how many it has."""

    def __init__(self, pool: BlockPool, host_pool: BlockPool, index: PrefixIndex) -> None:
        self._pool = pool
        self._host_pool = host_pool
        self._index = index
        self._pending: deque[Move] = deque()
        self.num_moved_out = 0
        self.num_moved_in = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Move]:
        return iter(self._pending)

    @property
    def num_returning(self) -> int:
        """Count the device blocks that will be free when the moves under way are done."""
        return sum(self._pool.ref_count(move.device_block) == 1 for move in self._pending)

    def num_copying(self) -> tuple[int, int]:
        """Count the blocks of the device and of the host that only the copying of cached content holds."""
        copies = [move for move in self._pending if move.node is not None]
        num_device = sum(self._pool.ref_count(move.device_block) == 1 for move in copies)
        return num_device, sum(self._host_pool.ref_count(move.host_block) == 1 for move in copies)

    def ordered_by(self, step: int) -> list[Move]:
        """The moves that the plan of `step`, the last, orders, in this order."""
        return list(takewhile(lambda move: move.step == step, reversed(self._pending)))[::-1]

    def add(self, move: Move) -> None:
        """Hold both ends of a move that a plan orders."""
        self._pool.share(move.device_block)
        self._host_pool.share(move.host_block)
        if move.node is not None:
            move.node.is_moving = True
        self._pending.append(move)

    def acknowledge(self, step: int) -> None:
        """Let go of the moves of all plans up to `step`: they are done."""
        while self._pending and self._pending[0].step <= step:
            move = self._pending.popleft()
            if move.node is not None:
                self._copied(move, move.node)
            cached = self._index.is_cached(move.device_block)
            self._pool.free(move.device_block, cached=cached, spare=move.node is not None, free_list=move.free_list)
            cached = self._index.node_of_host(move.host_block) is not None
            self._host_pool.free(move.host_block, cached=cached, free_list=move.free_list)
            self.num_moved_out += move.is_out
            self.num_moved_in += not move.is_out

    def _copied(self, move: Move, node: Node) -> None:
        """Make the second copy of a content available, unless it was found to be bad and forgotten meanwhile."""
        node.is_moving = False
        if move.is_out and self._index.node_of(move.device_block) is node and not node.host_block:
            self._index.add_host_copy(node, move.host_block)
        elif not move.is_out and self._index.node_of_host(move.host_block) is node:
            self._index.add_copy(node, move.device_block)
