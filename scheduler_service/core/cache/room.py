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
    """The number of step plans sent in the current epoch. All decoding rows share this object, so one increment
    advances all of them."""

    num_steps: int = 0


@dataclass(slots=True, eq=False)
class Allocation:
    """The KV cache blocks allocated to one sequence on a worker, and the state of the token positions in these blocks.

    An allocation survives swaps between the device and the host. It ends when its blocks are released.
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
        """Return the length of the sequence's block table: the number of device blocks allocated so far. Blocks that
        the sliding window has passed are included."""
        return len(self.block_table)

    @property
    def blocks(self) -> set[int]:
        """Return the numbers of the device blocks in the sequence's block table."""
        return set(self.block_table) - {0}

    @property
    def host_blocks(self) -> set[int]:
        """Return the numbers of the host blocks that contain the sequence's KV cache while the sequence is swapped
        out."""
        return set(self.host_table) - {0}

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed + (0 if self._steps is None else self._steps.num_steps - self._joined_step)

    @property
    def publishes(self) -> bool:
        """Return whether more blocks of this sequence can be published in the prefix index.

        This is impossible if a swap has reset the published blocks and the sliding window has already passed the first
        blocks. The index then has no known parent for the next block.
        """
        return self.num_freed_blocks <= self.num_published_blocks

    def computed_blocks(self, block_size: int) -> list[int]:
        """Return the sequence's device blocks with computed positions, in order. The entry is 0 for a block that the
        sliding window has passed."""
        return self.block_table[: -(-self.num_computed_tokens // block_size)]

    def depends_on(self, other: "Allocation", block_size: int) -> bool:
        """Return whether this sequence uses KV content that the sequence of `other` wrote: it has matched or published
        the first block that `other` wrote."""
        num_tokens = (other.num_matched_blocks + 1) * block_size
        return (
            max(self.num_matched_blocks, self.num_published_blocks) > other.num_matched_blocks
            and self.root == other.root
            and self.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

    def compute(self, num_tokens: int) -> None:
        """Count `num_tokens` more positions of the sequence as computed."""
        self._num_computed += num_tokens

    def compute_again(self, position: int) -> None:
        """Mark the positions from `position` on as not computed, so that they are planned again."""
        self._num_computed = min(self._num_computed, position)

    def join_decoding(self, steps: StepCount) -> None:
        """Begin to count one computed position for every step plan, starting with the next plan. `steps` counts the
        plans."""
        self._steps, self._joined_step = steps, steps.num_steps

    def leave_decoding(self) -> None:
        """Stop counting one computed position for every step plan. Later positions are counted by calls of
        `compute`."""
        self._num_computed, self._steps = self.num_computed_tokens, None

    def may_be_forked(self, step: int) -> None:
        """Record that the prompt is computed before the plan of `step`. From this plan on, other samples of the request
        may share the prompt's blocks."""
        self.forkable_from = step

    def matched(self, num_blocks: int) -> None:
        """Record that the sequence starts with `num_blocks` KV cache blocks that other sequences have written."""
        self.num_matched_blocks = num_blocks

    def freed(self, num_blocks: int) -> None:
        """Record that the sliding window has passed the first `num_blocks` blocks of the sequence."""
        self.num_freed_blocks = max(self.num_freed_blocks, num_blocks)

    def published(self, node: Node | None, num_blocks: int) -> None:
        """Record how many blocks of the sequence are in the prefix index. `node` is the index node of the last of these
        blocks.

        If `node` is None, later blocks cannot be published after the earlier blocks.
        """
        self.last_node, self.num_published_blocks = node, num_blocks

    def released(self) -> None:
        """Reset the counts of the sequence's positions after all its KV cache blocks were released."""
        self.published(None, 0)
        self.num_freed_blocks = self.forkable_from = self._num_computed = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix cache hit: the cached content with which a sequence can start.

    The nodes in `device` are on the device. The nodes in `host` follow them, and must be loaded from the host.
    """

    device: tuple[Node, ...] = ()
    host: tuple[Node, ...] = ()

    @property
    def is_loading(self) -> bool:
        """Return whether a node in `host` is being moved between the device and the host already, for example for
        another request."""
        return any(node.is_moving for node in self.host)

    def without_host(self) -> "Match":
        """Return the part of this prefix cache hit that is on the device and needs no load from the host."""
        return Match(self.device)


class Room:
    """The calculation of how many KV cache blocks sequences need, and whether the block pool of one worker has enough
    free blocks.

    The methods change nothing.
    """

    def __init__(self, capacity: WorkerCapacity, pool: BlockPool, *, num_step_tokens: int, watermark: float) -> None:
        """Create the calculator for a pool of KV cache blocks.

        `watermark` is the share of the blocks, from 0 to 1, that must stay free when a request is admitted.
        """
        self.block_size, self.window = capacity.block_size, capacity.sliding_window
        self.pool = pool
        self._num_step_tokens = num_step_tokens
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def max_request_blocks(self, request: Request) -> int:
        """Return the largest number of KV cache blocks that a request may need at once before it can finish.

        All sequences of the request share the full blocks of the prompt. Each beam of a beam search may also need a
        copy of a block that another beam continues. With a sliding window, the number of blocks for one window per
        sequence is used if it is lower.
        """
        num_blocks = self._num_blocks_of_all(request)
        num_rows, num_copies = request.num_rows, _num_copies(request)
        num_shared = (len(request.prompt_token_ids) - 1) // self.block_size
        if self.window and request.beam:
            num_shared = 0  # the window may have passed the prompt before a late beam gets its row
        max_blocks = num_shared + num_rows * (num_blocks - num_shared) + num_copies
        if not self.window:
            return max_blocks
        return min(max_blocks, num_rows * min(num_blocks, self.num_chunk_blocks(1)) + num_copies)

    def num_chunk_blocks(self, num_tokens: int) -> int:
        """Return the largest number of KV cache blocks that a sequence reads and writes while it computes `num_tokens`
        positions.

        The model must have a sliding window.
        """
        return (self.window + num_tokens + self.block_size - 3) // self.block_size + 1

    def max_row_blocks(self, request: Request) -> int:
        """Return the largest number of KV cache blocks that each running sequence of a request may hold.

        Without a sliding window, this is the number of blocks for all positions. With a sliding window, each sequence
        may hold an equal part of the pool, but no more blocks than it can use in one step. If an equal part cannot hold
        one window, the limit is again the number of blocks for all positions.
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
        """Return whether a request may allocate `num_blocks` KV cache blocks from the pool now.

        The watermark (a share of the pool) must remain free, unless no other request runs (`alone`).
        """
        return num_blocks + (0 if alone else self._num_watermark_blocks) <= self.pool.num_free

    def num_opening_entries(self, allocation: Allocation, num_passed: int) -> int:
        """Return the length of the block table with which a sequence starts to run: the number of blocks for all its
        tokens.

        With a sliding window, the window may pass some blocks before the last token is computed. The table then covers
        the `num_passed` blocks that the window has passed already and the blocks for a chunk as long as the window.
        """
        num_blocks = self.num_blocks_for(len(allocation.token_ids))
        if not self.window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(self.window), self.max_row_blocks(allocation.request))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def num_opening_blocks(self, allocation: Allocation, match: Match) -> int:
        """Return by how many free blocks the pool shrinks when a sequence starts to run from a prefix cache hit.

        Matched blocks that are idle are included, because they stop being free.
        """
        num_passed = self.num_passed_blocks(match)
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in match.device[num_passed:])
        return self.num_opening_entries(allocation, num_passed) - max(len(match.device), num_passed) + num_idle

    def num_passed_blocks(self, match: Match) -> int:
        """Return the number of blocks of a prefix cache hit that the sequence need not hold, because the sliding window
        has passed them.

        The last matched block is always held, so that the next block can be published after it.
        """
        num_blocks = len(match.device) + len(match.host)
        return max(0, min(self.first_needed_block(num_blocks * self.block_size), num_blocks - 1))

    def num_fork_blocks(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> int:
        """Return the number of free KV cache blocks that a sample needs in order to start with `num_tokens` positions
        of another sample of its request."""
        num_full = num_tokens // self.block_size
        return max(1, self.num_opening_entries(allocation, min(relative.num_freed_blocks, num_full)) - num_full)

    def num_missing_blocks(self, allocation: Allocation, num_tokens: int) -> int:
        """Return the number of KV cache blocks that a sequence must still get before it can compute `num_tokens` more
        positions."""
        return self.num_blocks_for(allocation.num_computed_tokens + num_tokens) - allocation.num_granted_blocks

    def first_needed_block(self, position: int) -> int:
        """Return the index of the first entry of the block table that a sequence reads when it computes from `position`
        on. It is 0 unless the model has a sliding window."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def num_computable_tokens(self, allocation: Allocation, num_tokens: int) -> int:
        """Return how many of its next `num_tokens` tokens a sequence may compute with the KV cache blocks that it has
        or may get.

        The result is at least 1 if `num_tokens` is at least 1. With a sliding window, a long chunk of a prompt is
        shortened to the blocks that the sequence may hold, and so that the watermark stays free. The rest of the chunk
        can be computed in a later step.
        """
        if not self.window or num_tokens <= 1:
            return num_tokens
        table = allocation.block_table
        num_allowed = self.max_row_blocks(allocation.request) + allocation.num_freed_blocks - len(table)
        num_blocks = max(0, min(num_allowed, self.pool.num_free - self._num_watermark_blocks))
        num_positions = (len(table) + num_blocks) * self.block_size - allocation.num_computed_tokens
        return min(num_tokens, max(1, num_positions))

    def num_swapped_blocks(self, allocations: Iterable[Allocation]) -> int:
        """Return the number of device blocks needed to load the KV cache of swapped-out sequences from the host. A host
        block that several sequences share counts once."""
        return len({block for allocation in allocations for block in allocation.host_blocks})

    def num_swap_in_blocks(self, allocations: list[Allocation]) -> int:
        """Return the number of device blocks that the sequences of a swapped-out request need in order to continue.

        This includes the blocks to load from the host, and the further blocks that a new row would get for its tokens.
        """
        return self.num_swapped_blocks(allocations) + sum(
            max(0, self.num_opening_entries(allocation, allocation.num_freed_blocks) - len(allocation.host_table))
            for allocation in allocations
        )


def _num_copies(request: Request) -> int:
    """Return the number of KV cache blocks that the beams of a request may copy at once. It is 0 without a beam search
    or with a single beam."""
    return request.num_rows if request.beam and request.num_rows > 1 else 0
