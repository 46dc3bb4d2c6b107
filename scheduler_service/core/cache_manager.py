"""Block tables: what holdings need of the block pools and the prefix index, for one worker's life.

The positions of a sequence, of which the cache knows no more than its tokens, its request and what it holds:

    freed      ├────┤                           the window has passed over these blocks
    matched    ├──────────┤                     these it found in the cache, or shares with a relative
    published  ├───────────────┤                and these others find
    computed   ├──────────────────┤             the K and V of these are there, or in a plan
    granted    ├────────────────────────┤       for these it has blocks, on the device or on the host
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from pagewire.common.messages import WorkerCapacity
from scheduler_service.core.cache import (
    BlockPool,
    Cursor,
    EvictionOrder,
    Move,
    MoveLedger,
    Node,
    PrefixIndex,
    RetentionPriority,
    Root,
    equal_priority,
    no_owner,
)
from scheduler_service.core.request import Request

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


@dataclass(slots=True)
class StepCount:
    """How many plans an epoch has had. What decodes is advanced by it, all at once."""

    num_steps: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """What a sequence holds of a worker's cache: from its opening to its release, through swaps."""

    request: Request
    root: Root
    token_ids: list[int]  # the sequence's own, of which there will be more
    free_list: int = 0  # where its blocks stand when they are idle
    block_table: list[int] = field(default_factory=list)  # device blocks; 0 where one fell out of the window
    host_table: list[int] = field(default_factory=list)  # host blocks, while it is swapped
    last_node: Node | None = None  # of the last block of the table that is published or was matched
    num_published_blocks: int = 0
    num_matched_blocks: int = 0  # still known when it is released: results of the row may be on their way
    num_freed_blocks: int = 0  # at the beginning of the table: holes of the window
    forkable_from: int = 0  # the first step that may copy its prompt; 0: its prompt is not computed
    # A row that decodes computes one position in every plan, and is not visited: the count is then that of when it
    # began to, and the plans since.
    _num_computed: int = 0
    _steps: StepCount | None = None  # while its row decodes
    _joined_step: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.block_table)} blocks and {len(self.host_table)} on the host: {self.num_freed_blocks} freed, "
            f"{self.num_matched_blocks} matched, {self.num_published_blocks} published; "
            f"{self.num_computed_tokens} tokens computed"
        )

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed + (0 if self._steps is None else self._steps.num_steps - self._joined_step)

    @property
    def publishes(self) -> bool:
        """Whether its blocks can be published: not if a swap forgot what was published, and the window has passed over
        it."""
        return self.num_freed_blocks <= self.num_published_blocks

    def compute(self, num_tokens: int) -> None:
        """So many more positions are computed."""
        self._num_computed += num_tokens

    def compute_again(self, position: int) -> None:
        """Positions are computed again from this one on, if they were."""
        self._num_computed = min(self._num_computed, position)

    def join_decoding(self, steps: StepCount) -> None:
        """Count one position for every plan from the next one on."""
        self._steps, self._joined_step = steps, steps.num_steps

    def leave_decoding(self) -> None:
        """Count what plans compute one by one again."""
        self._num_computed, self._steps = self.num_computed_tokens, None

    def may_be_forked(self, step: int) -> None:
        """Its prompt is computed before the plan of `step`."""
        self.forkable_from = step

    def unpublished(self) -> None:
        """Publish nothing any more on top of what was published or matched."""
        self.last_node, self.num_published_blocks = None, 0

    def released(self) -> None:
        """Hold nothing."""
        self.block_table.clear()
        self.host_table.clear()
        self.unpublished()
        self.num_freed_blocks = self.forkable_from = self._num_computed = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Cached content that a sequence could start from: first what is on the device, then what must be loaded."""

    device: tuple[Node, ...] = ()
    host: tuple[Node, ...] = ()

    @property
    def is_loading(self) -> bool:
        """Another group's load of this content is under way."""
        return any(node.is_moving for node in self.host)

    def without_host(self) -> "Match":
        """The part of it that needs no load."""
        return Match(self.device)


