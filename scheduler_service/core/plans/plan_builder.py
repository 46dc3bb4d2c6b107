"""The plan of a step while it is built, and the scheduler's view of the worker's rows.

The view tracks the free slots, and the number of tokens that each row computes unless a plan changes it.
"""

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

# The limit on token and block ids in one plan's row openings: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024

Work = list[tuple[Row, int]]  # rows of one group, each with the number of tokens that it computes


class RowSlots:
    """The slots 0..num_slots-1 of a worker. A slot can have one row (the worker's state of one running sequence).

    For each slot, this class also tracks how many tokens the worker computes in the next step by default. The lowest
    free slot is allocated first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._released: list[int] = []  # rows to end, since the last plan
        self._work = [0] * num_slots
        self._moving: set[int] = set()  # slots that compute in the next step by default, without the decoding rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Allocate the lowest free slot of the worker, and return its number."""
        return heappop(self._free)

    def reserve(self, group: SequenceGroup, num_slots: int) -> None:
        """Reserve `num_slots` slots of the worker for sequences of the request that will start later."""
        group.reserved_slots = [self.take() for _ in range(num_slots)]

    def give_back_reserved(self, group: SequenceGroup) -> None:
        """Release the slots that were reserved for later sequences of the request."""
        for slot in group.reserved_slots:
            self.give_back(slot)
        group.reserved_slots.clear()

    def end_row(self, slot: int) -> None:
        """Make the next plan end the row (running sequence) in this slot. The same plan may allocate a new row in the
        slot."""
        self._released.append(slot)
        self._work[slot] = 0
        self._moving.discard(slot)

    def give_back(self, slot: int) -> None:
        """Return a slot without a row to the free slots of the worker."""
        heappush(self._free, slot)

    def take_released(self) -> list[int]:
        """Return the slots whose rows (running sequences) the current plan must end, and clear this list."""
        released, self._released = self._released, []
        return released

    def decodes(self, slot: int) -> None:
        """Record that the row in this slot decodes one token in every plan, so that plans need not mention it."""
        self._moving.discard(slot)

    def stops_decoding(self, slot: int) -> None:
        """Record that the row in this slot no longer decodes one token in every plan. Its work is planned
        individually."""
        self._moving.add(slot)

    def patch(self, rows: Iterable[PlannedRow]) -> list[tuple[int, int]]:
        """Return the (slot, num_tokens) pairs in which this step differs from the number of tokens that the worker
        computes by default.

        `rows` are the individually planned rows. A row that is not among them rests, and gets 0 tokens.
        """
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
    """The rows (running sequences) of one worker: rows that decode one token in every plan, and rows that are planned
    individually."""

    def __init__(self, capacity: WorkerCapacity, num_slots: int, steps: StepCount) -> None:
        self._gates_grammars = capacity.gates_grammars
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(steps, capacity.block_size)
        self.active: dict[Row, None] = {}  # rows that have tokens to compute and do not decode
        self.num_open = 0
        self.drops = DropCount()

    def take_slot(self, sequence: Sequence) -> Row:
        """Create and return a row (the worker's state of one running sequence) for a sequence. The row gets a slot that
        is reserved for the request, or a free slot if none is reserved."""
        request, reserved = sequence.group.request, sequence.group.reserved_slots
        slot = reserved.pop(0) if reserved else self.slots.take()
        gates = request.grammar is not None and self._gates_grammars
        return sequence.take_slot(slot, self.drops, is_gated=gates or not sequence.group.chooses_tokens)

    def open(self, sequence: Sequence) -> Row:
        """Create and return a row on the worker for a sequence that starts to run. The row is planned individually
        until it decodes one token in every plan."""
        row = self.take_slot(sequence)
        self.active[row] = None
        self.num_open += 1
        return row

    def pause(self, row: Row) -> None:
        """Move a row from the decoding rows, which every plan includes, to the rows that are planned individually."""
        self.decoding.leave(row)
        self.slots.stops_decoding(row.slot)
        self.active[row] = None

    def vacate(self, row: Row) -> None:
        """End a row (running sequence) on the worker, and release its slot."""
        if row.is_decoding:
            self.decoding.leave(row)
        self.active.pop(row, None)
        beam = row.sequence.group.beam
        if beam is None or row.slot not in beam.new_slots:
            self.slots.end_row(row.slot)
            self.num_open -= 1
        self.slots.give_back(row.slot)
        row.vacate()

    def vacate_group(self, group: SequenceGroup) -> None:
        """End all rows of a request on the worker, and release all its slots, including reserved slots."""
        for row in group.open_rows:
            self.vacate(row)
        self.slots.give_back_reserved(group)
        if group.beam is not None:
            group.beam.forget_step()

    def repeat(self, row: Row) -> None:
        """Handle a row (running sequence) that could not sample in the oldest plan, because its grammar mask was not
        ready. The worker computes the row's last position again in the next plan.

        Each plan in flight then does the work that the preceding plan was to do. A decoding row without a first token
        is planned individually until it has a token, because its result needs individual handling.
        """
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
    """A step plan while the scheduler builds it: the work of one step on the worker.

    Decoding rows compute one token in every plan without an entry. The block transfers of this step are in the move
    ledger.
    """

    step: int
    max_tokens: int
    worker_rows: WorkerRows
    cache: CacheManager
    now: float
    num_row_tokens: int = 0  # of the individually planned rows
    num_opening_values: int = 0
    # The tokens that each row that does not decode may compute; None: each row may use all tokens that earlier rows
    # leave.
    shares: dict[Row, int] | None = None
    is_slowed: bool = False  # `max_tokens` is below the step limit, and `shares` will be set
    has_preempted: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)  # source, target
    added_grammars: list[AddedGrammar] = field(default_factory=list)
    openings: list[RowOpening] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # slot, block
    set_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    rows: list[PlannedRow] = field(default_factory=list)
    began_block: list[Row] = field(default_factory=list)  # decoding rows that got a block

    @property
    def num_tokens(self) -> int:
        return self.num_row_tokens + len(self.worker_rows.decoding)

    @property
    def num_free_tokens(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """Return whether the worker has nothing to do in this plan. Rows to end do not count, because they can be ended
        by a later plan."""
        return not (self.num_tokens or self.openings or self.added_grammars or self.cache.moves.ordered_by(self.step))

    def can_open(self, sequence: Sequence) -> bool:
        """Return whether the message of this plan has room for the tokens and blocks of another sequence that starts to
        run. The first such sequence always fits."""
        num_values = self.num_opening_values
        return not num_values or num_values + 2 * sequence.num_tokens <= _MAX_OPENING_VALUES

    def open(self, opening: RowOpening) -> None:
        """Add a row opening (the message that allocates a row for a sequence on the worker) to the plan."""
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def rows_to_plan(self) -> Iterator[tuple[SequenceGroup, list[Row]]]:
        """Iterate over the running sequences (rows) that need a decision in this plan, as (request group, rows of the
        group), in scheduling order.

        These are rows with tokens to compute, and decoding rows that need a KV cache block or sample their last token.
        """
        due = self.worker_rows.decoding.take_due(self.step)
        for row in due:
            if row.last_step == self.step:
                self.worker_rows.pause(row)
        due = [row for row in due if row.is_decoding]
        if self._has_ample_blocks(len(due)):
            for row in due:
                self._slide(row)
                self.appended_blocks.append((row.slot, self.cache.append_next(row.allocation)))
                self.worker_rows.decoding.got_block(row, self.step)
            self.began_block.extend(due)
            due.clear()
        in_order = sorted({**self.worker_rows.active, **dict.fromkeys(due)}, key=lambda row: row.order)
        for group, group_rows in groupby(in_order, key=lambda row: row.sequence.group):
            yield group, list(group_rows)

    def _has_ample_blocks(self, num_due: int) -> bool:
        """Return whether the pool has enough free KV cache blocks for all running requests in this plan.

        Then no request is preempted, and the order in which blocks are allocated does not matter.
        """
        num_missing = (
            self.cache.room.num_missing_blocks(row.allocation, min(row.num_uncomputed_tokens, self.max_tokens))
            for row in self.worker_rows.active
        )
        num_blocks = num_due + sum(max(0, num) + 1 for num in num_missing)  # 1: copy-on-write by a beam
        return num_blocks <= self.cache.pool.num_free

    def share_prompts(self, num_next_tokens: int, precedes: Callable[[SequenceGroup], bool]) -> None:
        """Divide the step's token budget among the running sequences that do not decode in every plan, so that short
        prompts are computed before long prompts.

        Sequences get tokens in order of their remaining tokens, fewest first. Up to `num_next_tokens` tokens are
        reserved for the next waiting request. Sequences with at most that many remaining tokens get their tokens before
        this reservation. Requests for which `precedes` is true get their tokens first of all.
        """
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
        """Return the number of tokens that each running sequence computes in this plan, as (row, number) pairs.

        A decoding row has one token already, and the other rows share the free tokens of the step in order.
        """
        num_free = self.num_free_tokens
        work = []
        for row in rows:
            self._slide(row)
            num_tokens = 1
            if not row.is_decoding:
                num_tokens = self.cache.room.num_computable_tokens(row.allocation, row.num_uncomputed_tokens)
                num_tokens = min(num_tokens, num_free)
                if self.shares is not None:
                    num_tokens = min(num_tokens, self.shares.get(row, num_tokens))
                num_free -= num_tokens
            work.append((row, num_tokens))
        return work

    def compute(self, work: Work) -> None:
        """Add the computation of these running sequences to the plan, and allocate the KV cache blocks that are missing
        for it. A row with 0 tokens rests in this step."""
        for row in _tails_to_copy(self.cache, work):
            index, source, target = self.cache.replace_tail(row.allocation)
            self.copies.append((source, target))
            self.set_blocks.append((row.slot, index, target))
        for row, num_tokens in work:
            for block in self.cache.append(
                row.allocation, self.cache.room.num_missing_blocks(row.allocation, num_tokens)
            ):
                self.appended_blocks.append((row.slot, block))
        for row, num_tokens in work:
            if row.is_decoding:
                self.worker_rows.decoding.got_block(row, self.step)
                self.began_block.append(row)
            elif num_tokens:
                self._plan_row(row, num_tokens)

    def _plan_row(self, row: Row, num_tokens: int) -> None:
        """Add the computation of `num_tokens` positions of a running sequence to the plan. The sequence must have the
        KV cache blocks for these positions."""
        sequence, start = row.sequence, row.allocation.num_computed_tokens
        samples = num_tokens == row.num_uncomputed_tokens
        num_owed = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        # This is still the value from when the row was allocated: no position from `start` on has been reported.
        num_prompt_logprobs = num_owed if sequence.wants_prompt_logprobs else 0
        num_tokens_next = int(not row.is_gated) if samples else num_tokens
        self.rows.append(PlannedRow(row.slot, row, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs))
        self.num_row_tokens += num_tokens
        row.plan(self.step, num_tokens, samples=samples)
        if not row.allocation.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            row.allocation.may_be_forked(self.step + 1)
        if samples:
            del self.worker_rows.active[row]
        self.cache.publish(row.allocation, row.num_settled_tokens)

    def add_beam_changes(self, beam_group: BeamGroup) -> None:
        """Add the changes from the last selection of a beam search to the plan: rows to fork, and tokens to append. The
        forks create rows in slots that had none."""
        self.forks.extend(beam_group.forks)
        self.appended_tokens.extend(beam_group.appended)
        self.worker_rows.num_open += len(beam_group.new_slots)
        beam_group.forget_changes()

    def _slide(self, row: Row) -> None:
        """Free the KV cache blocks of a running sequence that the sliding window has passed. Does nothing if the model
        has no sliding window."""
        if self.cache.window:
            self.cache.slide(row.allocation, row.next_position)

    def freeze(self, epoch: int, **others: Collection[Any]) -> StepPlan:
        """Return the finished plan as the message for the worker.

        `others` are the columns that are known last: the block transfers between device and host, the slots of ended
        rows, the grammars to release, and the changed (slot, number of tokens) pairs.
        """
        columns: dict[str, tuple[Any, ...]] = {}
        for phase, names in PHASES.items():
            entries = others[phase] if phase in others else getattr(self, phase)
            if entries and len(names) > 1:
                columns.update(zip(names, zip(*entries, strict=True), strict=True))
            elif entries:
                columns[phase] = tuple(entries)
        return StepPlan(epoch, self.step, **columns)


def num_missing_blocks(cache: CacheManager, work: Work) -> int:
    """Return the number of KV cache blocks that a request must get before it can compute the tokens of `work`, which
    are given per running sequence."""
    num_missing = sum(cache.room.num_missing_blocks(row.allocation, num_tokens) for row, num_tokens in work)
    return num_missing + len(_tails_to_copy(cache, work))


def _tails_to_copy(cache: CacheManager, work: Work) -> list[Row]:
    """Return the beams that must copy the KV cache block of their next position before they write to it, because
    another sequence holds the block too (copy-on-write)."""
    sharing: dict[int, list[Row]] = {}
    for row, num_tokens in work:
        writes = num_tokens and row.sequence.group.beam is not None
        if writes and (block := cache.shared_tail(row.allocation)):
            sharing.setdefault(block, []).append(row)
    copying = []
    for block, holders in sharing.items():
        num_others = cache.pool.ref_count(block) - len(holders)
        copying.extend(holders if num_others else holders[1:])
    return copying
