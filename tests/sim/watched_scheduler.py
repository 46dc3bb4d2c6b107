"""The scheduler core as the step loop drives it, with checks.

After every event the invariants are checked, and the outputs are recorded before the step loop and the clients see
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.common.wire.messages import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.request import EndReason, Request, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from tests.sim.client import Client
from tests.sim.state_ledger import check_saves

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class WatchedScheduler(Scheduler):
    _simulation: Simulation

    def watch(self, simulation: Simulation) -> None:
        """Report every event to a simulation. Not in the constructor, because mypyc does not pass on its keywords."""
        self._simulation = simulation

    def _told(self, outputs: TokenOutputs, *values: int) -> TokenOutputs:
        """Record the outputs of an event. `values` distinguish the event in the log hash."""
        simulation = self._simulation
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            client = simulation.client_of[sequence_id]
            client.num_lone_crashes = 0
            client.samples[sequence_id].num_confirmed += 1
            simulation.log_hash = hash((simulation.log_hash, sequence_id, token_id))
        for end in outputs.ended:
            client = simulation.client_of[end.sequence_id]
            output = client.samples[end.sequence_id]
            assert not output.has_ended, "S6: two ends"
            output.has_ended = True
            client.num_live -= 1
            simulation.note("end", client.key, output.index, end.reason, end.message)
            if end.reason is EndReason.NO_LONGER_FITS:
                simulation.check_misfit(client.request)
            simulation.reached[f"ended: {end.reason.value}"] += 1
            simulation.log_hash = hash((simulation.log_hash, end.sequence_id, end.num_output_tokens))
            if not client.num_live:
                del simulation.clients[client.key]
        simulation.audit(*values)
        return outputs

    # Requests

    def add(self, request: Request, now: float) -> list[int]:
        sequence_ids = super().add(request, now)
        self._simulation.audit(1)
        return sequence_ids

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        client = self._simulation.clients[tenant, request_id]
        assert client.is_aborted, "it was not aborted"
        outputs = self._told(super().abort(tenant, request_id, now), 2)
        assert not client.num_live, "an aborted request goes on"
        return outputs

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        output = self._simulation.client_of[sequence_id].samples[sequence_id]
        has_ended = output.has_ended
        outputs = super().stop(sequence_id, num_output_tokens, now)
        num_expected = [] if has_ended else [num_output_tokens]
        assert [end.num_output_tokens for end in outputs.ended] == num_expected, "a stop text drops no tokens"
        if not has_ended:
            output.num_stopped, output.num_read_at_stop = num_output_tokens, len(output.received)
        return self._told(outputs, 9, sequence_id)

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        num_preemptions = self.state.counters.num_preemptions
        plan = super().schedule(now)
        if plan is not None and plan.ends_lease:
            assert self.state.counters.num_preemptions == num_preemptions, "a plan that ends a lease preempts"
        self._simulation.planned(plan)
        return plan

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        self._simulation.reach.before_result(result)
        dispatches = self.state.worker.unacknowledged[:1]
        outputs = super().complete(result, now)
        machine = self._simulation.known_machine
        if machine is not None and machine.num_states:
            for dispatch in dispatches:
                check_saves(self.state.worker.cache, dispatch, machine)
        return self._told(outputs, 4, result.step)

    def moved(self, step: int, now: float) -> None:
        super().moved(step, now)
        self._simulation.moved(step)

    def grammar_ready(self, grammar_id: int, error: str, now: float) -> TokenOutputs:
        outputs = super().grammar_ready(grammar_id, error, now)
        if self._simulation.connection is not None:
            self._simulation.connection.told_grammar_ids.add(grammar_id)
        return self._told(outputs, 16, grammar_id)

    # The worker

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        self._simulation.missing_since = None
        return self._told(super().worker_joined(capacity, epoch, now), 7, epoch)

    def worker_lost(self, now: float) -> TokenOutputs:
        self._simulation.before_loss()
        return self._told(super().worker_lost(now), 8)

    def worker_grace_ended(self, now: float) -> TokenOutputs:
        simulation = self._simulation
        assert simulation.seconds_missing >= simulation.scenario.worker_grace, "the grace ends too early"
        staying: list[Client] = []
        for client in simulation.clients.values():
            client.is_abandoned = client.can_begin_elsewhere
            if not client.is_abandoned:
                staying.append(client)
        simulation.reach.before_grace_ends(staying)
        outputs = self._told(super().worker_grace_ended(now), 15)
        assert list(simulation.clients.values()) == staying, "a request that could begin elsewhere waits on"
        return outputs

    def worker_timed_out(self, now: float) -> TokenOutputs:
        simulation = self._simulation
        assert simulation.seconds_missing >= simulation.scenario.worker_timeout, "requests are given up too early"
        for client in simulation.clients.values():
            client.is_abandoned = True
        outputs = self._told(super().worker_timed_out(now), 14)
        assert not simulation.clients, "a request outlives the worker's timeout"
        return outputs

    def flush_cache(self, now: float) -> None:
        super().flush_cache(now)
        self._simulation.audit(15)
