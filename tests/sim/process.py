"""The worker's process: the production session over a simulated machine, driven as in `rpc/servicer.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagewire.common.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Refusal,
    RowStatus,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerProtocolError,
)
from scheduler_service.core.cost import PreemptionMode
from testing.core.simulated_worker import BAD, SimulatedWorker
from testing.core.toy_grammar import is_deadly
from tests.sim.connection import Connection
from tests.sim.scenario import BAD_TOKEN
from worker_service.rpc.session import Session, SessionRegister

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class WorkerProcess:
    def __init__(self, simulation: Simulation, capacity: WorkerCapacity) -> None:
        self.simulation = simulation
        self.capacity = capacity
        self.is_alive = True
        self._paused_until = 0.0
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.register = SessionRegister()
        self.session: Session | None = None
        self.connection: Connection | None = None
        self.machine: SimulatedWorker | None = None
        self._queue: deque[StepPlan] = deque()
        self._is_busy = False
        self._greeted: Connection | None = None  # waits for the step of an older session to finish

    # Sessions

    def greet(self, connection: Connection) -> None:
        """Process a Hello."""
        simulation = self.simulation
        if self._is_absent(self.greet, connection):
            return
        hello = Hello(PROTOCOL_VERSION, "ours", connection.epoch, simulation.scenario.options.pipeline_depth)
        answer = self.register.hello(hello, simulation.time)
        if isinstance(answer, Refusal):
            assert connection.epoch <= answer.epoch, "S9: a rising epoch is refused"
            time = connection.send_up(simulation.time, simulation._delay())
            simulation.at(time, simulation.receive_refusal, connection, answer.epoch)
            return
        self.end_session("another session begins")
        answer.max_leased_steps = self.capacity.max_leased_steps
        self.session, self._greeted = answer, connection
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        """Begin the new session with an empty machine, after all earlier steps and moves are finished."""
        connection, self._greeted = self._greeted, None
        assert connection is not None
        capacity, simulation = self.capacity, self.simulation
        self.connection = connection
        self.machine = SimulatedWorker.of(
            capacity,
            poisoned=frozenset((BAD_TOKEN,)),
            bad_sequences=simulation.bad_sequences,
            is_late=simulation.is_late,
        )
        simulation.at(connection.send_up(simulation.time, simulation._delay()), simulation.receive_ready, connection)

    def pause(self, seconds: float) -> None:
        simulation = self.simulation
        self._paused_until = max(self._paused_until, simulation.time + seconds)
        simulation.at(self._paused_until, self._resume)

    @property
    def is_paused(self) -> bool:
        return self.simulation.time < self._paused_until

    def _resume(self) -> None:
        """Process the deferred events in order."""
        while self._deferred and not self.is_paused:
            action, args = self._deferred.popleft()
            action(*args)

    def _is_absent(self, action: Callable[..., None], *args: object) -> bool:
        """Return whether the process cannot handle an event. A dead process drops it; a paused process defers it."""
        if not self.is_alive:
            return True
        if self.is_paused:
            self._deferred.append((action, args))
            return True
        return False

    def end_session(self, reason: str) -> None:
        """End the session. Nothing more is sent on the connection; messages in transit still arrive."""
        connection, simulation = self.connection or self._greeted, self.simulation
        if connection is not None:
            simulation.note("session ends:", reason)
            simulation.at(connection.send_up(simulation.time, simulation._delay()), simulation.lose, connection, reason)
        self.session = self.connection = self.machine = self._greeted = None
        self._queue.clear()

    def die(self, seconds: float) -> None:
        """Kill the process.

        Messages in transit arrive up to some point; the supervisor starts another process after `seconds`.
        """
        simulation = self.simulation
        if not self.is_alive:
            return
        simulation.note("crash")
        connection = self.connection or self._greeted
        if connection is not None:
            connection.cut(simulation.time, simulation.rng.random(), down=True, up=True)
            simulation.at(max(simulation.time, connection.up_cut_at), simulation.lose, connection, "the worker died")
        self.is_alive = False
        simulation.after(seconds, simulation.restart)

    # Steps

    def receive(self, connection: Connection, plan: StepPlan) -> None:
        """Process a plan."""
        if self._is_absent(self.receive, connection, plan) or connection is not self.connection:
            return
        assert self.session is not None
        self.session.plan(plan.epoch, plan.step, plan.num_leased_steps)
        self._queue.append(plan)
        if not self._is_busy:
            self._start()

    def _start(self) -> None:
        simulation = self.simulation
        self._is_busy = True
        seconds = simulation.scenario.step_seconds * (0.5 + simulation.rng.random())
        simulation.after(seconds, self._finish, self.connection, seconds)

    def _finish(self, connection: Connection, seconds: float) -> None:
        """Finish the running step, if the process still exists."""
        if self._is_absent(self._finish, connection, seconds):
            return
        simulation = self.simulation
        self._is_busy = False
        if connection is not self.connection:
            if self._greeted is not None:
                self._begin()
            return
        assert self.machine is not None
        assert self.session is not None
        plan = self._queue.popleft()
        if plan.fork_target_slots:
            simulation.reach.forks(plan, set(self.machine.rows).difference(plan.released_slots))
        result = self.machine.execute(plan, apply_moves=not simulation.scenario.move_seconds)
        if self._poison_runs():
            simulation.poison_crashed()
            self.die(0.2)
            return
        if not {RowStatus.NAN_LOGITS, RowStatus.OUT_OF_MEMORY}.isdisjoint(result.statuses):
            self._note_bad_rows()
        if (
            simulation.scenario.options.preemption is PreemptionMode.AUTO
        ):  # otherwise the rate stays unknown, and loads are preferred
            result = replace(result, duration_us=int(seconds * 1e6))
        elif self.capacity.max_leased_steps and all(row.work <= 1 for row in self.machine.rows.values()):
            result = replace(result, duration_us=int(seconds * 1e6))  # of decode steps, so that there are leases
        result = self._continue_lease(plan, result)
        for added in plan.added_grammars:
            delay = simulation.grammar_rng.choice((0.0, 0.02, 0.5)) * simulation.grammar_rng.random()
            simulation.after(delay, self._prepare, connection, added.grammar_id)
        self.session.answer(plan.step, result.num_dropped_steps)
        simulation.at(
            connection.send_up(simulation.time, simulation._delay()), simulation.receive_result, connection, result
        )
        if self.machine.pending:
            simulation.after(simulation.rng.random() * simulation.scenario.move_seconds, self._move, connection)
        if self._queue:
            self._start()

    def _continue_lease(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Queue the next step of a plan's lease, unless a plan ends the lease. Return the step's result."""
        num_left = plan.num_leased_steps
        if any(queued.ends_lease for queued in self._queue):
            return replace(result, num_dropped_steps=num_left)
        if num_left:
            self._queue.appendleft(StepPlan(plan.epoch, plan.step + 1, num_leased_steps=num_left - 1))
        return result

    def _prepare(self, connection: Connection, grammar_id: int) -> None:
        """Finish preparing a grammar, successfully or with an error."""
        if self._is_absent(self._prepare, connection, grammar_id) or connection is not self.connection:
            return
        assert self.machine is not None
        added = self.machine.grammars.get(grammar_id)
        if added is not None and is_deadly(added.text):
            self.simulation.reached["a grammar crashes the worker"] += 1
            self.die(0.2)
            return
        error = self.machine.prepare(grammar_id)
        if error is not None:
            simulation = self.simulation
            time = connection.send_up(simulation.time, simulation.grammar_rng.random() * 0.01)
            simulation.at(time, simulation.receive_grammar, connection, grammar_id, error)

    def _move(self, connection: Connection) -> None:
        """Finish some of the moves that were held back."""
        if self._is_absent(self._move, connection) or connection is not self.connection:
            return
        assert self.machine is not None
        simulation = self.simulation
        before = self.machine.last_moved_step
        step = self.machine.finish_moves(simulation.rng.randint(0, len(self.machine.pending)))
        if step > before:
            time = connection.send_up(simulation.time, simulation._delay())
            simulation.at(time, simulation.receive_heartbeat, connection, step)
        if self.machine.pending:
            simulation.after(simulation.rng.random() * simulation.scenario.move_seconds, self._move, connection)

    def _poison_runs(self) -> bool:
        assert self.machine is not None
        client_of = self.simulation.client_of
        return any(
            client_of[row.opening.sequence_id].arrival.crashes_worker for row in self.machine.rows.values() if row.work
        )

    def _note_bad_rows(self) -> None:
        """Mark the requests that may end because of a failed row.

        Requests that only read blocks written by others are not marked.
        """
        assert self.machine is not None
        for row in self.machine.rows.values():
            client = self.simulation.client_of[row.opening.sequence_id]
            self.simulation.reached["bad logits of a beam"] += client.request.beam is not None
            is_bad = BAD_TOKEN in client.request.prompt_token_ids
            client.may_be_bad |= is_bad or row.opening.sequence_id in self.machine.bad_sequences
            if BAD in row.digests and not client.may_be_bad:
                self.simulation.reached["a request computes on another one's bad blocks"] += 1

    # Messages that the session must refuse

    def refuse_stale_hello(self, age: int) -> None:
        if not self.is_alive or self.register.last_epoch <= age:
            return
        epoch = self.register.last_epoch - age
        answer = self.register.hello(Hello(PROTOCOL_VERSION, "another", epoch, 1), self.simulation.time)
        assert isinstance(answer, Refusal), "S9: a stale epoch was taken"
        assert answer.epoch == self.register.last_epoch
        self.simulation.reached["a stale hello is refused"] += 1

    def serve_rival(self) -> None:
        """Let another scheduler take over the worker, and leave again."""
        if not self.is_alive or self.is_paused:
            return
        hello = Hello(PROTOCOL_VERSION, "rival", self.register.last_epoch + 2, 1)
        answer = self.register.hello(hello, self.simulation.time)
        assert isinstance(answer, Session)
        self.simulation.reached["a rival takes the worker"] += 1
        self.end_session("a rival took over")

    def refuse_late_plan(self, plan: StepPlan) -> None:
        if not self.is_alive or self.session is None or plan.epoch == self.session.epoch:
            return
        self._refuse_plan(plan.epoch, plan.step)
        self.simulation.reached["a plan of an old epoch is refused"] += 1

    def refuse_wrong_plans(self) -> None:
        """Send a repeated plan, a plan that skips a step, and one beyond the pipeline depth; each must be refused."""
        if not self.is_alive or self.session is None:
            return
        epoch, step = self.session.epoch, self.session.last_planned_step
        self._refuse_plan(epoch, step)
        self._refuse_plan(epoch, step + 2)
        if self.session.num_unfinished == self.session.pipeline_depth:
            self._refuse_plan(epoch, step + 1)
            self.simulation.reached["a plan too many is refused"] += 1

    def _refuse_plan(self, epoch: int, step: int) -> None:
        session = self.session
        assert session is not None
        before = session.last_planned_step
        try:
            session.plan(epoch, step)
        except WorkerProtocolError:
            assert session.last_planned_step == before, "S9: a refused plan moved the session on"
            return
        raise AssertionError(f"S9: step {step} of epoch {epoch} was taken in epoch {session.epoch} after {before}")
