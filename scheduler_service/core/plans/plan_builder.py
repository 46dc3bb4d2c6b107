"""A plan while it is being made, and the worker's rows as the scheduler knows them: who may open which, and what each
will do unless a plan tells it otherwise."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from pagewire.common.messages import PHASES, AddedGrammar, RowOpening, StepPlan
from scheduler_service.core.cache import MoveLedger
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import Row, Sequence

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024


@dataclass(slots=True)
class PlanBuilder:
    """The plan of `step` while it is made. The decoding rows are in it without being named, and so are the moves of
    this step in the ledger."""

    step: int
    max_tokens: int
    decoding: DecodeBatch
    moves: MoveLedger
    now: float
    num_row_tokens: int = 0  # of the rows that are planned one by one
    num_opening_values: int = 0
    # Tokens that rows which do not decode may compute; None: each takes what those before it leave.
    shares: dict[Row, int] | None = None
    is_slowed: bool = False  # `max_tokens` are fewer than a step may have, and `shares` will be given
    has_preempted: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, target
    added_grammars: list[AddedGrammar] = field(default_factory=list)
    openings: list[RowOpening] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # slot, block
    set_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    rows: list[PlannedRow] = field(default_factory=list)
    began_block: list[Row] = field(default_factory=list)  # decoding rows that got one

    @property
    def num_tokens(self) -> int:
        return self.num_row_tokens + len(self.decoding)

    @property
    def num_free_tokens(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """There is nothing that the worker must do. Rows that end can wait for another plan."""
        return not (self.num_tokens or self.openings or self.added_grammars or self.moves.ordered_by(self.step))

    def can_open(self, sequence: Sequence) -> bool:
        """Whether the plan may become as large as a row's opening makes it. It always may have one opening."""
        num_values = self.num_opening_values
        return not num_values or num_values + 2 * sequence.num_tokens <= _MAX_OPENING_VALUES

    def open(self, opening: RowOpening) -> None:
        """Have the worker open a row."""
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def work(self, row: PlannedRow) -> None:
        """Have the worker compute tokens of a row."""
        self.rows.append(row)
        self.num_row_tokens += row.num_tokens

    def freeze(self, epoch: int, **others: Collection[Any]) -> StepPlan:
        """Make the plan of it. `others` are the phases that are known last: moves between device and host, the slots of
        rows that end, the grammars that no request needs, and the (slot, number of tokens) that change."""
        columns: dict[str, tuple[Any, ...]] = {}
        for phase, names in PHASES.items():
            entries = others[phase] if phase in others else getattr(self, phase)
            if entries and len(names) > 1:
                columns.update(zip(names, zip(*entries, strict=True), strict=True))
            elif entries:
                columns[phase] = tuple(entries)
        return StepPlan(epoch, self.step, **columns)


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
