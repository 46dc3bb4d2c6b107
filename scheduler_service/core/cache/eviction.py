"""From which shelf of idle blocks the next one is evicted."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

Worth = tuple[float, ...]


def no_worth(shelf: int) -> Worth:
    """Value all shelves alike."""
    return ()


class ShelfOrder:
    """Evicts from the shelf that is worth least. A pool says which shelves have blocks; only of these the worth is
    known, and asked for when they get the first one."""

    def __init__(self, worth_of: Callable[[int], Worth] = no_worth) -> None:
        """`worth_of` says what a shelf is worth now; whoever changes its answer calls `changed`."""
        self.worth_of = worth_of
        self._filled: list[tuple[Worth, int]] = []  # sorted
        self._worth: dict[int, Worth] = {}  # of the same

    def changed(self, shelf: int) -> None:
        """The worth of a shelf may be another one, whether it has blocks or not."""
        before = self._worth.get(shelf)
        if before is not None and (worth := self.worth_of(shelf)) != before:
            del self._filled[bisect_left(self._filled, (before, shelf))]
            self._insert(shelf, worth)

    def filled(self, shelf: int) -> None:
        """A shelf that was empty has a block."""
        self._insert(shelf, self.worth_of(shelf))

    def emptied(self, shelf: int) -> None:
        """The last block of a shelf was taken."""
        del self._filled[bisect_left(self._filled, (self._worth.pop(shelf), shelf))]

    def first(self) -> int:
        """The shelf to evict from. Raises IndexError if none has blocks."""
        return self._filled[0][1]

    def best(self, max_shelves: int) -> list[tuple[Worth, int]]:
        """Return the shelves with blocks that are worth most, each behind its worth, the best first."""
        return self._filled[: -max_shelves - 1 : -1]

    def __iter__(self) -> Iterator[int]:
        """Go through the shelves that have blocks, in the order in which they would be emptied."""
        return iter([shelf for _, shelf in self._filled])

    def _insert(self, shelf: int, worth: Worth) -> None:
        self._worth[shelf] = worth
        insort(self._filled, (worth, shelf))
