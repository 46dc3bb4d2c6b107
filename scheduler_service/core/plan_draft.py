"""A plan while it is being made."""

from dataclasses import dataclass, field

from scheduler_service.core.decode_batch import DecodeBatch
from scheduler_service.core.dispatch import PlannedRow
from scheduler_service.core.plan import RowOpening
from scheduler_service.core.sequence import Sequence


@dataclass(slots=True)
class PlanDraft:
    """What the plan of `step` will hold. The decoding rows are in it without being named."""

    step: int
    max_tokens: int
    decoding: DecodeBatch
    now: float
    num_row_tokens: int = 0  # of the rows that are planned one by one
    num_opening_values: int = 0
    has_preempted: bool = False
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # host block, device block
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, target
    openings: list[RowOpening] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # slot, block
    set_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    rows: list[PlannedRow] = field(default_factory=list)
    extended: list[Sequence] = field(default_factory=list)  # decoding rows that got a block

    @property
    def num_tokens(self) -> int:
        return self.num_row_tokens + len(self.decoding)

    @property
    def num_free_tokens(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """There is nothing that the worker must do. Rows that end can wait for another plan."""
        return not (self.num_tokens or self.swaps_out or self.swaps_in or self.openings)

    def open(self, opening: RowOpening) -> None:
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def work(self, row: PlannedRow) -> None:
        self.rows.append(row)
        self.num_row_tokens += row.num_tokens
