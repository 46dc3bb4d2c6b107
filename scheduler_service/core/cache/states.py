"""States of sequences besides K and V, such as the states of linear attention.

The worker has a pool of equal states. A state contains the states of all layers of one sequence, after some number of
its tokens. A running sequence writes one state in place, or two in turn if its last position may be computed again. A
plan may order *saves*: while a row computes, it also writes its state after a given number of tokens elsewhere. A saved
state at the end of a block is a content of the prefix index, like the block's K and V, when the result of the plan has
arrived. Then other sequences can start with it: they read it and write their own. So nothing ever copies a state, and
no state has to be undone.

States are saved where later sequences will probably start (lasting saves), and at regular distances. The latter are
evicted first, and never evict other states:

- at the last block boundary of the known tokens, and at each boundary while the sequence decodes;
- where a prompt parts from a cached prefix without a state;
- every `interval` tokens of a prompt, and beyond 16 intervals at distances that grow with the position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagewire.common.wire.messages import Pooling, WorkerCapacity
from scheduler_service.core.cache.prefix_index import BlockContent, Node
from scheduler_service.core.cache.room import Allocation, Match
from scheduler_service.core.cache.tiers import Tiers
from scheduler_service.core.request import Request

# A state weighs as much as the K and V of this number of intervals. Saves cost little time, but evict each other.
_INTERVALS_OF_STATE = 4
_MIN_INTERVAL_BLOCKS = 4
_DISTANCE_BITS = 4  # saves are at positions, in intervals, with at most this number of significant bits
# States that a request may need besides those that it writes: one that it reads, and one that is loaded or forked.
_NUM_READ = 2


@dataclass(slots=True, eq=False)
class Save:
    """An order to a worker's row to save its state after its first `position` tokens to the device state `state`.

    The save holds a reference to the state until the result of the plan has arrived.
    """

    allocation: Allocation
    position: int
    state: int
    node: Node | None  # a node of the index: the block that ends at the position, or an earlier one
    num_blocks: int  # up to the end of this block
    num_after: int = 0  # positions that the plan computes after this one; fewer for each time that the row is late
    is_decoded: bool = False
    is_lasting: bool = True
    is_void: bool = False  # the row may not have reached the position


class StatePool:
    """The device states of one worker, and the states that are cached. Without states in the model, all numbers are 0.

    States are numbered after the blocks of the same tier.
    """

    def __init__(self, capacity: WorkerCapacity, tiers: Tiers, *, enable_prefix_caching: bool) -> None:
        self.num_states = capacity.num_device_states
        self._tiers, self._device, self._pool = tiers, tiers.device, tiers.device.states
        self._group = len(capacity.windows)  # of the contents in the index
        self._block_size, self._first = capacity.block_size, capacity.num_device_blocks
        self._enable_prefix_caching = enable_prefix_caching
        self.weight = -(-capacity.state_bytes // max(1, capacity.block_bytes))  # of a state, in blocks
        num_blocks = self.weight // (_INTERVALS_OF_STATE * self._group)
        self.interval = max(_MIN_INTERVAL_BLOCKS, num_blocks) * self._block_size

    def number(self, state: int) -> int:
        """Return the number with which rows and saves name a state; 0 stays 0."""
        return state and state - self._first

    # Room

    def max_request_states(self, request: Request) -> int:
        """Return the number of states that a request may need in order to run: the states of one sample, or of all
        beams."""
        return _num_own(request) * (request.num_rows if request.beam else 1) + _NUM_READ

    def has_room(self, allocations: Sequence[Allocation], match: Match) -> bool:
        """Return whether sequences may allocate the states that they write, and one of them may start with a prefix
        cache hit, which may be empty."""
        num_needed = sum(_num_own(each.request) for each in allocations if not each.states.own)
        if match.nodes:
            states = match.nodes[-1].content(self._group).blocks
            num_needed += not states or self._pool.ref_count(states[0]) == 0
        return num_needed <= self._pool.num_free

    def can_swap(self, allocations: Sequence[Allocation]) -> bool:
        """Return whether the states of a request's rows can be swapped out. A row that writes two states is computed
        again instead, because the scheduler does not know which of them is the last."""
        return not self.num_states or (
            all(len(allocation.states.own) == 1 for allocation in allocations)
            and len(allocations) <= self._tiers.host.states.num_free
        )

    def can_swap_in(self, allocations: Sequence[Allocation]) -> bool:
        return sum(allocation.states.host > 0 for allocation in allocations) <= self._pool.num_free

    def weigh(self, contents: Sequence[BlockContent]) -> int:
        """Return how many blocks weigh as much as the given contents."""
        return sum(self.weight if content.is_state else 1 for content in contents)

    # Rows

    def share(self, allocation: Allocation, match: Match) -> BlockContent | None:
        """Hold the state with which a sequence starts after a prefix cache hit, if it is on the device. Return its
        content, or None if the sequence starts without a state."""
        nodes = match.nodes
        allocation.states.junction = match.num_spine_blocks if match.num_spine_blocks > len(nodes) else 0
        content = nodes[-1].content(self._group) if nodes else None
        if content is not None and content.blocks:
            self._hold_source(allocation, content.blocks[0])
        return content

    def open(self, allocation: Allocation) -> None:
        """Allocate the states that the row of a sequence writes, unless it has them."""
        if not allocation.states.own:
            allocation.states.own = tuple(self._device.allocate_state() for _ in range(_num_own(allocation.request)))

    def fork(self, allocation: Allocation, relative: Allocation) -> None:
        """Let a new sample start with the state that `relative` has saved for further samples."""
        if relative.states.fork:
            self._hold_source(allocation, relative.states.fork)
        self.open(allocation)

    def _hold_source(self, allocation: Allocation, state: int) -> None:
        self._pool.share(state)
        allocation.states.source = state

    def end_fork(self, allocation: Allocation) -> None:
        """Release the state for further samples, because all samples have started."""
        if allocation.states.fork:
            self._device.free(allocation.states.fork)
            allocation.states.fork = 0

    # Saves

    def save_fork(self, allocation: Allocation, start: int, end: int) -> Iterator[Save]:
        """Save the state before the last token of the prompt, for the other samples of the request, if the row computes
        the positions from `start` to `end`. The allocation holds the state."""
        position, states = len(allocation.request.prompt_token_ids) - 1, allocation.states
        if position and start <= position <= end and not states.fork and self._pool.num_free:
            states.fork = self._device.allocate_state()
            self._pool.share(states.fork)
            yield Save(allocation, position, states.fork, None, 0, is_void=True)

    def save_prompt(self, allocation: Allocation, start: int, end: int) -> Iterator[Save]:
        """Save the states of a row that computes the positions from `start` to `end`, whose tokens are known, at the
        boundaries of blocks that are in the prefix index already."""
        if not self._enable_prefix_caching or not allocation.publishes:
            return
        size, num_published = self._block_size, allocation.num_published_blocks
        boundaries = dict.fromkeys(self._distances(start, end), False)
        boundaries[(len(allocation.token_ids) - 1) // size * size] = True
        boundaries[allocation.states.junction * size] = True
        if start % size == 0 and start >= len(allocation.request.prompt_token_ids):
            boundaries[start] = True  # the row decodes, but is planned by itself
            if start > num_published * size:
                yield from self.save_decoded(allocation, start)
        node = allocation.last_node
        for position in sorted(boundaries, reverse=True):
            if not max(1, start) <= position <= min(end, num_published * size):
                continue
            while node is not None and num_published * size > position:
                node, num_published = node.parent, num_published - 1
            assert node is not None
            is_lasting = boundaries[position]
            is_free = self._pool.num_free if is_lasting else self._pool.next_without_loss()
            if is_free and not node.content(self._group).blocks:
                state = self._device.allocate_state()
                yield Save(allocation, position, state, node, num_published, end - position, is_lasting=is_lasting)

    def _distances(self, start: int, end: int) -> Iterator[int]:
        """Yield the positions after `start` and up to `end` at which states of long prompts are saved. Their distance
        grows with the position, from `interval` to an eighth or a sixteenth of the position."""
        for number in range(start // self.interval + 1, end // self.interval + 1):
            if number % (1 << max(0, number.bit_length() - _DISTANCE_BITS)) == 0:
                yield number * self.interval

    def save_decoded(self, allocation: Allocation, position: int) -> Iterator[Save]:
        """Save the state of a decoding row at the end of its last full block, with which its next step starts. The last
        tokens of this block may be in flight."""
        if self._enable_prefix_caching and allocation.publishes and self._pool.num_free:
            state = self._device.allocate_state()
            yield Save(allocation, position, state, allocation.last_node, allocation.num_published_blocks, 1, True)

    def confirm(self, save: Save) -> None:
        """Process a save after the result of its plan has arrived: add the state to the prefix index, if the block that
        ends there is cached, and release it."""
        allocation, state, index, node = save.allocation, save.state, self._tiers.index, None
        if not save.is_void:
            last_block = save.position // self._block_size - 1
            node = index.find(allocation.root, allocation.token_ids, last_block, save.node, save.num_blocks)
        content = None if node is None or not node.is_cached else node.content(self._group)
        if content is not None and not content.blocks:
            index.add_copy(content, state)
        else:
            content = None
        self._device.free(state, spare=not save.is_lasting, free_list=allocation.free_list)
        if save.is_decoded and content is not None:
            previous, allocation.states.last = allocation.states.last, content
            if previous is not None and previous.blocks and self._pool.ref_count(previous.blocks[0]) == 0:
                self._pool.spare(previous.blocks[0])

    def read(self, states: Sequence[int]) -> None:
        """Release the states with which rows of a plan start. This is safe when the plan is complete, because the rows
        read them before a later plan can write them."""
        for state in states:
            self._device.free(state)


def _num_own(request: Request) -> int:
    """Return how many states each row of a request writes: two if its last position may be computed again."""
    sampling = request.sampling
    is_gated = sampling.num_candidates is not None or sampling.pooling is not Pooling.NONE
    return 2 if is_gated or request.grammar is not None else 1
