"""A plan while it is being made."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pagewire.common.messages import PHASES, AddedGrammar, RowOpening, StepPlan
from scheduler_service.core.cache import MoveLedger
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import Sequence

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024


@dataclass(slots=True)
class PlanDraft:
    """A draft of the plan of `step`. The decoding rows are in it without being named, and so are the moves of this step
    in the ledger."""

    step: int
    max_tokens: int
    decoding: DecodeBatch
    moves: MoveLedger
    now: float
    num_row_tokens: int = 0  # of the rows that are planned one by one
    num_opening_values: int = 0
    # Tokens that rows which do not decode may compute; None: each takes what those before it leave.
    shares: dict[Sequence, int] | None = None
    has_preempted: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, target
    added_grammars: list[AddedGrammar] = field(default_factory=list)
    openings: list[RowOpening] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # slot, block
    set_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    rows: list[PlannedRow] = field(default_factory=list)
    began_block: list[Sequence] = field(default_factory=list)  # decoding rows that got one

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
