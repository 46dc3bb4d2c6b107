"""Counters of the dangerous states that the simulator has reached.

A state that is never reached is not tested. The counters read the core's state around its events, and change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.common.wire.messages import Pooling, RowStatus, StepPlan, StepResult
from scheduler_service.core.cache import Match
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.request import BlockRemoved, KvEvent, OutputMode, Tier
from scheduler_service.core.sequence import GroupState, Sequence, SequenceGroup
from scheduler_service.core.worker_state import WorkerState
from tests.sim.client import Client

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

STATES = (
    "ended: stop",
    "ended: length",
    "ended: abort",
    "ended: nan_logits",
    "ended: out_of_memory",
    "ended: crashes_worker",
    "ended: no_longer_fits",
    "ended: no_worker",
    "ended: grammar_failed",
    "ended: grammar_dead_end",
    "ended: grammar_limit",
    "a grammar is ready",
    "a grammar cannot be read",
    "a grammar crashes the worker",
    "a false report of a grammar is refused",
    "a row is late",
    "a row is late twice",
    "a beam is late",
    "a late row decodes",
    "a late row has its last token planned",
    "a late row has been preempted",
    "a late row no longer counts",
    "a late row has a window",
    "a plan leases steps",
    "a row begins a block within a lease",
    "a plan ends a lease",
    "a request ends a lease",
    "a lease ends early",
    "a row of a lease that ends early no longer counts",
    "a row of a lease that ends early has a window",
    "aborted while its grammar is prepared",
    "a stream waits on after the grace",
    "a detached request waits on after the grace",
    "an output that is read as a whole ends although it has tokens",
    "a beam search ends at the grace although it has begun",
    "a request that can never fit is refused",
    "the queue is full",
    "a plan has moves only",
    "preempted by swapping",
    "preempted by recomputing",
    "swapped because it is cheaper",
    "recomputed because it is cheaper",
    "preempted with a token in flight",
    "preempted in the middle of its prompt",
    "a group with shared blocks is swapped",
    "a swap finds a block on the host already",
    "beams are swapped",
    "beams are recomputed",
    "an embedding is swapped",
    "an embedding is recomputed",
    "an embedding is lost with its worker",
    "a group is swapped in",
    "a prefix is loaded from the host",
    "a request waits for another one's load",
    "a block is demoted",
    "a block is matched while it is demoted",
    "a host block's content is dropped",
    "the cache is emptied",
    "a sample copies the tail of its prompt",
    "a beam copies its tail",
    "a beam forks into a new row",
    "a beam forks into an old row",
    "a sample waits for room",
    "a block falls out of the window",
    "a window's hole is opened or forked",
    "a request is longer than the pool",
    "a row longer than the pool is preempted",
    "a state is cached",
    "a state is saved",
    "a row starts with a saved state",
    "a sample starts with the state of its prompt",
    "a beam gets states of its own",
    "a state is swapped out",
    "a state is swapped in",
    "a state is demoted",
    "a state is loaded from the host",
    "a late row saves a state",
    "a request waits for states",
    "aborted while it waits",
    "aborted with a token in flight",
    "aborted while it is swapped out",
    "aborted while it is swapped",
    "aborted while it is swapped in",
    "aborted while its prefix is loaded",
    "stopped with a token in flight",
    "stopped while it is swapped out",
    "stopped while it is swapped",
    "bad logits while moves are under way",
    "bad logits while another request is swapped",
    "bad logits of a beam",
    "a request computes on another one's bad blocks",
    "a result has rows that no longer count",
    "lost with two plans in flight",
    "lost while blocks are swapped out",
    "lost while blocks are swapped in",
    "lost while requests are swapped",
    "lost while beams run",
    "suspects of a crash are tried",
    "a request crashes the worker",
    "a worker comes back smaller",
    "a zombie's result is refused",
    "a false result is refused",
    "a false result ends the epoch",
    "a result of an epoch that the step loop has ended",
    "a request is refused without a worker",
    "a request is cancelled that has ended",
    "a request is cancelled that has ended, and another one has its name",
    "a false acknowledgement of moves is refused",
    "a stale hello is refused",
    "a plan of an old epoch is refused",
    "a plan too many is refused",
    "a rival takes the worker",
)


class Reach:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._count = simulation.reached
        self._late: set[Sequence] = set()  # sequences whose last sampling row was late

    @property
    def _epoch(self) -> WorkerState:
        return self._simulation.scheduler.state.worker

    def _group(self, client: Client) -> SequenceGroup:
        return self._simulation.scheduler.state.groups[client.key]

    def is_elsewhere(self, client: Client) -> bool:
        """Return whether the client's request is swapped, or being swapped in or out."""
        return self._group(client).state not in (GroupState.WAITING, GroupState.RUNNING)

    def before_abort(self, client: Client) -> None:
        group, count = self._group(client), self._count
        if group.state is GroupState.WAITING:
            count["aborted while it waits"] += 1
        elif group.state is GroupState.PREPARING:
            count["aborted while its grammar is prepared"] += 1
        elif group.state is GroupState.SWAPPING_OUT:
            count["aborted while it is swapped out"] += 1
        elif group.state is GroupState.SWAPPED:
            count["aborted while it is swapped"] += 1
        elif group.state is GroupState.SWAPPING_IN and self._loads(group):
            count["aborted while its prefix is loaded"] += 1
        elif group.state is GroupState.SWAPPING_IN:
            count["aborted while it is swapped in"] += 1
        if any(row.num_in_flight > 0 for row in group.rows):
            count["aborted with a token in flight"] += 1

    def _loads(self, group: SequenceGroup) -> bool:
        """Return whether the group waits for matched content to be loaded, rather than for its own swapped blocks."""
        blocks = {block for sequence in group.sequences for block in sequence.allocation.blocks}
        return any(move.content and not move.is_out and move.device_block in blocks for move in self._epoch.cache.moves)

    def before_stop(self, client: Client, sequence_id: int) -> None:
        group, count = self._group(client), self._count
        if group.state is GroupState.SWAPPING_OUT:
            count["stopped while it is swapped out"] += 1
        elif group.state is GroupState.SWAPPED:
            count["stopped while it is swapped"] += 1
        row = self._simulation.scheduler.state.samples[sequence_id].row
        if row is not None and row.num_in_flight > 0:
            count["stopped with a token in flight"] += 1

    def planned(self, plan: StepPlan) -> None:
        epoch, count = self._epoch, self._count
        if not epoch.unacknowledged[-1].num_tokens:
            count["a plan has moves only"] += 1
        if plan.num_leased_steps or plan.ends_lease:
            self._see_lease(epoch, plan)
        if plan.copy_source_blocks:
            num_of_beams = len(plan.set_block_ids)
            count["a beam copies its tail"] += num_of_beams
            count["a sample copies the tail of its prompt"] += len(plan.copy_source_blocks) - num_of_beams
        if len(epoch.cache.moves):
            self._see_moves(epoch, plan)
        if epoch.cache.states.num_states:
            self._see_states(epoch, plan)
        if self._simulation.scheduler.state.rowless:
            count["a sample waits for room"] += 1
        if epoch.cache.has_windows:
            self._see_windows(epoch, plan)
        if self._simulation.scheduler.state.quarantine.suspects:
            count["suspects of a crash are tried"] += 1
        for client in self._simulation.clients.values():
            group = self._group(client)
            if group.num_preemptions > client.num_preemptions_seen:
                client.num_preemptions_seen = group.num_preemptions
                self._see_preemption(epoch, plan, group)

    def _see_lease(self, epoch: WorkerState, plan: StepPlan) -> None:
        count, later = self._count, epoch.unacknowledged[-plan.num_leased_steps :] if plan.num_leased_steps else []
        count["a plan leases steps"] += bool(later)
        count["a row begins a block within a lease"] += any(dispatch.began_block for dispatch in later)
        count["a plan ends a lease"] += plan.ends_lease
        count["a request ends a lease"] += plan.ends_lease and bool(plan.openings)

    def forks(self, plan: StepPlan, occupied: set[int]) -> None:
        """Count forks. `occupied`: the worker's slots that had rows before."""
        for slot in plan.fork_target_slots:
            self._count["a beam forks into an old row" if slot in occupied else "a beam forks into a new row"] += 1

    def _see_moves(self, epoch: WorkerState, plan: StepPlan) -> None:
        count = self._count
        opened = {block for opening in plan.openings for block in opening.block_ids}
        demoted: set[int] = set()
        loads = False
        for move in epoch.cache.moves:
            loads = loads or not (move.content is None or move.is_out)
            if move.content is not None and move.is_out:
                demoted.add(move.device_block)
            if move.step != plan.step:
                continue
            if move.content is not None:
                count["a block is demoted" if move.is_out else "a prefix is loaded from the host"] += 1
            elif not move.is_out:
                count["a group is swapped in"] += 1
        if not demoted.isdisjoint(opened):
            count["a block is matched while it is demoted"] += 1
        if loads:
            group = self._simulation.scheduler.state.next_waiting(self._simulation.time)
            if group is not None and group.state is GroupState.WAITING:
                count["a request waits for another one's load"] += epoch.find(group.sequences[0]).is_loading

    def _see_states(self, epoch: WorkerState, plan: StepPlan) -> None:
        count, cache = self._count, epoch.cache
        count["a state is saved"] += len(plan.save_states)
        count["a beam gets states of its own"] += len(plan.set_state_slots)
        for opening in plan.openings:
            is_aligned = opening.num_computed_tokens % cache.block_size == 0
            is_fork = opening.num_computed_tokens == opening.num_prompt_tokens - 1 and opening.sample_index > 0
            count["a row starts with a saved state"] += opening.read_state not in (0, *opening.own_states)
            count["a sample starts with the state of its prompt"] += is_fork and not is_aligned
        for move in cache.moves:
            if move.step != plan.step or move.device_block <= cache.pool.num_blocks:
                continue
            if move.content is None:
                count["a state is swapped out" if move.is_out else "a state is swapped in"] += 1
            else:
                count["a state is demoted" if move.is_out else "a state is loaded from the host"] += 1
        group = self._simulation.scheduler.state.next_waiting(self._simulation.time)
        if group is not None and group.state is GroupState.WAITING:
            allocations = [sequence.allocation for sequence in group.sequences[: None if group.beam else 1]]
            count["a request waits for states"] += not cache.states.has_room(allocations, Match())

    def _see_windows(self, epoch: WorkerState, plan: StepPlan) -> None:
        running = self._simulation.scheduler.state.running
        held = [table for group in running for s in group.sequences for table in s.allocation.tables]
        self._count["a block falls out of the window"] += any(table.num_freed for table in held)
        self._count["a window's hole is opened or forked"] += any(0 in opening.block_ids for opening in plan.openings)
        self._count["a request is longer than the pool"] += any(
            len(table.blocks) > epoch.cache.pool.num_blocks for table in held
        )

    def _see_preemption(self, epoch: WorkerState, plan: StepPlan, group: SequenceGroup) -> None:
        count = self._count
        if any(row.num_in_flight > 0 for row in group.rows):
            count["preempted with a token in flight"] += 1
        size = epoch.cache.block_size
        if any(sequence.num_tokens > epoch.cache.pool.num_blocks * size for sequence in group.sequences):
            count["a row longer than the pool is preempted"] += 1
        is_beam, is_pooled = group.beam is not None, group.request.sampling.pooling is not Pooling.NONE
        preemption = self._simulation.scenario.options.preemption
        is_choice = epoch.cost.prefill_rate is not None and preemption is PreemptionMode.AUTO
        if group.state is GroupState.WAITING:
            count["preempted by recomputing"] += 1
            count["recomputed because it is cheaper"] += is_choice and epoch.cache.host_pool.num_blocks > 0
            count["beams are recomputed"] += is_beam
            count["an embedding is recomputed"] += is_pooled
            return
        count["preempted by swapping"] += 1
        count["swapped because it is cheaper"] += is_choice
        count["beams are swapped"] += is_beam
        count["an embedding is swapped"] += is_pooled
        tables = [table for sequence in group.sequences for table in sequence.allocation.tables]
        host_blocks = [block for table in tables for block in table.host_blocks if block]
        if len(set(host_blocks)) < len(host_blocks):
            count["a group with shared blocks is swapped"] += 1
        if not set(host_blocks) <= set(plan.swap_out_host_blocks):
            count["a swap finds a block on the host already"] += 1
        first = group.sequences[0]
        if first.allocation.num_computed_tokens < first.num_prompt_tokens:
            count["preempted in the middle of its prompt"] += 1

    def before_result(self, result: StepResult) -> None:
        epoch, count = self._epoch, self._count
        if not epoch.has_worker:
            return
        for dispatch in epoch.unacknowledged[:1]:
            rows = [*dispatch.columns.rows, *(planned.row for planned in dispatch.rows)]
            is_partial = any(row.is_dropped for row in rows)
            count["a result has rows that no longer count"] += is_partial
            is_expected = (result.epoch, result.step) == (epoch.epoch, dispatch.step)  # no other is accepted
            if is_expected and RowStatus.LATE in result.statuses:
                self._see_late_rows(epoch, result)
        if result.num_dropped_steps:
            self._see_dropped_steps(epoch)
        if result.statuses:
            count["bad logits while moves are under way"] += bool(len(epoch.cache.moves))
            count["bad logits while another request is swapped"] += bool(self._simulation.scheduler.state.swapped)

    def _see_dropped_steps(self, epoch: WorkerState) -> None:
        count = self._count
        count["a lease ends early"] += 1
        for row in epoch.unacknowledged[0].columns.rows:
            count["a row of a lease that ends early no longer counts"] += row.is_dropped
            count["a row of a lease that ends early has a window"] += epoch.cache.has_windows
            count["a row of a lease that ends early has its last token planned"] += not row.num_uncomputed_tokens

    def _see_late_rows(self, epoch: WorkerState, result: StepResult) -> None:
        count, dispatch = self._count, epoch.unacknowledged[0]
        rows = {planned.slot: planned.row for planned in dispatch.sampling_rows()}
        rows |= zip(dispatch.columns.slots, dispatch.columns.rows, strict=True)
        for slot, status in zip(sorted(rows), result.statuses, strict=True):
            row, sequence = rows[slot], rows[slot].sequence
            if status is not RowStatus.LATE:
                self._late.discard(sequence)
                continue
            count["a row is late"] += 1
            count["a row is late twice"] += sequence in self._late
            count["a beam is late"] += sequence.group.beam is not None
            count["a late row decodes"] += row.is_decoding
            is_last = not row.num_uncomputed_tokens and row.num_in_flight > 1
            count["a late row has its last token planned"] += is_last
            count["a late row no longer counts"] += row.is_dropped
            count["a late row has been preempted"] += not row.is_dropped and row.slot < 0
            count["a late row has a window"] += epoch.cache.has_windows
            count["a late row saves a state"] += any(save.allocation is row.allocation for save in dispatch.saves)
            self._late.add(sequence)

    def before_loss(self) -> None:
        epoch, count = self._epoch, self._count
        count["lost with two plans in flight"] += len(epoch.unacknowledged) >= 2
        count["lost while requests are swapped"] += bool(self._simulation.scheduler.state.swapped)
        running = list(self._simulation.scheduler.state.running)
        count["lost while beams run"] += any(group.beam for group in running)
        is_pooled = any(group.request.sampling.pooling is not Pooling.NONE for group in running)
        count["an embedding is lost with its worker"] += is_pooled
        count["lost while blocks are swapped out"] += any(move.is_out for move in epoch.cache.moves)
        count["lost while blocks are swapped in"] += any(not move.is_out for move in epoch.cache.moves)

    def before_grace_ends(self, staying: list[Client]) -> None:
        count = self._count
        for client in staying:
            is_detached = client.request.output_mode is OutputMode.DETACHED
            count[f"a {'detached request' if is_detached else 'stream'} waits on after the grace"] += 1
        for client in self._simulation.clients.values():
            if client.is_abandoned and any(sequence.num_output_tokens for sequence in self._group(client).sequences):
                is_search = client.request.beam is not None
                count["a beam search ends at the grace although it has begun"] += is_search
                count["an output that is read as a whole ends although it has tokens"] += not is_search

    def cache_changed(self, event: KvEvent) -> None:
        if isinstance(event, BlockRemoved) and event.tier is Tier.HOST:
            self._count["a host block's content is dropped"] += 1
