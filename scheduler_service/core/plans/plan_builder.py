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
from scheduler_service.core.cache import CacheManager, Save, StepCount
from scheduler_service.core.plans.decode_batch import DecodeBatch
from scheduler_service.core.plans.dispatch import PlannedRow
from scheduler_service.core.sequence import BeamGroup, DropCount, Row, Sequence, SequenceGroup

# The limit on token and block ids in one plan's row openings: at most 4 bytes each, 8 MiB together.
_MAX_OPENING_VALUES = 2 * 1024 * 1024

Work = list[tuple[Row, int]]  # rows of one group, each with the number of tokens that it computes


class RowSlots:
    """The slots of a worker, numbered from 0. A slot can contain one row (the worker's state of one running sequence).

    The lowest free slot is allocated first. This class also tracks, for each slot, how many tokens the worker computes
    in the next step if the plan does not mention the slot.
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

    @property
    def has_released(self) -> bool:
        """Whether the next plan has rows to end."""
        return bool(self._released)

    def take(self) -> int:
        """Allocate the lowest free slot of the worker, and return its number."""
        return heappop(self._free)

    def reserve(self, group: SequenceGroup, num_slots: int) -> None:
        """Reserve `num_slots` free slots of the worker for the sequences of a request, so that no other request gets
        these slots before the sequences start."""
        group.reserved_slots = [self.take() for _ in range(num_slots)]

    def give_back_reserved(self, group: SequenceGroup) -> None:
        """Release the slots that are still reserved for sequences of the request."""
        for slot in group.reserved_slots:
            self.give_back(slot)
        group.reserved_slots.clear()

    def end_row(self, slot: int) -> None:
        """Make the next plan delete the worker's state of the sequence in this slot. The same plan may start another
        sequence in the slot."""
        self._released.append(slot)
        self._work[slot] = 0
        self._moving.discard(slot)

    def give_back(self, slot: int) -> None:
        """Make a slot available again after its sequence has ended, or if the slot was only reserved."""
        heappush(self._free, slot)

    def take_released(self) -> list[int]:
        """Return the slots whose sequences the worker must delete in the current plan. Later calls do not return these
        slots again."""
        released, self._released = self._released, []
        return released

    def decodes(self, slot: int) -> None:
        """Record that the sequence in this slot decodes one token in every step from now on. Plans then need no entry
        for the slot."""
        self._moving.discard(slot)

    def stops_decoding(self, slot: int) -> None:
        """Record that the sequence in this slot no longer decodes one token in every step. From now on, the worker
        computes it only in steps whose plan has an entry for it."""
        self._moving.add(slot)

    def patch(self, rows: Iterable[PlannedRow]) -> list[tuple[int, int]]:
        """Return the (slot, number of tokens) pairs that the plan must send, because the worker would otherwise compute
        a different number of tokens in these slots.

        `rows` are the sequences that are planned individually. Such a sequence without an entry in `rows` computes 0
        tokens in this step.
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
    """The running sequences of one worker, in two sets: sequences that decode one token in every step, and sequences
    that are planned individually."""

    def __init__(self, capacity: WorkerCapacity, num_slots: int, steps: StepCount) -> None:
        self._gates_grammars, self.num_worker_slots = capacity.gates_grammars, capacity.max_num_seqs
        self._leases = capacity.max_leased_steps > 0
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(steps, capacity.block_size)
        self.active: dict[Row, None] = {}  # rows that have tokens to compute and do not decode
        self.num_open = 0
        self.drops = DropCount()

    def table(self, slot: int, group: int) -> int:
        """Return the number of the block table of a layer group for the row in a slot of the worker."""
        return group * self.num_worker_slots + slot

    def take_slot(self, sequence: Sequence) -> Row:
        """Assign a slot of the worker to a sequence, and return the sequence's new row (the worker's state of one
        running sequence). A slot that is reserved for the request is used first."""
        request, reserved = sequence.group.request, sequence.group.reserved_slots
        slot = reserved.pop(0) if reserved else self.slots.take()
        gates = request.grammar is not None and self._gates_grammars
        is_gated = gates or not sequence.group.chooses_tokens
        return sequence.take_slot(slot, self.drops, is_gated=is_gated, may_be_leased=self._leases)

    def open(self, sequence: Sequence) -> Row:
        """Assign a slot of the worker to a sequence that starts to run, and return the sequence's new row (the worker's
        state of one running sequence).

        Each plan needs an entry for the sequence, until the sequence decodes one token in every step.
        """
        row = self.take_slot(sequence)
        self.active[row] = None
        self.num_open += 1
        return row

    def pause(self, row: Row) -> None:
        """Stop decoding a sequence in every step. From now on, the worker computes it only in steps whose plan has an
        entry for it."""
        self.decoding.leave(row)
        self.slots.stops_decoding(row.slot)
        self.active[row] = None

    def vacate(self, row: Row) -> None:
        """End a sequence's row (its state on the worker), and make the slot available to other sequences."""
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
        """End the rows of all sequences of a request on the worker, and release the request's slots, including reserved
        slots. A row is the worker's state of one running sequence."""
        for row in group.open_rows:
            self.vacate(row)
        self.slots.give_back_reserved(group)
        if group.beam is not None:
            group.beam.forget_step()

    def repeat(self, row: Row, num_samples: int = 1) -> None:
        """Plan the last `num_samples` positions of a sequence again from the next plan on. The worker did not sample
        there, because the sequence's grammar mask was not ready, or because it has dropped the steps of a lease.

        Each plan in flight then does the work that the preceding plan was to do for this sequence. A decoding sequence
        that has no output token yet is planned individually until it has a token.
        """
        decodes = row.is_decoding and row.sequence.first_token_at is not None
        if decodes:
            self.decoding.leave(row)
        elif row.is_decoding:
            self.pause(row)
            self.drops.num_drops += 1
        row.repeat(num_samples)
        if decodes:
            self.decoding.join(row)
        elif row.slot >= 0 and row.num_uncomputed_tokens:
            self.active[row] = None


