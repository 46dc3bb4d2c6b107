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
    """The number of step plans sent to the current worker. All decoding sequences share this counter, so that one
    increment counts a token for each of them."""

    num_steps: int = 0


@dataclass(slots=True, eq=False)
class Allocation:
    """The KV cache blocks of one sequence on a worker, and the state of its token positions: which positions are
    computed, and which blocks are in the prefix index.

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
        """Return the length of the sequence's block table. It includes an entry for each block that was freed because
        the sliding window has passed it."""
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
        """Return whether further blocks of this sequence can still be added to the prefix index.

        A block can be added only after the preceding blocks. This is impossible if the sliding window has passed the
        first blocks and a swap has reset the record of the blocks in the index.
        """
        return self.num_freed_blocks <= self.num_published_blocks

    def computed_blocks(self, block_size: int) -> list[int]:
        """Return the part of the sequence's block table that contains computed positions. An entry is 0 if the block
        was freed because the sliding window has passed it."""
        return self.block_table[: -(-self.num_computed_tokens // block_size)]

    def depends_on(self, other: "Allocation", block_size: int) -> bool:
        """Return whether this sequence uses KV cache content that another sequence wrote. `other` is the allocation of
        that sequence.

        The result is true if this sequence has matched or published the first block that the other sequence wrote.
        """
        num_tokens = (other.num_matched_blocks + 1) * block_size
        return (
            max(self.num_matched_blocks, self.num_published_blocks) > other.num_matched_blocks
            and self.root == other.root
            and self.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

    def compute(self, num_tokens: int) -> None:
        """Record that a plan computes the next `num_tokens` positions of the sequence."""
        self._num_computed += num_tokens

    def compute_again(self, position: int) -> None:
        """Make the scheduler plan the positions from `position` on once more, as if they had never been computed."""
        self._num_computed = min(self._num_computed, position)

    def join_decoding(self, steps: StepCount) -> None:
        """Count one more computed position for each step plan from now on, without further calls. `steps` is the
        counter of step plans."""
        self._steps, self._joined_step = steps, steps.num_steps

    def leave_decoding(self) -> None:
        """Stop counting one computed position for each step plan. From now on, `compute` must be called for computed
        positions."""
        self._num_computed, self._steps = self.num_computed_tokens, None

    def may_be_forked(self, step: int) -> None:
        """Record that other samples of the request may share the prompt's blocks from the plan of `step` on. The prompt
        is computed before this plan."""
        self.forkable_from = step

    def matched(self, num_blocks: int) -> None:
        """Record that the first `num_blocks` KV cache blocks of the sequence were written by other sequences."""
        self.num_matched_blocks = num_blocks

    def freed(self, num_blocks: int) -> None:
        """Record that the sequence no longer uses its first `num_blocks` blocks, because the sliding window has passed
        them."""
        self.num_freed_blocks = max(self.num_freed_blocks, num_blocks)

    def published(self, node: Node | None, num_blocks: int) -> None:
        """Record that the first `num_blocks` blocks of the sequence are in the prefix index. `node` is the index node
        of the last of them.

        If `node` is None, no later block of the sequence can continue these blocks in the index.
        """
        self.last_node, self.num_published_blocks = node, num_blocks

    def released(self) -> None:
        """Reset the record of computed, published and freed positions, because all KV cache blocks of the sequence were
        released."""
        self.published(None, 0)
        self.num_freed_blocks = self.forkable_from = self._num_computed = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix cache hit: the cached blocks with which a sequence can start.

    The first blocks of the prefix are on the device (`device`). The blocks that follow must be loaded from the host
    (`host`).
    """

    device: tuple[Node, ...] = ()
    host: tuple[Node, ...] = ()

    @property
    def is_loading(self) -> bool:
        """Return whether a block of this hit is already being copied between the host and the device, for example for
        another request."""
        return any(node.is_moving for node in self.host)

    def without_host(self) -> "Match":
        """Return the part of this prefix cache hit that is already on the device."""
        return Match(self.device)


