"""From which shelf of idle blocks the next one is evicted. Each shelf is one owner's: a tenant's."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

Worth = tuple[float, ...]
# The blocks of a shelf, in the order in which they are taken.
Ring = Callable[[int], Iterator[int]]


def no_worth(shelf: int) -> Worth:
    """Value all shelves alike."""
    return ()


def no_owner(shelf: int) -> str:
    """Let all shelves have one owner."""
    return ""


class _Owner:
    """The shelves with blocks of one owner."""

    __slots__ = ("name", "num_blocks", "shelves")

    def __init__(self, name: str) -> None:
        self.name = name
        self.shelves: list[tuple[Worth, int]] = []  # sorted
        self.num_blocks = 0  # on all of them


class ShelfOrder:
    """Evicts from shelves that are worth less than the horizon first, whose ever they are: from that of the least
    worth. Where all are worth more, it evicts from the owner who has most blocks, from the shelf that is worth least of
    that owner's. So whatever an owner keeps takes nothing from one who has fewer blocks, if these are of worth.

    A pool says which shelves have blocks; only of these the worth is known, and asked for when they get the first one.
    """

    def __init__(self, worth_of: Callable[[int], Worth] = no_worth, owner_of: Callable[[int], str] = no_owner) -> None:
        """`worth_of` says what a shelf is worth now; what changes its answer calls `changed`. `owner_of` says whose
        it is, which does not change while it has blocks."""
        self.worth_of = worth_of
        self.owner_of = owner_of
        self.horizon: Worth = ()
        self._filled: list[tuple[Worth, int]] = []  # sorted
        self._worth: dict[int, Worth] = {}  # of the same
        self._owners: dict[str, _Owner] = {}
        self._owner: dict[int, _Owner] = {}  # by shelf
        self._levels: dict[int, dict[_Owner, None]] = {}  # owners by their number of blocks
        self._most_blocks = 0  # that an owner has

    def changed(self, shelf: int) -> None:
        """The worth of a shelf may be another one, whether it has blocks or not."""
        before = self._worth.get(shelf)
        if before is not None and (worth := self.worth_of(shelf)) != before:
            self._remove(shelf, before)
            self._insert(shelf, worth)

    def added(self, shelf: int) -> None:
        """A block stands on a shelf."""
        owner = self._owner.get(shelf)
        if owner is None:
            name = self.owner_of(shelf)
            owner = self._owner[shelf] = self._owners.setdefault(name, _Owner(name))
            self._insert(shelf, self.worth_of(shelf))
        self._count(owner, owner.num_blocks + 1)

    def taken(self, shelf: int, *, is_last: bool) -> None:
        """A block stands on a shelf no longer. `is_last`: nor does any other."""
        owner = self._owner[shelf]
        self._count(owner, owner.num_blocks - 1)
        if is_last:
            self._remove(shelf, self._worth.pop(shelf))
            del self._owner[shelf]
            if not owner.shelves:
                del self._owners[owner.name]

    def first(self) -> int:
        """The shelf to evict from. Raises IndexError if none has blocks."""
        worth, shelf = self._filled[0]
        if worth < self.horizon:
            return shelf
        return next(iter(self._levels[self._most_blocks])).shelves[0][1]

    def yields(self, shelf: int, other: int) -> bool:
        """Whether what stands on a shelf may be lost to what stands on another: it is worth less, and another owner's
        only if it is below the horizon."""
        worth = self.worth_of(shelf)
        is_exposed = worth < self.horizon or self.owner_of(shelf) == self.owner_of(other)
        return is_exposed and worth < self.worth_of(other)

    def best(self, max_shelves: int) -> list[int]:
        """Return the shelves with blocks that are worth most, the best first."""
        return [shelf for _, shelf in self._filled[: -max_shelves - 1 : -1]]

    def blocks(self, ring: Ring) -> Iterator[tuple[int, int]]:
        """Go through the blocks of all shelves, each behind its shelf, in the order in which they would be evicted."""
        num_exposed = bisect_left(self._filled, (self.horizon,))
        num_taken: dict[_Owner, int] = {}
        for _, shelf in islice(self._filled, num_exposed):
            owner = self._owner[shelf]
            before = num_taken.pop(owner, 0)
            for num, block in enumerate(ring(shelf), before + 1):
                num_taken[owner] = num
                yield shelf, block
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
        for _, shelf in islice(owner.shelves, bisect_left(owner.shelves, (self.horizon,)), None):
            for block in ring(shelf):
                yield shelf, block

    def _insert(self, shelf: int, worth: Worth) -> None:
        self._worth[shelf] = worth
        insort(self._filled, (worth, shelf))
        insort(self._owner[shelf].shelves, (worth, shelf))

    def _remove(self, shelf: int, worth: Worth) -> None:
        for shelves in (self._filled, self._owner[shelf].shelves):
            del shelves[bisect_left(shelves, (worth, shelf))]

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
