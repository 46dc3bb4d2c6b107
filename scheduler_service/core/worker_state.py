"""The state of one epoch: one worker's blocks, rows and plans. It is discarded when the worker is lost."""

from dataclasses import replace
from itertools import chain

from pagewire.common.wire.messages import RowOpening, StepPlan, WorkerCapacity
from scheduler_service.core.beam import Child
from scheduler_service.core.cache import CacheManager, Match, StepCount
from scheduler_service.core.cost import CostModel, PreemptionMode
from scheduler_service.core.needed_grammars import NeededGrammars
from scheduler_service.core.plans import Dispatch, PlanBuilder, WorkerRows, num_missing_blocks
from scheduler_service.core.sequence import BeamGroup, Row, Sequence, SequenceGroup

# The capacity while no worker is connected. No request fits.
_NO_CAPACITY = WorkerCapacity("", b"", 0, 0, 1, 0, 0, 0, 0, "", "", "")
# The shortest plan, in steps with its lease, after which the next plan is sent a step earlier.
_NUM_PAIRED_STEPS = 4


class WorkerState:
    """The scheduler's record of one connected worker: its KV cache blocks, running sequences, grammars and plans in
    flight.

    If no worker is connected, an empty record with epoch 0 is used. So only `scheduler.py` needs to check whether a
    worker is connected.
    """

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
        # The next plan is sent when two steps of the last plan are left, not one. Then the worker may send the results
        # of both in one message, and still does not wait for a plan.
        self.is_followed_early = False
        self.last_moved_step = 0

    @classmethod
    def without_worker(cls) -> "WorkerState":
        """Return an empty record, which is used while no worker is connected. It has no slots and no KV cache
        blocks."""
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
        """Return whether the worker has finished all plans and block transfers that it has received. Its state then
        does not change until the scheduler sends another plan."""
        return not self.unacknowledged and not len(self.cache.moves)

    # Rows

    def open_row(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Start a sequence in the plan that `builder` builds: create its row (the worker's state of the sequence), and
        plan as many of its tokens as the step's token budget allows.

        The sequence must already have the KV cache blocks for its present tokens.
        """
        row = self.rows.open(sequence)
        if row.allocation.num_computed_tokens >= sequence.num_prompt_tokens:
            row.allocation.may_be_forked(builder.step + 1)  # it may have matched blocks that this plan computes
        builder.open(self._opening(row))
        work = builder.share_tokens([row])
        if num_missing_blocks(self.cache, work) <= self.cache.pool.num_free:
            builder.compute(work)

    def _opening(self, row: Row) -> RowOpening:
        sequence, request, tables = row.sequence, row.sequence.group.request, row.allocation.tables
        grammar, sampling = request.grammar, request.sampling
        number, states = self.cache.states.number, row.allocation.states
        if sampling.num_prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return RowOpening(
            slot=row.slot,
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=row.allocation.num_computed_tokens,
            block_ids=tuple(chain.from_iterable(table.blocks for table in tables)),
            sampling=sampling,
            seed=request.seed,
            sample_index=sequence.sample_index,
            traceparent=request.traceparent,
            grammar_id=0 if grammar is None else self.grammars.id_of(grammar),
            table_lengths=tuple(len(table.blocks) for table in tables) if len(tables) > 1 else (),
            read_state=number(states.current) if row.allocation.num_computed_tokens and states.own else 0,
            own_states=tuple(map(number, states.own)),
        )

    def forget(self, group: SequenceGroup) -> None:
        """Free everything that a request uses on the worker: the slots of its sequences, and its KV cache blocks on the
        device and on the host."""
        self.rows.vacate_group(group)
        for sequence in group.sequences:
            self.cache.release(sequence.allocation)

    # Beams

    def branch(self, group: SequenceGroup, beam_group: BeamGroup, children: list[Child]) -> None:
        """Assign the beams that a beam search has chosen for the next step (`children`) to the sequences of the
        request. Each beam shares the KV cache blocks of its parent beam.

        The first child of a parent stays in the parent's sequence, and so on the same slot of the worker. Its other
        children get sequences whose beam has no child.
        """
        parents, rows = beam_group.beams, {row.sequence: row for row in group.open_rows}
        used = {parents[child.parent] for child in children}
        spare = [sequence for sequence in group.sequences if sequence not in used]
        for sequence in spare:
            self.cache.release(sequence.allocation, keeps_states=True)
        beam_group.beams = []
        for child in children:
            parent = beam = parents[child.parent]
            if parent in beam_group.beams:
                beam = spare.pop(0)
                beam.token_ids[:] = parent.token_ids
                self.cache.branch(beam.allocation, parent.allocation)
                if beam not in rows:
                    rows[beam] = self.rows.take_slot(beam)
                    beam_group.new_slots.add(rows[beam].slot)
                beam_group.forks.append((rows[parent].slot, rows[beam].slot))
                if beam.allocation.states.own:
                    states = map(self.cache.states.number, beam.allocation.states.own)
                    beam_group.new_states.append((rows[beam].slot, *states))
            beam_group.beams.append(beam)
        for beam, child in zip(beam_group.beams, children, strict=True):
            row = rows[beam]
            row.append_token(child.token_id)
            beam.cumulative_logprob = child.cumulative_logprob
            beam_group.appended.append((row.slot, child.token_id))
            self.rows.active[row] = None
            self.cache.publish(row.allocation, row.num_settled_tokens)

    # Blocks

    def find(self, sequence: Sequence) -> Match:
        """Return the prefix cache hit of a sequence. The hit is empty if nothing is cached, or if the sequence must not
        start from cached content."""
        is_sought = self.cache.enable_prefix_caching and sequence.may_match
        return self.cache.match(sequence.allocation, sequence.group.cursor) if is_sought else Match()

    def match(self, sequence: Sequence) -> Match | None:
        """Return the prefix cache hit from which a sequence should start now, or None if it should wait.

        The sequence should wait if another request is already loading the same content from the host. Content on the
        host is left out if computing it again takes less time than loading it.
        """
        match = self.find(sequence)
        if match.is_loading:
            return None
        num_tokens = match.num_loaded_blocks * self.cache.block_size
        if match.loads and self.cost.prefers_load(self.cache.states.weigh(match.loads), num_tokens):
            return match
        return match.without_host()

    def num_forked_tokens(self, sequence: Sequence, relative: Row) -> int:
        """Return how many prompt positions a new sample can reuse from another sample of the same request. `relative`
        is the row of that sample, and its prompt is computed.

        Positions that the other sample may write again are left out. The result is 0 if the sliding window has passed
        blocks that the new sample would read.
        """
        num_tokens = min(sequence.num_prompt_tokens, sequence.num_tokens - 1, relative.next_position)
        if self.cache.states.num_states:
            num_tokens = sequence.num_prompt_tokens - 1 if relative.allocation.states.fork else 0
        is_held = all(
            table.num_freed <= self.cache.room.first_needed_block(table.window, num_tokens)
            for table in relative.allocation.tables
        )
        return num_tokens if is_held else 0

    def free_unread(self, group: SequenceGroup) -> bool:
        """Free the KV cache blocks of a running request that it no longer reads, because its sliding windows have
        passed them. Return True if any block became free."""
        num_free = self.cache.pool.num_free
        if self.cache.has_windows:
            for row in group.open_rows:
                self.cache.free_unread(row.allocation, row.next_position)
        return self.cache.pool.num_free > num_free

    # Plans

    @property
    def num_plans(self) -> int:
        """The number of plans in flight. A plan with a lease is in flight until its last result has arrived."""
        return [dispatch.num_later_steps for dispatch in self.unacknowledged].count(0)

    @property
    def is_calm(self) -> bool:
        """Return whether each row decodes, and nothing else is due on the worker."""
        rows, grammars = self.rows, self.grammars
        return (
            rows.num_open == len(rows.decoding)
            and not rows.active
            and not rows.slots.has_released
            and not grammars.num_unreported
            and rows.decoding.columns().may_be_leased
        )

    def drop_steps(self, dispatch: Dispatch) -> None:
        """Forget the steps of a lease that the worker does not compute. `dispatch` is the last step that it has
        computed."""
        del self.unacknowledged[: dispatch.num_later_steps]
        for row in dispatch.columns.rows:
            if not row.is_dropped:
                self.rows.repeat(row, dispatch.num_later_steps)

    def void_saves(self, row: Row) -> None:
        """Ignore the saves that a row does not reach in the plans in flight, because it was late in the plan before
        them: it ends one position earlier in each of these plans."""
        for save in [save for each in self.unacknowledged for save in each.saves if save.allocation is row.allocation]:
            save.num_after -= 1
            save.is_void = save.is_void or save.num_after < 0

    def dispatch(self, builder: PlanBuilder) -> StepPlan | None:
        """Complete the plan that `builder` has built, record that it is in flight, and return it. Return None if the
        worker has nothing to do in this plan."""
        if builder.is_empty:
            return None
        num_leased = len(builder.leased)
        self.steps.num_steps += 1 + num_leased
        self.is_followed_early = num_leased + 1 >= _NUM_PAIRED_STEPS and not self.cache.states.num_states
        self.cache.copied(builder.copies)
        if builder.read_states:
            self.cache.states.read(builder.read_states)
        number, tiers = self.cache.states.number, self.cache.tiers
        device_id, host_id = tiers.device.public_id, tiers.host.public_id
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
                saves=tuple(save for _, save in builder.saves),
                num_later_steps=num_leased,
            )
        )
        for i, began_block in enumerate(builder.leased, start=1):
            step = Dispatch(
                step=builder.step + i,
                rows=(),
                columns=self.rows.decoding.columns(),
                began_block=began_block,
                num_drops=self.rows.drops.num_drops,
                num_tokens=len(self.rows.decoding),
                num_prompt_tokens=0,
                has_moves=False,
                num_later_steps=num_leased - i,
            )
            self.unacknowledged.append(step)
        released_grammar_ids, self.grammars.released = self.grammars.released, []
        plan = builder.freeze(
            self.epoch,
            swaps_out=[(device_id(move.device_block), host_id(move.host_block)) for move in moves if move.is_out],
            swaps_in=[(host_id(move.host_block), device_id(move.device_block)) for move in moves if not move.is_out],
            saves=[(slot, save.position, number(save.state)) for slot, save in builder.saves],
            released_slots=self.rows.slots.take_released(),
            released_grammar_ids=released_grammar_ids,
            patches_of_work=self.rows.slots.patch(rows),
        )
        for planned in rows:
            if planned.samples and planned.num_tokens_next and planned.row.num_uncomputed_tokens:
                self.rows.decoding.join(planned.row)
                self.rows.slots.decodes(planned.slot)
        return plan