class Room:
    """Computes how many KV cache blocks a sequence needs, and whether the worker's block pool has enough free blocks.
    The methods only read state."""

    def __init__(self, capacity: WorkerCapacity, pool: BlockPool, *, num_step_tokens: int, watermark: float) -> None:
        """Create the calculator for a pool of KV cache blocks.

        `watermark` is the share of the blocks, from 0 to 1, that must stay free when a request is admitted.
        """
        self.block_size, self.window = capacity.block_size, capacity.layer_groups[0].sliding_window
        self.pool = pool
        self._num_step_tokens = num_step_tokens
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def max_request_blocks(self, request: Request) -> int:
        """Return the largest number of KV cache blocks that a request may need at the same time.

        All sequences of the request share the full blocks of the prompt. In a beam search, each beam may also need a
        copy of a shared block. With a sliding window, the result is at most the number of blocks that cover one window
        per sequence, plus these copies.
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
        """Return how many KV cache blocks a sequence needs at most while it computes `num_tokens` positions: the blocks
        that it reads or writes. The model must have a sliding window."""
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

        A fixed share of the pool (the watermark) must still be free afterwards. If no other request runs (`alone`), the
        request may use all free blocks.
        """
        return num_blocks + (0 if alone else self._num_watermark_blocks) <= self.pool.num_free

    def num_opening_entries(self, allocation: Allocation, num_passed: int) -> int:
        """Return the length of a sequence's block table at its start: the number of blocks for all tokens that the
        sequence has then.

        With a sliding window, the table may be shorter. It then covers `num_passed` blocks that the window has already
        passed, and the blocks for a chunk as long as the window.
        """
        num_blocks = self.num_blocks_for(len(allocation.token_ids))
        if not self.window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(self.window), self.max_row_blocks(allocation.request))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def num_opening_blocks(self, allocation: Allocation, match: Match) -> int:
        """Return how many free blocks of the pool a sequence uses up when it starts from the prefix cache hit `match`.

        Matched blocks that no other sequence uses are included, because they are free until then.
        """
        num_passed = self.num_passed_blocks(match)
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in match.device[num_passed:])
        return self.num_opening_entries(allocation, num_passed) - max(len(match.device), num_passed) + num_idle

    def num_passed_blocks(self, match: Match) -> int:
        """Return how many of the first blocks of a prefix cache hit a sequence need not keep, because its sliding
        window has passed them.

        The last matched block is always kept, because the next block is added to the prefix index after it.
        """
        num_blocks = len(match.device) + len(match.host)
        return max(0, min(self.first_needed_block(num_blocks * self.block_size), num_blocks - 1))

    def num_fork_blocks(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> int:
        """Return how many free KV cache blocks a new sample needs if it shares the first `num_tokens` positions of
        another sample of its request."""
        num_full = num_tokens // self.block_size
        return max(1, self.num_opening_entries(allocation, min(relative.num_freed_blocks, num_full)) - num_full)

    def num_missing_blocks(self, allocation: Allocation, num_tokens: int) -> int:
        """Return how many more KV cache blocks must be allocated to a sequence before it can compute its next
        `num_tokens` positions."""
        return self.num_blocks_for(allocation.num_computed_tokens + num_tokens) - allocation.num_granted_blocks

    def first_needed_block(self, position: int) -> int:
        """Return the index in the block table of the first block that a sequence still reads when it computes
        `position` and later positions. It is 0 unless the model has a sliding window."""
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
        """Return how many device blocks are needed to load swapped-out sequences from the host. A host block that
        several sequences share is counted once."""
        return len({block for allocation in allocations for block in allocation.host_blocks})

    def num_swap_in_blocks(self, allocations: list[Allocation]) -> int:
        """Return how many device blocks a swapped-out request needs in order to continue.

        The number includes the blocks to load from the host, and new blocks for tokens of its sequences that have no
        block yet.
        """
        return self.num_swapped_blocks(allocations) + sum(
            max(0, self.num_opening_entries(allocation, allocation.num_freed_blocks) - len(allocation.host_table))
            for allocation in allocations
        )


def _num_copies(request: Request) -> int:
    """Return how many KV cache blocks the beams of a request may need at once for copies of shared blocks
    (copy-on-write). It is 0 without a beam search or with a single beam."""
    return request.num_rows if request.beam and request.num_rows > 1 else 0
