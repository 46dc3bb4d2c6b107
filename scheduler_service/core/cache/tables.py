"""Block tables: the allocation of both tiers' blocks to sequences, and their publication in the prefix index."""

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.prefix_index import Cursor
from scheduler_service.core.cache.room import Allocation, Match, Room
from scheduler_service.core.cache.tiers import Move, Tiers


class CacheManager:
    """The KV cache of one worker. It allocates blocks to sequences, adds full blocks to the prefix index so that other
    sequences can use them, and releases blocks."""

    def __init__(
        self, capacity: WorkerCapacity, *, num_step_tokens: int, enable_prefix_caching: bool, watermark: float
    ) -> None:
        """Create a manager for an empty KV cache. `watermark` is the share of the blocks, from 0 to 1, that must stay
        free when a request is admitted."""
        self.block_size, self.window = capacity.block_size, capacity.layer_groups[0].sliding_window
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers = Tiers(capacity)
        self.pool, self.host_pool, self.index, self.moves = tiers.pool, tiers.host_pool, tiers.index, tiers.moves
        self.room = Room(capacity, tiers.pool, num_step_tokens=num_step_tokens, watermark=watermark)
        self._allocate = tiers.device.allocate

    # New rows

    def match(self, allocation: Allocation, cursor: Cursor | None) -> Match:
        """Find the longest cached prefix of a sequence's tokens. Return its blocks on the device, and the blocks on the
        host that follow them.

        `cursor` is the prompt's known position in the prefix index. If it is None, the index is searched. The last
        token is never matched, because the model must compute it to sample the next token.
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
        """Fill the block table of a sequence that starts to run: first the cached blocks of `match`, then new blocks.

        The plan of `step` loads the cached blocks that are on the host only. Blocks that the sliding window has passed
        are not loaded, except for the last block of `match`.
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
        """Let a new sample start with the first `num_tokens` positions of another sample of its request. The two
        samples share full blocks. A block that is only partly covered must be copied.

        Return the block to copy as a list of one (source block, target block), or an empty list if no block must be
        copied.
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
        """Give a beam all KV cache blocks of the beam `parent`. Both beams have the same tokens, and share the
        blocks."""
        self._share_table(allocation, parent, len(parent.block_table))
        allocation.matched(parent.num_matched_blocks)
        allocation.may_be_forked(parent.forkable_from)
        allocation.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """Release the source blocks of a plan's block copies, which were reserved until the plan was complete.

        This is safe, because the worker reads the source blocks before any later plan can write to them.
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
        """Allocate `num_blocks` more device blocks to a sequence, and return the numbers of these blocks."""
        blocks = [self._allocate() for _ in range(num_blocks)]
        allocation.block_table += blocks
        return blocks

    def append_next(self, allocation: Allocation) -> int:
        """Allocate one more device block to a sequence, and return the number of this block."""
        block = self._allocate()
        allocation.block_table.append(block)
        return block

    def shared_tail(self, allocation: Allocation) -> int:
        """Return the block to which the sequence will write its next position, if other sequences use this block too.
        Otherwise return 0.

        The sequence must copy a shared block before it writes to the block.
        """
        index = allocation.num_computed_tokens // self.block_size
        block = allocation.block_table[index] if index < len(allocation.block_table) else 0
        return block if self.pool.ref_count(block) > 1 else 0

    def replace_tail(self, allocation: Allocation) -> tuple[int, int, int]:
        """Replace a shared block by a new block before the sequence writes its next position (copy-on-write).

        Return (index in the block table, source block, target block). The worker must copy the source to the target.
        The source is not reused until `copied` is called.
        """
        index = allocation.num_computed_tokens // self.block_size
        source = allocation.block_table[index]
        target = allocation.block_table[index] = self._allocate()
        return index, source, target  # the table's reference to the source now belongs to the copy

    def slide(self, allocation: Allocation, position: int) -> None:
        """Free the blocks of a sequence that the sliding window has passed, because `position` and later positions do
        not read them.

        The last block that is in the prefix index is kept, so that the next block can be added after it.
        """
        num_passed = self.room.first_needed_block(position)
        if self.enable_prefix_caching and allocation.publishes:
            num_passed = min(num_passed, allocation.num_published_blocks - 1)
        self._free_passed(allocation, num_passed)

    def free_unread(self, allocation: Allocation, position: int) -> None:
        """Free all blocks of a sequence that `position` and later positions do not read, because the sliding window has
        passed them.

        Unlike `slide`, this also frees the last block that is in the prefix index. No further blocks of the sequence
        can then be added to the index.
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
        """Add the full blocks of a sequence's first `num_positions` positions to the prefix index, so that other
        sequences can use them. The tokens of these positions must be known."""
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
        """Release all KV cache blocks of a sequence, on the device and on the host. Until a block is reused, other
        sequences can still get it as a prefix cache hit."""
        self.tiers.device.free_table(allocation.block_table, allocation.free_list)
        self.tiers.host.free_table(allocation.host_table, allocation.free_list)
        allocation.released()

    def unpublish(self, allocation: Allocation) -> None:
        """Remove the blocks that a sequence wrote from the prefix index, because their content is bad. Blocks that
        continue these blocks are removed too.

        Blocks that the sequence got as a prefix cache hit stay in the index.
        """
        node = self.index.find(allocation.root, allocation.token_ids, allocation.num_matched_blocks)
        if node is not None:
            self.tiers.unpublish(node)
