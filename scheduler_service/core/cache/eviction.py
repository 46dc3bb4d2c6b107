"""From which free list of idle blocks the next one is evicted. Each list is one owner's: a tenant's."""

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