@dataclass(slots=True)
class PlanBuilder:
    """A step plan that the scheduler is building: the computation for one step on the worker.

    Sequences that decode one token in every step need no entry in the plan. The block transfers between device and host
    in this step are stored in `MoveLedger`.
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
    appended_blocks: list[tuple[int, int]] = field(default_factory=list)  # table, block
    set_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # table, index, block
    appended_tokens: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    set_states: list[tuple[int, ...]] = field(default_factory=list)  # slot, first and second state
    saves: list[tuple[int, Save]] = field(default_factory=list)  # slot, save
    read_states: list[int] = field(default_factory=list)  # that rows start with
    rows: list[PlannedRow] = field(default_factory=list)
    began_block: list[Row] = field(default_factory=list)  # decoding rows that got a block
    ends_lease: bool = False  # the plan in flight has a lease with steps that the worker has not computed
    follows_lease: bool = False  # rows may be fewer positions ahead than it seems, if the lease ends early
    leased: list[tuple[Row, ...]] = field(default_factory=list)  # for each leased step, the rows that begin a block

    @property
    def num_tokens(self) -> int:
        return self.num_row_tokens + len(self.worker_rows.decoding)

    @property
    def num_free_tokens(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_empty(self) -> bool:
        """Return whether the plan has nothing to compute, no sequence to start, no grammar to prepare and no block to
        transfer. Sequences to delete matter only if the worker may still compute them in a lease."""
        has_work = self.num_tokens or self.openings or self.added_grammars or self.cache.moves.ordered_by(self.step)
        return not (has_work or (self.ends_lease and self.worker_rows.slots.has_released))

    def can_open(self, sequence: Sequence) -> bool:
        """Return whether another sequence may start in this plan without exceeding the size limit of the plan's
        message. The first sequence that starts in a plan always fits."""
        num_values = self.num_opening_values
        return not num_values or num_values + 2 * sequence.num_tokens <= _MAX_OPENING_VALUES

    def open(self, opening: RowOpening) -> None:
        """Add a new sequence to the plan. `opening` gives the worker the sequence's tokens, blocks and sampling
        parameters."""
        self.openings.append(opening)
        self.num_opening_values += len(opening.token_ids) + len(opening.block_ids)

    def rows_to_plan(self) -> Iterator[tuple[SequenceGroup, list[Row]]]:
        """Iterate over the running sequences that the scheduler must examine for this plan, as (request, sequences of
        the request), in scheduling order.

        These are the sequences that are planned individually, and the decoding sequences that need another KV cache
        block or sample their last token. If the pool has ample free blocks, decoding sequences get their blocks here
        and are left out.
        """
        due = self.worker_rows.decoding.take_due(self.step)
        for row in due:
            if row.last_step == self.step:
                self.worker_rows.pause(row)
        due = [row for row in due if row.is_decoding]
        if self._has_ample_blocks(len(due)):
            for row in due:
                self._append_next(row, self.step)
            self._began_blocks(due)
            due.clear()
        if not (due or self.worker_rows.active):
            return
        in_order = sorted({**self.worker_rows.active, **dict.fromkeys(due)}, key=lambda row: row.order)
        for group, group_rows in groupby(in_order, key=lambda row: row.sequence.group):
            yield group, list(group_rows)

    def lease(self, max_steps: int) -> None:
        """Lease further steps to the worker, up to `max_steps`. Decoding sequences get the blocks that they need then.

        A lease ends before a step that must be planned, because a sequence ends in it, saves its state or finds no free
        block.
        """
        decoding = self.worker_rows.decoding
        while len(self.leased) < max_steps:
            step = self.step + len(self.leased) + 1
            due = decoding.due(step)
            num_blocks = (len(due) + len(decoding)) * len(self.cache.room.windows.of_groups)  # one remains for each row
            ends = any(row.last_step == step for row in due)
            if due and (ends or self.cache.states.num_states or num_blocks > self.cache.pool.num_free):
                return
            for row in decoding.take_due(step):
                self._append_next(row, step)
                decoding.got_block(row, step)
            self.leased.append(tuple(due))

    def _append_next(self, row: Row, step: int) -> None:
        """Give a decoding sequence its next block of each layer group for a step, unless it has the block already,
        because a plan gave it the block for a sample that the worker did not compute."""
        cache, held, number = self.cache, row.allocation, row.slot
        self._slide(row)
        if row.may_repeat:
            num_needed = held.num_computed_tokens + step - self.step + 1
            if num_needed <= held.num_granted_blocks * cache.block_size:
                return
        for block in cache.append_next(held):
            self.appended_blocks.append((number, block))
            number += self.worker_rows.num_worker_slots

    def _has_ample_blocks(self, num_due: int) -> bool:
        """Return whether the pool has enough free KV cache blocks for all running sequences in this plan.

        Then no request must be preempted, and the blocks can be allocated in any order.
        """
        num_missing = (
            self.cache.room.num_missing_blocks(row.allocation, min(row.num_uncomputed_tokens, self.max_tokens))
            for row in self.worker_rows.active
        )
        num_groups = len(self.cache.room.windows.of_groups)
        num_blocks = num_due * num_groups + sum(num + num_groups for num in num_missing)  # copy-on-write by beams
        return num_blocks <= self.cache.pool.num_free

    def _append(self, row: Row, num_tokens: int) -> None:
        """Allocate the blocks that a row still needs to compute its next `num_tokens` positions."""
        for group, block in self.cache.append(row.allocation, num_tokens):
            self.appended_blocks.append((self.worker_rows.table(row.slot, group), block))

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
        """Return how many tokens each of these running sequences computes in this plan, as (row, number of tokens)
        pairs.

        A decoding sequence computes 1 token, which is already included in the plan's token count. The other sequences
        get the remaining tokens of the step, in the given order.
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
        """Add the computation of running sequences to the plan, and allocate the KV cache blocks that they still need
        for it. `work` has the number of tokens for each sequence. With 0 tokens, a sequence is not computed in this
        step."""
        for row in _tails_to_copy(self.cache, work):
            index, pairs = self.cache.replace_tail(row.allocation)
            self.copies.extend(pairs)
            for group, (_, target) in enumerate(pairs):
                self.set_blocks.append((self.worker_rows.table(row.slot, group), index, target))
        for row, num_tokens in work:
            self._append(row, num_tokens)
        for row, num_tokens in work:
            if row.is_decoding:
                self._began_blocks([row])
            elif num_tokens:
                self._plan_row(row, num_tokens)

    def _began_blocks(self, rows: list[Row]) -> None:
        """Record that the plan gives decoding sequences their next KV cache blocks."""
        got_block, states = self.worker_rows.decoding.got_block, self.cache.states
        for row in rows:
            got_block(row, self.step)
            if states.num_states and not self.follows_lease:
                saves = states.save_decoded(row.allocation, row.allocation.num_computed_tokens)
                self.saves += [(row.slot, save) for save in saves]
        self.began_block += rows

    def _plan_row(self, row: Row, num_tokens: int) -> None:
        """Add the computation of the next `num_tokens` positions of a running sequence to the plan. The sequence must
        already have the KV cache blocks for these positions."""
        sequence, start = row.sequence, row.allocation.num_computed_tokens
        samples = num_tokens == row.num_uncomputed_tokens
        num_owed = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        # This is still the value from when the row was allocated: no position from `start` on has been reported.
        num_prompt_logprobs = num_owed if sequence.wants_prompt_logprobs else 0
        num_tokens_next = int(not row.is_gated) if samples else num_tokens
        self.rows.append(PlannedRow(row.slot, row, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs))
        self.num_row_tokens += num_tokens
        is_certain = not (self.follows_lease and row.num_in_flight)
        row.plan(self.step, num_tokens, samples=samples)
        if not row.allocation.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            row.allocation.may_be_forked(self.step + 1)
        if samples:
            del self.worker_rows.active[row]
        self.cache.publish(row.allocation, row.num_settled_tokens)
        if self.cache.states.num_states:
            self._plan_states(row, start, start + num_tokens, is_certain=is_certain)

    def _plan_states(self, row: Row, start: int, end: int, *, is_certain: bool) -> None:
        """Plan the saves of a row that computes the positions from `start` to `end`. Beams save no states after their
        prompt, because they continue in other sequences. Nor does a row whose position is not certain."""
        states, allocation, group = self.cache.states, row.allocation, row.sequence.group
        if allocation.states.source:
            self.read_states.append(allocation.states.source)
            allocation.states.source = 0
        if not is_certain or (group.beam is not None and start >= row.sequence.num_prompt_tokens):
            return
        if group.beam is None and group.rowless_sequences:
            for save in states.save_fork(allocation, start, end):
                self.saves.append((row.slot, save))
                allocation.may_be_forked(self.step + 1)  # also if the row computes the end of its prompt again
        self.saves += [(row.slot, save) for save in states.save_prompt(allocation, start, end)]

    def add_beam_changes(self, beam_group: BeamGroup) -> None:
        """Add the result of the last beam selection to the plan: the beams that the worker must fork from another beam,
        and the token to append to each beam.

        A fork may create a beam in a slot in which the worker has no sequence yet.
        """
        self.forks.extend(beam_group.forks)
        self.set_states.extend(beam_group.new_states)
        self.appended_tokens.extend(beam_group.appended)
        self.worker_rows.num_open += len(beam_group.new_slots)
        beam_group.forget_changes()

    def _slide(self, row: Row) -> None:
        """Free the KV cache blocks of a running sequence that the sliding window has passed. Does nothing if the model
        has no sliding window."""
        if self.cache.has_windows:
            self.cache.slide(row.allocation, row.next_position)

    def freeze(self, epoch: int, **others: Collection[Any]) -> StepPlan:
        """Return the finished plan as a message for the worker.

        `others` are the fields of the message that are known only at the end: block transfers between device and host,
        slots to clear, grammars to release, and changed numbers of tokens.
        """
        columns: dict[str, tuple[Any, ...]] = {}
        for phase, names in PHASES.items():
            entries = others[phase] if phase in others else getattr(self, phase)
            if entries and len(names) > 1:
                columns.update(zip(names, zip(*entries, strict=True), strict=True))
            elif entries:
                columns[phase] = tuple(entries)
        return StepPlan(epoch, self.step, num_leased_steps=len(self.leased), ends_lease=self.ends_lease, **columns)


def num_missing_blocks(cache: CacheManager, work: Work) -> int:
    """Return how many more KV cache blocks must be allocated before the sequences in `work` can compute their
    tokens."""
    num_missing = sum(cache.room.num_missing_blocks(row.allocation, num_tokens) for row, num_tokens in work)
    return num_missing + len(_tails_to_copy(cache, work)) * len(cache.room.windows.of_groups)


def _tails_to_copy(cache: CacheManager, work: Work) -> list[Row]:
    """Return the beams that must copy a KV cache block before they write their next position to it (copy-on-write),
    because another sequence uses the same block."""
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
