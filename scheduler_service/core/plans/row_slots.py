"""The worker's rows as the scheduler knows them: who may open which, and what each will do unless told otherwise."""

from collections.abc import Iterable
from heapq import heappop, heappush

from scheduler_service.core.plans.dispatch import PlannedRow


class RowSlots:
    """Slots 0..num_slots-1, the lowest free one first, and a mirror of the worker's working set."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._released: list[int] = []  # rows to end, since the last plan
        self._work = [0] * num_slots
        self._moving: set[int] = set()  # slots that would compute, but are not of the decoding rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free slot."""
        return heappop(self._free)

    def end_row(self, slot: int) -> None:
        """The slot's row ends with the next plan, which may open the slot again."""
        self._released.append(slot)
        self._work[slot] = 0
        self._moving.discard(slot)

    def give_back(self, slot: int) -> None:
        """The slot, without a row, may be any sequence's."""
        heappush(self._free, slot)

    def take_released(self) -> list[int]:
        """Take the slots whose rows the plan that is made now must end."""
        released, self._released = self._released, []
        return released

    def decodes(self, slot: int) -> None:
        """The slot's row goes on with one token a plan, and is not among those planned one by one."""
        self._moving.discard(slot)

    def stops_decoding(self, slot: int) -> None:
        """The slot's row is planned one by one again."""
        self._moving.add(slot)

    def patch(self, rows: Iterable[PlannedRow]) -> list[tuple[int, int]]:
        """Find the (slot, num_tokens) that differ from what the worker would do by itself."""
        patches = []
        resting = self._moving
        self._moving = set()
        for row in rows:
            slot = row.slot
            resting.discard(slot)
            if self._work[slot] != row.num_tokens:
                patches.append((slot, row.num_tokens))
            self._work[slot] = row.num_tokens_next
            if row.num_tokens_next:
                self._moving.add(slot)
        for slot in sorted(resting):
            self._work[slot] = 0
            patches.append((slot, 0))
        return patches
