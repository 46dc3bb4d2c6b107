"""What a sequence holds of a worker's cache, and room for its tokens: how many blocks they need, and may have.

The positions of a sequence, of which the cache knows no more than its tokens, its request and what it holds:

    freed      ├────┤                           the window has passed over these blocks
    matched    ├──────────┤                     these it found in the cache, or shares with a relative
    published  ├───────────────┤                and these others find
    computed   ├──────────────────┤             the K and V of these are there, or in a plan
    granted    ├────────────────────────┤       for these it has blocks, on the device or on the host
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.block_pool import BlockPool
from scheduler_service.core.cache.prefix_index import Node, Root
from scheduler_service.core.request import Request


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
    def num_granted_blocks(self) -> int:
        """Count the blocks that it was given on the device, those too that are freed."""
        return len(self.block_table)

    @property
    def blocks(self) -> set[int]:
        """The device blocks that it holds."""
        return set(self.block_table) - {0}

    @property
    def host_blocks(self) -> set[int]:
        """The host blocks that it holds, while it is swapped."""
        return set(self.host_table) - {0}

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed + (0 if self._steps is None else self._steps.num_steps - self._joined_step)

    @property
    def publishes(self) -> bool:
        """Whether its blocks can be published: not if a swap forgot what was published, and the window has passed over
        it."""
        return self.num_freed_blocks <= self.num_published_blocks

    def computed_blocks(self, block_size: int) -> list[int]:
        """Its blocks that hold anything; 0 where one is freed."""
        return self.block_table[: -(-self.num_computed_tokens // block_size)]

    def depends_on(self, other: "Holding", block_size: int) -> bool:
        """Whether this sequence matched, or has published, the first block that `other` wrote."""
        num_tokens = (other.num_matched_blocks + 1) * block_size
        return (
            max(self.num_matched_blocks, self.num_published_blocks) > other.num_matched_blocks
            and self.root == other.root
            and self.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

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

    def matched(self, num_blocks: int) -> None:
        """It begins behind so many blocks that others wrote."""
        self.num_matched_blocks = num_blocks

    def freed(self, num_blocks: int) -> None:
        """The window has passed over so many blocks."""
        self.num_freed_blocks = max(self.num_freed_blocks, num_blocks)

    def published(self, node: Node | None, num_blocks: int) -> None:
        """So many blocks are published or matched, the last as this content; none, and nothing is published any more
        on top of what was."""
        self.last_node, self.num_published_blocks = node, num_blocks

    def released(self) -> None:
        """Nothing is left of what it held."""
        self.published(None, 0)
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


class Room:
    """Counts blocks of one worker's device: no question changes anything."""

    def __init__(self, capacity: WorkerCapacity, pool: BlockPool, *, num_step_tokens: int, watermark: float) -> None:
        """`watermark` is the share of blocks an admission leaves free."""
        self.block_size, self.window = capacity.block_size, capacity.sliding_window
        self.pool = pool
        self._num_step_tokens = num_step_tokens
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

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
        return num_blocks + (0 if alone else self._num_watermark_blocks) <= self.pool.num_free

    def num_opening_entries(self, holding: Holding, num_passed: int) -> int:
        """Count the entries that a table has when its row opens: blocks for all its tokens. Where the window passes
        over some of these before the last is computed, those of a chunk as long as the window; `num_passed` are passed
        already."""
        num_blocks = self.num_blocks_for(len(holding.token_ids))
        if not self.window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(self.window), self.max_row_blocks(holding.request))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def num_opening_blocks(self, holding: Holding, match: Match) -> int:
        """Count the blocks that opening a row takes off the free list. Idle blocks that it matches itself are not free
        twice."""
        num_passed = self.num_passed_blocks(match)
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in match.device[num_passed:])
        return self.num_opening_entries(holding, num_passed) - max(len(match.device), num_passed) + num_idle

    def num_passed_blocks(self, match: Match) -> int:
        """Count the blocks of a match that a sequence which goes on after it need not hold: the window has passed over
        them. The last is held, since content is published on top of it."""
        num_blocks = len(match.device) + len(match.host)
        return max(0, min(self.first_needed_block(num_blocks * self.block_size), num_blocks - 1))

    def num_fork_blocks(self, holding: Holding, relative: Holding, num_tokens: int) -> int:
        """Count the blocks that a fork of `num_tokens` positions takes off the free list."""
        num_full = num_tokens // self.block_size
        return max(1, self.num_opening_entries(holding, min(relative.num_freed_blocks, num_full)) - num_full)

    def num_missing_blocks(self, holding: Holding, num_tokens: int) -> int:
        """Count the blocks that a row must get before it can compute `num_tokens` more."""
        return self.num_blocks_for(holding.num_computed_tokens + num_tokens) - holding.num_granted_blocks

    def first_needed_block(self, position: int) -> int:
        """Return the index of the first block that is read by a row that computes from this position on."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def num_computable_tokens(self, holding: Holding, num_tokens: int) -> int:
        """Count the tokens, of so many behind those computed, for which there are blocks that a row may have: always
        one, if it has any. Under a window the watermark binds chunks too, since what they take beside the window they
        need not have."""
        if not self.window or num_tokens <= 1:
            return num_tokens
        table = holding.block_table
        num_allowed = self.max_row_blocks(holding.request) + holding.num_freed_blocks - len(table)
        num_blocks = max(0, min(num_allowed, self.pool.num_free - self._num_watermark_blocks))
        num_positions = (len(table) + num_blocks) * self.block_size - holding.num_computed_tokens
        return min(num_tokens, max(1, num_positions))

    def num_swapped_blocks(self, holdings: Iterable[Holding]) -> int:
        """Count the device blocks that swapped rows need to be back where they were."""
        return len({block for holding in holdings for block in holding.host_blocks})

    def num_swap_in_blocks(self, holdings: list[Holding]) -> int:
        """Count the device blocks that swapped rows need to run on: those they had, and as many more as if they
        opened."""
        return self.num_swapped_blocks(holdings) + sum(
            max(0, self.num_opening_entries(holding, holding.num_freed_blocks) - len(holding.host_table))
            for holding in holdings
        )


def _num_copies(request: Request) -> int:
    """Count the blocks that a request's beams may copy at once."""
    return request.num_rows if request.beam and request.num_rows > 1 else 0
