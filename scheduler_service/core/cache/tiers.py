"""The two tiers of one worker's cache, and the moves of blocks between the device and the host.

A move holds a reference to both its blocks, from the plan that orders the move until the worker acknowledges it. Other
holders may release the blocks in the meantime (S3). So no other code needs to track which blocks must not be used yet.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile, zip_longest
from typing import NamedTuple

from pagewire.common.wire.messages import FIRST_STATE_ID, WorkerCapacity
from scheduler_service.core.cache.block_pool import (
    BlockPool,
    RetentionPriority,
    equal_priority,
    no_owner,
)
from scheduler_service.core.cache.prefix_index import BlockContent, Node, PrefixIndex
from scheduler_service.core.cache.room import Allocation

# Demotion keeps 1/_DEMOTION_SHARE of the device blocks free without loss: they have no cached content, or the host has
# a copy too. An admission allocates many blocks at once, and cached content without a copy is then lost.
_DEMOTION_SHARE = 2
_MIN_DEMOTION_RESERVE = 4
# A plan may demote up to twice the blocks that it computes, and _MAX_DEMOTIONS more. It may skip up to _DEMOTION_WINDOW
# entries of the free lists.
_MAX_DEMOTIONS = 16
_DEMOTION_WINDOW = 64
# The number of blocks that a plan may promote before a request needs them, and the number of free lists it searches.
_MAX_PROMOTIONS = 64
_MAX_STATE_MOVES = 1  # states that a plan may promote, or demote: a state is as large as many blocks
_PROMOTION_WINDOW = 16


class Move(NamedTuple):
    """The copy of one KV cache block from the device to the host, or from the host to the device. The worker makes the
    copy as part of the plan of `step`. A state moves like a block."""

    step: int
    device_block: int
    host_block: int
    is_out: bool  # device to host
    content: BlockContent | None  # that gets a copy in the other tier; None: a swap
    free_list: int = 0  # the free list for the move's blocks if no sequence holds them afterwards


class TierAllocator:
    """The allocator of the KV cache blocks of one tier (the device or the host). When it reuses a block with cached
    content, it removes the content from the prefix index."""

    def __init__(
        self, num_blocks: int, num_states: int, contents: list[BlockContent | None], forget: Callable[[int], None]
    ) -> None:
        """Create an allocator with `num_blocks` free blocks, and `num_states` free states with the numbers after them.

        `contents[block]` is the content of a block in the prefix index, or None if the block has no cached content.
        `forget` is called to remove a block from the prefix index. Both also accept states.
        """
        self.pool, self.states = BlockPool(num_blocks), BlockPool(num_states, num_before=num_blocks)
        self._contents, self._forget = contents, forget

    def allocate(self) -> int:
        """Allocate the next free block, and return its number. If the block had cached content, the content is removed
        from the prefix index."""
        block = self.pool.allocate()
        if self._contents[block] is not None:
            self._forget(block)
        return block

    def allocate_state(self) -> int:
        """Allocate the next free state, and return its number. See `allocate`."""
        state = self.states.allocate()
        if self._contents[state] is not None:
            self._forget(state)
        return state

    def allocate_for(self, content: BlockContent) -> int:
        """Allocate a block or state for a copy of a content, and return its number."""
        return self.allocate_state() if content.is_state else self.allocate()

    def pool_of(self, block: int) -> BlockPool:
        """Return the pool of a block or state."""
        return self.pool if block <= self.pool.num_blocks else self.states

    def free(self, block: int, *, spare: bool = False, free_list: int = 0) -> None:
        """Drop a reference to a block or state. For the parameters, see `BlockPool.free`."""
        self.pool_of(block).free(block, cached=self._contents[block] is not None, spare=spare, free_list=free_list)

    def public_id(self, block: int) -> int:
        """Return the number with which moves name a block or state."""
        num_blocks = self.pool.num_blocks
        return block if block <= num_blocks else FIRST_STATE_ID + block - num_blocks

    def free_tables(self, tables: list[list[int]], free_list: int) -> None:
        """Release all blocks of a sequence's block tables, and clear the tables.

        The blocks of the last positions are released first, in all layer groups. So a block is evicted before the
        blocks that precede it in the prefix, and the window before a position no earlier than the position.
        """
        free, contents = self.pool.free, self._contents
        for blocks in reversed(list(zip_longest(*tables, fillvalue=0))):
            for block in blocks:
                if block:
                    free(block, cached=contents[block] is not None, free_list=free_list)
        for table in tables:
            table.clear()


class MoveLedger:
    """The block transfers between device and host that the worker has not finished yet, and the numbers of finished
    transfers."""

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
        """Return how many device blocks will become free when all pending transfers between device and host are
        finished."""
        pool = self._device.pool
        blocks = [move.device_block for move in self._pending if move.device_block <= pool.num_blocks]
        return sum(pool.ref_count(block) == 1 for block in blocks)

    def num_copying(self) -> tuple[int, int]:
        """Return two numbers, for the device and for the host: the blocks that are not free only because a pending
        transfer of cached content still uses them. Swaps of requests are not included."""
        copies = [move for move in self._pending if move.content is not None and not move.content.is_state]
        num_device = sum(self._device.pool.ref_count(move.device_block) == 1 for move in copies)
        return num_device, sum(self._host.pool.ref_count(move.host_block) == 1 for move in copies)

    def ordered_by(self, step: int) -> list[Move]:
        """Return the block transfers of the plan of `step`, in order. `step` must be the last planned step."""
        return list(takewhile(lambda move: move.step == step, reversed(self._pending)))[::-1]

    def add(self, move: Move) -> None:
        """Add a block transfer to the current plan. Neither the device block nor the host block is reused until the
        worker has finished the transfer."""
        self._device.pool_of(move.device_block).share(move.device_block)
        self._host.pool_of(move.host_block).share(move.host_block)
        if move.content is not None:
            move.content.is_moving = True
        self._pending.append(move)

    def acknowledge(self, step: int) -> None:
        """Finish the block transfers of all plans up to `step`, after the worker has reported them: release their
        blocks, and record the new copies in the prefix index."""
        while self._pending and self._pending[0].step <= step:
            move = self._pending.popleft()
            if move.content is not None:
                self._record_copy(move, move.content)
            self._device.free(move.device_block, spare=move.content is not None, free_list=move.free_list)
            self._host.free(move.host_block, free_list=move.free_list)
            self.num_moved_out += move.is_out
            self.num_moved_in += not move.is_out

    def _record_copy(self, move: Move, content: BlockContent) -> None:
        """Add the target block of a finished transfer to the prefix index, as a second copy of the content.

        Does nothing if the content was removed from the index in the meantime, for example because it was bad.
        """
        content.is_moving = False
        if move.is_out and self._index.contents[move.device_block] is content and not content.host_block:
            self._index.add_host_copy(content, move.host_block)
        elif not move.is_out and self._index.host_contents[move.host_block] is content:
            self._index.add_copy(content, move.device_block)


class Tiers:
    """The KV cache blocks of one worker on the device and on the host, with the prefix index of their content and the
    transfers between the two tiers."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self._block_size = capacity.block_size
        sizes = (capacity.num_device_blocks, capacity.num_device_states)
        host_sizes = (capacity.num_host_blocks, capacity.num_host_states)
        self.index = index = PrefixIndex(
            capacity.block_size,
            sum(sizes),
            sum(host_sizes),
            capacity.windows,
            has_states=capacity.num_device_states > 0,
        )
        self.device = TierAllocator(*sizes, index.contents, index.forget)
        self.host = TierAllocator(*host_sizes, index.host_contents, index.forget_host)
        self.pool, self.host_pool = self.device.pool, self.host.pool
        self._blocks, self._states = (self.pool, self.host_pool), (self.device.states, self.host.states)
        self.pools = (*self._blocks, *self._states)
        self.moves = MoveLedger(self.device, self.host, index)
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)

    def set_priorities(
        self,
        priority_of: Callable[[int], RetentionPriority],
        owner_of: Callable[[int], str],
        is_expected: Callable[[int], bool],
    ) -> None:
        """Set the functions that decide which idle KV cache blocks are evicted first. Idle blocks are in free lists,
        one for each session (conversation).

        `priority_of` returns the eviction priority of a free list, and `owner_of` its tenant. `is_expected` returns
        whether the session has no request now but will probably send one.
        """
        for pool in self.pools:
            pool.order.priority_of, pool.order.owner_of = priority_of, owner_of
        self._is_expected = is_expected

    def dissolve(self) -> None:
        """Break the reference cycles of a KV cache whose worker is lost, so that Python frees its memory without a run
        of the garbage collector. The functions passed to `set_priorities` are removed too."""
        self.index.dissolve()
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)

    def priority_changed(self, free_list: int) -> None:
        """Move a free list to its new place in the eviction orders of the device and the host. Call this whenever an
        event may have changed the priority of the list."""
        for pool in self.pools:
            pool.order.changed(free_list)

    # Bad content

    def unpublish(self, node: Node) -> None:
        """Remove the content of an index node from the prefix index, and all content that continues it. No sequence can
        match this content afterwards."""
        blocks, host_blocks = self.index.forget_subtree(node)
        for tier, exposed in ((self.device, blocks), (self.host, host_blocks)):
            for block in exposed:
                tier.pool_of(block).uncache(block)

    def flush(self) -> None:
        """Remove all content from the prefix index, on the device and on the host."""
        for root in list(self.index.roots.values()):
            self.unpublish(root)

    # Swaps: all rows of a request at once

    def num_swap_blocks(self, allocations: list[Allocation]) -> tuple[int, int]:
        """Return two block counts for swapping out a request: the device blocks with content to save, and the free host
        blocks that the swap uses up.

        A host block that already has a copy of the content is used again. It counts in the second number if no sequence
        uses it now, because it is then a free block.
        """
        copies = [self._host_copy(block) for block in self._computed_blocks(allocations)]
        return len(copies), sum(copy == 0 or self.host_pool.ref_count(copy) == 0 for copy in copies)

    def swap_out(self, allocations: list[Allocation], step: int) -> bool:
        """Release the device blocks of a preempted request, and make the plan of `step` copy the computed blocks to the
        host.

        A block that several sequences share is copied once. Return False if nothing must be copied, because the host
        already has copies of all of them, and the sequences have no states.
        """
        blocks = self._computed_blocks(allocations)
        host_blocks = {block: self._host_copy(block) for block in blocks if self._host_copy(block)}
        for host_block in host_blocks.values():  # before an allocation can evict an idle copy
            self.host_pool.share(host_block)
        missing = [block for block in blocks if block not in host_blocks]
        for block in missing:
            host_blocks[block] = self.host.allocate()
            self.moves.add(Move(step, block, host_blocks[block], True, None))
        for allocation in allocations:
            for table in allocation.tables:
                for block in allocation.computed_blocks(table, self._block_size):
                    table.host_blocks.append(host_blocks[block] if block else 0)
                    if block:
                        self.host_pool.share(host_blocks[block])
            self.device.free_tables([table.blocks for table in allocation.tables], allocation.free_list)
            allocation.published(None, 0)
            if allocation.states.own and allocation.num_computed_tokens:
                allocation.states.host = self.host.allocate_state()
                self.moves.add(Move(step, allocation.states.current, allocation.states.host, True, None))
                self.release_states(allocation)
        for host_block in host_blocks.values():  # the host tables hold references now
            self.host.free(host_block, free_list=allocations[0].free_list)
        return bool(missing) or any(allocation.states.host for allocation in allocations)

    def swap_in(self, allocations: list[Allocation], step: int) -> None:
        """Allocate device blocks for the sequences of a swapped-out request, and make the plan of `step` load these
        blocks from the host."""
        blocks: dict[int, int] = {}
        for allocation in allocations:
            for table in allocation.tables:
                for host_block in table.host_blocks:
                    if host_block and host_block not in blocks:
                        blocks[host_block] = self.device.allocate()
                        self.moves.add(Move(step, blocks[host_block], host_block, False, None))
                    elif host_block:
                        self.pool.share(blocks[host_block])
                    table.blocks.append(blocks[host_block] if host_block else 0)
            self.host.free_tables([table.host_blocks for table in allocation.tables], allocation.free_list)
            states = allocation.states
            if states.host:
                states.own = (self.device.allocate_state(),)
                self.moves.add(Move(step, states.own[0], states.host, False, None))
                self.release_host_state(allocation)

    def release_states(self, allocation: Allocation) -> None:
        """Release all device states that a sequence holds."""
        for state in allocation.states.held:
            self.device.free(state, free_list=allocation.free_list)
        states = allocation.states
        states.own, states.source, states.fork, states.last = (), 0, 0, None

    def release_host_state(self, allocation: Allocation) -> None:
        """Release the host state of a sequence that was swapped out, if it has one."""
        if allocation.states.host:
            self.host.free(allocation.states.host)
            allocation.states.host = 0

    def num_lost_tokens(self, allocations: list[Allocation]) -> int:
        """Return how many tokens must be computed again if the KV cache blocks of these sequences are discarded. Blocks
        that the sliding window has passed are included."""
        first = [(allocation, allocation.tables[0]) for allocation in allocations]
        computed = {block for each in first for block in each[0].computed_blocks(each[1], self._block_size)} - {0}
        most_freed = max((table.num_freed for _, table in first), default=0)
        return (len(computed) + most_freed) * self._block_size

    def _computed_blocks(self, allocations: list[Allocation]) -> list[int]:
        """Return the device blocks that contain computed positions of these sequences. A block that several sequences
        share is returned once."""
        return list(
            {
                block: None
                for allocation in allocations
                for table in allocation.tables
                for block in allocation.computed_blocks(table, self._block_size)
                if block
            }
        )

    def _host_copy(self, block: int) -> int:
        return 0 if (content := self.index.contents[block]) is None else content.host_block

    # Idle blocks

    def demote(self, step: int, num_tokens: int) -> None:
        """Make the plan of `step` copy idle cached blocks from the device to the host, so that their content survives
        when the device blocks are reused. The blocks that would be evicted next are copied first.

        The plan computes `num_tokens` tokens. It may copy more blocks than it computes, so the copies keep up with any
        load.
        """
        max_blocks = _MAX_DEMOTIONS + 2 * -(-num_tokens // self._block_size)
        for pool, host_pool, most in (*self._blocks, max_blocks), (*self._states, _MAX_STATE_MOVES):
            if pool.num_idle_cached and host_pool.num_free:
                self._demote(step, pool, host_pool, most)

    def _demote(self, step: int, pool: BlockPool, host_pool: BlockPool, most: int) -> None:
        """Make the plan of `step` copy up to `most` idle cached blocks, or states, from the device to the host."""
        num_lossless = pool.num_free - pool.num_idle_cached + pool.num_backed_up + len(self.moves)
        num_wanted = max(_MIN_DEMOTION_RESERVE, pool.num_blocks // _DEMOTION_SHARE) - num_lossless
        max_chosen = min(num_wanted, most, host_pool.num_free)
        if max_chosen <= 0:
            return
        chosen: list[tuple[BlockContent, int]] = []  # with the free list of the block
        spare: list[int] = []
        for free_list, block in islice(pool.idle_blocks(), max_chosen + _DEMOTION_WINDOW):
            content = self.index.contents[block]
            if content is None or content.is_moving:
                continue
            if content.host_block or content.blocks[0] != block:
                spare.append(block)
            else:
                chosen.append((content, free_list))
            if len(chosen) + len(spare) >= max_chosen:
                break
        for block in spare:
            pool.spare(block)
        for content, free_list in chosen:
            host_block = self.host.allocate_for(content)
            self.moves.add(Move(step, content.blocks[0], host_block, True, content, free_list))
            self.host.free(host_block)  # the move holds a reference

    def promote(self, step: int) -> None:
        """Make the plan of `step` load cached blocks from the host before a request needs them. These are blocks of
        sessions (conversations) that have no request now but will probably send one.

        Does nothing while another block transfer is pending. The load never overwrites the only copy of cached content,
        nor cached content of higher priority.
        """
        if len(self.moves):
            return
        for pool, host_pool, most in (*self._blocks, _MAX_PROMOTIONS), (*self._states, _MAX_STATE_MOVES):
            if host_pool.num_idle_cached:
                self._promote(step, pool, host_pool, most)

    def _promote(self, step: int, pool: BlockPool, host_pool: BlockPool, most: int) -> None:
        """Make the plan of `step` load up to `most` cached blocks, or states, from the host."""
        num_chosen = 0
        for free_list in host_pool.order.best(_PROMOTION_WINDOW):
            if not self._is_expected(free_list) or not self._has_room(pool, free_list):
                continue
            for content in self._missing_contents(host_pool.next_of(free_list)):
                if num_chosen == most:
                    return
                if not self._has_room(pool, free_list):
                    break
                host_block, block = content.host_block, self.device.allocate_for(content)
                self.moves.add(Move(step, block, host_block, False, content, free_list))
                self.device.free(block)  # the move holds a reference
                num_chosen += 1

    def _has_room(self, pool: BlockPool, free_list: int) -> bool:
        """Return whether a block of `free_list` may be loaded from the host to `pool` ahead of time.

        The device block to overwrite must not contain the only copy of cached content. If it contains cached content at
        all, that content must have a lower eviction priority.
        """
        target = pool.next_without_loss()
        return target > 0 and (
            self.index.contents[target] is None or pool.order.may_evict(pool.free_list_of(target), free_list)
        )

    def _missing_contents(self, host_block: int) -> list[BlockContent]:
        """Return the contents to load so that a host block can be used on the device: its own, and those of its
        preceding blocks in the same layer group that are not on the device either. In a layer group outside the spine,
        these are the blocks of one window. The order is that of the prompt.

        Return an empty list if one of these blocks is not on the host either, or is being transferred.
        """
        last, windows = self.index.host_contents[host_block], self.index.windows
        if last is None:
            return []
        is_spine = last.group < windows.num_spine
        num_passed = 0 if is_spine else windows.num_passed(last.group, last.node.depth)
        contents: list[BlockContent] = []
        node = last.node
        most = last.node.depth - num_passed
        while node.parent is not None and len(contents) < most and not node.content(last.group).blocks:
            content = node.content(last.group)
            if content.is_moving or not content.host_block:
                return []
            contents.append(content)
            node = node.parent
        return contents[::-1]
