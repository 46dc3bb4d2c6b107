"""The worker's rows as the scheduler knows them: who may open which, and what each will do unless told otherwise."""

from collections.abc import Iterable
from heapq import heappop, heappush

from scheduler_service.core.dispatch import PlannedRow


class RowSlots:
    """Slots 0..num_slots-1, the lowest free one first, and a mirror of the worker's working set."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._released: list[int] = []  # since the last plan
        self._work = [0] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heappop(self._free)

    def release(self, slot: int) -> None:
        """The slot's row ends with the next plan, which may open the slot again."""
        self._released.append(slot)
        self._work[slot] = 0
        heappush(self._free, slot)

    def take_released(self) -> tuple[int, ...]:
        released = tuple(self._released)
        self._released.clear()
        return released

    def patch(self, rows: Iterable[PlannedRow]) -> list[tuple[int, int]]:
        """The (slot, num_tokens) that differ from what the worker would do by itself."""
        patches = []
        for row in rows:
            if self._work[row.slot] != row.num_tokens:
                patches.append((row.slot, row.num_tokens))
            self._work[row.slot] = 1 if row.samples else row.num_tokens
        return patches
