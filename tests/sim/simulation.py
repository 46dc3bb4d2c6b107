"""The scheduler core, the step loop and the worker session in one seeded event loop with every possible fault.

These are the production code. One heap of (time, number) orders all events, and one `random.Random(seed)` makes all
choices, so a seed determines a history. The scheduler's side acts as `links/worker/worker_link.py`, the worker's side
as `rpc/servicer.py` and `engine.py`, without gRPC, threads or a real clock.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any

from pagewire.common.wire.messages import RowStatus, StepPlan, StepResult, WorkerProtocolError
from scheduler_service.core import explain
from scheduler_service.core.plans import Dispatch
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    BlockUse,
    Grammar,
    OutputMode,
    Request,
)
from scheduler_service.core.sequence import GroupState, SequenceGroup
from scheduler_service.serving.kv_events import KvEventLog
from scheduler_service.serving.refusal import RefusedError
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.simulation.timeline import Timeline
from testing.core.simulated_worker import SimulatedWorker
from tests.sim.cache_view import CacheView
from tests.sim.client import Client
from tests.sim.connection import NEVER, Connection
from tests.sim.move_ledger import MoveLedger
from tests.sim.process import WorkerProcess
from tests.sim.reach import Reach
from tests.sim.reader import Reader
from tests.sim.root_ledger import RootLedger
from tests.sim.scenario import MIN_STATES, Arrival, draw_scenario, smaller
from tests.sim.state_ledger import check_cached_states, check_free
from tests.sim.surroundings import Link, Witness
from tests.sim.watched_scheduler import WatchedScheduler

_HEARTBEAT_LIMIT = 2.5
_BACKOFF = 0.1
_MAX_EVENTS = 40_000


def _brief(value: Any) -> str:
    """Return a dataclass as text, without the fields that have their default value."""
    if not is_dataclass(value):
        return f"[{', '.join(map(_brief, value))}]" if isinstance(value, tuple) else str(value)
    given = [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(f'{name}={_brief(entry)}' for name, entry in given)})"


class Simulation(Timeline):
    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.rng = rng = Random(seed)
        self.scenario = scenario = draw_scenario(seed, rng)
        self.trace = trace
        self.clock_offset = 0.0
        self.num_audits = 0
        self.num_steps = 0
        self.log_hash = seed
        self.reached: Counter[str] = Counter()
        self.scheduler = WatchedScheduler(scenario.options)
        self.scheduler.watch(self)
        self._kv_event_log = KvEventLog(max_batches=1000)
        self.loop = StepLoop(
            self.scheduler,
            [Witness(self)],
            worker_timeout=scenario.worker_timeout,
            worker_grace=scenario.worker_grace,
            kv_event_log=self._kv_event_log,
            clock=self,
        )
        self.reader = Reader(self)
        self.grammar_rng = Random(f"grammars of workers {seed}")
        self._late_rng = Random(f"late rows {seed}")
        self.clients: dict[tuple[str, str], Client] = {}  # whose requests are in the core
        self.waiting: dict[Client, None] = {}  # for more output, though the core may have ended their requests
        self.gone: list[Client] = []  # clients that have received everything
        self.client_of: dict[int, Client] = {}  # by sequence, including ended ones
        self.bad_sequences: dict[int, RowStatus] = {}  # sequences whose next sampling row fails, with the failure
        self.num_losses = self.num_poison_crashes = 0
        self.num_expected = len(scenario.arrivals)  # future arrivals
        self.epoch = 0
        self.connection: Connection | None = None  # of the scheduler's current epoch
        self.dialled: Connection | None = None  # waits for Ready
        self.expects_close = False  # a worker has sent a false message to the step loop
        self.closing: Connection | None = None  # closed by the step loop; its session does not know it yet
        self.missing_since: float | None = 0.0  # since when there has been no worker
        self.old_connections: deque[Connection] = deque(maxlen=3)
        self.ledger = MoveLedger(scenario.capacity.block_size, scenario.capacity.windows)
        self.root_ledger = RootLedger(scenario.capacity)
        self.cache_view = CacheView()
        self.process = WorkerProcess(self, scenario.capacity)
        self.is_calm = False  # faults have stopped
        self.num_kv_batches = 0
        self.max_steps = 0
        self.reach = Reach(self)

    # The loop

    def at(self, time: float, action: Callable[..., object], *args: Any) -> None:
        assert self.num_events < _MAX_EVENTS, "L1: events without end"
        if time < NEVER:
            super().at(time, action, *args)

    def run(self) -> None:
        """Run one history to the end of every request. Raises AssertionError or any error of the code under test."""
        if self.trace is not None:
            self.trace(_brief(replace(self.scenario, arrivals=())))
        for arrival in self.scenario.arrivals:
            self.at(arrival.time, self.arrive, arrival)
        for time in self.scenario.flush_times:
            self.at(time, self.flush)
        disabled = logging.root.manager.disable
        logging.disable()  # the loss of a worker would be logged for an operator
        try:
            with self.loop.kv_events.following():
                self._run()
        finally:
            logging.disable(disabled)

    def _run(self) -> None:
        self.loop.availability.start_timers()
        self.dial()
        self.drive(self.loop, lambda: self.rng.random() * self.scenario.wake_seconds)
        assert not self.clients, f"L1: nothing happens any more, but these wait: {sorted(self.clients)}"
        assert not self.waiting, f"S6: an end has not come: {[client.key for client in self.waiting]}"
        self._check_idle()

    def note(self, name: str, *values: object) -> None:
        if self.trace is not None:
            self.trace(f"{self.time:9.4f} {name} {' '.join(map(str, values))}")

    def audit(self, *values: int) -> None:
        """Check the invariants after an event of the scheduler."""
        self.num_audits += 1
        self.log_hash = hash((self.log_hash, self.time, *values))
        self.scheduler.check()
        self._check_states()
        if not self.is_calm:
            self._tempt_fate()

    def _check_states(self) -> None:
        worker, machine = self.scheduler.state.worker, self.known_machine
        if worker.capacity.num_device_states and machine is not None:
            num_cached = check_cached_states(worker.cache, machine)
            self.reached["a state is cached"] += num_cached > 0

    @property
    def known_machine(self) -> SimulatedWorker | None:
        """The worker, if it is still the one that the core knows."""
        return self.process.machine if self.connection is self.process.connection else None

    def _tempt_fate(self) -> None:
        scenario, state = self.scenario, self.scheduler.state
        is_delicate = state.swapped or state.loading
        if scenario.faults and self.rng.random() < scenario.fault_rate * (8 if is_delicate else 1):
            faults = scenario.faults
            if is_delicate and self.rng.random() < 0.5:
                faults = tuple(fault for fault in faults if fault in ("cancel", "stop")) or faults
            self.at(self.time, getattr(self, self.rng.choice(faults)))
        if self.num_audits > 150:
            self._calm_down()

    def _calm_down(self) -> None:
        self.is_calm = True
        if not self.num_expected:
            self._bound_steps()

    def _bound_steps(self) -> None:
        """Set the largest number of steps after faults have stopped (L1).

        Every plan computes tokens of the first request in order, or moves blocks that it waits for. A row needs a plan
        per token, or two plans per token in a beam search. Each suspect of a crash may be tried alone.
        """
        num_restarts = 3 + sum(client.arrival.crashes_worker for client in self.clients.values()) * 5
        num_tokens = sum(
            (client.request.beam.beam_width if client.request.beam else client.request.n)
            * (len(client.request.prompt_token_ids) + client.request.max_tokens + 4)
            for client in self.clients.values()
        )
        self.max_steps = self.num_steps + 3 * num_restarts * num_tokens + 20

    def _check_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_requests
        self._check_cache_view()
        stats = explain.stats(scheduler.state)
        assert (stats.num_held_blocks, stats.num_held_host_blocks) == (0, 0), f"S8: {stats}"
        assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_waiting_tokens) == (0, 0, 0, 0)
        check_free(scheduler.state.worker.cache)

    def _check_cache_view(self) -> None:
        """Read the KV events as a subscriber does, and compare the result with the actual cache."""
        self.loop.kv_events.take()
        while (batch := self._kv_event_log.after(self.num_kv_batches)) is not None:
            self.num_kv_batches += 1
            for event in batch.events:
                self.cache_view.take(event)
                self.reach.cache_changed(event)
        self.cache_view.check(self.scheduler.kv_snapshot())

    def now(self) -> float:
        """Return the time of the clock, which may jump. Timers do not jump."""
        return self.time + self.clock_offset

    @property
    def seconds_missing(self) -> float:
        """How many seconds there has been no worker."""
        return 0.0 if self.missing_since is None else self.time - self.missing_since + 1e-9

    # Clients

    def arrive(self, arrival: Arrival) -> None:
        self.num_expected -= 1
        request = arrival.request
        if self.trace is not None:
            self.note("add", _brief(request), "crashes the worker" if arrival.crashes_worker else "")
        if arrival.reads_every == 1:
            client = Client(arrival, self.loop, self.has_everything)
        else:
            client = self.reader.client(arrival)
        try:
            self.loop.submit(client.active)
        except AdmissionError as error:
            self.note("refused", error)
            self._check_refusal(arrival, error)
        except RefusedError as refusal:  # mypyc needs another name here
            self.note("refused", refusal)
            self._check_patience(request.output_mode)
            self.reached["a request is refused without a worker"] += 1
        else:
            self._is_queued(client)
        if not client.samples:
            client.outputs.clear()  # breaks the reference cycle between outputs and their records
        if self.is_calm and not self.num_expected:
            self._bound_steps()

    def _is_queued(self, client: Client) -> None:
        request, arrival = client.request, client.arrival
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        assert num_tokens <= self.scheduler.max_sequence_tokens, "a request that can never run was taken"
        assert not self._is_out_of_patience(request.output_mode, 0.001), "a request is taken after the worker's timeout"
        client.is_queued()
        self.clients[client.key] = client
        self.waiting[client] = None
        num_rows = request.beam.beam_width if request.beam else request.n
        first = min(client.samples)
        for sequence_id in range(first, first + num_rows):
            self.client_of[sequence_id] = client
            if arrival.goes_bad:
                self._turn_bad(sequence_id)
        if request.deadline is not None:
            self.at(request.deadline, self.abort, client)

    def _is_out_of_patience(self, output_mode: OutputMode, margin: float) -> bool:
        """Return whether requests of this mode have been without a worker for `margin` seconds longer than they may."""
        scenario = self.scenario
        patience = scenario.worker_timeout
        if output_mode is not OutputMode.DETACHED:
            patience = min(patience, scenario.worker_grace)
        return self.missing_since is not None and self.seconds_missing >= patience + margin

    def _check_patience(self, output_mode: OutputMode) -> None:
        assert self._is_out_of_patience(output_mode, 0.0), "a worker is there, or has not been away for long"

    def has_everything(self, client: Client) -> None:
        """Record that the last of the client's outputs has ended."""
        del self.waiting[client]
        self.gone.append(client)

    def check_misfit(self, request: Request) -> None:
        if request.grammar is not None and self.process.capacity.grammar_version != "g":
            return
        if 0 < self.process.capacity.num_device_states <= MIN_STATES:
            return
        num_tokens = len(request.prompt_token_ids) + max(1, request.max_tokens)
        assert num_tokens > self.scheduler.max_sequence_tokens or request.n > 1 or request.beam, "it fits"

    def _check_refusal(self, arrival: Arrival, error: AdmissionError) -> None:
        request, scenario = arrival.request, self.scenario
        if error.reason is AdmissionReason.INVALID:
            self.reached["a request that can never fit is refused"] += 1
            self.check_misfit(request)
        elif error.reason is AdmissionReason.QUEUE_FULL:
            self.reached["the queue is full"] += 1
            assert (
                scenario.options.max_waiting_requests < 100
                or scenario.options.max_waiting_tokens < 1000
                or (scenario.options.max_tenant_waiting_requests is not None)
            ), str(error)
        else:
            assert (request.tenant, request.request_id) in self.clients, str(error)

    def abort(self, client: Client) -> None:
        if self.clients.get(client.key) is not client:
            return
        self.note("abort", client.key)
        self.reach.before_abort(client)
        client.is_aborted = True
        if self.rng.random() < 0.5:
            self.loop.cancel(client.active)
        else:
            self.loop.abort(*client.key)

    # Plans and results

    def planned(self, plan: StepPlan | None) -> None:
        """Process a new plan, or None if the core has nothing to do."""
        if plan is None:
            self._check_no_other_waits_for_grammars()
            self.audit(13)
            return
        self.num_steps += 1
        assert not self.max_steps or self.num_steps <= self.max_steps, "L1: too many steps"
        if self.trace is not None:
            self.note("plan", _brief(plan))
        self.reach.planned(plan)
        self.audit(3, plan.step, *plan.released_slots, *plan.append_block_ids, *plan.work_num_tokens)

    def _check_no_other_waits_for_grammars(self) -> None:
        """Check that a worker with nothing to do prepares the grammars of all waiting requests."""
        state, epoch = self.scheduler.state, self.scheduler.state.worker
        if not epoch.has_worker or epoch.unacknowledged or len(epoch.cache.moves) or state.quarantine.suspects:
            return
        for group in state.groups.values():
            assert group.state is GroupState.PREPARING, "L1: it could run, and waits for another one's grammar"
            assert group.request.grammar is not None, "L1: it waits for a grammar and has none"

    def receive_grammar(self, connection: Connection, grammar_id: int, error: str) -> None:
        if connection in (self.connection, self.closing):
            self.note("grammar", grammar_id, error)
            self.reached["a grammar cannot be read" if error else "a grammar is ready"] += 1
            self.loop.exchange.grammar_ready(grammar_id, error)

    def send(self, connection: Connection, plan: StepPlan) -> None:
        assert connection is self.connection, "S9: a plan for a worker that is gone"
        assert plan.epoch == connection.epoch
        last = connection.plans[-1] if connection.plans else StepPlan(plan.epoch, 0)
        assert plan.step == last.step + last.num_leased_steps + 1
        connection.plans.append(plan)
        connection.grammar_ids.difference_update(plan.released_grammar_ids)
        connection.grammar_ids.update(added.grammar_id for added in plan.added_grammars)
        if connection.grammar_ids:
            self._check_grammars(connection, {added.grammar_id for added in plan.added_grammars})
        self.ledger.check(plan)
        self.root_ledger.check(plan, self.client_of)
        self.at(connection.send_down(self.time, self._delay()), self.process.receive, connection, plan)

    def _check_grammars(self, connection: Connection, added: set[int]) -> None:
        """Check that the worker has the grammars of the live requests that may run, and no grammar that is not needed.

        `added`: the grammars of a new plan, which must belong to such requests.
        """
        state = self.scheduler.state
        needed = {group: group.request.grammar for group in state.groups.values() if group.request.grammar is not None}
        ids = {group: state.worker.grammars.id_of(grammar) for group, grammar in needed.items()}
        admitted = {grammar_id for group, grammar_id in ids.items() if state.quarantine.admits(group)}
        assert admitted <= connection.grammar_ids <= set(ids.values()) - {0}, "S8: grammars"
        assert added <= admitted, "a grammar is prepared beside suspects that do not need it"

    def _delay(self) -> float:
        return self.rng.random() * self.scenario.delay_seconds

    def is_late(self, num_tokens: int, step: int) -> bool:
        """Return whether the worker computes a row's grammar mask too late for the step."""
        return not self.is_calm and self._late_rng.random() < self.scenario.late_rate

    def receive_result(self, connection: Connection, result: StepResult) -> None:
        if connection not in (self.connection, self.closing):
            self._refuse(result, "a zombie's result is refused")
            return
        if self.trace is not None:
            self.note("result", _brief(result))
        self.reached["a result of an epoch that the step loop has ended"] += connection is self.closing
        self._hear_of_moves(connection, result.last_moved_step)
        self.loop.exchange.result(result)

    def _refuse(self, result: StepResult, what: str) -> None:
        """Check that the core refuses a result (S9) and does not change."""
        try:
            self.scheduler.complete(result, self.now())
        except WorkerProtocolError as error:
            self.note("refused", error)
            self.reached[what] += 1
            self.audit(5, result.step)
        else:
            raise AssertionError(f"S9: {what}: it was not: {result}")

    def receive_heartbeat(self, connection: Connection, last_moved_step: int) -> None:
        if connection in (self.connection, self.closing):
            self.note("heartbeat", last_moved_step)
            self._hear_of_moves(connection, last_moved_step)

    def _hear_of_moves(self, connection: Connection, step: int) -> None:
        if step > connection.last_moved_step:
            connection.last_moved_step = step
            self.loop.exchange.moved(step)

    def moved(self, step: int) -> None:
        """Record that the core knows that the moves up to `step` are done."""
        self.ledger.moved(step)
        self.audit(6, step)

    # Epochs, as managed by the link

    def dial(self) -> None:
        """Begin a new epoch. If no answer comes, dial again."""
        self.epoch += 1
        connection = self.dialled = Connection(self.epoch, self.time, self.time)
        self.note("dial", self.epoch)
        self.at(connection.send_down(self.time, self._delay()), self.process.greet, connection)
        self.after(_HEARTBEAT_LIMIT, self._give_up_dialling, connection)

    def _give_up_dialling(self, connection: Connection) -> None:
        if connection is self.dialled:
            self.dial()

    def receive_ready(self, connection: Connection) -> None:
        if connection is not self.dialled:
            return
        if self.trace is not None:
            self.note("ready", connection.epoch, _brief(self.process.capacity))
        self.dialled, self.connection = None, connection
        capacity = self.process.capacity
        self.ledger = MoveLedger(capacity.block_size, capacity.windows)
        self.root_ledger = RootLedger(capacity)
        self.loop.exchange.worker_ready(capacity, connection.epoch, Link(self, connection))

    def receive_refusal(self, connection: Connection, epoch: int) -> None:
        if connection is self.dialled:
            self.note("refused", epoch)
            self.dialled = None
            self.epoch = max(self.epoch, epoch)
            self.after(_BACKOFF, self.dial)

    def lose(self, connection: Connection, reason: str) -> None:
        """Let the scheduler notice that a connection is over."""
        if connection is self.dialled:
            self.dialled = None
            self.after(_BACKOFF, self.dial)
        if connection is self.closing:
            self.closing = None
            self.loop.exchange.worker_lost(reason)
            self.after(_BACKOFF, self.dial)
        elif connection is self.connection:
            self.note("lost", reason)
            self.loop.exchange.worker_lost(reason)
            if self.closing is connection:  # a message that arrived earlier was false
                self.closing = None
            self.after(_BACKOFF, self.dial)

    def close(self, connection: Connection, reason: str) -> None:
        """Close the connection for the step loop, which ends an epoch. The session notices a moment later."""
        assert self.expects_close, f"the step loop ends an epoch: {reason}"
        self.note("closed", reason)
        self.expects_close = False
        self.closing = connection
        self.after(self.rng.random() * 0.05, self.lose, connection, reason)

    def before_loss(self) -> None:
        """Prepare for the core's notice that the worker is lost."""
        assert self.connection is not None
        self.reach.before_loss()
        dispatched = {group for dispatch in self._unacknowledged() for group in dispatch.groups()}
        causes: dict[SequenceGroup, object] = {group: group for group in dispatched if not group.is_finished}
        causes |= self._preparing(self.connection)
        if len(set(causes.values())) == 1:
            for group in causes:
                self.clients[group.request.tenant, group.request.request_id].num_lone_crashes += 1
        self.num_losses += 1
        self.missing_since = self.time
        self.old_connections.append(self.connection)
        self.connection = None
        self.expects_close = False

    def _preparing(self, connection: Connection) -> dict[SequenceGroup, Grammar]:
        """Return the requests whose grammars the worker prepares as far as the scheduler knows, with these grammars."""
        epoch, preparing = self.scheduler.state.worker, connection.grammar_ids - connection.told_grammar_ids
        if not preparing:
            return {}
        needed = {group: group.request.grammar for group in self.scheduler.state.groups.values()}
        return {group: one for group, one in needed.items() if one and epoch.grammars.id_of(one) in preparing}

    def _unacknowledged(self) -> list[Dispatch]:
        return self.scheduler.state.worker.unacknowledged

    def poison_crashed(self) -> None:
        """Check S10: one request among n is found by its (3 + log2(n))-th crash, if there are no other losses."""
        self.reached["a request crashes the worker"] += 1
        self.num_poison_crashes += 1
        arrivals = self.scenario.arrivals
        is_sole_cause = sum(arrival.crashes_worker for arrival in arrivals) == 1 and not self.num_other_losses
        limit = 3 + (len(arrivals) - 1).bit_length()
        assert not is_sole_cause or self.num_poison_crashes <= limit, f"S10: {limit + 1} crashes by one request"

    @property
    def num_other_losses(self) -> int:
        return self.num_losses - (self.num_poison_crashes - 1)

    # Faults

    def crash(self) -> None:
        self.process.die(self.rng.random() * 0.5)

    def cut(self) -> None:
        connection = self.connection
        if connection is None:
            return
        ways = self.rng.choice(((True, True), (True, False), (False, True)))
        connection.cut(self.time, self.rng.random(), down=ways[0], up=ways[1])
        delay = self.rng.choice((self._delay(), _HEARTBEAT_LIMIT))
        self.note("cut", ways, "noticed in", delay)
        self.after(delay, self.lose, connection, "the connection broke")

    def pause(self) -> None:
        seconds = self.rng.choice((0.05, _HEARTBEAT_LIMIT * 2))
        self.note("pause", seconds)
        self.process.pause(seconds)
        if seconds > _HEARTBEAT_LIMIT and self.connection is not None:
            self.after(_HEARTBEAT_LIMIT, self.lose, self.connection, "no heartbeat")

    def out_of_memory(self) -> None:
        self.process.end_session("out of memory")

    def bad_row(self) -> None:
        machine = self.process.machine
        if machine is not None and machine.rows:
            self._turn_bad(machine.rows[self.rng.choice(sorted(machine.rows))].opening.sequence_id)

    def _turn_bad(self, sequence_id: int) -> None:
        self.bad_sequences[sequence_id] = RowStatus.OUT_OF_MEMORY if sequence_id % 2 else RowStatus.NAN_LOGITS

    def _any_client(self) -> Client | None:
        """Return a random client, often one whose blocks are not where it could run."""
        keys = sorted(self.clients)
        if self.rng.random() < 0.7:
            keys = [key for key in keys if self.reach.is_elsewhere(self.clients[key])] or keys
        return self.clients[self.rng.choice(keys)] if keys else None

    def cancel(self) -> None:
        client = self._any_client()
        if client is not None:
            self.abort(client)

    def late_cancel(self) -> None:
        """Cancel a request that has ended in the core.

        The client may or may not know of the end, and the name may be in use again.
        """
        clients = [*self.gone, *(client for client in self.waiting if not client.num_live)]
        if clients:
            client = self.rng.choice(clients)
            self.note("late cancel", client.key)
            self.reached["a request is cancelled that has ended"] += 1
            is_renamed = client.key in self.clients
            self.reached["a request is cancelled that has ended, and another one has its name"] += is_renamed
            self.loop.cancel(client.active)

    def stop(self) -> None:
        """Report a stop text in the tokens that a client has received."""
        client = self._any_client()
        if client is None or client.request.beam is not None:
            return
        sequence_ids = [sequence_id for sequence_id, output in client.samples.items() if output.received]
        if sequence_ids:
            sequence_id = self.rng.choice(sequence_ids)
            output = client.samples[sequence_id]
            num_tokens = self.rng.randint(1, len(output.received))
            self.note("stop", sequence_id, num_tokens)
            if not output.has_ended:
                self.reach.before_stop(client, sequence_id)
            self.loop.stop(output.record, num_tokens)

    def stale_hello(self) -> None:
        self.process.refuse_stale_hello(self.rng.randint(0, 2))

    def rival(self) -> None:
        self.process.serve_rival()

    def late_plan(self) -> None:
        if self.old_connections:
            plans = self.rng.choice(list(self.old_connections)).plans
            if plans:
                self.process.refuse_late_plan(self.rng.choice(plans))

    def wrong_plans(self) -> None:
        self.process.refuse_wrong_plans()

    def false_result(self) -> None:
        """Send a false result: it answers no plan in flight, or does not match its plan."""
        oldest = next(iter(self._unacknowledged()), None)
        step = oldest.step if oldest else 0
        result = StepResult(self.epoch, step)
        num_samples = len(oldest.sampling_rows()) + len(oldest.columns.slots) if oldest else 0
        false = [
            replace(result, epoch=self.epoch - 1),
            replace(result, step=step + 1),
            replace(result, token_ids=(0,) * (num_samples + 1)),
        ]
        if self.connection is None or self.rng.random() < 0.5:
            self._refuse(self.rng.choice(false), "a false result is refused")
            return
        self.reached["a false result ends the epoch"] += 1
        self.expects_close = True
        self.loop.exchange.result(self.rng.choice(false))

    def false_acknowledgement(self) -> None:
        """Acknowledge moves that were never ordered; then send an acknowledgement that reports nothing new."""
        epoch = self.scheduler.state.worker
        try:
            self.scheduler.moved(epoch.steps.num_steps + 1, self.now())
        except WorkerProtocolError:
            self.reached["a false acknowledgement of moves is refused"] += 1
        else:
            raise AssertionError("moves of a step that was never planned are acknowledged")
        self._report_false_grammars()
        if epoch.has_worker:
            self.scheduler.moved(epoch.last_moved_step // 2, self.now())
        self.audit(11)

    def _report_false_grammars(self) -> None:
        """Report a grammar that was never added, and then a grammar that was released."""
        epoch = self.scheduler.state.worker
        last_id = epoch.grammars.last_id
        try:
            self.scheduler.grammar_ready(last_id + 1, "", self.now())
        except WorkerProtocolError:
            self.reached["a false report of a grammar is refused"] += 1
        else:
            raise AssertionError("a grammar that was never added is reported")
        if last_id and not self.scheduler.state.waiting.held:
            assert not self.scheduler.grammar_ready(last_id, "too late", self.now()).ended

    def question(self) -> None:
        """Ask for an operator's reports, which must not change anything."""
        stats, block_map = explain.stats(self.scheduler.state), explain.block_map(self.scheduler.state)
        assert len(block_map.device) == stats.num_device_blocks
        assert len(block_map.host) == stats.num_host_blocks
        epoch = self.scheduler.state.worker
        if epoch.has_worker:
            # Requests own the blocks that their swaps move. Copies of cached content own none.
            cache = epoch.cache
            swaps = [
                move for move in cache.moves if move.content is None and move.device_block <= cache.pool.num_blocks
            ]
            for uses, pool, swapped, num_held in (
                (block_map.device, cache.pool, {move.device_block for move in swaps}, stats.num_held_blocks),
                (block_map.host, cache.host_pool, {move.host_block for move in swaps}, stats.num_held_host_blocks),
            ):
                held = {block for block, use in enumerate(uses, 1) if use > BlockUse.MOVING} | swapped
                assert len(held) == num_held, "S8: blocks that are held are counted wrong"
                assert uses.count(BlockUse.CACHED) == pool.num_idle_cached, "S8: idle content is counted wrong"
            for states, tier in (
                (block_map.device_states, cache.tiers.device),
                (block_map.host_states, cache.tiers.host),
            ):
                assert len(states) == tier.states.num_blocks
                assert states.count(BlockUse.CACHED) == tier.states.num_idle_cached, "S8: idle states"
                num_free = states.count(BlockUse.FREE) + states.count(BlockUse.CACHED)
                assert num_free == tier.states.num_free, "S8: states that are held are counted wrong"
        for client in self.clients.values():
            report = explain.report(self.scheduler.state, *client.key)
            assert report.num_sequences == client.num_live or client.request.beam
            assert report.reason or report.state == "running", f"it waits without a reason: {report}"
        self._check_cache_view()
        self.audit(12)

    def flush(self) -> None:
        """Empty the cache for an operator. While there are requests, nothing may happen."""
        before = self.scheduler.kv_snapshot()
        self.scheduler.flush_cache(self.now())
        self.note("flush", len(before))
        after = self.scheduler.kv_snapshot()
        if self.clients:
            assert after == before, "the cache was emptied under requests"
        elif before and self.connection is not None:
            assert not after, "content outlives a flush"
            self.reached["the cache is emptied"] += 1

    def clock_jump(self) -> None:
        self.clock_offset += self.rng.choice((0.5, 100.0))

    def duplicate(self) -> None:
        client = self._any_client()
        if client is None or self.loop.availability.refusal(client.request.output_mode):
            return
        self.note("duplicate", client.key)
        try:
            self.loop.submit(client.active)
        except AdmissionError as error:
            self._check_duplicate(error.reason)
        else:
            raise AssertionError("S8: a request was taken twice")

    def _check_duplicate(self, reason: AdmissionReason) -> None:
        assert reason is AdmissionReason.DUPLICATE
        self.audit(10)

    # Requests of the worker's process

    def restart(self) -> None:
        """Restart the worker's process, sometimes with a smaller capacity."""
        capacity = self.scenario.capacity
        if self.rng.random() < 0.3:
            capacity = smaller(self.rng, capacity)
            self.reached["a worker comes back smaller"] += 1
        version = self.grammar_rng.choice(("g", "g", "g", "another"))
        gates = self.grammar_rng.random() < 0.5
        capacity = replace(capacity, grammar_version=version, gates_grammars=gates)
        self.process = WorkerProcess(self, capacity)
