"""A plan while it is being made, and the worker's rows as the scheduler knows them: who may open which, and what each
will do unless a plan tells it otherwise."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

from pagewire.common.wire.messages import PHASES, AddedGrammar, RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.cache import CacheManager, StepCount
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import BeamGroup, DropCount, Row, Sequence, SequenceGroup

# Tokens and block ids that the openings of one plan may carry: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024

Work = list[tuple[Row, int]]  # rows of a group, each with the number of tokens that it computes


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


@dataclass(slots=True)
class PlanBuilder:
    """The plan of `step` while it is made. The decoding rows are in it without being named, and so are the moves of
    this step in the ledger."""

    step: int
    max_tokens: int
    worker_rows: WorkerRows
    cache: CacheManager
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
        return self.num_row_tokens + len(self.worker_rows.decoding)

    @property
    def num_free_tokens(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """There is nothing that the worker must do. Rows that end can wait for another plan."""
        return not (self.num_tokens or self.openings or self.added_grammars or self.cache.moves.ordered_by(self.step))

    def can_open(self, sequence: Sequence) -> bool:
        """Whether the plan may become as large as a row's opening makes it. It always may have one opening."""
        num_values = self.num_opening_values
        return not num_values or num_values + 2 * sequence.num_tokens <= _MAX_OPENING_VALUES

    def open(self, opening: RowOpening) -> None:
        """Have the worker open a row."""
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def rows_to_plan(self) -> Iterator[tuple[SequenceGroup, list[Row]]]:
        """Go through the rows that need a decision, by group, in order: those with tokens to compute, and decoding ones
        that need a block or come to their last token."""
        due = self.worker_rows.decoding.take_due(self.step)
        for row in due:
            if row.last_step == self.step:
                self.worker_rows.pause(row)
        due = [row for row in due if row.is_decoding]
        if self._has_ample_blocks(len(due)):
            for row in due:
                self._slide(row)
                self.appended_blocks.append((row.slot, self.cache.append_next(row.holding)))
                self.worker_rows.decoding.got_block(row, self.step)
            self.began_block.extend(due)
            due.clear()
        in_order = sorted({**self.worker_rows.active, **dict.fromkeys(due)}, key=lambda row: row.order)
        for group, group_rows in groupby(in_order, key=lambda row: row.sequence.group):
            yield group, list(group_rows)

    def _has_ample_blocks(self, num_due: int) -> bool:
        """Whether no running group can lack a block in this plan, so that the order in which they get theirs, and who
        would be preempted for whom, does not matter."""
        num_missing = (
            self.cache.room.num_missing_blocks(row.holding, min(row.num_uncomputed_tokens, self.max_tokens))
            for row in self.worker_rows.active
        )
        num_blocks = num_due + sum(max(0, num) + 1 for num in num_missing)  # 1: a beam's copy
        return num_blocks <= self.cache.pool.num_free

    def share_prompts(self, num_next_tokens: int, precedes: Callable[[SequenceGroup], bool]) -> None:
        """Have long prompts give way to short ones: rows that do not decode get tokens in order of what they have left,
        and behind those that have less left than `num_next_tokens` up to so many are kept for the request that is next.
        Those that `precede` give way to none."""
        active = self.worker_rows.active
        rows = [(not precedes(row.sequence.group), row.num_uncomputed_tokens, row.order, row) for row in active]
        self.shares = {}
        num_free, is_kept = self.num_free_tokens, not num_next_tokens
        for gives_way, num_left, _, row in sorted(rows, key=itemgetter(0, 1, 2)):
            if not is_kept and gives_way and num_left > num_next_tokens:
                is_kept = True
                num_free -= min(num_next_tokens, num_free)
            num_tokens = self.shares[row] = min(num_left, num_free)
            num_free -= num_tokens

    def share_tokens(self, rows: Iterable[Row]) -> Work:
        """Say how many tokens of the budget each row computes. A decoding row has its one already."""
        num_free = self.num_free_tokens
        work = []
        for row in rows:
            self._slide(row)
            num_tokens = 1
            if not row.is_decoding:
                num_tokens = self.cache.room.num_computable_tokens(row.holding, row.num_uncomputed_tokens)
                num_tokens = min(num_tokens, num_free)
                if self.shares is not None:
                    num_tokens = min(num_tokens, self.shares.get(row, num_tokens))
                num_free -= num_tokens
            work.append((row, num_tokens))
        return work

    def compute(self, work: Work) -> None:
        """Give the rows the blocks that `num_missing_blocks` counted, and let them compute. Those without tokens
        rest."""
        for row in _tails_to_copy(self.cache, work):
            index, source, target = self.cache.replace_tail(row.holding)
            self.copies.append((source, target))
            self.set_blocks.append((row.slot, index, target))
        for row, num_tokens in work:
            for block in self.cache.append(row.holding, self.cache.room.num_missing_blocks(row.holding, num_tokens)):
                self.appended_blocks.append((row.slot, block))
        for row, num_tokens in work:
            if row.is_decoding:
                self.worker_rows.decoding.got_block(row, self.step)
                self.began_block.append(row)
            elif num_tokens:
                self._plan_row(row, num_tokens)

    def _plan_row(self, row: Row, num_tokens: int) -> None:
        """Let a row compute `num_tokens` positions for which it has blocks."""
        sequence, start = row.sequence, row.holding.num_computed_tokens
        samples = num_tokens == row.num_uncomputed_tokens
        num_owed = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        # It wants them as when its row was opened, which has reported no position from `start` on.
        num_prompt_logprobs = num_owed if sequence.wants_prompt_logprobs else 0
        num_tokens_next = int(not row.is_gated) if samples else num_tokens
        self.rows.append(PlannedRow(row.slot, row, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs))
        self.num_row_tokens += num_tokens
        row.plan(self.step, num_tokens, samples=samples)
        if not row.holding.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            row.holding.may_be_forked(self.step + 1)
        if samples:
            del self.worker_rows.active[row]
        self.cache.publish(row.holding, row.num_settled_tokens)

    def tell_branches(self, beam_group: BeamGroup) -> None:
        """Put what the last selection changed into the plan, which opens rows that had none."""
        self.forks.extend(beam_group.forks)
        self.appended_tokens.extend(beam_group.appended)
        self.worker_rows.num_open += len(beam_group.unborn_slots)
        beam_group.forget_changes()

    def _slide(self, row: Row) -> None:
        """Free the blocks that fell out of a row's window, if there is one."""
        if self.cache.window:
            self.cache.slide(row.holding, row.next_position)

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


def num_missing_blocks(cache: CacheManager, work: Work) -> int:
    """Count the blocks that a group must get before its rows can compute so many tokens each."""
    num_missing = sum(cache.room.num_missing_blocks(row.holding, num_tokens) for row, num_tokens in work)
    return num_missing + len(_tails_to_copy(cache, work))


def _tails_to_copy(cache: CacheManager, work: Work) -> list[Row]:
    """Find the beams that must have a copy of the block they write to next, because another one writes there
    too."""
    sharing: dict[int, list[Row]] = {}
    for row, num_tokens in work:
        writes = num_tokens and row.sequence.group.beam is not None
        if writes and (block := cache.shared_tail(row.holding)):
            sharing.setdefault(block, []).append(row)
    copying = []
    for block, holders in sharing.items():
        num_others = cache.pool.ref_count(block) - len(holders)
        copying.extend(holders if num_others else holders[1:])
    return copying
