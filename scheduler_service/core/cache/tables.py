"""Block tables: the allocation of both tiers' blocks to sequences, and their publication in the prefix index."""

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.prefix_index import Cursor
from scheduler_service.core.cache.room import Holding, Match, Room
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

    def match(self, holding: Holding, cursor: Cursor | None) -> Match:
        """Find the longest cached prefix of a sequence's tokens.

        `cursor` is its position in the prefix index, if known. The last token is never matched, because computing it
        yields the next token.
        """
        if cursor is not None:
            chain = cursor.chain()
        else:
            chain = self.index.match(holding.root, holding.token_ids, (len(holding.token_ids) - 1) // self.block_size)
        num_device = next((i for i, node in enumerate(chain) if not node.blocks), len(chain))
        num_host = next((i for i, node in enumerate(chain[num_device:]) if node.blocks), len(chain) - num_device)
        return Match(tuple(chain[:num_device]), tuple(chain[num_device : num_device + num_host]))

    def open(self, holding: Holding, match: Match, step: int) -> None:
        """Allocate the blocks of a new row, the matched blocks first.

        The plan of `step` loads the matched blocks that are on the host and that the window has not passed. The last of
        these is always loaded, because no window has passed it.
        """
        num_passed = self.room.num_passed_blocks(match)
        for node in match.device:  # includes blocks that the window has passed, so that they count as recently used
            self.pool.share(node.blocks[0])
            holding.block_table.append(node.blocks[0])
        self._free_passed(holding, min(num_passed, len(match.device)))
        holding.block_table.extend([0] * (num_passed - len(match.device)))
        holding.freed(num_passed)
        self.append(holding, self.room.num_opening_entries(holding, num_passed) - len(holding.block_table))
        nodes = match.device + match.host
        holding.matched(len(nodes))
        holding.published(nodes[-1] if nodes else None, len(nodes))
        for node, block in zip(match.host, holding.block_table[len(match.device) :], strict=False):
            if block:
                self.moves.add(Move(step, block, node.host_block, False, node, holding.free_list))
        holding.compute(len(nodes) * self.block_size)

    def fork(self, holding: Holding, relative: Holding, num_tokens: int) -> list[tuple[int, int]]:
        """Share the full blocks of `num_tokens` positions with another sequence of the same group.

        Returns the copy of the last block if it is not full, as a list of one (source, target); otherwise an empty
        list.
        """
        num_full = num_tokens // self.block_size
        self._share_table(holding, relative, num_full)
        self.append(holding, self.room.num_fork_blocks(holding, relative, num_tokens))
        holding.matched(num_full)
        holding.compute(num_tokens)
        if num_tokens % self.block_size == 0:
            return []
        source = relative.block_table[num_full]
        self.pool.share(source)  # until the plan is final: a move of the plan must not write to a copy's source
        return [(source, holding.block_table[num_full])]

    def branch(self, holding: Holding, parent: Holding) -> None:
        """Share every block of `parent` with another beam that has the same tokens."""
        self._share_table(holding, parent, len(parent.block_table))
        holding.matched(parent.num_matched_blocks)
        holding.may_be_forked(parent.forkable_from)
        holding.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """Release the sources of a plan's copies.

        The plan is final, so nothing can write to a source before it is read.
        """
        for source, _ in copies:
            self.tiers.device.free(source)

    def _share_table(self, holding: Holding, other: Holding, num_blocks: int) -> None:
        for block in other.block_table[:num_blocks]:
            if block:
                self.pool.share(block)
            holding.block_table.append(block)
        holding.freed(min(other.num_freed_blocks, num_blocks))
        num_published = min(other.num_published_blocks, num_blocks)
        if holding.num_freed_blocks >= num_published:
            return  # the last published block is not held, so nothing can be published on top of it
        node = other.last_node
        for _ in range(other.num_published_blocks - num_published):
            assert node is not None
            node = node.parent
        holding.published(node, num_published)

    # Running

    def append(self, holding: Holding, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` more blocks to the sequence, and return them."""
        blocks = [self._allocate() for _ in range(num_blocks)]
        holding.block_table += blocks
        return blocks

    def append_next(self, holding: Holding) -> int:
        """Allocate one more block to the sequence, and return it."""
        block = self._allocate()
        holding.block_table.append(block)
        return block

    def shared_tail(self, holding: Holding) -> int:
        """Return the block of the sequence's next position if other sequences hold it too, else 0."""
        index = holding.num_computed_tokens // self.block_size
        block = holding.block_table[index] if index < len(holding.block_table) else 0
        return block if self.pool.ref_count(block) > 1 else 0

    def replace_tail(self, holding: Holding) -> tuple[int, int, int]:
        """Replace the shared block of the next position by a new block (copy-on-write).

        Returns (index, source, target). A reference to the source is held until `copied`.
        """
        index = holding.num_computed_tokens // self.block_size
        source = holding.block_table[index]
        target = holding.block_table[index] = self._allocate()
        return index, source, target  # the table's reference to the source now belongs to the copy

    def slide(self, holding: Holding, position: int) -> None:
        """Free the blocks that the sliding window has passed: no position from `position` on reads them.

        The last published block is kept, because content is published on top of it.
        """
        num_passed = self.room.first_needed_block(position)
        if self.enable_prefix_caching and holding.publishes:
            num_passed = min(num_passed, holding.num_published_blocks - 1)
        self._free_passed(holding, num_passed)

    def slide_wholly(self, holding: Holding, position: int) -> None:
        """Free every block that is not read from `position` on.

        If this frees the last published block, the sequence publishes nothing any more.
        """
        self._free_passed(holding, self.room.first_needed_block(position))
        if holding.num_freed_blocks and holding.num_freed_blocks >= holding.num_published_blocks:
            holding.published(None, 0)

    def _free_passed(self, holding: Holding, num_passed: int) -> None:
        for i in range(holding.num_freed_blocks, num_passed):
            self.tiers.device.free(holding.block_table[i], free_list=holding.free_list)
            holding.block_table[i] = 0
        holding.freed(num_passed)

    def publish(self, holding: Holding, num_positions: int) -> None:
        """Publish the full blocks of the first `num_positions` positions, so that other sequences can match them.

        The tokens of these positions must be known.
        """
        num_full = num_positions // self.block_size
        if num_full <= holding.num_published_blocks or not (self.enable_prefix_caching and holding.publishes):
            return
        node, first = holding.last_node, holding.num_published_blocks
        for i, block in enumerate(holding.block_table[first:num_full], start=first):
            node = self.index.contents[block] or self.index.publish(holding.root, node, holding.token_ids, i, block)
        holding.published(node, num_full)

    def release(self, holding: Holding) -> None:
        """Release all blocks of a sequence, in both tiers."""
        self.tiers.device.free_table(holding.block_table, holding.free_list)
        self.tiers.host.free_table(holding.host_table, holding.free_list)
        holding.released()

    def unpublish(self, holding: Holding) -> None:
        """Unpublish the blocks that a row wrote, and all content computed on top of them.

        The first such block is the first block that the row did not match.
        """
        node = self.index.find(holding.root, holding.token_ids, holding.num_matched_blocks)
        if node is not None:
            self.tiers.unpublish(node)
