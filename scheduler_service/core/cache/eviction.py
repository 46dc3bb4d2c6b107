"""From which shelf of idle blocks the next one is evicted."""

from bisect import bisect_left, insort
from collections.abc import Iterator

# The worth of a shelf begins with one of these: nobody is expected to come for its blocks, somebody may, somebody is
# there, somebody waits and will use them.
GIVEN_UP, IDLE, PRESENT, AWAITED = 0.0, 1.0, 2.0, 3.0

Worth = tuple[float, ...]


class ShelfOrder:
    """Evicts from the shelf that is worth least. A shelf is worth (GIVEN_UP,) until another worth is named. A pool says
    which shelves have blocks."""

    def __init__(self) -> None:
        self._worth: dict[int, Worth] = {}
        self._filled: list[tuple[Worth, int]] = []  # sorted

    def value(self, shelf: int, worth: Worth) -> None:
        """Name the worth of a shelf, whether it has blocks or not."""
        before = self._entry(shelf)
        self._worth[shelf] = worth
        index = bisect_left(self._filled, before)
        if self._filled[index : index + 1] == [before]:
            del self._filled[index]
            insort(self._filled, self._entry(shelf))

    def filled(self, shelf: int) -> None:
        """A shelf that was empty has a block."""
        insort(self._filled, self._entry(shelf))

    def emptied(self, shelf: int) -> None:
        """The last block of a shelf was taken."""
        del self._filled[bisect_left(self._filled, self._entry(shelf))]

    def first(self) -> int:
        """The shelf to evict from. Raises IndexError if none has blocks."""
        return self._filled[0][1]

    def worth(self, shelf: int) -> Worth:
        return self._worth.get(shelf, (GIVEN_UP,))

    def best(self, max_shelves: int) -> list[tuple[Worth, int]]:
        """Return the shelves with blocks that are worth most, each behind its worth, the best first."""
        return self._filled[: -max_shelves - 1 : -1]

    def __iter__(self) -> Iterator[int]:
        """Go through the shelves that have blocks, in the order in which they would be emptied."""
        return iter([shelf for _, shelf in self._filled])

    def _entry(self, shelf: int) -> tuple[Worth, int]:
        return self.worth(shelf), shelf
