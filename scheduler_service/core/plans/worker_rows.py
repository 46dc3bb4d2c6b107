"""The worker's rows as the scheduler knows them: who may open which, and what each will do unless a plan tells it
otherwise."""

from collections.abc import Iterable
from heapq import heappop, heappush

from pagewire.common.messages import WorkerCapacity
from scheduler_service.core.cache import StepCount
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import DropCount, Row, Sequence, SequenceGroup


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

    def reserve(self, group: SequenceGroup, num_slots: int) -> None:
        """Keep slots for rows that the group will open."""
        group.reserved_slots = [self.take() for _ in range(num_slots)]

    def give_back_reserved(self, group: SequenceGroup) -> None:
        """Let any group have the slots that were kept for this one."""
        for slot in group.reserved_slots:
            self.give_back(slot)
        group.reserved_slots.clear()

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


class WorkerRows:
    """The rows of one worker: those that decode, and those that are planned one by one."""

    def __init__(self, capacity: WorkerCapacity, num_slots: int, steps: StepCount) -> None:
        self._gates_grammars = capacity.gates_grammars
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(steps, capacity.block_size)
        self.active: dict[Row, None] = {}  # rows with tokens to compute that do not decode
        self.num_open = 0
        self.drops = DropCount()

    def take_slot(self, sequence: Sequence) -> Row:
        """Give a sequence a row, if it can be in a slot that is kept for its group."""
        request, reserved = sequence.group.request, sequence.group.reserved_slots
        slot = reserved.pop(0) if reserved else self.slots.take()
        gates = request.grammar is not None and self._gates_grammars
        return sequence.take_slot(slot, self.drops, is_gated=gates or not request.sampling.chooses_tokens)

    def open(self, sequence: Sequence) -> Row:
        """Give a sequence a row that is planned by itself."""
        row = self.take_slot(sequence)
        self.active[row] = None
        self.num_open += 1
        return row

    def pause(self, row: Row) -> None:
        """A decoding row goes back to those that are planned one by one."""
        self.decoding.leave(row)
        self.slots.stops_decoding(row.slot)
        self.active[row] = None

    def vacate(self, row: Row) -> None:
        """The row ends."""
        if row.is_decoding:
            self.decoding.leave(row)
        self.active.pop(row, None)
        beam = row.sequence.group.beam
        if beam is None or row.slot not in beam.unborn_slots:
            self.slots.end_row(row.slot)
            self.num_open -= 1
        self.slots.give_back(row.slot)
        row.vacate()

    def vacate_group(self, group: SequenceGroup) -> None:
        """End all rows of the group, and give back every slot it has."""
        for row in group.open_rows:
            self.vacate(row)
        self.slots.give_back_reserved(group)
        if group.beam is not None:
            group.beam.forget_step()

    def repeat(self, row: Row) -> None:
        """A row was late in the oldest plan: the worker has it compute its last position again in the plans that are
        under way, each of which thus does what the plan before it was to do. One without a token is planned by itself
        until it has one: that is looked at."""
        decodes = row.is_decoding and row.sequence.first_token_at is not None
        if decodes:
            self.decoding.leave(row)
        elif row.is_decoding:
            self.pause(row)
            self.drops.num_drops += 1
        row.repeat()
        if decodes:
            self.decoding.join(row)
        elif row.slot >= 0 and row.num_uncomputed_tokens:
            self.active[row] = None
