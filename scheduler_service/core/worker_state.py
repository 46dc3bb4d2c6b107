"""The state that lives and dies with an epoch: one worker's blocks, rows and plans, and the mechanics of using them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from pagewire.common.messages import RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.beam import Child
from scheduler_service.core.cache import CacheManager, Holding, Match, StepCount
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.grammars import NeededGrammars
from scheduler_service.core.plans import DecodeBatch, Dispatch, PlanBuilder, PlannedRow, RowSlots
from scheduler_service.core.sequence import BeamGroup, DropCount, Row, Sequence, SequenceGroup

# Of no worker: nothing fits on that.
_NO_CAPACITY = WorkerCapacity("", b"", 0, 0, 1, 0, 0, 0, 0, "", "", "")


class WorkerState:
    """One worker as the scheduler knows it, from the moment it joins until it is lost. Between two workers there is
    a state too, of epoch 0, so that none but `scheduler.py` needs to ask whether a worker is there."""

    def __init__(
        self,
        epoch: int,
        capacity: WorkerCapacity,
        cache: CacheManager,
        num_slots: int,
        cost: CostModel,
    ) -> None:
        self.epoch = epoch
        self.capacity = capacity
        self.cache = cache
        self.cost = cost
        self.drops = DropCount()
        self.steps = StepCount()
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(self.steps, capacity.block_size)
        self.grammars = NeededGrammars(prepares=self.has_worker)
        self.num_rows = 0
        self.active: dict[Row, None] = {}  # rows with tokens to compute that do not decode
        self.unacknowledged: list[Dispatch] = []
        self.last_moved_step = 0

    @classmethod
    def without_worker(cls) -> "WorkerState":
        """What there is instead of a worker: no row, no block."""
        cache = CacheManager(_NO_CAPACITY, num_step_tokens=0, enable_prefix_caching=False, watermark=0.0)
        return cls(0, _NO_CAPACITY, cache, 0, CostModel(PreemptionMode.RECOMPUTE, 0, 0.0))

    @property
    def has_worker(self) -> bool:
        return self.epoch > 0

    @property
    def num_steps(self) -> int:
        return self.steps.num_steps

    @property
    def last_acknowledged_step(self) -> int:
        return self.unacknowledged[0].step - 1 if self.unacknowledged else self.steps.num_steps

    @property
    def is_idle(self) -> bool:
        """The worker has nothing to answer: nothing changes unless a plan is made."""
        return not self.unacknowledged and not len(self.cache.moves)

    # Rows

    def reserve_slots(self, group: SequenceGroup, num_slots: int) -> None:
        """Keep slots for rows that the group will open."""
        group.reserved_slots = [self.slots.take() for _ in range(num_slots)]

    def give_back_reserved(self, group: SequenceGroup) -> None:
        """Slots that were kept for the group may be any group's."""
        for slot in group.reserved_slots:
            self.slots.give_back(slot)
        group.reserved_slots.clear()

    def take_slot(self, sequence: Sequence) -> Row:
        """Give a sequence a row, if it can be in a slot that is kept for its group."""
        request, reserved = sequence.group.request, sequence.group.reserved_slots
        slot = reserved.pop(0) if reserved else self.slots.take()
        gates = request.grammar is not None and self.capacity.gates_grammars
        return sequence.take_slot(slot, self.drops, is_gated=gates or not request.sampling.chooses_tokens)

    def open_row(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Have the worker open a row of a sequence that has its blocks, and let it compute what the budget allows."""
        row = self.take_slot(sequence)
        if row.holding.num_computed_tokens >= sequence.num_prompt_tokens:
            row.holding.may_be_forked(builder.step + 1)  # it may have matched what this very plan computes
        self.active[row] = None
        self.num_rows += 1
        builder.open(self._opening(row))
        work = self.share_tokens([row], builder)
        if self.num_missing_blocks(work) <= self.cache.pool.num_free:
            self.give_blocks(work, builder)
            self.plan_row(*work[0], builder)

    def _opening(self, row: Row) -> RowOpening:
        sequence, request = row.sequence, row.sequence.group.request
        grammar, sampling = request.grammar, request.sampling
        if sampling.num_prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return RowOpening(
            slot=row.slot,
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=row.holding.num_computed_tokens,
            block_ids=tuple(row.holding.block_table),
            sampling=sampling,
            seed=request.seed,
            sample_index=sequence.sample_index,
            traceparent=request.traceparent,
            grammar_id=0 if grammar is None else self.grammars.id_of(grammar),
        )

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
            self.num_rows -= 1
        self.slots.give_back(row.slot)
        row.vacate()

    def vacate_group(self, group: SequenceGroup) -> None:
        """End all rows of the group, and give back every slot it has."""
        for row in group.open_rows:
            self.vacate(row)
        self.give_back_reserved(group)
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

    def forget(self, group: SequenceGroup) -> None:
        """The group holds nothing any more: no row, no block of either tier."""
        self.vacate_group(group)
        for sequence in group.sequences:
            self.cache.release(sequence.holding)

    # Beams

    def branch(self, group: SequenceGroup, beam_group: BeamGroup, children: list[Child]) -> None:
        """Let the group's rows hold the children: the first child of a beam stays in its row, the others move to rows
        whose beam has none."""
        parents, rows = beam_group.beams, {row.sequence: row for row in group.open_rows}
        used = {parents[child.parent] for child in children}
        spare = [sequence for sequence in group.sequences if sequence not in used]
        for sequence in spare:
            self.cache.release(sequence.holding)
        beam_group.beams = []
        for child in children:
            parent = beam = parents[child.parent]
            if parent in beam_group.beams:
                beam = spare.pop(0)
                beam.token_ids[:] = parent.token_ids
                self.cache.branch(beam.holding, parent.holding)
                if beam not in rows:
                    rows[beam] = self.take_slot(beam)
                    beam_group.unborn_slots.add(rows[beam].slot)
                beam_group.forks.append((rows[parent].slot, rows[beam].slot))
            beam_group.beams.append(beam)
        for beam, child in zip(beam_group.beams, children, strict=True):
            row = rows[beam]
            row.go_on_with(child.token_id)
            beam.cumulative_logprob = child.cumulative_logprob
            beam_group.appended.append((row.slot, child.token_id))
            self.active[row] = None
            self.publish(row)

    def tell_branches(self, beam_group: BeamGroup, builder: PlanBuilder) -> None:
        """Put what the last selection changed into the plan, which opens rows that had none."""
        builder.forks.extend(beam_group.forks)
        builder.appended_tokens.extend(beam_group.appended)
        self.num_rows += len(beam_group.unborn_slots)
        beam_group.forget_changes()

    # Blocks

    def find(self, sequence: Sequence) -> Match:
        """Find cached content that the sequence begins with."""
        is_sought = self.cache.enable_prefix_caching and sequence.may_match
        return self.cache.match(sequence.holding, sequence.group.cursor) if is_sought else Match()

    def match(self, sequence: Sequence) -> Match | None:
        """Choose what the sequence would start from. None: it waits for another group's load of the same content."""
        match = self.find(sequence)
        if match.is_loading:
            return None
        if match.host and self.cost.prefers_load(len(match.host), len(match.host) * self.cache.block_size):
            return match
        return match.without_host()

    def num_forked_tokens(self, sequence: Sequence, relative: Row) -> int:
        """Count the positions that the sequence can have from a relative whose prompt is computed, but none that this
        one may write again: none at all if the window has passed over them there."""
        num_tokens = min(sequence.num_prompt_tokens, sequence.num_tokens - 1, relative.next_position)
        return num_tokens if relative.holding.num_freed_blocks <= self.cache.room.first_needed_block(num_tokens) else 0

    def publish(self, row: Row) -> None:
        """Make the full blocks of a row available to others."""
        self.cache.publish(row.holding, row.num_settled_tokens)

    def slide(self, row: Row) -> None:
        """Free the blocks that fell out of a row's window, if there is one."""
        if self.cache.window:
            self.cache.slide(row.holding, row.next_position)

    def slide_wholly(self, group: SequenceGroup) -> bool:
        """Let the group's rows hold no block more than they read. Whether that freed any."""
        num_free = self.cache.pool.num_free
        if self.cache.window:
            for row in group.open_rows:
                self.cache.slide_wholly(row.holding, row.next_position)
        return self.cache.pool.num_free > num_free

    def _num_missing(self, holding: Holding, num_tokens: int) -> int:
        """Count the blocks that a row must get before it can compute so many tokens."""
        return self.cache.room.num_blocks_for(holding.num_computed_tokens + num_tokens) - holding.num_granted_blocks

    def num_missing_blocks(self, work: list[tuple[Row, int]]) -> int:
        """Count the blocks that a group must get before its rows can compute so many tokens each."""
        num_missing = sum(self._num_missing(row.holding, num_tokens) for row, num_tokens in work)
        return num_missing + len(self._tails_to_copy(work))

    def give_blocks(self, work: list[tuple[Row, int]], builder: PlanBuilder) -> None:
        """Give a group's rows the blocks that `num_missing_blocks` counted."""
        for row in self._tails_to_copy(work):
            index, source, target = self.cache.replace_tail(row.holding)
            builder.copies.append((source, target))
            builder.set_blocks.append((row.slot, index, target))
        for row, num_tokens in work:
            for block in self.cache.append(row.holding, self._num_missing(row.holding, num_tokens)):
                builder.appended_blocks.append((row.slot, block))

    def _tails_to_copy(self, work: list[tuple[Row, int]]) -> list[Row]:
        """Find the beams that must have a copy of the block they write to next, because another one writes there
        too."""
        sharing: dict[int, list[Row]] = {}
        for row, num_tokens in work:
            writes = num_tokens and row.sequence.group.beam is not None
            if writes and (block := self.cache.shared_tail(row.holding)):
                sharing.setdefault(block, []).append(row)
        copying = []
        for block, holders in sharing.items():
            num_others = self.cache.pool.ref_count(block) - len(holders)
            copying.extend(holders if num_others else holders[1:])
        return copying

    # Plans

    def rows_to_plan(self, builder: PlanBuilder) -> Iterator[tuple[SequenceGroup, list[Row]]]:
        """Go through the rows that need a decision, by group, in order: those with tokens to compute, and decoding ones
        that need a block or come to their last token."""
        due = self.decoding.take_due(builder.step)
        for row in due:
            if row.last_step == builder.step:
                self.pause(row)
        due = [row for row in due if row.is_decoding]
        if self._has_ample_blocks(len(due), builder.max_tokens):
            for row in due:
                self.slide(row)
                builder.appended_blocks.append((row.slot, self.cache.append_next(row.holding)))
                self.decoding.got_block(row, builder.step)
            builder.began_block.extend(due)
            due.clear()
        rows = {**self.active, **dict.fromkeys(due)}
        in_order = sorted(rows, key=lambda row: row.order)
        for group, group_rows in groupby(in_order, key=lambda row: row.sequence.group):
            yield group, list(group_rows)

    def _has_ample_blocks(self, num_due: int, max_tokens: int) -> bool:
        """Whether no running group can lack a block in this plan, so that the order in which they get theirs, and who
        would be preempted for whom, does not matter."""
        num_missing = (
            self._num_missing(row.holding, min(row.num_uncomputed_tokens, max_tokens)) for row in self.active
        )
        num_blocks = num_due + sum(max(0, num) + 1 for num in num_missing)  # 1: a beam's copy
        return num_blocks <= self.cache.pool.num_free

    def share_prompts(
        self, builder: PlanBuilder, num_next_tokens: int, precedes: Callable[[SequenceGroup], bool]
    ) -> None:
        """Have long prompts give way to short ones: rows that do not decode get tokens in order of what they have left,
        and behind those that have less left than `num_next_tokens` up to so many are kept for the request that is next.
        Those that `precede` give way to none."""
        rows = [(not precedes(row.sequence.group), row.num_uncomputed_tokens, row.order, row) for row in self.active]
        rows.sort(key=itemgetter(0, 1, 2))
        builder.shares = {}
        num_free, is_kept = builder.num_free_tokens, not num_next_tokens
        for gives_way, num_left, _, row in rows:
            if not is_kept and gives_way and num_left > num_next_tokens:
                is_kept = True
                num_free -= min(num_next_tokens, num_free)
            num_tokens = builder.shares[row] = min(num_left, num_free)
            num_free -= num_tokens

    def share_tokens(self, rows: Iterable[Row], builder: PlanBuilder) -> list[tuple[Row, int]]:
        """Say how many tokens of the budget each row computes. A decoding row has its one already."""
        num_free = builder.num_free_tokens
        work = []
        for row in rows:
            self.slide(row)
            num_tokens = 1
            if not row.is_decoding:
                num_left = row.num_uncomputed_tokens
                num_tokens = min(self.cache.room.num_computable_tokens(row.holding, num_left), num_free)
                if builder.shares is not None:
                    num_tokens = min(num_tokens, builder.shares.get(row, num_tokens))
                num_free -= num_tokens
            work.append((row, num_tokens))
        return work

    def plan_row(self, row: Row, num_tokens: int, builder: PlanBuilder) -> None:
        """Let a row compute `num_tokens` positions for which it has blocks; 0 lets it rest."""
        if not num_tokens:
            return
        sequence, start = row.sequence, row.holding.num_computed_tokens
        samples = num_tokens == row.num_uncomputed_tokens
        num_owed = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        # It wants them as when its row was opened, which has reported no position from `start` on.
        num_prompt_logprobs = num_owed if sequence.wants_prompt_logprobs else 0
        num_tokens_next = int(not row.is_gated) if samples else num_tokens
        builder.work(PlannedRow(row.slot, row, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs))
        row.plan(builder.step, num_tokens, samples=samples)
        if not row.holding.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            row.holding.may_be_forked(builder.step + 1)
        if samples:
            del self.active[row]
        self.publish(row)

    def dispatch(self, builder: PlanBuilder) -> StepPlan | None:
        """Make the plan final. None if there is nothing to do."""
        if builder.is_empty:
            return None
        self.steps.num_steps += 1
        self.cache.copied(builder.copies)
        rows, moves = tuple(builder.rows), self.cache.moves.ordered_by(builder.step)
        self.unacknowledged.append(
            Dispatch(
                step=builder.step,
                rows=rows,
                columns=self.decoding.columns(),
                began_block=tuple(builder.began_block),
                num_drops=self.drops.num_drops,
                num_tokens=builder.num_tokens,
                num_prompt_tokens=sum(
                    planned.num_tokens
                    for planned in rows
                    if planned.start + planned.num_tokens <= planned.row.sequence.num_prompt_tokens
                ),
                has_moves=bool(moves),
            )
        )
        plan = builder.freeze(
            self.epoch,
            swaps_out=[(move.device_block, move.host_block) for move in moves if move.is_out],
            swaps_in=[(move.host_block, move.device_block) for move in moves if not move.is_out],
            released_slots=self.slots.take_released(),
            released_grammar_ids=self.grammars.take_released(),
            patches_of_work=self.slots.patch(rows),
        )
        for planned in rows:
            if planned.samples and planned.num_tokens_next and planned.row.num_uncomputed_tokens:
                self.decoding.join(planned.row)
                self.slots.decodes(planned.slot)
        return plan
