"""The blocks allocated to one sequence, and the number of blocks that a sequence needs and may have.

The cache knows only three things about a sequence: its tokens, its request and its allocation. The ranges of its
positions are:

    freed      ├────┤                           the layer group's window has passed these blocks
    matched    ├──────────┤                     prefix cache hits, or blocks shared with a relative
    published  ├───────────────┤                other sequences can match these blocks
    computed   ├──────────────────┤             K and V exist, or a plan in flight computes them
    granted    ├────────────────────────┤       blocks are allocated, on the device or on the host

A sequence has a block table for each layer group. The tables differ in what is freed and granted.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache.block_pool import BlockPool
from scheduler_service.core.cache.prefix_index import BlockContent, Node, Root, Windows
from scheduler_service.core.request import Request


@dataclass(slots=True)
class StepCount:
    """The number of step plans sent to the current worker. All decoding sequences share this counter, so that one
    increment counts a token for each of them."""

    num_steps: int = 0


@dataclass(slots=True, eq=False)
class BlockTable:
    """The KV cache blocks of one sequence in one layer group."""

    group: int
    window: int  # the sliding window of the layer group, in tokens; 0: none
    is_spine: bool
    blocks: list[int] = field(default_factory=list)  # device blocks; 0 for a block that the window has passed
    host_blocks: list[int] = field(default_factory=list)  # while the sequence is swapped
    num_freed: int = 0  # at the start of the table: blocks that the window has passed

    def freed(self, num_blocks: int) -> None:
        """Record that the sequence no longer uses the first `num_blocks` blocks of the table, because the sliding
        window has passed them."""
        self.num_freed = max(self.num_freed, num_blocks)


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The states of one sequence on a worker whose model has states. Each is a reference to a state of the pool, which
    the sequence holds."""

    own: tuple[int, ...] = ()  # the states that its row writes: one, or two if its last position may be computed again
    source: int = 0  # the state with which its row starts, until a plan computes the row; 0: zeros
    fork: int = 0  # the state before the last token of the prompt, with which further samples start
    host: int = 0  # the host state while the sequence is swapped
    junction: int = 0  # the number of cached blocks of its prompt, if no state is cached after them
    last: BlockContent | None = None  # the last state that was saved while it decoded; it is not held

    @property
    def current(self) -> int:
        """Return the device state after the computed tokens of a row that writes one state."""
        return self.source or self.own[0]

    @property
    def held(self) -> list[int]:
        """Return all device states that the sequence holds."""
        return [state for state in (*self.own, self.source, self.fork) if state]


