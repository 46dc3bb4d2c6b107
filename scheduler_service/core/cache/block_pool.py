"""The pool of KV cache blocks: reference counts and the free lists, over plain integers, and which of these lists the
next block is evicted from. Each list is one owner's: a tenant's.

Blocks are 1..num_blocks; block 0 is never allocated and serves as the sentinel of the first free list. The lists are
intrusive doubly linked rings over two flat arrays, so that a prefix hit takes an idle cached block back in O(1) (the
structure of vLLM's FreeKVCacheBlockQueue). Blocks whose content nothing is lost with are in the first list. The others
stand in further free lists, in the order in which they were freed; an eviction order says from which one is taken.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

RetentionPriority = tuple[float, ...]
# The blocks of a free list, in the order in which they are taken.
Ring = Callable[[int], Iterator[int]]


def equal_priority(free_list: int) -> RetentionPriority:
    """Give all free lists one priority."""
    return ()


def no_owner(free_list: int) -> str:
    """Let all free lists have one owner."""
    return ""


@dataclass(slots=True, eq=False)
class _Owner:
    """The free lists with blocks of one owner."""

    name: str
    free_lists: list[tuple[RetentionPriority, int]] = field(default_factory=list)  # sorted
    num_blocks: int = 0  # on all of them


class EvictionOrder:
    """Evicts from free lists of a priority below the horizon first, of any owner: from that of the lowest priority.
    Where none is below, it evicts from the owner who has most blocks, from the owner's list of the lowest priority. So
    what an owner keeps takes nothing from one who has fewer blocks, if these are not below the horizon.

    A pool says which lists have blocks; only of these the priority is known, and asked for when they get the first one.
    """

    def __init__(
        self,
        priority_of: Callable[[int], RetentionPriority] = equal_priority,
        owner_of: Callable[[int], str] = no_owner,
    ) -> None:
        """`priority_of` says which priority a list has now; what changes its answer calls `changed`. `owner_of` says
        whose it is, which does not change while it has blocks."""
        self.priority_of = priority_of
        self.owner_of = owner_of
        self.horizon: RetentionPriority = ()
        self._filled: list[tuple[RetentionPriority, int]] = []  # sorted
        self._priorities: dict[int, RetentionPriority] = {}  # of the same
        self._owners: dict[str, _Owner] = {}
        self._owner: dict[int, _Owner] = {}  # by free list
        self._levels: dict[int, dict[_Owner, None]] = {}  # owners by their number of blocks
        self._most_blocks = 0  # that an owner has

    def changed(self, free_list: int) -> None:
        """The priority of a list may be another one, whether it has blocks or not."""
        before = self._priorities.get(free_list)
        if before is not None and (priority := self.priority_of(free_list)) != before:
            self._remove(free_list, before)
            self._insert(free_list, priority)

    def added(self, free_list: int) -> None:
        """A block is in a list."""
        owner = self._owner.get(free_list)
        if owner is None:
            name = self.owner_of(free_list)
            owner = self._owner[free_list] = self._owners.setdefault(name, _Owner(name))
            self._insert(free_list, self.priority_of(free_list))
        self._count(owner, owner.num_blocks + 1)

    def taken(self, free_list: int, *, is_last: bool) -> None:
        """A block is in a list no longer. `is_last`: nor does any other."""
        owner = self._owner[free_list]
        self._count(owner, owner.num_blocks - 1)
        if is_last:
            self._remove(free_list, self._priorities.pop(free_list))
            del self._owner[free_list]
            if not owner.free_lists:
                del self._owners[owner.name]

    def first(self) -> int:
        """The list to evict from. Raises IndexError if none has blocks."""
        priority, free_list = self._filled[0]
        if priority < self.horizon:
            return free_list
        return next(iter(self._levels[self._most_blocks])).free_lists[0][1]

    def yields(self, free_list: int, other: int) -> bool:
        """Whether what is in a list may be lost to what is in another: its priority is lower, and another owner's
        only if it is below the horizon."""
        priority = self.priority_of(free_list)
        is_exposed = priority < self.horizon or self.owner_of(free_list) == self.owner_of(other)
        return is_exposed and priority < self.priority_of(other)

    def best(self, max_lists: int) -> list[int]:
        """Return the lists with blocks of the highest priorities, the best first."""
        return [free_list for _, free_list in self._filled[: -max_lists - 1 : -1]]

    def blocks(self, ring: Ring) -> Iterator[tuple[int, int]]:
        """Go through the blocks of all lists, each behind its list, in the order in which they would be evicted."""
        num_exposed = bisect_left(self._filled, (self.horizon,))
        num_taken: dict[_Owner, int] = {}
        for _, free_list in islice(self._filled, num_exposed):
            owner = self._owner[free_list]
            before = num_taken.pop(owner, 0)
            for num, block in enumerate(ring(free_list), before + 1):
                num_taken[owner] = num
                yield free_list, block
        lowered: dict[int, list[_Owner]] = {}  # owners from whom blocks were taken, by what they have left
        for owner, num in num_taken.items():
            lowered.setdefault(owner.num_blocks - num, []).append(owner)
        remaining: list[Iterator[tuple[int, int]]] = []  # of the owners who have most
        for level in range(self._most_blocks, 0, -1):
            untouched = [owner for owner in self._levels.get(level, ()) if owner not in num_taken]
            remaining[:0] = [self._remaining(owner, ring) for owner in (*untouched, *lowered.get(level, ()))]
            for blocks in remaining:
                yield next(blocks)

    def _remaining(self, owner: _Owner, ring: Ring) -> Iterator[tuple[int, int]]:
        """Go through an owner's blocks that are not below the horizon."""
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
        """Put an owner on the level above or below."""
        level = self._levels.get(owner.num_blocks)
        if level is not None:  # it is there
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
    """The blocks of one tier: how many hold each, and in which order free ones are taken."""

    def __init__(self, num_blocks: int, order: EvictionOrder | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_idle_cached = 0  # free blocks whose content can be matched
        self.num_spare = 0  # of these, such whose content can be had elsewhere
        self.order = order or EvictionOrder()
        # Arrays rather than lists: a garbage collection would stop for every one of their numbers.
        self._ref_counts = array("q", bytes(8 * (num_blocks + 1)))
        self._is_idle_cached = bytearray(num_blocks + 1)
        self._is_spare = bytearray(num_blocks + 1)
        self._free_list_of = array("q", bytes(8 * (num_blocks + 1)))  # where each stood last
        # The entries behind those of the blocks are the sentinels of free lists.
        self._next = array("q", [*range(1, num_blocks + 1), 0])
        self._previous = array("q", [num_blocks, *range(num_blocks)])

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take the next free block. Its content, if it was cached, is lost."""
        block = self._next[0] or self.next_of(self.order.first()) if self.num_free else 0
        if block == 0:
            raise RuntimeError("the block pool is empty: allocation was not checked against num_free")
        self._unlink(block)
        self._ref_counts[block] = 1
        self._free_list_of[block] = 0
        return block

    def share(self, block: int) -> None:
        """Count one more holder. An idle cached block comes back into use."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1

    def free(self, block: int, *, cached: bool, spare: bool = False, free_list: int = 0) -> None:
        """Count one holder less. A block without a holder then is free. If its content is cached, it stands behind all
        others of its free list; if that can be had elsewhere too, the block is `spare`: behind those that hold nothing
        and the other spare ones."""
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
        """An idle block's content can be had elsewhere too."""
        self._unlink(block)
        self._link_spare(block)

    def expose(self, block: int) -> None:
        """An idle block's content is no longer cached: it goes to the head of the first list."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, before=self._next[0], cached=False)

    def free_list_of(self, block: int) -> int:
        """The further list in which a block stands, or stood last since it has its content; 0 if in none."""
        return self._free_list_of[block]

    def has_blocks(self, free_list: int) -> bool:
        """Whether any block stands in a free list."""
        sentinel = self._sentinel(free_list)
        return self._next[sentinel] != sentinel

    def next_without_loss(self) -> int:
        """The free block that is taken next, if it holds nothing, or what can be had elsewhere; else 0."""
        return self._next[0]

    def next_of(self, free_list: int) -> int:
        """The block that is taken next from a free list; 0 if it has none."""
        block = self._next[self._sentinel(free_list)]
        return block if block <= self.num_blocks else 0

    def free_blocks(self) -> Iterator[int]:
        """Go through all free blocks in the order in which they are taken, if nothing changes that."""
        yield from self._ring(0)
        for _, block in self.idle_blocks():
            yield block

    def idle_blocks(self) -> Iterator[tuple[int, int]]:
        """Go through the idle blocks that are not spare, in the same order, each with its free list."""
        return self.order.blocks(lambda free_list: self._ring(self._sentinel(free_list)))

    def _ring(self, sentinel: int) -> Iterator[int]:
        block = self._next[sentinel]
        while block != sentinel:
            yield block
            block = self._next[block]

    def _sentinel(self, free_list: int) -> int:
        """The entry of a free list, which is made where there is none."""
        sentinel = self.num_blocks + 1 + free_list
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
        if self._is_spare[block]:
            self._is_spare[block] = False
            self.num_spare -= 1
        else:
            self.order.taken(self._free_list_of[block], is_last=before == after)

    def _link_spare(self, block: int) -> None:
        self._link(block, before=0, cached=True)
        self._is_spare[block] = True
        self.num_spare += 1

    def _link(self, block: int, *, before: int, cached: bool) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._previous[block], self._next[block] = previous, before
        self.num_free += 1
        if cached:
            self._is_idle_cached[block] = True
            self.num_idle_cached += 1
