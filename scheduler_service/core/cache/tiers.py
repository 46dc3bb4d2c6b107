"""The two tiers of one worker's cache, and the blocks that are on their way between device and host.

A move holds both its ends with references of its own, from the plan that orders it until the worker acknowledges it,
whatever else lets go of them meanwhile (S3). So nothing else needs to remember what must not be used yet.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import NamedTuple

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.block_pool import (
    BlockPool,
    RetentionPriority,
    equal_priority,
    no_owner,
)
from scheduler_service.core.cache.prefix_index import Node, PrefixIndex
from scheduler_service.core.cache.room import Holding

# Demotion keeps this part of the device's blocks free without loss, holding nothing or what the host holds too: an
# admission takes many blocks at once, and what has no copy then is lost.
_DEMOTION_SHARE = 2
_MIN_DEMOTION_RESERVE = 4
# Blocks a plan may order to be copied to the host beyond twice those that it computes, and the entries of the free list
# it may look at in vain.
_MAX_DEMOTIONS = 16
_DEMOTION_WINDOW = 64
# Blocks a plan may order to be copied back before a request asks for them, and the free lists it looks at for such.
_MAX_PROMOTIONS = 64
_PROMOTION_WINDOW = 16


class Move(NamedTuple):
    """A block's bytes on their way, ordered by the plan of `step`."""

    step: int
    device_block: int
    host_block: int
    is_out: bool  # device to host
    node: Node | None  # whose content gets a copy in the other tier; None: a swap
    free_list: int = 0  # where the blocks stand that are not held when it is done


class TierAllocator:
    """Gives blocks of one tier and takes them back, by what they hold."""

    def __init__(self, num_blocks: int, contents: list[Node | None], forget: Callable[[int], None]) -> None:
        """`contents` are those by block, and `forget` has one of them forgotten."""
        self.pool = BlockPool(num_blocks)
        self._contents, self._forget = contents, forget

    def allocate(self) -> int:
        """Take the next free block. What it held is lost."""
        block = self.pool.allocate()
        self._forget(block)
        return block

    def free(self, block: int, *, spare: bool = False, free_list: int = 0) -> None:
        """Let go of a block: see `BlockPool.free`."""
        self.pool.free(block, cached=self._contents[block] is not None, spare=spare, free_list=free_list)

    def free_table(self, table: list[int], free_list: int) -> None:
        """Let go of all blocks of a table, leaves first, so that a prefix outlives what follows it."""
        free, contents = self.pool.free, self._contents
        for block in reversed(table):
            if block:
                free(block, cached=contents[block] is not None, free_list=free_list)
        table.clear()


class MoveLedger:
    """The moves that no worker has acknowledged yet, and how many it has."""

    def __init__(self, device: TierAllocator, host: TierAllocator, index: PrefixIndex) -> None:
        self._device, self._host = device, host
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
        return sum(self._device.pool.ref_count(move.device_block) == 1 for move in self._pending)

    def num_copying(self) -> tuple[int, int]:
        """Count the blocks of the device and of the host that only the copying of cached content holds."""
        copies = [move for move in self._pending if move.node is not None]
        num_device = sum(self._device.pool.ref_count(move.device_block) == 1 for move in copies)
        return num_device, sum(self._host.pool.ref_count(move.host_block) == 1 for move in copies)

    def ordered_by(self, step: int) -> list[Move]:
        """The moves that the plan of `step`, the last, orders, in this order."""
        return list(takewhile(lambda move: move.step == step, reversed(self._pending)))[::-1]

    def add(self, move: Move) -> None:
        """Hold both ends of a move that a plan orders."""
        self._device.pool.share(move.device_block)
        self._host.pool.share(move.host_block)
        if move.node is not None:
            move.node.is_moving = True
        self._pending.append(move)

    def acknowledge(self, step: int) -> None:
        """Let go of the moves of all plans up to `step`: they are done."""
        while self._pending and self._pending[0].step <= step:
            move = self._pending.popleft()
            if move.node is not None:
                self._copied(move, move.node)
            self._device.free(move.device_block, spare=move.node is not None, free_list=move.free_list)
            self._host.free(move.host_block, free_list=move.free_list)
            self.num_moved_out += move.is_out
            self.num_moved_in += not move.is_out

    def _copied(self, move: Move, node: Node) -> None:
        """Make the second copy of a content available, unless it was found to be bad and forgotten meanwhile."""
        node.is_moving = False
        if move.is_out and self._index.contents[move.device_block] is node and not node.host_block:
            self._index.add_host_copy(node, move.host_block)
        elif not move.is_out and self._index.host_contents[move.host_block] is node:
            self._index.add_copy(node, move.device_block)


