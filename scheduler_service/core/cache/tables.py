"""Block tables: the allocation of both tiers' blocks to sequences, and their publication in the prefix index."""

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.prefix_index import Cursor, Node, Root
from scheduler_service.core.cache.room import Allocation, BlockTable, Match, Room
from scheduler_service.core.cache.states import StatePool
from scheduler_service.core.cache.tiers import Move, Tiers
from scheduler_service.core.request import Request


class CacheManager:
    """The KV cache of one worker. It allocates blocks to sequences, adds full blocks to the prefix index so that other
    sequences can use them, and releases blocks."""

    def __init__(
        self, capacity: WorkerCapacity, *, num_step_tokens: int, enable_prefix_caching: bool, watermark: float
    ) -> None:
        """Create a manager for an empty KV cache. `watermark` is the share of the blocks, from 0 to 1, that must stay
        free when a request is admitted."""
        self.block_size, self.has_windows = capacity.block_size, any(capacity.windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers = Tiers(capacity)
        self.pool, self.host_pool, self.index, self.moves = tiers.pool, tiers.host_pool, tiers.index, tiers.moves
        self._windows = tiers.index.windows
        self.room = Room(capacity, tiers.pool, num_step_tokens=num_step_tokens, watermark=watermark)
        self.states = StatePool(capacity, tiers, enable_prefix_caching=enable_prefix_caching)
        self._allocate = tiers.device.allocate

    # New rows

    def new_allocation(self, request: Request, root: Root, token_ids: list[int]) -> Allocation:
        """Return an allocation without blocks for a sequence of a request. `token_ids` is the sequence's own list."""
        windows, num_spine = self.room.windows.of_groups, self._windows.num_spine
        tables = tuple(BlockTable(group, window, group < num_spine) for group, window in enumerate(windows))
        return Allocation(request, root, token_ids, tables)

    def match(self, allocation: Allocation, cursor: Cursor | None) -> Match:
        """Find the longest cached prefix with which a sequence can start. Its blocks are on the device, or on the host.

        `cursor` is the prompt's known position in the prefix index. If it is None, the index is searched. The last
        token is never matched, because the model must compute it to sample the next token.
        """
        if cursor is not None:
            chain = cursor.chain()
        else:
            chain = self.index.match(
                allocation.root, allocation.token_ids, (len(allocation.token_ids) - 1) // self.block_size
            )
        windows, is_on_device = self._windows, [node.is_spine_on_device for node in chain]
        num_device = (*is_on_device, False).index(False)
        num_spine = (*is_on_device[num_device:], True).index(True) + num_device
        nodes = tuple(chain[: windows.num_usable(chain[:num_spine])])
        loads = tuple(
            content
            for group in range(len(windows.of_groups))
            for node in nodes[windows.num_passed(group, len(nodes)) :]
            if not (content := node.content(group)).blocks
        )
        if not loads:
            return Match(nodes, len(nodes), (), num_spine)
        return Match(nodes, windows.num_usable(nodes[:num_device], on_device=True), loads, num_spine)

    def open(self, allocation: Allocation, match: Match, step: int) -> None:
        """Fill the block tables of a sequence that starts to run: first the cached blocks of `match`, then new blocks.

        The plan of `step` loads the cached blocks that are on the host only. Blocks that the sliding window has passed
        are not loaded, except for the last block of `match`.
        """
        nodes = match.nodes
        for table in allocation.tables:
            table.freed(self._windows.num_passed(table.group, len(nodes)))
            self._share_match(allocation, table, nodes)
        has_states, device = self.states.num_states > 0, self.tiers.device
        state = self.states.share(allocation, match) if has_states else None
        # Only now: an allocation evicts idle blocks.
        blocks = {content: device.allocate_for(content) for content in match.loads}
        if state in blocks:
            allocation.states.source = blocks[state]
        if has_states:
            self.states.open(allocation)
        for table in allocation.tables:
            for i in range(table.num_freed, len(nodes)):
                table.blocks[i] = table.blocks[i] or blocks[nodes[i].content(table.group)]
            num_entries = self.room.num_opening_entries(allocation, table, table.num_freed)
            table.blocks += [self._allocate() for _ in range(num_entries - len(nodes))]
        for content, block in blocks.items():
            self.moves.add(Move(step, block, content.host_block, False, content, allocation.free_list))
        allocation.matched(len(nodes), _branches(allocation, nodes, self.block_size))
        allocation.published(nodes[-1] if nodes else None, len(nodes))
        allocation.compute(len(nodes) * self.block_size)

    def _share_match(self, allocation: Allocation, table: BlockTable, nodes: tuple[Node, ...]) -> None:
        """Begin a block table with the blocks of a prefix cache hit on the device. The other entries are 0.

        Blocks of the spine that the window has passed are shared and freed at once, so that they count as recently
        used.
        """
        for node in nodes:
            blocks = node.content(table.group).blocks
            is_read = len(table.blocks) >= table.num_freed
            if blocks and (is_read or table.is_spine):
                self.pool.share(blocks[0])
            table.blocks.append(blocks[0] if blocks and is_read else 0)
        if table.is_spine:
            for node in nodes[: table.num_freed]:
                for block in node.content(table.group).blocks[:1]:
                    self.tiers.device.free(block, free_list=allocation.free_list)

    def fork(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> list[tuple[int, int]]:
        """Let a new sample start with the first `num_tokens` positions of another sample of its request. The two
        samples share full blocks. A block that is only partly covered must be copied.

        Return the blocks to copy as (source block, target block), one in each layer group, or an empty list if no block
        must be copied.
        """
        num_full = num_tokens // self.block_size
        self._share_tables(allocation, relative, num_full)
        num_blocks = self.room.num_fork_blocks(allocation, relative, num_tokens)
        for table, num in zip(allocation.tables, num_blocks, strict=True):
            table.blocks += [self._allocate() for _ in range(num)]
        if self.states.num_states:
            self.states.fork(allocation, relative)
        allocation.matched(num_full, relative.branches)
        allocation.compute(num_tokens)
        if num_tokens % self.block_size == 0:
            return []
        sources = [table.blocks[num_full] for table in relative.tables]
        for source in sources:  # until the plan is final: a move of the plan must not write to a copy's source
            self.pool.share(source)
        return list(zip(sources, [table.blocks[num_full] for table in allocation.tables], strict=True))

    def branch(self, allocation: Allocation, parent: Allocation) -> None:
        """Give a beam all KV cache blocks of the beam `parent`. Both beams have the same tokens, and share the
        blocks."""
        self._share_tables(allocation, parent, max(len(table.blocks) for table in parent.tables))
        allocation.matched(parent.num_matched_blocks, parent.branches)
        allocation.may_be_forked(parent.forkable_from)
        allocation.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """Release the source blocks of a plan's block copies, which were reserved until the plan was complete.

        This is safe, because the worker reads the source blocks before any later plan can write to them.
        """
        for source, _ in copies:
            self.tiers.device.free(source)

    def _share_tables(self, allocation: Allocation, other: Allocation, num_blocks: int) -> None:
        for table, others in zip(allocation.tables, other.tables, strict=True):
            for block in others.blocks[:num_blocks]:
                if block:
                    self.pool.share(block)
                table.blocks.append(block)
            table.freed(min(others.num_freed, num_blocks))
        num_published = min(other.num_published_blocks, num_blocks)
        if allocation.tables[0].num_freed >= num_published:
            return  # the last published block is not held, so nothing can be published on top of it
        node = other.last_node
        for _ in range(other.num_published_blocks - num_published):
            assert node is not None
            node = node.parent
        allocation.published(node, num_published)

    # Running

    def append_next(self, allocation: Allocation) -> list[int]:
        """Allocate one more device block to a sequence in each layer group, and return the numbers of these blocks."""
        blocks = []
        for table in allocation.tables:
            block = self._allocate()
            table.blocks.append(block)
            blocks.append(block)
        return blocks

    def append(self, allocation: Allocation, num_tokens: int) -> list[tuple[int, int]]:
        """Allocate the device blocks that a sequence still needs to compute its next `num_tokens` positions. Return
        them as (layer group, block)."""
        num_blocks = self.room.num_blocks_for(allocation.num_computed_tokens + num_tokens)
        appended = []
        for group, table in enumerate(allocation.tables):
            for _ in range(num_blocks - len(table.blocks)):
                table.blocks.append(self._allocate())
                appended.append((group, table.blocks[-1]))
        return appended

    def shared_tail(self, allocation: Allocation) -> int:
        """Return the block to which the sequence will write its next position, if other sequences use this block too.
        Otherwise return 0.

        The sequence must copy a shared block before it writes to the block.
        """
        index, blocks = allocation.num_computed_tokens // self.block_size, allocation.tables[0].blocks
        block = blocks[index] if index < len(blocks) else 0
        return block if self.pool.ref_count(block) > 1 else 0

    def replace_tail(self, allocation: Allocation) -> tuple[int, list[tuple[int, int]]]:
        """Replace the shared blocks of all layer groups by new blocks before the sequence writes its next position
        (copy-on-write). Beams share the blocks of all groups, or of none.

        Return (index in the block tables, pairs of source block and target block, one for each layer group). The worker
        must copy the sources to the targets. The sources are not reused until `copied` is called.
        """
        index, pairs = allocation.num_computed_tokens // self.block_size, []
        for table in allocation.tables:
            source = table.blocks[index]
            target = table.blocks[index] = self._allocate()
            pairs.append((source, target))
        return index, pairs  # the tables' references to the sources now belong to the copies

    def slide(self, allocation: Allocation, position: int) -> None:
        """Free the blocks of a sequence that the sliding window has passed, because `position` and later positions do
        not read them.

        The last block that is in the prefix index is kept, so that the next block can be added after it.
        """
        most = position  # more blocks than any window has passed
        if self.enable_prefix_caching and allocation.publishes:
            most = allocation.num_published_blocks - 1
        for table in allocation.tables:
            if table.window:
                num_passed = min(most, self.room.first_needed_block(table.window, position))
                if num_passed > table.num_freed:
                    self._free_passed(allocation, table, num_passed)

    def free_unread(self, allocation: Allocation, position: int) -> None:
        """Free all blocks of a sequence that `position` and later positions do not read, because the sliding window has
        passed them.

        Unlike `slide`, this also frees the last block that is in the prefix index. No further blocks of the sequence
        can then be added to the index.
        """
        for table in allocation.tables:
            num_passed = self.room.first_needed_block(table.window, position)
            if num_passed > table.num_freed:
                self._free_passed(allocation, table, num_passed)
        num_freed = allocation.tables[0].num_freed
        if num_freed and num_freed >= allocation.num_published_blocks:
            allocation.published(None, 0)

    def _free_passed(self, allocation: Allocation, table: BlockTable, num_passed: int) -> None:
        """Free the first blocks of a block table, up to `num_passed`, because the sliding window has passed them.

        Blocks outside the spine are evicted before all other cached blocks, because hardly a prompt ends where they are
        read. The exceptions are the windows before the branches of the allocation.
        """
        free, blocks = self.tiers.device.free, table.blocks
        ends = allocation.branches
        first_spare = num_passed if table.is_spine else max(ends, default=0)
        for i in range(table.num_freed, num_passed):
            is_spare = i >= first_spare or not (table.is_spine or self._windows.reads(table.group, i, ends))
            free(blocks[i], spare=is_spare, free_list=allocation.free_list)
            blocks[i] = 0
        table.freed(num_passed)

    def publish(self, allocation: Allocation, num_positions: int) -> None:
        """Add the full blocks of a sequence's first `num_positions` positions to the prefix index, so that other
        sequences can use them. The tokens of these positions must be known."""
        num_full = num_positions // self.block_size
        if num_full <= allocation.num_published_blocks or not (self.enable_prefix_caching and allocation.publishes):
            return
        node, index, tables = allocation.last_node, self.index, allocation.tables
        for i in range(allocation.num_published_blocks, num_full):
            first = tables[0].blocks[i]
            published = index.contents[first]
            if published is None:
                node = index.extend(allocation.root, node, allocation.token_ids, i)
                index.add_copy(node, first)
            else:
                node = published.node
            for content in node.later[: len(tables) - 1]:  # without the state
                block = tables[content.group].blocks[i]
                if block and index.contents[block] is None:
                    index.add_copy(content, block)
        allocation.published(node, num_full)

    def release(self, allocation: Allocation, *, keeps_states: bool = False) -> None:
        """Release all KV cache blocks of a sequence, on the device and on the host, and unless `keeps_states`, its
        states. Until a block is reused, other sequences can still get it as a prefix cache hit."""
        self._hold_ends(allocation)
        self.tiers.device.free_tables([table.blocks for table in allocation.tables], allocation.free_list)
        self.tiers.host.free_tables([table.host_blocks for table in allocation.tables], allocation.free_list)
        if not keeps_states:
            self.tiers.release_states(allocation)
            self.tiers.release_host_state(allocation)
        allocation.released()

    def _hold_ends(self, allocation: Allocation) -> None:
        """Let a sequence hold the cached windows that it has passed and that another sequence may start with. So they
        are released, and later evicted, in the order of the prefix.

        Other sequences may start at the branches of the allocation, and where a prefix goes on in several ways by now.
        """
        if allocation.tables[-1].is_spine:
            return
        node = allocation.last_node
        ends = set(allocation.branches)
        for i in range(allocation.num_published_blocks - 1, -1, -1):
            assert node is not None
            if len(node.children) > 1:
                ends.add(i + 1)
            for content, table in zip(node.later, allocation.tables[1:], strict=False):  # without the state
                is_passed = not content.is_spine and i < table.num_freed
                if is_passed and content.blocks and self._windows.reads(table.group, i, ends):
                    table.blocks[i] = content.blocks[0]
                    self.pool.share(content.blocks[0])
            node = node.parent

    def unpublish(self, allocation: Allocation) -> None:
        """Remove the blocks that a sequence wrote from the prefix index, because their content is bad. Blocks that
        continue these blocks are removed too.

        Blocks that the sequence got as a prefix cache hit stay in the index.
        """
        node = self.index.find(allocation.root, allocation.token_ids, allocation.num_matched_blocks)
        if node is not None:
            self.tiers.unpublish(node)


def _branches(allocation: Allocation, nodes: tuple[Node, ...], block_size: int) -> tuple[int, ...]:
    """Return the numbers of blocks of a sequence after which later sequences will probably continue, in order.

    They are the branches of the matched prefix, and the end of the prompt. If the sequence continues the whole of
    an earlier sequence, the end of its prompt is left out, because the next sequence will probably do the same.
    """
    if allocation.tables[-1].is_spine:
        return ()  # no layer group needs them
    branches = [i for i, node in enumerate(nodes, 1) if len(node.children) > (i < len(nodes))]
    if not nodes or len(nodes) in branches[-1:]:
        branches.append(len(allocation.request.prompt_token_ids) // block_size)
    return tuple(branches)
