"""The state that lives and dies with an epoch: one worker's blocks, rows and plans, and the mechanics of using them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from pagewire.common.messages import RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.cache_manager import CacheManager, Match, StepCount
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.grammars import NeededGrammars
from scheduler_service.core.plans import DecodeBatch, Dispatch, PlanDraft, PlannedRow, RowSlots
from scheduler_service.core.sequence import DropCount, Sequence, SequenceGroup

# Of no worker: nothing fits on that.
_NO_CAPACITY = WorkerCapacity("", b"", 0, 0, 1, 0, 0, 0, 0, "", "", "")


class Epoch:
    """One worker as the scheduler knows it, from the moment it joins until it is lost. Between two workers there is an
    epoch too, with the number 0, so that none but `scheduler.py` needs to ask whether a worker is there."""

    def __init__(
        self,
        number: int,
        capacity: WorkerCapacity,
        cache: CacheManager,
        num_slots: int,
        cost: CostModel,
        drops: DropCount,
    ) -> None:
        self.number = number
        self.capacity = capacity
        self.cache = cache
        self.cost = cost
        self.drops = drops
        self.steps = StepCount()
        self.slots = RowSlots(num_slots)
        self.decoding = DecodeBatch(self.steps, capacity.block_size)
        self.grammars = NeededGrammars(prepares=self.has_worker)
        self.num_rows = 0
        self.active: dict[Sequence, None] = {}  # rows with tokens to compute that do not decode
        self.unacknowledged: list[Dispatch] = []
        self.last_moved_step = 0

    @classmethod
    def without_worker(cls, drops: DropCount) -> "Epoch":
        """What there is instead of a worker: no row, no block."""
        cache = CacheManager(_NO_CAPACITY, num_step_tokens=0, enable_prefix_caching=False, watermark=0.0)
        return cls(0, _NO_CAPACITY, cache, 0, CostModel(PreemptionMode.RECOMPUTE, 0, 0.0), drops)

    @property
    def has_worker(self) -> bool:
        return self.number > 0

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

    def take_slot(self, sequence: Sequence) -> None:
        """Give a sequence the slot of its row, if it can be one that is kept for its group."""
        request, reserved = sequence.group.request, sequence.group.reserved_slots
        sequence.slot = reserved.pop(0) if reserved else self.slots.take()
        gates = request.grammar is not None and self.capacity.gates_grammars
        sequence.is_gated = gates or not request.sampling.chooses_tokens

    def open_row(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Have the worker open a row of a sequence that has its blocks, and let it compute what the budget allows."""
        self.take_slot(sequence)
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            sequence.holding.may_be_forked(draft.step + 1)  # it may have matched what this very plan computes
        self.active[sequence] = None
        self.num_rows += 1
        draft.open(self._opening(sequence))
        work = self.share_tokens([sequence], draft)
        if self.num_missing_blocks(work) <= self.cache.pool.num_free:
            self.give_blocks(work, draft)
            self.plan_row(*work[0], draft)

    def _opening(self, sequence: Sequence) -> RowOpening:
        request = sequence.group.request
        grammar, sampling = request.grammar, request.sampling
        if sampling.num_prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return RowOpening(
            slot=sequence.slot,
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(sequence.holding.block_table),
            sampling=sampling,
            seed=request.seed,
            sample_index=sequence.sample_index,
            traceparent=request.traceparent,
            grammar_id=0 if grammar is None else self.grammars.id_of(grammar),
        )

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
        """End all rows of the group, and give back every slot it has."""
        for sequence in group.open_sequences:
            self.vacate(sequence)
        self.give_back_reserved(group)
        if group.beam is not None:
            group.beam.forget_step()

    def lose(self, group: SequenceGroup) -> None:
        """All rows of the group are gone, with the worker."""
        group.reserved_slots.clear()
        for sequence in group.sequences:
            sequence.slot = -1
            sequence.forget_epoch()
        if group.beam is not None:
            group.beam.forget_step()

    def repeat(self, sequence: Sequence) -> None:
        """A row was late in the oldest plan: the worker has it compute its last position again in the plans that are
        under way, each of which thus does what the plan before it was to do. One without a token is planned by itself
        until it has one: that is looked at."""
        decodes = sequence.is_decoding and sequence.first_token_at is not None
        if decodes:
            self.decoding.leave(sequence)
        elif sequence.is_decoding:
            self.pause(sequence)
            self.drops.num_drops += 1
        sequence.repeat()
        if decodes:
            self.decoding.join(sequence)
        elif sequence.slot >= 0 and sequence.num_uncomputed_tokens:
            self.active[sequence] = None

    def rewind(self, group: SequenceGroup) -> None:
        """Forget what gated rows have reported, or are about to: each computes its last token again."""
        for sequence in group.sequences:
            if sequence.is_gated:
                sequence.drop(self.num_steps)
                sequence.holding.compute_again(sequence.num_tokens - 1)

    def forget(self, group: SequenceGroup) -> None:
        """The group holds nothing any more: no row, no block of either tier."""
        self.vacate_group(group)
        for sequence in group.sequences:
            self.cache.release(sequence.holding)

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

    def num_forked_tokens(self, sequence: Sequence, relative: Sequence) -> int:
        """Count the positions that the sequence can have from a relative whose prompt is computed, but none that this
        one may write again: none at all if the window has passed over them there."""
        num_tokens = min(sequence.num_prompt_tokens, sequence.num_tokens - 1, relative.next_position)
        return num_tokens if relative.holding.num_freed_blocks <= self.cache.first_needed_block(num_tokens) else 0

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of a sequence available to others."""
        self.cache.publish(sequence.holding, sequence.num_settled_tokens)

    def slide(self, sequence: Sequence) -> None:
        """Free the blocks that fell out of a row's window, if there is one."""
        self.cache.slide(sequence.holding, sequence.next_position)

    def slide_wholly(self, group: SequenceGroup) -> bool:
        """Let the group's rows hold no block more than they read. Whether that freed any."""
        num_free = self.cache.pool.num_free
        if self.cache.window:
            for sequence in group.open_sequences:
                self.cache.slide_wholly(sequence.holding, sequence.next_position)
        return self.cache.pool.num_free > num_free

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Count the blocks that a row must get before it can compute so many tokens."""
        return self.cache.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.holding.block_table)

    def num_missing_blocks(self, rows: list[tuple[Sequence, int]]) -> int:
        """Count the blocks that a group must get before its rows can compute so many tokens each."""
        num_missing = sum(self._num_missing(sequence, num_tokens) for sequence, num_tokens in rows)
        return num_missing + len(self._tails_to_copy(rows))

    def give_blocks(self, rows: list[tuple[Sequence, int]], draft: PlanDraft) -> None:
        """Give a group's rows the blocks that `num_missing_blocks` counted."""
        for sequence in self._tails_to_copy(rows):
            index, source, target = self.cache.replace_tail(sequence.holding)
            draft.copies.append((source, target))
            draft.set_blocks.append((sequence.slot, index, target))
        for sequence, num_tokens in rows:
            for block in self.cache.append(sequence.holding, self._num_missing(sequence, num_tokens)):
                draft.appended_blocks.append((sequence.slot, block))

    def _tails_to_copy(self, rows: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Find the beams that must have a copy of the block they write to next, because another one writes there
        too."""
        sharing: dict[int, list[Sequence]] = {}
        for sequence, num_tokens in rows:
            writes = num_tokens and sequence.group.beam is not None
            if writes and (block := self.cache.shared_tail(sequence.holding)):
                sharing.setdefault(block, []).append(sequence)
        copying = []
        for block, holders in sharing.items():
            num_others = self.cache.pool.ref_count(block) - len(holders)
            copying.extend(holders if num_others else holders[1:])
        return copying

    # Plans

    def rows_to_plan(self, draft: PlanDraft) -> Iterator[tuple[SequenceGroup, list[Sequence]]]:
        """Go through the rows that need a decision, by group, in order: those with tokens to compute, and decoding ones
        that need a block or come to their last token."""
        due = self.decoding.take_due(draft.step)
        for sequence in due:
            if sequence.last_step == draft.step:
                self.pause(sequence)
        due = [sequence for sequence in due if sequence.is_decoding]
        if self._has_ample_blocks(len(due), draft.max_tokens):
            for sequence in due:
                if self.cache.window:
                    self.slide(sequence)
                draft.appended_blocks.append((sequence.slot, self.cache.append_next(sequence.holding)))
                self.decoding.got_block(sequence, draft.step)
            draft.began_block.extend(due)
            due.clear()
        rows = {**self.active, **dict.fromkeys(due)}
        for _, sequences in groupby(sorted(rows, key=lambda row: row.order), key=lambda row: row.group.order):
            group_rows = list(sequences)
            yield group_rows[0].group, group_rows

    def _has_ample_blocks(self, num_due: int, max_tokens: int) -> bool:
        """Whether no running group can lack a block in this plan, so that the order in which they get theirs, and who
        would be preempted for whom, does not matter."""
        num_missing = (self._num_missing(row, min(row.num_uncomputed_tokens, max_tokens)) for row in self.active)
        num_blocks = num_due + sum(max(0, num) + 1 for num in num_missing)  # 1: a beam's copy
        return num_blocks <= self.cache.pool.num_free

    def share_prompts(self, draft: PlanDraft, num_next_tokens: int, precedes: Callable[[SequenceGroup], bool]) -> None:
        """Have long prompts give way to short ones: rows that do not decode get tokens in order of what they have left,
        and behind those that have less left than `num_next_tokens` so many are kept for the request that is next, if it
        would be done at once. Those that `precede` give way to none."""
        rows = [(not precedes(row.group), row.num_uncomputed_tokens, row.order, row) for row in self.active]
        rows.sort(key=itemgetter(0, 1, 2))
        draft.shares = {}
        num_free, is_kept = draft.num_free_tokens, not num_next_tokens
        for gives_way, num_left, _, row in rows:
            if not is_kept and gives_way and num_left > num_next_tokens:
                is_kept = True
                num_free -= num_next_tokens if num_next_tokens <= num_free else 0
            num_tokens = draft.shares[row] = min(num_left, num_free)
            num_free -= num_tokens

    def share_tokens(self, rows: Iterable[Sequence], draft: PlanDraft) -> list[tuple[Sequence, int]]:
        """Say how many tokens of the budget each row computes. A decoding row has its one already."""
        num_free = draft.num_free_tokens
        work = []
        for sequence in rows:
            self.slide(sequence)
            num_tokens = 1
            if not sequence.is_decoding:
                num_left = sequence.num_uncomputed_tokens
                num_tokens = min(self.cache.num_computable_tokens(sequence.holding, num_left), num_free)
                if draft.shares is not None:
                    num_tokens = min(num_tokens, draft.shares.get(sequence, num_tokens))
                num_free -= num_tokens
            work.append((sequence, num_tokens))
        return work

    def plan_row(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> None:
        """Let a row compute `num_tokens` positions for which it has blocks; 0 lets it rest."""
        if not num_tokens:
            return
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens
        num_owed = max(0, min(start + num_tokens, sequence.num_prompt_tokens - 1) - start)
        # It wants them as when its row was opened, which has reported no position from `start` on.
        num_prompt_logprobs = num_owed if sequence.wants_prompt_logprobs else 0
        num_tokens_next = int(not sequence.is_gated) if samples else num_tokens
        draft.work(
            PlannedRow(sequence.slot, sequence, start, num_tokens, samples, num_tokens_next, num_prompt_logprobs)
        )
        sequence.plan(num_tokens, samples=samples)
        if not sequence.holding.forkable_from and start + num_tokens >= sequence.num_prompt_tokens:
            sequence.holding.may_be_forked(draft.step + 1)
        if samples:
            del self.active[sequence]
        self.publish(sequence)

    def dispatch(self, draft: PlanDraft) -> StepPlan | None:
        """Make the plan final. None if there is nothing to do."""
        if draft.is_empty:
            return None
        self.steps.num_steps += 1
        self.cache.copied(draft.copies)
        rows, moves = tuple(draft.rows), self.cache.moves.ordered_by(draft.step)
        self.unacknowledged.append(
            Dispatch(
                step=draft.step,
                rows=rows,
                columns=self.decoding.columns(),
                began_block=tuple(draft.began_block),
                num_drops=self.drops.num_drops,
                num_tokens=draft.num_tokens,
                num_prompt_tokens=sum(
                    row.num_tokens for row in rows if row.start + row.num_tokens <= row.sequence.num_prompt_tokens
                ),
                has_moves=bool(moves),
            )
        )
        plan = draft.freeze(
            self.number,
            swaps_out=[(move.device_block, move.host_block) for move in moves if move.is_out],
            swaps_in=[(move.host_block, move.device_block) for move in moves if not move.is_out],
            released_slots=self.slots.take_released(),
            released_grammar_ids=self.grammars.take_released(),
            patches_of_work=self.slots.patch(rows),
        )
        for row in rows:
            sequence = row.sequence
            if row.samples and row.num_tokens_next and sequence.num_uncomputed_tokens:
                self.decoding.join(sequence)
                self.slots.decodes(row.slot)
        return plan
