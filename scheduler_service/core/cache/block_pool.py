"""The pool of KV cache blocks: reference counts, free lists and the eviction order.

Blocks are numbered 1..num_blocks. Block 0 is never allocated, and serves as the sentinel of the first free list. The
free lists are intrusive doubly linked rings in two flat arrays, like vLLM's FreeKVCacheBlockQueue. So a prefix cache
hit takes an idle cached block out of its list in O(1).

The first free list contains the blocks whose content is not cached, or is cached elsewhere too. All other idle blocks
are in further free lists, in the order in which they were freed. Each of these lists belongs to one owner, a tenant. An
`EvictionOrder` chooses the list from which the next block is evicted.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

RetentionPriority = tuple[float, ...]
# Iterates over the blocks of a free list in allocation order.
Ring = Callable[[int], Iterator[int]]


def equal_priority(free_list: int) -> RetentionPriority:
    """Return an empty eviction priority, which is the same for every free list of KV cache blocks. `EvictionOrder` uses
    this function if no other is given."""
    return ()


def no_owner(free_list: int) -> str:
    """Return an empty owner name for every free list of KV cache blocks. `EvictionOrder` uses this function if no other
    is given."""
    return ""


@dataclass(slots=True, eq=False)
class _Owner:
    """The record of one owner (a tenant) in a pool of KV cache blocks: the tenant's nonempty free lists, and the total
    number of blocks in them."""

    name: str
    free_lists: list[tuple[RetentionPriority, int]] = field(default_factory=list)  # sorted
    num_blocks: int = 0  # in all of these lists


class EvictionOrder:
    """The order in which idle cached KV blocks are evicted from the free lists of a block pool.

    Each free list has a priority and an owner (a tenant). A free list whose priority is below `horizon` is evicted
    first, regardless of its owner. Among several such lists, the list with the lowest priority is evicted first. If no
    list is below the horizon, the owner with the most blocks loses a block, from the owner's list with the lowest
    priority. So an owner's blocks at or above the horizon never displace blocks of an owner with fewer blocks, unless
    the blocks of the other owner are below the horizon.

    The pool reports which lists contain blocks. `priority_of` is called for a list when the list gets its first block.
    """

    def __init__(
        self,
        priority_of: Callable[[int], RetentionPriority] = equal_priority,
        owner_of: Callable[[int], str] = no_owner,
    ) -> None:
        """Create an eviction order. All free lists are empty at first.

        `priority_of` returns the current priority of a free list. If this priority may have changed, the caller must
        call `changed`. `owner_of` returns the owner of a free list. The owner must not change while the list contains
        blocks.
        """
        self.priority_of = priority_of
        self.owner_of = owner_of
        self.horizon: RetentionPriority = ()
        self._filled: list[tuple[RetentionPriority, int]] = []  # sorted
        self._priorities: dict[int, RetentionPriority] = {}  # of the lists in _filled
        self._owners: dict[str, _Owner] = {}
        self._owner: dict[int, _Owner] = {}  # by free list
        self._levels: dict[int, dict[_Owner, None]] = {}  # owners by number of blocks
        self._most_blocks = 0  # the largest number of blocks of one owner

    def changed(self, free_list: int) -> None:
        """Compute the priority of a free list again, and move the list to its new place in the eviction order. Does
        nothing if the list is empty."""
        before = self._priorities.get(free_list)
        if before is not None and (priority := self.priority_of(free_list)) != before:
            self._remove(free_list, before)
            self._insert(free_list, priority)

    def added(self, free_list: int) -> None:
        """Record that the block pool has added a KV cache block to a free list."""
        owner = self._owner.get(free_list)
        if owner is None:
            name = self.owner_of(free_list)
            owner = self._owner[free_list] = self._owners.setdefault(name, _Owner(name))
            self._insert(free_list, self.priority_of(free_list))
        self._count(owner, owner.num_blocks + 1)

    def taken(self, free_list: int, *, is_last: bool) -> None:
        """Record that the block pool has removed a KV cache block from a free list. `is_last` is true if the list is
        empty now."""
        owner = self._owner[free_list]
        self._count(owner, owner.num_blocks - 1)
        if is_last:
            self._remove(free_list, self._priorities.pop(free_list))
            del self._owner[free_list]
            if not owner.free_lists:
                del self._owners[owner.name]

    def first(self) -> int:
        """Return the free list from which the next KV cache block is evicted. Raises IndexError if all free lists are
        empty."""
        priority, free_list = self._filled[0]
        if priority < self.horizon:
            return free_list
        return next(iter(self._levels[self._most_blocks])).free_lists[0][1]

    def may_evict(self, free_list: int, other: int) -> bool:
        """Return whether a KV cache block of `free_list` may be evicted to make room for a block of the free list
        `other`.

        The priority of `free_list` must be lower than the priority of `other`. If the two lists belong to different
        tenants, the priority of `free_list` must also be below `horizon`, because blocks below the horizon have no
        protection from other tenants.
        """
        priority = self.priority_of(free_list)
        is_exposed = priority < self.horizon or self.owner_of(free_list) == self.owner_of(other)
        return is_exposed and priority < self.priority_of(other)

    def best(self, max_lists: int) -> list[int]:
        """Return up to `max_lists` nonempty free lists with the highest eviction priorities, highest first. The blocks
        of these lists should be evicted last."""
        return [free_list for _, free_list in self._filled[: -max_lists - 1 : -1]]

    def blocks(self, ring: Ring) -> Iterator[tuple[int, int]]:
        """Iterate over the KV cache blocks of all free lists in eviction order, as (free list, block). `ring` is a
        function that iterates over the blocks of one free list."""
        num_exposed = bisect_left(self._filled, (self.horizon,))
        num_taken: dict[_Owner, int] = {}
        for _, free_list in islice(self._filled, num_exposed):
            owner = self._owner[free_list]
            before = num_taken.pop(owner, 0)
            for num, block in enumerate(ring(free_list), before + 1):
                num_taken[owner] = num
                yield free_list, block
        lowered: dict[int, list[_Owner]] = {}  # owners of exposed blocks, by number of remaining blocks
        for owner, num in num_taken.items():
            lowered.setdefault(owner.num_blocks - num, []).append(owner)
        remaining: list[Iterator[tuple[int, int]]] = []  # of the owners with the most remaining blocks
        for level in range(self._most_blocks, 0, -1):
            untouched = [owner for owner in self._levels.get(level, ()) if owner not in num_taken]
            remaining[:0] = [self._remaining(owner, ring) for owner in (*untouched, *lowered.get(level, ()))]
            for blocks in remaining:
                yield next(blocks)

    def _remaining(self, owner: _Owner, ring: Ring) -> Iterator[tuple[int, int]]:
        """Iterate over a tenant's idle KV cache blocks whose free lists have a priority of at least `horizon`, as (free
        list, block). Lists with a priority below `horizon` are evicted earlier, regardless of the tenant."""
        for _, free_list in islice(owner.free_lists, bisect_left(owner.free_lists, (self.horizon,)), None):
            for block in ring(free_list):
                yield free_list, block

    def _insert(self, free_list: int, priority: RetentionPriority) -> None:
        self._priorities[free_list] = priority
        insort(self._filled, (priority, free_list))
        insort(self._owner[free_list].free_lists, (priority, free_list))

    def _remove(self, free_list: int, priority: RetentionPriority) -> None:
        for free_lists in (self._filled, self._owner[free_list].free_lists):
            del free_lists[bisect_left(free_lists, (priority, free_list))]

    def _count(self, owner: _Owner, num_blocks: int) -> None:
        """Set a tenant's number of idle blocks, which changes by one. Also update the index of tenants by number of
        blocks, with which the tenant with the most blocks is found quickly."""
        level = self._levels.get(owner.num_blocks)
        if level is not None:  # the owner has blocks
            del level[owner]
            if not level:
                del self._levels[owner.num_blocks]
                if self._most_blocks == owner.num_blocks:
                    self._most_blocks = num_blocks
        owner.num_blocks = num_blocks
        if num_blocks:
            self._levels.setdefault(num_blocks, {})[owner] = None
            self._most_blocks = max(self._most_blocks, num_blocks)


class BlockPool:
    """The KV cache blocks of one tier of memory (device or host). The pool counts the references to each block, and
    keeps the free blocks in the order in which they are allocated."""

    def __init__(self, num_blocks: int, order: EvictionOrder | None = None, *, num_before: int = 0) -> None:
        """Create a pool in which all blocks are free. Its first block has the number `num_before + 1`."""
        self.num_blocks = num_blocks
        self._last = last = num_before + num_blocks
        self.num_free = num_blocks
        self.num_idle_cached = 0  # free blocks whose content can still be matched
        self.num_backed_up = 0  # of these, backed-up blocks: the content is cached elsewhere too
        self.order = order or EvictionOrder()
        # Arrays rather than lists: the garbage collector would visit every integer of a list. They have an entry for
        # each number up to the last.
        self._ref_counts = array("q", bytes(8 * (last + 1)))
        self._is_idle_cached = bytearray(last + 1)
        self._is_backed_up = bytearray(last + 1)
        self._free_list_of = array("q", bytes(8 * (last + 1)))  # the list that last contained each block
        # The entries after the blocks' entries are the sentinels of the further free lists.
        self._next = array("q", [*range(1, last + 1), 0])
        self._previous = array("q", [last, *range(last)])
        first = num_before + 1 if num_blocks else 0
        self._next[0], self._previous[first], self._previous[0] = first, 0, last if num_blocks else 0

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Allocate the next free block, and return its number. If the content of the block was cached, the block is
        evicted from the cache. Raises RuntimeError if no block is free."""
        block = self._next[0] or self.next_of(self.order.first()) if self.num_free else 0
        if block == 0:
            raise RuntimeError("the block pool is empty: allocation was not checked against num_free")
        self._unlink(block)
        self._ref_counts[block] = 1
        self._free_list_of[block] = 0
        return block

    def share(self, block: int) -> None:
        """Add a reference to a KV cache block, for example after a prefix cache hit. If the block had no reference, it
        stops being free."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1

    def free(self, block: int, *, cached: bool, spare: bool = False, free_list: int = 0) -> None:
        """Drop a reference to a KV cache block. A block without references becomes free.

        If the content of the block is not cached, the block goes to the head of the first free list, so that it is
        reused next. If the content is cached, the block goes to the end of free list `free_list`. The content of a
        backed-up block (`spare`) is cached elsewhere too. Such a block goes to the end of the first free list. Raises
        RuntimeError if the block has no reference.
        """
        count = self._ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was freed by a caller that does not hold it")
        self._ref_counts[block] = count
        if count > 0:
            return
        if not cached:
            self._link(block, before=self._next[0], cached=False)
        elif spare:
            self._free_list_of[block] = free_list
            self._link_spare(block)
        else:
            self._link(block, before=self._sentinel(free_list), cached=True)
            self._free_list_of[block] = free_list
            self.order.added(free_list)

    def spare(self, block: int) -> None:
        """Mark a free block with cached content as backed-up, because its content now has a second copy elsewhere.
        Backed-up blocks are evicted before all other cached blocks."""
        self._unlink(block)
        self._link_spare(block)

    def uncache(self, block: int) -> None:
        """Mark the content of a block as no longer cached. If the block has no reference, it is the next block to be
        allocated."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, before=self._next[0], cached=False)

    def free_list_of(self, block: int) -> int:
        """Return the number of the free list that contains the block. If no list contains it now, return the last list
        that contained it with its present content, or 0 if there is none.

        The first free list does not count here. It contains the blocks whose content is not cached or has another copy.
        """
        return self._free_list_of[block]

    def has_blocks(self, free_list: int) -> bool:
        """Return whether the free list `free_list` contains any block."""
        sentinel = self._sentinel(free_list)
        return self._next[sentinel] != sentinel

    def next_without_loss(self) -> int:
        """Return the next block that can be allocated without losing cached content, or 0 if there is no such block.

        The block has no cached content, or its content has another copy.
        """
        return self._next[0]

    def next_of(self, free_list: int) -> int:
        """Return the KV cache block that is evicted first from `free_list`, or 0 if the list is empty."""
        block = self._next[self._sentinel(free_list)]
        return block if block <= self._last else 0

    def free_blocks(self) -> Iterator[int]:
        """Iterate over all free blocks of the pool in the order in which they would be allocated now."""
        yield from self._ring(0)
        for _, block in self.idle_blocks():
            yield block

    def idle_blocks(self) -> Iterator[tuple[int, int]]:
        """Iterate over the free blocks with cached content in eviction order, as (free list, block). Blocks whose
        content has another copy are left out."""
        return self.order.blocks(lambda free_list: self._ring(self._sentinel(free_list)))

    def _ring(self, sentinel: int) -> Iterator[int]:
        block = self._next[sentinel]
        while block != sentinel:
            yield block
            block = self._next[block]

    def _sentinel(self, free_list: int) -> int:
        """Return the index of a free list's sentinel, the entry at which its linked list of blocks begins and ends.
        Create the list if it does not exist."""
        sentinel = self._last + 1 + free_list
        if sentinel >= len(self._next):
            entries = range(len(self._next), sentinel + 1)
            self._next.extend(entries)
            self._previous.extend(entries)
        return sentinel

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1
        if not self._is_idle_cached[block]:
            return
        self._is_idle_cached[block] = False
        self.num_idle_cached -= 1
        if self._is_backed_up[block]:
            self._is_backed_up[block] = False
            self.num_backed_up -= 1
        else:
            self.order.taken(self._free_list_of[block], is_last=before == after)

    def _link_spare(self, block: int) -> None:
        self._link(block, before=0, cached=True)
        self._is_backed_up[block] = True
        self.num_backed_up += 1

    def _link(self, block: int, *, before: int, cached: bool) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._previous[block], self._next[block] = previous, before
        self.num_free += 1
        if cached:
            self._is_idle_cached[block] = True
            self.num_idle_cached += 1
