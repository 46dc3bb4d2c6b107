"""A plan while it is being made."""

from scheduler_service.core.dispatch import PlannedRow
from scheduler_service.core.plan import RowOpening


class PlanDraft:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self.num_opening_values = 0
        self.openings: list[RowOpening] = []
        self.append_slots: list[int] = []
        self.append_block_ids: list[int] = []
        self.rows: list[PlannedRow] = []  # of every running sequence; those that rest have no tokens

    @property
    def num_free_tokens(self) -> int:
        return self._max_tokens - self.num_tokens

    def open(self, opening: RowOpening) -> None:
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        self.append_slots.extend([slot] * len(block_ids))
        self.append_block_ids.extend(block_ids)

    def work(self, row: PlannedRow) -> None:
        self.rows.append(row)
        self.num_tokens += row.num_tokens
