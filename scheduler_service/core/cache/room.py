"""The blocks allocated to one sequence, and the number of blocks that a sequence needs and may have.

The cache knows only three things about a sequence: its tokens, its request and its allocation. The ranges of its
positions are:

    freed      ├────┤                           the sliding window has passed these blocks
    matched    ├──────────┤                     prefix cache hits, or blocks shared with a relative
    published  ├───────────────┤                other sequences can match these blocks
    computed   ├──────────────────┤             K and V exist, or a plan in flight computes them
    granted    ├────────────────────────┤       blocks are allocated, on the device or on the host
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.block_pool import BlockPool
from scheduler_service.core.cache.prefix_index import Node, Root
from scheduler_service.core.request import Request


@dataclass(slots=True)
class StepCount:
    """The number of plans in the current epoch. Incrementing it advances all decoding rows at once."""

    num_steps: int = 0


@dataclass(slots=True, eq=False)
class Allocation:
    """The KV cache blocks allocated to one sequence on a worker, and the state of their positions.

    An allocation survives swaps between the device and the host. It ends when the blocks are released.
    """

    request: Request
    root: Root
    token_ids: list[int]  # the sequence's own list, which grows
    free_list: int = 0  # the free list for its blocks when they are idle
    block_table: list[int] = field(default_factory=list)  # device blocks; 0 for a block that the window has passed
    host_table: list[int] = field(default_factory=list)  # host blocks while the sequence is swapped
    last_node: Node | None = None  # of the last block in the table that was published or matched
    num_published_blocks: int = 0
    num_matched_blocks: int = 0  # kept after the release: results of the row may be in flight
    num_freed_blocks: int = 0  # at the start of the table: blocks that the window has passed
    forkable_from: int = 0  # the first step that may fork its prompt; 0: the prompt is not computed
    # A decoding row computes one position in every plan and is not visited. Its count is then the count at which it
    # began to decode, plus the number of plans since.
    _num_computed: int = 0
    _steps: StepCount | None = None  # set while the row decodes
    _joined_step: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.block_table)} blocks and {len(self.host_table)} on the host: {self.num_freed_blocks} freed, "
            f"{self.num_matched_blocks} matched, {self.num_published_blocks} published; "
            f"{self.num_computed_tokens} tokens computed"
        )

    @property
    def num_granted_blocks(self) -> int:
        """Return the number of device blocks allocated so far, including freed blocks."""
        return len(self.block_table)

    @property
    def blocks(self) -> set[int]:
        """Return the ids of the device blocks in the sequence's block table."""
        return set(self.block_table) - {0}

    @property
    def host_blocks(self) -> set[int]:
        """Return the host blocks that the sequence holds while it is swapped."""
        return set(self.host_table) - {0}

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed + (0 if self._steps is None else self._steps.num_steps - self._joined_step)

    @property
    def publishes(self) -> bool:
        """Return whether further blocks can be published.

        They cannot if a swap has reset the published blocks and the window has passed some of the blocks. No content is
        then available to publish on top of.
        """
        return self.num_freed_blocks <= self.num_published_blocks

    def computed_blocks(self, block_size: int) -> list[int]:
        """Return the blocks with computed positions; 0 for a freed block."""
        return self.block_table[: -(-self.num_computed_tokens // block_size)]

    def depends_on(self, other: "Allocation", block_size: int) -> bool:
        """Return whether this sequence matched or published the first block that `other` wrote."""
        num_tokens = (other.num_matched_blocks + 1) * block_size
        return (
            max(self.num_matched_blocks, self.num_published_blocks) > other.num_matched_blocks
            and self.root == other.root
            and self.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

    def compute(self, num_tokens: int) -> None:
        """Count `num_tokens` more positions as computed."""
        self._num_computed += num_tokens

    def compute_again(self, position: int) -> None:
        """Mark the positions from `position` on as not computed."""
        self._num_computed = min(self._num_computed, position)

    def join_decoding(self, steps: StepCount) -> None:
        """Count one computed position for every plan from the next plan on."""
        self._steps, self._joined_step = steps, steps.num_steps

    def leave_decoding(self) -> None:
        """Stop counting a position for every plan. `compute` counts positions again."""
        self._num_computed, self._steps = self.num_computed_tokens, None

    def may_be_forked(self, step: int) -> None:
        """Record that the prompt is computed before the plan of `step`."""
        self.forkable_from = step

    def matched(self, num_blocks: int) -> None:
        """Record that the sequence starts after `num_blocks` blocks that other sequences wrote."""
        self.num_matched_blocks = num_blocks

    def freed(self, num_blocks: int) -> None:
        """Record that the sliding window has passed `num_blocks` blocks."""
        self.num_freed_blocks = max(self.num_freed_blocks, num_blocks)

    def published(self, node: Node | None, num_blocks: int) -> None:
        """Record how many blocks are published or matched, and the index node of the last such block.

        `None` as the node stops publishing on top of the earlier blocks.
        """
        self.last_node, self.num_published_blocks = node, num_blocks

    def released(self) -> None:
        """Reset the counts after all blocks were released."""
        self.published(None, 0)
        self.num_freed_blocks = self.forkable_from = self._num_computed = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Cached content that a sequence can start from: first nodes on the device, then nodes to load from the host."""

    device: tuple[Node, ...] = ()
    host: tuple[Node, ...] = ()

    @property
    def is_loading(self) -> bool:
        """Return whether another group's load of this content is in progress."""
        return any(node.is_moving for node in self.host)

    def without_host(self) -> "Match":
        """Return the part that needs no load from the host."""
        return Match(self.device)


class Room:
    """The block counts of one worker's device. Its methods change nothing."""

    def __init__(self, capacity: WorkerCapacity, pool: BlockPool, *, num_step_tokens: int, watermark: float) -> None:
        """Create the counts for a block pool.

        `watermark` is the share of the blocks that an admission leaves free.
        """
        self.block_size, self.window = capacity.block_size, capacity.sliding_window
        self.pool = pool
        self._num_step_tokens = num_step_tokens
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def num_most_blocks(self, request: Request) -> int:
        """Return the number of blocks that a request may need at once before it can finish.

        All rows share the full blocks of the prompt. Each beam may need a copy of a block that another beam continues.
        With a sliding window, the blocks of one window per row are enough if they are fewer.
        """
        num_blocks = self._num_blocks_of_all(request)
        num_rows, num_copies = request.num_rows, _num_copies(request)
        num_shared = (len(request.prompt_token_ids) - 1) // self.block_size
        if self.window and request.beam:
            num_shared = 0  # the window may have passed the prompt before a late beam gets its row
        num_most = num_shared + num_rows * (num_blocks - num_shared) + num_copies
        if not self.window:
            return num_most
        return min(num_most, num_rows * min(num_blocks, self.num_chunk_blocks(1)) + num_copies)

    def num_chunk_blocks(self, num_tokens: int) -> int:
        """Return the largest number of blocks that a row reads and writes while it computes `num_tokens` positions.

        The model must have a sliding window.
        """
        return (self.window + num_tokens + self.block_size - 3) // self.block_size + 1

    def max_row_blocks(self, request: Request) -> int:
        """Return the largest number of blocks that each row of a request may hold.

        With a sliding window, each row may hold an equal part of the pool, but no more blocks than it can use in one
        step. If an equal part cannot hold a window, or if the model has no window, the limit is the number of blocks
        for all positions.
        """
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
        """Return whether a group may allocate `num_blocks` blocks from the free list now.

        The watermark must remain free, unless the group runs `alone`.
        """
        return num_blocks + (0 if alone else self._num_watermark_blocks) <= self.pool.num_free

    def num_opening_entries(self, allocation: Allocation, num_passed: int) -> int:
        """Return the number of block table entries with which a row starts: the blocks for all tokens of the sequence.

        The sliding window may pass some of these blocks before the last token is computed. The table then starts with
        the blocks for a chunk as long as the window, after `num_passed` blocks that the window has passed already.
        """
        num_blocks = self.num_blocks_for(len(allocation.token_ids))
        if not self.window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(self.window), self.max_row_blocks(allocation.request))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def num_opening_blocks(self, allocation: Allocation, match: Match) -> int:
        """Return the number of blocks that a new row takes from the free list.

        Idle blocks that the row matches are included, because they stop being free.
        """
        num_passed = self.num_passed_blocks(match)
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in match.device[num_passed:])
        return self.num_opening_entries(allocation, num_passed) - max(len(match.device), num_passed) + num_idle

    def num_passed_blocks(self, match: Match) -> int:
        """Return the number of matched blocks that the sequence need not hold, because the window has passed them.

        The last matched block is always held, because new content is published on top of it.
        """
        num_blocks = len(match.device) + len(match.host)
        return max(0, min(self.first_needed_block(num_blocks * self.block_size), num_blocks - 1))

    def num_fork_blocks(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> int:
        """Return the number of free blocks needed to fork `num_tokens` positions from another sequence of the group."""
        num_full = num_tokens // self.block_size
        return max(1, self.num_opening_entries(allocation, min(relative.num_freed_blocks, num_full)) - num_full)

    def num_missing_blocks(self, allocation: Allocation, num_tokens: int) -> int:
        """Return the number of blocks that a row must get before it can compute `num_tokens` more positions."""
        return self.num_blocks_for(allocation.num_computed_tokens + num_tokens) - allocation.num_granted_blocks

    def first_needed_block(self, position: int) -> int:
        """Return the index of the first block that a row reads when it computes from `position` on."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def num_computable_tokens(self, allocation: Allocation, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens a row may compute with the blocks that it has or may get.

        The result is at least 1 if `num_tokens` is. With a sliding window, chunks also leave the watermark free. The
        blocks of a chunk beyond the window are not essential.
        """
        if not self.window or num_tokens <= 1:
            return num_tokens
        table = allocation.block_table
        num_allowed = self.max_row_blocks(allocation.request) + allocation.num_freed_blocks - len(table)
        num_blocks = max(0, min(num_allowed, self.pool.num_free - self._num_watermark_blocks))
        num_positions = (len(table) + num_blocks) * self.block_size - allocation.num_computed_tokens
        return min(num_tokens, max(1, num_positions))

    def num_swapped_blocks(self, allocations: Iterable[Allocation]) -> int:
        """Return the number of device blocks that swapped rows need to get their content back."""
        return len({block for allocation in allocations for block in allocation.host_blocks})

    def num_swap_in_blocks(self, allocations: list[Allocation]) -> int:
        """Return the number of device blocks that swapped rows need to continue.

        These are their former blocks, and the further blocks that a new row would get.
        """
        return self.num_swapped_blocks(allocations) + sum(
            max(0, self.num_opening_entries(allocation, allocation.num_freed_blocks) - len(allocation.host_table))
            for allocation in allocations
        )


def _num_copies(request: Request) -> int:
    """Return the number of blocks that a request's beams may copy at once."""
    return request.num_rows if request.beam and request.num_rows > 1 else 0
