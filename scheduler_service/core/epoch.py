"""What lives and dies with an epoch: one worker's blocks, rows and plans, and the mechanics of using them."""

from collections.abc import Iterable
from dataclasses import replace

from scheduler_service.core.cache_manager import CacheManager
from scheduler_service.core.cost import CostModel
from scheduler_service.core.decode_batch import DecodeBatch
from scheduler_service.core.dispatch import Dispatch, PlannedRow
from scheduler_service.core.plan import RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.plan_draft import PlanDraft
from scheduler_service.core.row_slots import RowSlots
from scheduler_service.core.sequence import Sequence, SequenceGroup, StepClock


class Epoch:
    def __init__(
        self, number: int, capacity: WorkerCapacity, cache: CacheManager, num_slots: int, cost: CostModel
    ) -> None:
        self.number = number
        self.capacity = capacity
        self.cache = cache
        self.cost = cost
        self.clock = StepClock()
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(self.clock, capacity.block_size)
        self.num_rows = 0
        self.active: dict[Sequence, None] = {}  # rows with tokens to compute that do not decode
        self.unacknowledged: list[Dispatch] = []
        self.last_moved_step = 0
        self.swapped: dict[SequenceGroup, None] = {}  # out, or on their way out
        self.loading: dict[SequenceGroup, None] = {}  # on their way in
        self.partial: dict[SequenceGroup, None] = {}  # running groups of which some sequence has no row
        self.blocked: tuple[SequenceGroup | None, int] = (None, 0)  # who last lacked blocks, and how many were free

    @property
    def num_steps(self) -> int:
        return self.clock.num_steps

    @property
    def last_acknowledged_step(self) -> int:
        return self.unacknowledged[0].step - 1 if self.unacknowledged else self.clock.num_steps

    @property
    def is_idle(self) -> bool:
        """The worker has nothing to answer: nothing changes unless a plan is made."""
        return not self.unacknowledged and not len(self.cache.moves)

    # Rows

    def reserve_slots(self, group: SequenceGroup, num_slots: int) -> None:
        group.reserved_slots = [self.slots.take() for _ in range(num_slots)]

    def give_back_reserved(self, group: SequenceGroup) -> None:
        for slot in group.reserved_slots:
            self.slots.give_back(slot)
        group.reserved_slots.clear()

    def open_row(self, sequence: Sequence, draft: PlanDraft) -> None:
        group = sequence.group
        sequence.slot = group.reserved_slots.pop(0) if group.reserved_slots else self.slots.take()
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            sequence.forkable_from = draft.step + 1  # it may have matched what this very plan computes
        self.active[sequence] = None
        self.num_rows += 1
        draft.open(_opening(sequence))

    def pause(self, sequence: Sequence) -> None:
        """A decoding row goes back to those that are planned one by one."""
        self.decoding.leave(sequence)
        self.slots.stops_decoding(sequence.slot)
        self.active[sequence] = None

    def vacate(self, sequence: Sequence) -> None:
        """The sequence's row ends."""
        if sequence.is_decoding:
            self.decoding.leave(sequence)
        self.active.pop(sequence, None)
        beam = sequence.group.beam
        if beam is None or sequence.slot not in beam.unborn_slots:
            self.slots.end_row(sequence.slot)
            self.num_rows -= 1
        self.slots.give_back(sequence.slot)
        sequence.slot = -1

    def vacate_group(self, group: SequenceGroup) -> None:
        """All its rows end, and every slot it has is given back."""
        for sequence in group.open_sequences:
            self.vacate(sequence)
        self.give_back_reserved(group)
        self.partial.pop(group, None)
        if group.beam is not None:
            group.beam.candidates.clear()
            group.beam.forget_changes()

    def drop(self, sequence: Sequence) -> None:
        """Samples of the sequence that are on their way no longer count."""
        if sequence.num_in_flight:
            for dispatch in self.unacknowledged:
                dispatch.dropped.add(sequence)
            sequence.forget_in_flight()

    def forget(self, group: SequenceGroup) -> None:
        """The group holds nothing any more: no row, no block of either tier."""
        self.vacate_group(group)
        for sequence in group.sequences:
            self.cache.release(sequence)
        self.swapped.pop(group, None)
        self.loading.pop(group, None)

    # Beams

    def num_missing_blocks(self, rows: Iterable[tuple[Sequence, int]]) -> int:
        """What a group must get before its rows can compute so many tokens each."""
        rows = list(rows)
        num_missing = sum(self.cache.num_missing_blocks(sequence, num_tokens) for sequence, num_tokens in rows)
        return num_missing + len(self.tails_to_copy([sequence for sequence, num_tokens in rows if num_tokens]))

    def tails_to_copy(self, rows: list[Sequence]) -> list[Sequence]:
        """The beams that must have a copy of the block they write to next, because another one writes there too."""
        sharing: dict[int, list[Sequence]] = {}
        for sequence in rows:
            block = self.cache.shared_tail(sequence) if sequence.group.beam is not None else 0
            if block:
                sharing.setdefault(block, []).append(sequence)
        copying = []
        for block, holders in sharing.items():
            num_others = self.cache.pool.ref_count(block) - len(holders)
            copying.extend(holders if num_others else holders[1:])
        return copying

    def tell_beams(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Put what the last selection changed into the plan."""
        beam = group.beam
        if beam is not None and beam.appended:
            draft.forks.extend(beam.forks)
            draft.appended_tokens.extend(beam.appended)
            self.num_rows += len(beam.unborn_slots)
            beam.forget_changes()

    # Plans

    def has_ample_blocks(self, num_due: int, max_tokens: int) -> bool:
        """Whether nobody who runs can lack a block in this plan, so that the order in which they get theirs, and who
        would be preempted for whom, does not matter."""
        cache = self.cache
        num_blocks = num_due
        for sequence in self.active:
            num_tokens = min(sequence.num_uncomputed_tokens, max_tokens)
            num_blocks += max(0, cache.num_missing_blocks(sequence, num_tokens)) + 1  # a beam's copy
        return num_blocks <= cache.pool.num_free

    def extend_decoding(self, due: list[Sequence], draft: PlanDraft) -> None:
        """A block for each decoding row that needs one."""
        for sequence in due:
            draft.appended_blocks.append((sequence.slot, self.cache.append_next(sequence)))
            self.decoding.extended(sequence, draft.step)
        draft.extended.extend(due)

    def give_blocks(self, rows: list[tuple[Sequence, int]], draft: PlanDraft) -> None:
        """The blocks that `num_missing_blocks` counted."""
        for sequence in self.tails_to_copy([sequence for sequence, num_tokens in rows if num_tokens]):
            index, source, target = self.cache.replace_tail(sequence)
            draft.copies.append((source, target))
            draft.set_blocks.append((sequence.slot, index, target))
        for sequence, num_tokens in rows:
            num_missing = self.cache.num_missing_blocks(sequence, num_tokens)
            if num_missing > 0:
                for block in self.cache.append(sequence, num_missing):
                    draft.appended_blocks.append((sequence.slot, block))

    def plan_row(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> None:
        """Let a row compute `num_tokens` positions for which it has blocks; 0 lets it rest."""
        if not num_tokens:
            return
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens
        num_prompt_logprobs = 0
        if sequence.reports_prompt_logprobs:
            num_prompt_logprobs = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        num_tokens_next = (0 if sequence.group.beam is not None else 1) if samples else num_tokens
        draft.work(
            PlannedRow(sequence.slot, sequence, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs)
        )
        sequence.plan(num_tokens, samples=samples)
        if not sequence.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            sequence.forkable_from = draft.step + 1
        if samples:
            del self.active[sequence]
        self.cache.publish(sequence)

    def dispatch(self, draft: PlanDraft) -> StepPlan | None:
        """Make the plan final. None if there is nothing to do."""
        if draft.is_empty:
            return None
        self.clock.num_steps += 1
        self.cache.copied(draft.copies)
        rows = tuple(draft.rows)
        self.unacknowledged.append(
            Dispatch(
                step=draft.step,
                rows=rows,
                columns=self.decoding.columns(),
                extended=tuple(draft.extended),
                num_tokens=draft.num_tokens,
                num_prompt_tokens=sum(
                    row.num_tokens for row in rows if row.start + row.num_tokens <= row.sequence.num_prompt_tokens
                ),
                has_moves=bool(draft.swaps_out or draft.swaps_in),
            )
        )
        plan = _freeze(draft, self.number, self.slots.take_released(), self.slots.patch(rows))
        for row in rows:
            sequence = row.sequence
            if row.samples and row.num_tokens_next and sequence.num_uncomputed_tokens:
                self.decoding.join(sequence)
                self.slots.decodes(row.slot)
        return plan


def _opening(sequence: Sequence) -> RowOpening:
    request = sequence.group.request
    sampling = request.sampling
    sequence.reports_prompt_logprobs = sequence.wants_prompt_logprobs
    if sampling.num_prompt_logprobs is not None and not sequence.reports_prompt_logprobs:
        sampling = replace(sampling, num_prompt_logprobs=None)
    return RowOpening(
        slot=sequence.slot,
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=tuple(sequence.block_table),
        sampling=sampling,
        seed=request.seed,
        sample_index=sequence.sample_index,
        traceparent=request.traceparent,
    )


def _freeze(draft: PlanDraft, epoch: int, released_slots: tuple[int, ...], patches: list[tuple[int, int]]) -> StepPlan:
    swap_out_device_blocks, swap_out_host_blocks = _columns(draft.swaps_out, 2)
    swap_in_host_blocks, swap_in_device_blocks = _columns(draft.swaps_in, 2)
    copy_source_blocks, copy_target_blocks = _columns(draft.copies, 2)
    fork_source_slots, fork_target_slots = _columns(draft.forks, 2)
    append_slots, append_block_ids = _columns(draft.appended_blocks, 2)
    set_block_slots, set_block_indexes, set_block_ids = _columns(draft.set_blocks, 3)
    append_token_slots, append_token_ids = _columns(draft.appended_tokens, 2)
    work_slots, work_num_tokens = _columns(patches, 2)
    return StepPlan(
        epoch=epoch,
        step=draft.step,
        released_slots=released_slots,
        swap_out_device_blocks=swap_out_device_blocks,
        swap_out_host_blocks=swap_out_host_blocks,
        swap_in_host_blocks=swap_in_host_blocks,
        swap_in_device_blocks=swap_in_device_blocks,
        copy_source_blocks=copy_source_blocks,
        copy_target_blocks=copy_target_blocks,
        openings=tuple(draft.openings),
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
    )


def _columns(entries: Iterable[tuple[int, ...]], width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(zip(*entries, strict=True)) or ((),) * width
