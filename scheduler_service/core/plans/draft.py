"""A plan while it is being made."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_service.core.plan import AddedGrammar, RowOpening, StepPlan
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import Sequence

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024


@dataclass(slots=True)
class PlanDraft:
    """A draft of the plan of `step`. The decoding rows are in it without being named."""

    step: int
    max_tokens: int
    decoding: DecodeBatch
    now: float
    num_row_tokens: int = 0  # of the rows that are planned one by one
    num_opening_values: int = 0
    # Tokens that rows which do not decode may compute; None: each takes what those before it leave.
    shares: dict[Sequence, int] | None = None
    has_preempted: bool = False
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # host block, device block
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
        return not (self.num_tokens or self.swaps_out or self.swaps_in or self.openings or self.added_grammars)

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

    def freeze(
        self,
        epoch: int,
        released_slots: tuple[int, ...],
        released_grammar_ids: tuple[int, ...],
        patches: list[tuple[int, int]],
    ) -> StepPlan:
        """Make the plan of it, with the slots of rows that end, the grammars that nobody needs, and the (slot, number
        of tokens) that change."""
        swap_out_device_blocks, swap_out_host_blocks = _columns(self.swaps_out, 2)
        swap_in_host_blocks, swap_in_device_blocks = _columns(self.swaps_in, 2)
        copy_source_blocks, copy_target_blocks = _columns(self.copies, 2)
        fork_source_slots, fork_target_slots = _columns(self.forks, 2)
        append_slots, append_block_ids = _columns(self.appended_blocks, 2)
        set_block_slots, set_block_indexes, set_block_ids = _columns(self.set_blocks, 3)
        append_token_slots, append_token_ids = _columns(self.appended_tokens, 2)
        work_slots, work_num_tokens = _columns(patches, 2)
        return StepPlan(
            epoch=epoch,
            step=self.step,
            released_slots=released_slots,
            swap_out_device_blocks=swap_out_device_blocks,
            swap_out_host_blocks=swap_out_host_blocks,
            swap_in_host_blocks=swap_in_host_blocks,
            swap_in_device_blocks=swap_in_device_blocks,
            copy_source_blocks=copy_source_blocks,
            copy_target_blocks=copy_target_blocks,
            openings=tuple(self.openings),
            fork_source_slots=fork_source_slots,
            fork_target_slots=fork_target_slots,
            append_slots=append_slots,
            append_block_ids=append_block_ids,
            set_block_slots=set_block_slots,
            set_block_indexes=set_block_indexes,
            set_block_ids=set_block_ids,
            append_token_slots=append_token_slots,
            append_token_ids=append_token_ids,
            work_slots=work_slots,
            work_num_tokens=work_num_tokens,
            added_grammars=tuple(self.added_grammars),
            released_grammar_ids=released_grammar_ids,
        )


def _columns(entries: Iterable[tuple[int, ...]], width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(zip(*entries, strict=True)) or ((),) * width
