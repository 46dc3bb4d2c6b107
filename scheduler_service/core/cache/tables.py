"""Block tables: the allocation of both tiers' blocks to sequences, and their publication in the prefix index."""

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.prefix_index import Cursor
from scheduler_service.core.cache.room import Allocation, Match, Room
from scheduler_service.core.cache.tiers import Move, Tiers


class CacheManager:
    """The cache of one worker. It allocates blocks to sequences and takes them back."""

    def __init__(
        self, capacity: WorkerCapacity, *, num_step_tokens: int, enable_prefix_caching: bool, watermark: float
    ) -> None:
        """Create an empty cache. `watermark` is the share of the blocks that an admission leaves free."""
        self.block_size, self.window = capacity.block_size, capacity.sliding_window
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers = Tiers(capacity)
        self.pool, self.host_pool, self.index, self.moves = tiers.pool, tiers.host_pool, tiers.index, tiers.moves
        self.room = Room(capacity, tiers.pool, num_step_tokens=num_step_tokens, watermark=watermark)
        self._allocate = tiers.device.allocate

    # New rows

    def match(self, allocation: Allocation, cursor: Cursor | None) -> Match:
        """Find the longest cached prefix of a sequence's tokens.

        `cursor` is its position in the prefix index, if known. The last token is never matched, because computing it
        yields the next token.
        """
        if cursor is not None:
            chain = cursor.chain()
        else:
            chain = self.index.match(
                allocation.root, allocation.token_ids, (len(allocation.token_ids) - 1) // self.block_size
            )
        num_device = next((i for i, node in enumerate(chain) if not node.blocks), len(chain))
        num_host = next((i for i, node in enumerate(chain[num_device:]) if node.blocks), len(chain) - num_device)
        return Match(tuple(chain[:num_device]), tuple(chain[num_device : num_device + num_host]))

    def open(self, allocation: Allocation, match: Match, step: int) -> None:
        """Allocate the blocks of a new row, the matched blocks first.

        The plan of `step` loads the matched blocks that are on the host and that the window has not passed. The last of
        these is always loaded, because no window has passed it.
        """
        num_passed = self.room.num_passed_blocks(match)
        for node in match.device:  # includes blocks that the window has passed, so that they count as recently used
            self.pool.share(node.blocks[0])
            allocation.block_table.append(node.blocks[0])
        self._free_passed(allocation, min(num_passed, len(match.device)))
        allocation.block_table.extend([0] * (num_passed - len(match.device)))
        allocation.freed(num_passed)
        self.append(allocation, self.room.num_opening_entries(allocation, num_passed) - len(allocation.block_table))
        nodes = match.device + match.host
        allocation.matched(len(nodes))
        allocation.published(nodes[-1] if nodes else None, len(nodes))
        for node, block in zip(match.host, allocation.block_table[len(match.device) :], strict=False):
            if block:
                self.moves.add(Move(step, block, node.host_block, False, node, allocation.free_list))
        allocation.compute(len(nodes) * self.block_size)

    def fork(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> list[tuple[int, int]]:
        """Share the full blocks of `num_tokens` positions with another sequence of the same group.

        Returns the copy of the last block if it is not full, as a list of one (source, target); otherwise an empty
        list.
        """
        num_full = num_tokens // self.block_size
        self._share_table(allocation, relative, num_full)
        self.append(allocation, self.room.num_fork_blocks(allocation, relative, num_tokens))
        allocation.matched(num_full)
        allocation.compute(num_tokens)
        if num_tokens % self.block_size == 0:
            return []
        source = relative.block_table[num_full]
        self.pool.share(source)  # until the plan is final: a move of the plan must not write to a copy's source
        return [(source, allocation.block_table[num_full])]

    def branch(self, allocation: Allocation, parent: Allocation) -> None:
        """Share every block of `parent` with another beam that has the same tokens."""
        self._share_table(allocation, parent, len(parent.block_table))
        allocation.matched(parent.num_matched_blocks)
        allocation.may_be_forked(parent.forkable_from)
        allocation.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """Release the sources of a plan's copies.

        The plan is final, so nothing can write to a source before it is read.
        """
        for source, _ in copies:
            self.tiers.device.free(source)

    def _share_table(self, allocation: Allocation, other: Allocation, num_blocks: int) -> None:
        for block in other.block_table[:num_blocks]:
            if block:
                self.pool.share(block)
            allocation.block_table.append(block)
        allocation.freed(min(other.num_freed_blocks, num_blocks))
        num_published = min(other.num_published_blocks, num_blocks)
        if allocation.num_freed_blocks >= num_published:
            return  # the last published block is not held, so nothing can be published on top of it
        node = other.last_node
        for _ in range(other.num_published_blocks - num_published):
            assert node is not None
            node = node.parent
        allocation.published(node, num_published)

    # Running

    def append(self, allocation: Allocation, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` more blocks to the sequence, and return them."""
        blocks = [self._allocate() for _ in range(num_blocks)]
        allocation.block_table += blocks
        return blocks

    def append_next(self, allocation: Allocation) -> int:
        """Allocate one more block to the sequence, and return it."""
        block = self._allocate()
        allocation.block_table.append(block)
        return block

    def shared_tail(self, allocation: Allocation) -> int:
        """Return the block of the sequence's next position if other sequences hold it too, else 0."""
        index = allocation.num_computed_tokens // self.block_size
        block = allocation.block_table[index] if index < len(allocation.block_table) else 0
        return block if self.pool.ref_count(block) > 1 else 0

    def replace_tail(self, allocation: Allocation) -> tuple[int, int, int]:
        """Replace the shared block of the next position by a new block (copy-on-write).

        Returns (index, source, target). A reference to the source is held until `copied`.
        """
        index = allocation.num_computed_tokens // self.block_size
        source = allocation.block_table[index]
        target = allocation.block_table[index] = self._allocate()
        return index, source, target  # the table's reference to the source now belongs to the copy

    def slide(self, allocation: Allocation, position: int) -> None:
        """Free the blocks that the sliding window has passed: no position from `position` on reads them.

        The last published block is kept, because content is published on top of it.
        """
        num_passed = self.room.first_needed_block(position)
        if self.enable_prefix_caching and allocation.publishes:
            num_passed = min(num_passed, allocation.num_published_blocks - 1)
        self._free_passed(allocation, num_passed)

    def free_unread(self, allocation: Allocation, position: int) -> None:
        """Free every block that is not read from `position` on.

        If this frees the last published block, the sequence publishes nothing any more.
        """
        self._free_passed(allocation, self.room.first_needed_block(position))
        if allocation.num_freed_blocks and allocation.num_freed_blocks >= allocation.num_published_blocks:
            allocation.published(None, 0)

    def _free_passed(self, allocation: Allocation, num_passed: int) -> None:
        for i in range(allocation.num_freed_blocks, num_passed):
            self.tiers.device.free(allocation.block_table[i], free_list=allocation.free_list)
            allocation.block_table[i] = 0
        allocation.freed(num_passed)

    def publish(self, allocation: Allocation, num_positions: int) -> None:
        """Publish the full blocks of the first `num_positions` positions, so that other sequences can match them.

        The tokens of these positions must be known.
        """
        num_full = num_positions // self.block_size
        if num_full <= allocation.num_published_blocks or not (self.enable_prefix_caching and allocation.publishes):
            return
        node, first = allocation.last_node, allocation.num_published_blocks
        for i, block in enumerate(allocation.block_table[first:num_full], start=first):
            node = self.index.contents[block] or self.index.publish(
                allocation.root, node, allocation.token_ids, i, block
            )
        allocation.published(node, num_full)

    def release(self, allocation: Allocation) -> None:
        """Release all blocks of a sequence, in both tiers."""
        self.tiers.device.free_table(allocation.block_table, allocation.free_list)
        self.tiers.host.free_table(allocation.host_table, allocation.free_list)
        allocation.released()

    def unpublish(self, allocation: Allocation) -> None:
        """Unpublish the blocks that a row wrote, and all content computed on top of them.

        The first such block is the first block that the row did not match.
        """
        node = self.index.find(allocation.root, allocation.token_ids, allocation.num_matched_blocks)
        if node is not None:
            self.tiers.unpublish(node)