class Tiers:
    """The blocks of both, and the content by which they are found."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self._block_size = capacity.block_size
        self.index = index = PrefixIndex(capacity.block_size, capacity.num_device_blocks, capacity.num_host_blocks)
        self.device = TierAllocator(capacity.num_device_blocks, index.contents, index.forget)
        self.host = TierAllocator(capacity.num_host_blocks, index.host_contents, index.forget_host)
        self.pool, self.host_pool = self.device.pool, self.host.pool
        self.moves = MoveLedger(self.device, self.host, index)
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)

    def set_priorities(
        self,
        priority_of: Callable[[int], RetentionPriority],
        owner_of: Callable[[int], str],
        is_expected: Callable[[int], bool],
    ) -> None:
        """Set what says which priority a free list has, whose it is, and whether that session is away and expected
        back."""
        for pool in (self.pool, self.host_pool):
            pool.order.priority_of, pool.order.owner_of = priority_of, owner_of
        self._is_expected = is_expected

    def dissolve(self) -> None:
        """The cache is needed no more: see `PrefixIndex.dissolve`. Nor does it hold what gave its lists priorities."""
        self.index.dissolve()
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)

    def priority_changed(self, free_list: int) -> None:
        """A free list may have another priority."""
        self.pool.order.changed(free_list)
        self.host_pool.order.changed(free_list)

    # Bad content

    def unpublish(self, node: Node) -> None:
        """Forget this content and all that follows it."""
        blocks, host_blocks = self.index.forget_subtree(node)
        for pool, exposed in ((self.pool, blocks), (self.host_pool, host_blocks)):
            for block in exposed:
                pool.expose(block)

    def flush(self) -> None:
        """Forget all that was computed until now."""
        for root in list(self.index.roots.values()):
            self.unpublish(root)

    # Swapping: what all rows of a request hold, at once

    def num_swap_blocks(self, holdings: list[Holding]) -> tuple[int, int]:
        """Count the device blocks that swapping the rows out saves, and the blocks that it takes off the host's free
        list. Copies that are there already may be idle."""
        copies = [self._host_copy(block) for block in self._computed_blocks(holdings)]
        return len(copies), sum(copy == 0 or self.host_pool.ref_count(copy) == 0 for copy in copies)

    def swap_out(self, holdings: list[Holding], step: int) -> bool:
        """Have the plan of `step` put what the rows have computed into host blocks, a shared block once.

        Returns False if nothing moves, as the host has all of it."""
        blocks = self._computed_blocks(holdings)
        host_blocks = {block: self._host_copy(block) for block in blocks if self._host_copy(block)}
        for host_block in host_blocks.values():  # before an allocation can take one that is idle
            self.host_pool.share(host_block)
        missing = [block for block in blocks if block not in host_blocks]
        for block in missing:
            host_blocks[block] = self.host.allocate()
            self.moves.add(Move(step, block, host_blocks[block], True, None))
        for holding in holdings:
            for block in holding.computed_blocks(self._block_size):
                holding.host_table.append(host_blocks[block] if block else 0)
                if block:
                    self.host_pool.share(host_blocks[block])
            self.device.free_table(holding.block_table, holding.free_list)
            holding.published(None, 0)
        for host_block in host_blocks.values():  # the tables hold them now
            self.host.free(host_block, free_list=holdings[0].free_list)
        return bool(missing)

    def swap_in(self, holdings: list[Holding], step: int) -> None:
        """Give the rows the blocks again that they had before `swap_out`, which the plan of `step` loads."""
        blocks: dict[int, int] = {}
        for holding in holdings:
            for host_block in holding.host_table:
                if host_block and host_block not in blocks:
                    blocks[host_block] = self.device.allocate()
                    self.moves.add(Move(step, blocks[host_block], host_block, False, None))
                elif host_block:
                    self.pool.share(blocks[host_block])
                holding.block_table.append(blocks[host_block] if host_block else 0)
            self.host.free_table(holding.host_table, holding.free_list)

    def num_lost_tokens(self, holdings: list[Holding]) -> int:
        """Count the tokens to compute again if the rows' blocks are lost, those that the window has passed too."""
        most_freed = max((holding.num_freed_blocks for holding in holdings), default=0)
        return (len(self._computed_blocks(holdings)) + most_freed) * self._block_size

    def _computed_blocks(self, holdings: list[Holding]) -> list[int]:
        """The rows' blocks that hold anything, each once."""
        return list(
            {block: None for holding in holdings for block in holding.computed_blocks(self._block_size) if block}
        )

    def _host_copy(self, block: int) -> int:
        return 0 if (node := self.index.contents[block]) is None else node.host_block

    # What nobody holds

    def demote(self, step: int, num_tokens: int) -> None:
        """Have the plan of `step`, which computes `num_tokens`, copy the oldest idle cached blocks to the host before
        they are needed for something else. Every block there is to demote was computed once, so plans that copy more
        than they compute keep ahead of any load."""
        pool = self.pool
        num_lossless = pool.num_free - pool.num_idle_cached + pool.num_spare + len(self.moves)
        num_wanted = max(_MIN_DEMOTION_RESERVE, pool.num_blocks // _DEMOTION_SHARE) - num_lossless
        max_chosen = min(num_wanted, _MAX_DEMOTIONS + 2 * -(-num_tokens // self._block_size), self.host_pool.num_free)
        if max_chosen <= 0 or not pool.num_idle_cached:
            return
        chosen: list[tuple[Node, int]] = []  # with its free list
        spare: list[int] = []
        for free_list, block in islice(pool.idle_blocks(), max_chosen + _DEMOTION_WINDOW):
            node = self.index.contents[block]
            if node is None or node.is_moving:
                continue
            if node.host_block or node.blocks[0] != block:
                spare.append(block)
            else:
                chosen.append((node, free_list))
            if len(chosen) + len(spare) >= max_chosen:
                break
        for block in spare:
            pool.spare(block)
        for node, free_list in chosen:
            host_block = self.host.allocate()
            self.moves.add(Move(step, node.blocks[0], host_block, True, node, free_list))
            self.host.free(host_block)  # the move holds it

    def promote(self, step: int) -> None:
        """Have the plan of `step` copy what sessions will come back for from the host while nothing else moves, over
        device blocks of lower priority with which nothing is lost."""
        if len(self.moves):
            return
        for free_list in self.host_pool.order.best(_PROMOTION_WINDOW):
            if not self._is_expected(free_list) or not self._has_room(free_list):
                continue
            for node in self._missing_nodes(self.host_pool.next_of(free_list)):
                if len(self.moves) == _MAX_PROMOTIONS:
                    return
                if not self._has_room(free_list):
                    break
                host_block, block = node.host_block, self.device.allocate()
                self.moves.add(Move(step, block, host_block, False, node, free_list))
                self.device.free(block)  # the move holds it

    def _has_room(self, free_list: int) -> bool:
        """Whether a block of a free list may come to the device: over what has a lower priority there, and is not
        lost."""
        target = self.pool.next_without_loss()
        return target > 0 and (
            self.index.contents[target] is None or self.pool.order.yields(self.pool.free_list_of(target), free_list)
        )

    def _missing_nodes(self, host_block: int) -> list[Node]:
        """Go from a host block's content back to what the device has; what the host alone has, first ones first. None
        if a part of it is nowhere."""
        nodes = []
        node = self.index.host_contents[host_block]
        while node is not None and node.parent is not None and not node.blocks:
            if node.is_moving or not node.host_block:
                return []
            nodes.append(node)
            node = node.parent
        return nodes[::-1]
