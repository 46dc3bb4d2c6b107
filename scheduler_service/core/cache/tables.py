"""Block tables: what holdings get of the tiers' blocks and of the prefix index, for one worker's life."""

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.prefix_index import Cursor
from scheduler_service.core.cache.room import Holding, Match, Room
from scheduler_service.core.cache.tiers import Move, Tiers


class CacheManager:
    """Gives blocks to holdings and takes them back."""

    def __init__(
        self, capacity: WorkerCapacity, *, num_step_tokens: int, enable_prefix_caching: bool, watermark: float
    ) -> None:
        """`watermark` is the share of blocks an admission leaves free."""
        self.block_size, self.window = capacity.block_size, capacity.sliding_window
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers = Tiers(capacity)
        self.pool, self.host_pool, self.index, self.moves = tiers.pool, tiers.host_pool, tiers.index, tiers.moves
        self.room = Room(capacity, tiers.pool, num_step_tokens=num_step_tokens, watermark=watermark)
        self._allocate = tiers.device.allocate

    # Opening

    def match(self, holding: Holding, cursor: Cursor | None) -> Match:
        """Find cached content that the tokens begin with, for which there may be a cursor. The last one is never
        matched: computing that is what yields the next one."""
        if cursor is not None:
            chain = cursor.chain()
        else:
            chain = self.index.match(holding.root, holding.token_ids, (len(holding.token_ids) - 1) // self.block_size)
        num_device = next((i for i, node in enumerate(chain) if not node.blocks), len(chain))
        num_host = next((i for i, node in enumerate(chain[num_device:]) if node.blocks), len(chain) - num_device)
        return Match(tuple(chain[:num_device]), tuple(chain[num_device : num_device + num_host]))

    def open(self, holding: Holding, match: Match, step: int) -> None:
        """Give a holding the blocks that it opens with, the matched ones first. The plan of `step` loads those that
        are on the host: the last of them always, which no window has passed."""
        num_passed = self.room.num_passed_blocks(match)
        for node in match.device:  # also what the window has passed: it was used just now
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
        """Let a holding share the full blocks of so many positions with a relative. Returns the copy of the one that
        is not full, if there is one: (source, target)."""
        num_full = num_tokens // self.block_size
        self._share_table(holding, relative, num_full)
        self.append(holding, self.room.num_fork_blocks(holding, relative, num_tokens))
        holding.matched(num_full)
        holding.compute(num_tokens)
        if num_tokens % self.block_size == 0:
            return []
        source = relative.block_table[num_full]
        self.pool.share(source)  # until the plan is made: no move of it may write what its copies read
        return [(source, holding.block_table[num_full])]

    def branch(self, holding: Holding, parent: Holding) -> None:
        """Let a beam hold what another one of the same tokens holds: every block is shared."""
        self._share_table(holding, parent, len(parent.block_table))
        holding.matched(parent.num_matched_blocks)
        holding.may_be_forked(parent.forkable_from)
        holding.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """The plan with these copies is made: nothing can be written to their sources before they are read."""
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
            return  # nobody needs the last one any more, so nothing can be published on top of it
        node = other.last_node
        for _ in range(other.num_published_blocks - num_published):
            assert node is not None
            node = node.parent
        holding.published(node, num_published)

    # Running

    def append(self, holding: Holding, num_blocks: int) -> list[int]:
        """Give the holding so many more blocks, and return these."""
        blocks = [self._allocate() for _ in range(num_blocks)]
        holding.block_table += blocks
        return blocks

    def append_next(self, holding: Holding) -> int:
        """Give the holding one more block, and return it."""
        block = self._allocate()
        holding.block_table.append(block)
        return block

    def shared_tail(self, holding: Holding) -> int:
        """Return the block that its next position is written to if others hold it too, else 0."""
        index = holding.num_computed_tokens // self.block_size
        block = holding.block_table[index] if index < len(holding.block_table) else 0
        return block if self.pool.ref_count(block) > 1 else 0

    def replace_tail(self, holding: Holding) -> tuple[int, int, int]:
        """Copy on write: give the holding a block of its own where the shared one of its next position stood. Returns
        (index, source, target); the source is held until `copied`."""
        index = holding.num_computed_tokens // self.block_size
        source = holding.block_table[index]
        target = holding.block_table[index] = self._allocate()
        return index, source, target  # the table's reference becomes the copy's

    def slide(self, holding: Holding, position: int) -> None:
        """Free the blocks that fell out of the window: no position from this one on reads them. The last published one
        stays, since content is published on top of it."""
        num_passed = self.room.first_needed_block(position)
        if self.enable_prefix_caching and holding.publishes:
            num_passed = min(num_passed, holding.num_published_blocks - 1)
        self._free_passed(holding, num_passed)

    def slide_wholly(self, holding: Holding, position: int) -> None:
        """Hold no block more than is read from this position on: a holding that would need one to do so publishes
        nothing any more."""
        self._free_passed(holding, self.room.first_needed_block(position))
        if holding.num_freed_blocks and holding.num_freed_blocks >= holding.num_published_blocks:
            holding.published(None, 0)

    def _free_passed(self, holding: Holding, num_passed: int) -> None:
        for i in range(holding.num_freed_blocks, num_passed):
            self.tiers.device.free(holding.block_table[i], free_list=holding.free_list)
            holding.block_table[i] = 0
        holding.freed(num_passed)

    def publish(self, holding: Holding, num_positions: int) -> None:
        """Make the full blocks of so many positions, whose tokens are known, available to others."""
        num_full = num_positions // self.block_size
        if num_full <= holding.num_published_blocks or not (self.enable_prefix_caching and holding.publishes):
            return
        node, first = holding.last_node, holding.num_published_blocks
        for i, block in enumerate(holding.block_table[first:num_full], start=first):
            node = self.index.contents[block] or self.index.publish(holding.root, node, holding.token_ids, i, block)
        holding.published(node, num_full)

    def release(self, holding: Holding) -> None:
        """Take all blocks of a holding back."""
        self.tiers.device.free_table(holding.block_table, holding.free_list)
        self.tiers.host.free_table(holding.host_table, holding.free_list)
        holding.released()

    def unpublish(self, holding: Holding) -> None:
        """Unpublish what a row wrote, from its first block that it did not match on, nor any content computed on top
        of it."""
        node = self.index.find(holding.root, holding.token_ids, holding.num_matched_blocks)
        if node is not None:
            self.tiers.unpublish(node)
