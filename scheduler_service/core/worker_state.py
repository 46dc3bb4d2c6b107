"""The state that lives and dies with an epoch: one worker's blocks, rows and plans."""

from dataclasses import replace

from pagewire.common.wire.messages import RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.beam import Child
from scheduler_service.core.cache import CacheManager, Match, StepCount
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.needed_grammars import NeededGrammars
from scheduler_service.core.plans import Dispatch, PlanBuilder, WorkerRows, num_missing_blocks
from scheduler_service.core.sequence import BeamGroup, Row, Sequence, SequenceGroup

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
        self.steps = StepCount()
        self.rows = WorkerRows(capacity, num_slots, self.steps)
        self.grammars = NeededGrammars(prepares=self.has_worker)
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
    def last_acknowledged_step(self) -> int:
        return self.unacknowledged[0].step - 1 if self.unacknowledged else self.steps.num_steps

    @property
    def is_idle(self) -> bool:
        """The worker has nothing to answer: nothing changes unless a plan is made."""
        return not self.unacknowledged and not len(self.cache.moves)

    # Rows

    def open_row(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Have the worker open a row of a sequence that has its blocks, and let it compute what the budget allows."""
        row = self.rows.open(sequence)
        if row.holding.num_computed_tokens >= sequence.num_prompt_tokens:
            row.holding.may_be_forked(builder.step + 1)  # it may have matched what this very plan computes
        builder.open(self._opening(row))
        work = builder.share_tokens([row])
        if num_missing_blocks(self.cache, work) <= self.cache.pool.num_free:
            builder.compute(work)

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

    def forget(self, group: SequenceGroup) -> None:
        """The group holds nothing any more: no row, no block of either tier."""
        self.rows.vacate_group(group)
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
                    rows[beam] = self.rows.take_slot(beam)
                    beam_group.unborn_slots.add(rows[beam].slot)
                beam_group.forks.append((rows[parent].slot, rows[beam].slot))
            beam_group.beams.append(beam)
        for beam, child in zip(beam_group.beams, children, strict=True):
            row = rows[beam]
            row.go_on_with(child.token_id)
            beam.cumulative_logprob = child.cumulative_logprob
            beam_group.appended.append((row.slot, child.token_id))
            self.rows.active[row] = None
            self.cache.publish(row.holding, row.num_settled_tokens)

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

    def slide_wholly(self, group: SequenceGroup) -> bool:
        """Let the group's rows hold no block more than they read. Whether that freed any."""
        num_free = self.cache.pool.num_free
        if self.cache.window:
            for row in group.open_rows:
                self.cache.slide_wholly(row.holding, row.next_position)
        return self.cache.pool.num_free > num_free

    # Plans

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
                columns=self.rows.decoding.columns(),
                began_block=tuple(builder.began_block),
                num_drops=self.rows.drops.num_drops,
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
            released_slots=self.rows.slots.take_released(),
            released_grammar_ids=self.grammars.take_released(),
            patches_of_work=self.rows.slots.patch(rows),
        )
        for planned in rows:
            if planned.samples and planned.num_tokens_next and planned.row.num_uncomputed_tokens:
                self.rows.decoding.join(planned.row)
                self.rows.slots.decodes(planned.slot)
        return plan