class CacheManager:
    """Gives blocks to holdings and takes them back. `watermark` is the share of blocks an admission leaves free."""

    def __init__(
        self, capacity: WorkerCapacity, *, num_step_tokens: int, enable_prefix_caching: bool, watermark: float
    ) -> None:
        self.block_size = capacity.block_size
        self.window = capacity.sliding_window
        self._num_step_tokens = num_step_tokens
        self.order, self.host_order = EvictionOrder(), EvictionOrder()
        self.pool = BlockPool(capacity.num_device_blocks, self.order)
        self.host_pool = BlockPool(capacity.num_host_blocks, self.host_order)
        self.index = PrefixIndex(capacity.block_size, capacity.num_device_blocks, capacity.num_host_blocks)
        self.moves = MoveLedger(self.pool, self.host_pool, self.index)
        self.enable_prefix_caching = enable_prefix_caching
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

    def set_priorities(
        self,
        priority_of: Callable[[int], RetentionPriority],
        owner_of: Callable[[int], str],
        is_expected: Callable[[int], bool],
    ) -> None:
        """Set what says which priority a free list has, whose it is, and whether that session is away and expected
        back."""
        for order in (self.order, self.host_order):
            order.priority_of, order.owner_of = priority_of, owner_of
        self._is_expected = is_expected

    def dissolve(self) -> None:
        """The cache is needed no more: see `PrefixIndex.dissolve`. Nor does it hold what gave its lists priorities."""
        self.index.dissolve()
        self.set_priorities(equal_priority, no_owner, lambda free_list: False)

    def priority_changed(self, free_list: int) -> None:
        """A free list may have another priority."""
        self.order.changed(free_list)
        self.host_order.changed(free_list)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def num_most_blocks(self, request: Request) -> int:
        """Count the blocks without which the request cannot end: full blocks of its prompt are shared, and each beam
        may need a copy of a block that another one goes on with. Or those of a window for each row, if these are
        fewer."""
        num_blocks = self._num_blocks_of_all(request)
        num_rows, num_copies = request.num_rows, _num_copies(request)
        num_shared = (len(request.prompt_token_ids) - 1) // self.block_size
        if self.window and request.beam:
            num_shared = 0  # a beam whose row is opened late may find that the window has passed over the prompt
        num_most = num_shared + num_rows * (num_blocks - num_shared) + num_copies
        if not self.window:
            return num_most
        return min(num_most, num_rows * min(num_blocks, self.num_chunk_blocks(1)) + num_copies)

    def num_chunk_blocks(self, num_tokens: int) -> int:
        """Count the blocks, at most, that a row reads and writes while it computes so many positions. There is a
        window."""
        return (self.window + num_tokens + self.block_size - 3) // self.block_size + 1

    def max_row_blocks(self, request: Request) -> int:
        """Count the blocks that each row of a request may hold: its part of the pool, if a window fits into that, but
        no more than it can use in a step. Rows for which that is not enough have blocks for all their positions."""
        num_blocks = self._num_blocks_of_all(request)
        if not self.window:
            return num_blocks
        num_shared_out = (self.pool.num_blocks - _num_copies(request)) // request.num_rows
        if num_shared_out < min(num_blocks, self.num_chunk_blocks(1)):
            return num_blocks
        return min(num_blocks, num_shared_out, self.num_chunk_blocks(self._num_step_tokens))

    def _num_blocks_of_all(self, request: Request) -> int:
        return self.num_blocks_for(len(request.prompt_token_ids) + max(0, request.max_tokens - 1))

    def can_allocate(self, num_blocks: int, *, alone: bool) -> bool:
        """Whether a group that takes `num_blocks` off the free list may have them now. The watermark does not bind one
        that is `alone`."""
        num_reserved = 0 if alone else self._num_watermark_blocks
        return num_blocks + num_reserved <= self.pool.num_free

    # Opening

    def match(self, holding: Holding, cursor: Cursor | None) -> Match:
        """Find cached content that the tokens begin with, for which there may be a cursor. The last one is never
        matched: computing that is what yields the next one."""
        if cursor is not None:
            chain = cursor.chain()
        else:
            max_blocks = (len(holding.token_ids) - 1) // self.block_size
            chain = self.index.match(holding.root, holding.token_ids, max_blocks)
        num_device = next((i for i, node in enumerate(chain) if not node.blocks), len(chain))
        num_host = next((i for i, node in enumerate(chain[num_device:]) if node.blocks), len(chain) - num_device)
        return Match(tuple(chain[:num_device]), tuple(chain[num_device : num_device + num_host]))

    def num_opening_blocks(self, holding: Holding, match: Match) -> int:
        """Count the blocks that opening takes off the free list. Idle blocks that it matches itself are not free
        twice."""
        num_passed = self._num_passed(match)
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in match.device[num_passed:])
        return self.num_opening_entries(holding, num_passed) - max(len(match.device), num_passed) + num_idle

    def num_opening_entries(self, holding: Holding, num_passed: int) -> int:
        """Count the entries that a table has when its row opens: blocks for all its tokens. Where the window passes
        over some of these before the last is computed, those of a chunk as long as the window; `num_passed` are passed
        already."""
        num_blocks = self.num_blocks_for(len(holding.token_ids))
        if not self.window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(self.window), self.max_row_blocks(holding.request))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def _num_passed(self, match: Match) -> int:
        """Count the blocks of a match that a sequence which goes on behind it need not hold: the window has passed over
        them. The last is held, since content is published on top of it."""
        num_blocks = len(match.device) + len(match.host)
        return max(0, min(self.first_needed_block(num_blocks * self.block_size), num_blocks - 1))

    def first_needed_block(self, position: int) -> int:
        """Return the index of the first block that is read by a row that computes from this position on."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def open(self, holding: Holding, match: Match, step: int) -> None:
        """Give a holding the blocks that it opens with, the matched ones first. The plan of `step` loads those that
        are on the host: the last of them always, which no window has passed."""
        num_passed = self._num_passed(match)
        for node in match.device:  # also what the window has passed: it was used just now
            self.pool.share(node.blocks[0])
            holding.block_table.append(node.blocks[0])
        self._free_passed(holding, min(num_passed, len(match.device)))
        holding.block_table.extend([0] * (num_passed - len(match.device)))
        holding.num_freed_blocks = num_passed
        self.append(holding, self.num_opening_entries(holding, num_passed) - len(holding.block_table))
        nodes = match.device + match.host
        holding.last_node = nodes[-1] if nodes else None
        holding.num_matched_blocks = holding.num_published_blocks = len(nodes)
        for i, node in enumerate(match.host, start=len(match.device)):
            block = holding.block_table[i]
            if block:
                self.moves.add(Move(step, block, node.host_block, False, node, holding.free_list))
        holding.compute(len(nodes) * self.block_size)

    def num_fork_blocks(self, holding: Holding, relative: Holding, num_tokens: int) -> int:
        """Count the blocks that a fork of so many positions takes off the free list."""
        num_full = num_tokens // self.block_size
        return max(1, self.num_opening_entries(holding, min(relative.num_freed_blocks, num_full)) - num_full)

    def fork(self, holding: Holding, relative: Holding, num_tokens: int) -> list[tuple[int, int]]:
        """Let a holding share the full blocks of so many positions with a relative. Returns the copy of the one that
        is not full, if there is one: (source, target)."""
        num_full = num_tokens // self.block_size
        self._share_table(holding, relative, num_full)
        self.append(holding, self.num_fork_blocks(holding, relative, num_tokens))
        holding.num_matched_blocks = num_full
        holding.compute(num_tokens)
        if num_tokens % self.block_size == 0:
            return []
        source = relative.block_table[num_full]
        self.pool.share(source)  # until the plan is made: no move of it may write what its copies read
        return [(source, holding.block_table[num_full])]

    def branch(self, holding: Holding, parent: Holding) -> None:
        """Let a beam hold what another one of the same tokens holds: every block is shared."""
        self._share_table(holding, parent, len(parent.block_table))
        holding.num_matched_blocks = parent.num_matched_blocks
        holding.forkable_from = parent.forkable_from
        holding.compute(parent.num_computed_tokens)

    def copied(self, copies: list[tuple[int, int]]) -> None:
        """The plan with these copies is made: nothing can be written to their sources before they are read."""
        for source, _ in copies:
            self.pool.free(source, cached=self.index.is_cached(source))

    def _share_table(self, holding: Holding, other: Holding, num_blocks: int) -> None:
        for block in other.block_table[:num_blocks]:
            if block:
                self.pool.share(block)
            holding.block_table.append(block)
        holding.num_freed_blocks = min(other.num_freed_blocks, num_blocks)
        num_published = min(other.num_published_blocks, num_blocks)
        if holding.num_freed_blocks >= num_published:
            return  # nobody needs the last one any more, so nothing can be published on top of it
        node = other.last_node
        for _ in range(other.num_published_blocks - num_published):
            assert node is not None
            node = node.parent
        holding.last_node, holding.num_published_blocks = node, num_published

    # Running

    def num_computable_tokens(self, holding: Holding, num_tokens: int) -> int:
        """Count the tokens, of so many behind those computed, for which there are blocks that a row may have: always
        one, if it has any. Under a window the watermark binds chunks too, since what they take beside the window they
        need not have."""
        if not self.window or num_tokens <= 1:
            return num_tokens
        table = holding.block_table
        num_held = len(table) - holding.num_freed_blocks
        num_allowed = self.max_row_blocks(holding.request) - num_held
        num_blocks = max(0, min(num_allowed, self.pool.num_free - self._num_watermark_blocks))
        num_positions = (len(table) + num_blocks) * self.block_size - holding.num_computed_tokens
        return min(num_tokens, max(1, num_positions))

    def append(self, holding: Holding, num_blocks: int) -> list[int]:
        """Give the holding so many more blocks, and return these."""
        return [self.append_next(holding) for _ in range(num_blocks)]

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
        num_passed = self.first_needed_block(position)
        if self.enable_prefix_caching and holding.publishes:
            num_passed = min(num_passed, holding.num_published_blocks - 1)
        self._free_passed(holding, num_passed)

    def slide_wholly(self, holding: Holding, position: int) -> None:
        """Hold no block more than is read from this position on: a holding that would need one to do so publishes
        nothing any more."""
        self._free_passed(holding, self.first_needed_block(position))
        if holding.num_freed_blocks and holding.num_freed_blocks >= holding.num_published_blocks:
            holding.unpublished()

    def _free_passed(self, holding: Holding, num_passed: int) -> None:
        for i in range(holding.num_freed_blocks, num_passed):
            self._free(holding.block_table[i], holding)
            holding.block_table[i] = 0
        holding.num_freed_blocks = max(holding.num_freed_blocks, num_passed)

    def publish(self, holding: Holding, num_positions: int) -> None:
        """Make the full blocks of so many positions, whose tokens are known, available to others."""
        num_full = num_positions // self.block_size
        if num_full <= holding.num_published_blocks or not (self.enable_prefix_caching and holding.publishes):
            return
        for i in range(holding.num_published_blocks, num_full):
            block = holding.block_table[i]
            holding.last_node = self.index.node_of(block) or self.index.publish(
                holding.root, holding.last_node, holding.token_ids, i, block
            )
        holding.num_published_blocks = num_full

    def release(self, holding: Holding) -> None:
        """Take all blocks of a holding back, leaves first, so that a prefix outlives what follows it."""
        free, is_cached, free_list = self.pool.free, self.index.is_cached, holding.free_list
        for block in reversed(holding.block_table):
            if block:
                free(block, cached=is_cached(block), free_list=free_list)
        for host_block in reversed(holding.host_table):
            if host_block:
                self._free_host(host_block, holding)
        holding.released()

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
            host_blocks[block] = self._allocate_host()
            self.moves.add(Move(step, block, host_blocks[block], True, None))
        for holding in holdings:
            for block in holding.block_table[: self.num_blocks_for(holding.num_computed_tokens)]:
                holding.host_table.append(host_blocks[block] if block else 0)
                if block:
                    self.host_pool.share(host_blocks[block])
            for block in reversed(holding.block_table):
                if block:
                    self._free(block, holding)
            holding.block_table.clear()
            holding.unpublished()
        for host_block in host_blocks.values():  # the tables hold them now
            self._free_host(host_block, holdings[0])
        return bool(missing)

    def num_swapped_blocks(self, holdings: Iterable[Holding]) -> int:
        """Count the device blocks that swapped rows need to be back where they were."""
        return len({block for holding in holdings for block in holding.host_table if block})

    def num_swap_in_blocks(self, holdings: list[Holding]) -> int:
        """Count the device blocks that swapped rows need to run on: those they had, and as many more as if they
        opened."""
        return self.num_swapped_blocks(holdings) + sum(
            max(0, self.num_opening_entries(holding, holding.num_freed_blocks) - len(holding.host_table))
            for holding in holdings
        )

    def swap_in(self, holdings: list[Holding], step: int) -> None:
        """Give the rows the blocks again that they had before `swap_out`, which the plan of `step` loads."""
        blocks: dict[int, int] = {}
        for holding in holdings:
            for host_block in holding.host_table:
                if host_block and host_block not in blocks:
                    blocks[host_block] = self._allocate()
                    self.moves.add(Move(step, blocks[host_block], host_block, False, None))
                elif host_block:
                    self.pool.share(blocks[host_block])
                holding.block_table.append(blocks[host_block] if host_block else 0)
            for host_block in reversed(holding.host_table):
                if host_block:
                    self._free_host(host_block, holding)
            holding.host_table.clear()

    def num_lost_tokens(self, holdings: list[Holding]) -> int:
        """Count the tokens to compute again if the rows' blocks are lost, those that the window has passed too."""
        most_freed = max((holding.num_freed_blocks for holding in holdings), default=0)
        return (len(self._computed_blocks(holdings)) + most_freed) * self.block_size

    def _computed_blocks(self, holdings: list[Holding]) -> list[int]:
        """The rows' blocks that hold anything, each once."""
        return list(
            {
                block: None
                for holding in holdings
                for block in holding.block_table[: self.num_blocks_for(holding.num_computed_tokens)]
                if block
            }
        )

    def _host_copy(self, block: int) -> int:
        node = self.index.node_of(block)
        return node.host_block if node is not None else 0

    # The host tier

    def demote(self, step: int, num_tokens: int) -> None:
        """Have the plan of `step`, which computes `num_tokens`, copy the oldest idle cached blocks to the host before
        they are needed for something else. Every block there is to demote was computed once, so plans that copy more
        than they compute keep ahead of any load."""
        pool = self.pool
        num_lossless = pool.num_free - pool.num_idle_cached + pool.num_spare + len(self.moves)
        num_wanted = max(_MIN_DEMOTION_RESERVE, pool.num_blocks // _DEMOTION_SHARE) - num_lossless
        max_chosen = min(num_wanted, _MAX_DEMOTIONS + 2 * self.num_blocks_for(num_tokens), self.host_pool.num_free)
        if max_chosen <= 0 or not pool.num_idle_cached:
            return
        chosen: list[tuple[Node, int]] = []  # with its free list
        spare: list[int] = []
        for free_list, block in islice(pool.idle_blocks(), max_chosen + _DEMOTION_WINDOW):
            node = self.index.node_of(block)
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
            host_block = self._allocate_host()
            self.moves.add(Move(step, node.blocks[0], host_block, True, node, free_list))
            self.host_pool.free(host_block, cached=False)  # the move holds it

    def promote(self, step: int) -> None:
        """Have the plan of `step` copy what sessions will come back for from the host while nothing else moves, over
        device blocks of lower priority with which nothing is lost."""
        if len(self.moves):
            return
        for free_list in self.host_order.best(_PROMOTION_WINDOW):
            if not self._is_expected(free_list) or not self._has_room(free_list):
                continue
            for node in self._missing_nodes(self.host_pool.next_of(free_list)):
                if len(self.moves) == _MAX_PROMOTIONS:
                    return
                if not self._has_room(free_list):
                    break
                host_block, block = node.host_block, self._allocate()
                self.moves.add(Move(step, block, host_block, False, node, free_list))
                self.pool.free(block, cached=False)  # the move holds it

    def _has_room(self, free_list: int) -> bool:
        """Whether a block of a free list may come to the device: over what has a lower priority there, and is not
        lost."""
        target = self.pool.next_without_loss()
        return target > 0 and (
            not self.index.is_cached(target) or self.order.yields(self.pool.free_list_of(target), free_list)
        )

    def _missing_nodes(self, host_block: int) -> list[Node]:
        """Go from a host block's content back to what the device has; what the host alone has, first ones first. None
        if a part of it is nowhere."""
        nodes = []
        node = self.index.node_of_host(host_block)
        while node is not None and node.parent is not None and not node.blocks:
            if node.is_moving or not node.host_block:
                return []
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    # Bad content

    def unpublish(self, holding: Holding) -> None:
        """Unpublish what a row wrote, from its first block that it did not match on, nor any content computed on top
        of it."""
        node = self.index.find(holding.root, holding.token_ids, holding.num_matched_blocks)
        if node is not None:
            self._expose(*self.index.forget_subtree(node))

    def flush(self) -> None:
        """Unpublish all that was computed until now."""
        self._expose(*self.index.forget_all())

    def _expose(self, blocks: list[int], host_blocks: list[int]) -> None:
        for block in blocks:
            self.pool.expose(block)
        for host_block in host_blocks:
            self.host_pool.expose(host_block)

    def stands_on(self, holding: Holding, other: Holding) -> bool:
        """Whether a row matched, or has published, a block of the content that that of `other` wrote first."""
        num_tokens = (other.num_matched_blocks + 1) * self.block_size
        return (
            max(holding.num_matched_blocks, holding.num_published_blocks) > other.num_matched_blocks
            and holding.root == other.root
            and holding.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

    # Blocks

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.index.forget(block)
        return block

    def _allocate_host(self) -> int:
        host_block = self.host_pool.allocate()
        self.index.forget_host(host_block)
        return host_block

    def _free(self, block: int, holding: Holding) -> None:
        self.pool.free(block, cached=self.index.is_cached(block), free_list=holding.free_list)

    def _free_host(self, host_block: int, holding: Holding) -> None:
        cached = self.index.node_of_host(host_block) is not None
        self.host_pool.free(host_block, cached=cached, free_list=holding.free_list)


def _num_copies(request: Request) -> int:
    """Count the blocks that a request's beams may copy at once."""
    return request.num_rows if request.beam and request.num_rows > 1 else 0