@dataclass(slots=True, eq=False)
class Allocation:
    """The KV cache blocks of one sequence on a worker, and the state of its token positions: which positions are
    computed, and which blocks are in the prefix index.

    An allocation survives swaps between the device and the host. It ends when its blocks are released.
    """

    request: Request
    root: Root
    token_ids: list[int]  # the sequence's own list, which grows
    tables: tuple[BlockTable, ...]  # one for each layer group of the worker's model, the longest reach first
    free_list: int = 0  # the free list for its blocks when they are idle
    last_node: Node | None = None  # of the last block in the tables that was published or matched
    num_published_blocks: int = 0
    num_matched_blocks: int = 0  # kept after the release: results of the row may be in flight
    branches: tuple[int, ...] = ()  # numbers of blocks after which later sequences will probably continue
    forkable_from: int = 0  # the first step that may fork its prompt; 0: the prompt is not computed
    states: SequenceStates = field(default_factory=SequenceStates)
    # A decoding row computes one position in every plan and is not visited. Its count is then the count at which it
    # began to decode, plus the number of plans since.
    _num_computed: int = 0
    _steps: StepCount | None = None  # set while the row decodes
    _joined_step: int = 0

    def __str__(self) -> str:
        sizes = ", ".join(f"{len(table.blocks)} ({table.num_freed} freed)" for table in self.tables)
        return (
            f"tables of {sizes} blocks and {len(self.host_blocks)} on the host: {self.num_matched_blocks} matched, "
            f"{self.num_published_blocks} published; {self.num_computed_tokens} tokens computed"
        )

    @property
    def num_granted_blocks(self) -> int:
        """Return the length of the sequence's shortest block table. It includes an entry for each block that was freed
        because the sliding window has passed it."""
        return min([len(table.blocks) for table in self.tables])

    @property
    def blocks(self) -> set[int]:
        """Return the numbers of the device blocks in the sequence's block tables."""
        return {block for table in self.tables for block in table.blocks} - {0}

    @property
    def host_blocks(self) -> set[int]:
        """Return the numbers of the host blocks that contain the sequence's KV cache while the sequence is swapped
        out."""
        return {block for table in self.tables for block in table.host_blocks} - {0}

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed + (0 if self._steps is None else self._steps.num_steps - self._joined_step)

    @property
    def publishes(self) -> bool:
        """Return whether further blocks of this sequence can still be added to the prefix index.

        A block can be added only after the preceding blocks. This is impossible if the window of the layer group with
        the longest reach has passed the first blocks, and a swap has reset the record of the blocks in the index.
        """
        return self.tables[0].num_freed <= self.num_published_blocks

    def computed_blocks(self, table: BlockTable, block_size: int) -> list[int]:
        """Return the part of one of the sequence's block tables that contains computed positions. An entry is 0 if the
        block was freed because the sliding window has passed it."""
        return table.blocks[: -(-self.num_computed_tokens // block_size)]

    def first_blocks(self, num_blocks: int) -> list[list[int]]:
        """Return the first `num_blocks` entries of the sequence's block table in each layer group."""
        return [table.blocks[:num_blocks] for table in self.tables]

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

    def matched(self, num_blocks: int, branches: tuple[int, ...]) -> None:
        """Record that the first `num_blocks` KV cache blocks of the sequence were written by other sequences.

        `branches` are the numbers of blocks after which later sequences will probably continue.
        """
        self.num_matched_blocks, self.branches = num_blocks, branches

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
        for table in self.tables:
            table.num_freed = 0
        self.forkable_from = self._num_computed = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix cache hit: the cached blocks with which a sequence can start.

    A shorter prefix, of the first `num_on_device` nodes, needs nothing from the host. For the whole prefix, the
    contents `loads` must be loaded. The spine of a longer prefix, of `num_spine_blocks`, may be cached too.
    """

    nodes: tuple[Node, ...] = ()
    num_on_device: int = 0
    loads: tuple[BlockContent, ...] = ()
    num_spine_blocks: int = 0

    @property
    def num_loaded_blocks(self) -> int:
        """Return how many blocks the prefix is longer than the one that needs nothing from the host."""
        return len(self.nodes) - self.num_on_device

    @property
    def is_loading(self) -> bool:
        """Return whether a block of this hit is already being copied between the host and the device, for example for
        another request."""
        return any(content.is_moving for content in self.loads)

    def without_host(self) -> "Match":
        """Return the part of this prefix cache hit that is already on the device."""
        return Match(self.nodes[: self.num_on_device], self.num_on_device, (), self.num_spine_blocks)


class Room:
    """Computes how many KV cache blocks a sequence needs, and whether the worker's block pool has enough free blocks.
    The methods only read state.

    All layer groups take their blocks from one pool, so that a number of blocks is the sum over the groups.
    """

    def __init__(self, capacity: WorkerCapacity, pool: BlockPool, *, num_step_tokens: int, watermark: float) -> None:
        """Create the calculator for a pool of KV cache blocks.

        `watermark` is the share of the blocks, from 0 to 1, that must stay free when a request is admitted.
        """
        self.block_size, self.windows = capacity.block_size, Windows(capacity.windows, capacity.block_size)
        self.pool = pool
        self._has_states = capacity.num_device_states > 0
        self._sliding = [window for window in capacity.windows if window]
        self._num_full = len(capacity.windows) - len(self._sliding)  # layer groups without a window
        # Only if some layer groups have windows and some have none, samples may share less of their prompt than
        # `max_request_blocks` counts.
        self.is_mixed = 0 < self._num_full < len(capacity.windows)
        self._num_step_tokens = num_step_tokens
        self._num_watermark_blocks = int(watermark * capacity.num_device_blocks)

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def max_request_blocks(self, request: Request) -> int:
        """Return the largest number of KV cache blocks that a request may need at the same time.

        All samples of the request share the full blocks of the prompt. In a beam search, each beam may also need a copy
        of a shared block. In a layer group with a sliding window, a sequence needs at most the blocks that cover one
        window.
        """
        num_blocks, num_rows = self._num_blocks_of_all(request), request.num_rows
        most = self._num_distinct_blocks(request)
        return (
            self._num_full * most
            + self._num_copies(request)
            + sum(min(most, num_rows * min(num_blocks, self.num_chunk_blocks(window, 1))) for window in self._sliding)
        )

    @property
    def max_sequence_blocks(self) -> int | None:
        """Return the length of the longest block table with which one sequence fits into the pool. The result is None
        if all layer groups have a window, and the pool can hold one of each."""
        num_window_blocks = [self.num_chunk_blocks(window, 1) for window in self._sliding]
        if not self._num_full and sum(num_window_blocks) <= self.pool.num_blocks:
            return None

        def total(num_blocks: int) -> int:
            return self._num_full * num_blocks + sum(min(num_blocks, most) for most in num_window_blocks)

        return bisect_right(range(1, self.pool.num_blocks + 1), self.pool.num_blocks, key=total)

    def num_chunk_blocks(self, window: int, num_tokens: int) -> int:
        """Return how many KV cache blocks a sequence needs at most in a layer group with a sliding window while it
        computes `num_tokens` positions: the blocks that it reads or writes."""
        return (window + num_tokens + self.block_size - 3) // self.block_size + 1

    def max_table_blocks(self, request: Request, window: int) -> int:
        """Return the largest number of KV cache blocks that each running sequence of a request may hold in a layer
        group with the given sliding window.

        Without a window, this is the number of blocks for all positions. With a window, each sequence may hold the
        blocks of one window and an equal part of what the request's other needs leave of the pool, but no more blocks
        than it can use in one step. If the pool cannot hold the request, the limit is again the number of blocks for
        all positions.
        """
        num_blocks = self._num_blocks_of_all(request)
        if not window:
            return num_blocks
        num_rows, num_full = request.num_rows, self._num_full * self._num_distinct_blocks(request)
        least = [min(num_blocks, self.num_chunk_blocks(each, 1)) for each in self._sliding]
        num_left = self.pool.num_blocks - self._num_copies(request) - num_full - num_rows * sum(least)
        if num_left < 0:
            return num_blocks
        num_allowed = min(num_blocks, self.num_chunk_blocks(window, 1)) + num_left // (num_rows * len(least))
        return min(num_blocks, num_allowed, self.num_chunk_blocks(window, self._num_step_tokens))

    def _num_blocks_of_all(self, request: Request) -> int:
        return self.num_blocks_for(len(request.prompt_token_ids) + max(0, request.max_tokens - 1))

    def _num_distinct_blocks(self, request: Request) -> int:
        """Return how many different KV cache blocks the sequences of a request need in a layer group without a window.

        They share the full blocks of the prompt. With a window in any layer group, beams may share nothing: the window
        of a beam that is computed again may have passed the prompt before the next beam gets its row. With states, the
        state after the prompt may be lost.
        """
        num_blocks = self._num_blocks_of_all(request)
        num_shared = (len(request.prompt_token_ids) - 1) // self.block_size
        if request.beam and (self._sliding or self._has_states):
            num_shared = 0
        return num_shared + request.num_rows * (num_blocks - num_shared)

    def _num_copies(self, request: Request) -> int:
        """Return how many KV cache blocks the beams of a request may need at once for copies of shared blocks
        (copy-on-write). It is 0 without a beam search or with a single beam."""
        has_copies = request.beam and request.num_rows > 1
        return request.num_rows * len(self.windows.of_groups) if has_copies else 0

    def can_allocate(self, num_blocks: int, *, alone: bool) -> bool:
        """Return whether a request may allocate `num_blocks` KV cache blocks from the pool now.

        A fixed share of the pool (the watermark) must still be free afterwards. If no other request runs (`alone`), the
        request may use all free blocks.
        """
        return num_blocks + (0 if alone else self._num_watermark_blocks) <= self.pool.num_free

    def num_opening_entries(self, allocation: Allocation, table: BlockTable, num_passed: int) -> int:
        """Return the length of one of a sequence's block tables at its start: the number of blocks for all tokens that
        the sequence has then.

        With a sliding window, the table may be shorter. It then covers `num_passed` blocks that the window has already
        passed, and the blocks for a chunk as long as the window.
        """
        num_blocks, window = self.num_blocks_for(len(allocation.token_ids)), table.window
        if not window:
            return num_blocks
        num_chunk_blocks = min(self.num_chunk_blocks(window, window), self.max_table_blocks(allocation.request, window))
        return min(num_blocks, num_passed + num_chunk_blocks)

    def num_opening_blocks(self, allocation: Allocation, match: Match) -> int:
        """Return how many free blocks of the pool a sequence uses up when it starts from the prefix cache hit `match`.

        Matched blocks that no other sequence uses are included, because they are free until then.
        """
        total = 0
        for table in allocation.tables:
            num_passed = self.windows.num_passed(table.group, len(match.nodes))
            copies = [node.content(table.group).blocks for node in match.nodes[num_passed:]]
            num_used = sum(self.pool.ref_count(blocks[0]) > 0 for blocks in copies if blocks)
            total += self.num_opening_entries(allocation, table, num_passed) - num_passed - num_used
        return total

    def num_fork_blocks(self, allocation: Allocation, relative: Allocation, num_tokens: int) -> list[int]:
        """Return how many free KV cache blocks a new sample needs in each layer group if it shares the first
        `num_tokens` positions of another sample of its request."""
        num_full = num_tokens // self.block_size
        return [
            max(1, self.num_opening_entries(allocation, table, min(other.num_freed, num_full)) - num_full)
            for table, other in zip(allocation.tables, relative.tables, strict=True)
        ]

    def matched_blocks(self, match: Match) -> list[list[int]]:
        """Return the device blocks of a prefix cache hit in each layer group. An entry is 0 if the window has passed
        the block."""
        passed = [self.windows.num_passed(group, len(match.nodes)) for group in range(len(self.windows.of_groups))]
        return [
            [0] * num_passed + [node.content(group).blocks[0] for node in match.nodes[num_passed:]]
            for group, num_passed in enumerate(passed)
        ]

    def num_final_blocks(self, rows: Sequence[Allocation], sample: Allocation, starts: Sequence[list[int]]) -> int:
        """Return how many KV cache blocks the running samples of a request (`rows`) and one more may need at the same
        time until they end. A block that several samples share is counted once.

        `starts` has the blocks with which the new sample starts in each layer group, and 0 for each block that the
        window has passed.
        """
        num_blocks, total = self._num_blocks_of_all(sample.request), 0
        for group, (window, start) in enumerate(zip(self.windows.of_groups, starts, strict=True)):
            tables = [start, *(row.tables[group].blocks for row in rows)]
            most = len({block for table in tables for block in table} - {0})
            most += sum(num_blocks - len(table) for table in tables)
            if window:
                most = min(most, len(tables) * min(num_blocks, self.num_chunk_blocks(window, 1)))
            total += most
        return total

    def num_missing_blocks(self, allocation: Allocation, num_tokens: int) -> int:
        """Return how many more KV cache blocks must be allocated to a sequence before it can compute its next
        `num_tokens` positions."""
        num_blocks = self.num_blocks_for(allocation.num_computed_tokens + num_tokens)
        return sum([max(0, num_blocks - len(table.blocks)) for table in allocation.tables])

    def first_needed_block(self, window: int, position: int) -> int:
        """Return the index in a block table of the first block that a sequence still reads when it computes `position`
        and later positions. It is 0 if the layer group has no sliding window."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def num_computable_tokens(self, allocation: Allocation, num_tokens: int) -> int:
        """Return how many of its next `num_tokens` tokens a sequence may compute with the KV cache blocks that it has
        or may get.

        The result is at least 1 if `num_tokens` is at least 1. With a sliding window, a long chunk of a prompt is
        shortened to the blocks that the sequence may hold, and so that the watermark stays free. The rest of the chunk
        can be computed in a later step.
        """
        if not self._sliding or num_tokens <= 1:
            return num_tokens
        num_blocks = self.num_blocks_for(allocation.num_computed_tokens + num_tokens)
        num_full = sum(max(0, num_blocks - len(table.blocks)) for table in allocation.tables if not table.window)
        num_free = max(0, self.pool.num_free - self._num_watermark_blocks - num_full) // len(self._sliding)
        for table in allocation.tables:
            if table.window:
                num_allowed = self.max_table_blocks(allocation.request, table.window) + table.num_freed
                num_blocks = max(0, min(num_allowed - len(table.blocks), num_free))
                num_positions = (len(table.blocks) + num_blocks) * self.block_size - allocation.num_computed_tokens
                num_tokens = min(num_tokens, max(1, num_positions))
        return num_tokens

    def num_swapped_blocks(self, allocations: Iterable[Allocation]) -> int:
        """Return how many device blocks are needed to load swapped-out sequences from the host. A host block that
        several sequences share is counted once."""
        return len({block for allocation in allocations for block in allocation.host_blocks})

    def num_swap_in_blocks(self, allocations: Sequence[Allocation]) -> int:
        """Return how many device blocks a swapped-out request needs in order to continue.

        The number includes the blocks to load from the host, and new blocks for tokens of its sequences that have no
        block yet.
        """
        return self.num_swapped_blocks(allocations) + sum(
            max(0, self.num_opening_entries(allocation, table, table.num_freed) - len(table.host_blocks))
            for allocation in allocations
            for table in allocation.tables
        )
