"""The engine with a runner whose steps finish later than they are launched, as on a GPU."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest

from pagewire.common.wire.messages import GrammarReport, StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from worker_service.engine import Engine, EngineSession, LoadedWorker, Outcome
from worker_service.engine import engine as engine_module

READY = WorkerCapacity("w", b"m", 9, 64, 16, 8, 1, 4, 64, "cuda", "float32", "none")
TIMEOUT_S = 20


class SlowStep:
    """A step that finishes when the test sets `done`."""

    def __init__(self, plan: StepPlan, error: Exception | None) -> None:
        self.plan = plan
        self.error = error
        self.done = threading.Event()

    def is_done(self) -> bool:
        return self.done.is_set()

    def result(self) -> StepResult:
        assert self.done.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return StepResult(self.plan.epoch, self.plan.step, token_ids=(self.plan.step,))


class SlowRunner:
    def __init__(self) -> None:
        self.launched: SimpleQueue[SlowStep] = SimpleQueue()
        self.errors: dict[int, Exception] = {}  # by step; raised when the step is done
        self.launch_errors: dict[int, Exception] = {}
        self.reset_error: Exception | None = None
        self.fatal: Exception | None = None
        self.num_moved = 0
        self.is_moving = False
        self.log: list[Any] = []

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None]) -> None:
        self.log.append(f"epoch {epoch}")
        if self.reset_error is not None:
            raise self.reset_error

    def launch(self, plan: StepPlan) -> SlowStep:
        self.log.append(plan.step)
        if plan.step in self.launch_errors:
            raise self.launch_errors[plan.step]
        step = SlowStep(plan, self.errors.get(plan.step))
        self.launched.put(step)
        return step

    def last_moved_step(self) -> int:
        return self.num_moved

    def is_fatal(self, error: Exception) -> bool:
        return error is self.fatal


class System:
    """An engine, and its outcomes by session."""

    def __init__(self, runner: SlowRunner | None = None) -> None:
        self.runner = runner or SlowRunner()
        self.done: list[int] = []
        self.engine = Engine(lambda: LoadedWorker(self.runner, READY), lambda plan, _: self.done.append(plan.step))
        loaded: SimpleQueue[Exception | None] = SimpleQueue()
        self.engine.start(loaded.put)
        assert loaded.get(timeout=TIMEOUT_S) is None

    def begin(self, epoch: int) -> tuple[EngineSession, "SimpleQueue[Outcome]"]:
        outcomes: SimpleQueue[Outcome] = SimpleQueue()
        session = EngineSession(outcomes.put)
        begun = threading.Event()
        self.engine.begin(session, epoch, begun.set)
        assert begun.wait(TIMEOUT_S)
        return session, outcomes

    def stop(self) -> None:
        assert self.engine.stop(TIMEOUT_S)
        assert not self.engine.is_running


def test_plans_are_launched_while_steps_are_under_way_and_results_come_in_order() -> None:
    system = System()
    session, outcomes = system.begin(7)
    for step in (1, 2, 3):
        system.engine.submit(session, StepPlan(7, step))
    steps = [system.runner.launched.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert (session.last_started_step, session.last_finished_step, outcomes.empty()) == (3, 0, True)
    for step in reversed(steps):
        assert outcomes.empty()
        step.done.set()
    results = [outcomes.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert [result.token_ids for result in results] == [(1,), (2,), (3,)]
    assert session.last_finished_step == 3
    system.stop()
    assert system.done == [1, 2, 3]


class InstantStep:
    """A step that is done when it is launched, as on a CPU."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult(self.plan.epoch, self.plan.step)


class InstantRunner(SlowRunner):
    """A runner whose steps take place in `launch`. The test allows each step to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.begun: SimpleQueue[int] = SimpleQueue()

    def launch(self, plan: StepPlan) -> InstantStep:  # type: ignore[override]
        self.begun.put(plan.step)
        assert self.allowed.acquire(timeout=TIMEOUT_S)
        return InstantStep(plan)


def test_lease_runs_until_a_plan_ends_it() -> None:
    runner = InstantRunner()
    system = System(runner)
    session, outcomes = system.begin(7)
    system.engine.submit(session, StepPlan(7, 1, num_leased_steps=9))
    for step in (1, 2):
        assert runner.begun.get(timeout=TIMEOUT_S) == step
        runner.allowed.release()
        assert outcomes.get(timeout=TIMEOUT_S) == StepResult(7, step)
    assert runner.begun.get(timeout=TIMEOUT_S) == 3  # under way when the next plan arrives
    system.engine.submit(session, StepPlan(7, 11, num_leased_steps=1, ends_lease=True))
    for _ in range(3):
        runner.allowed.release()
    results = [outcomes.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert results == [StepResult(7, 3, num_dropped_steps=7), StepResult(7, 11), StepResult(7, 12)]
    system.stop()
    assert system.done == [1, 2, 3, 11, 12]


def test_lease_runs_to_its_end_before_a_plan_that_does_not_end_it() -> None:
    runner = InstantRunner()
    system = System(runner)
    session, outcomes = system.begin(7)
    system.engine.submit(session, StepPlan(7, 1, num_leased_steps=2))
    system.engine.submit(session, StepPlan(7, 4))
    for _ in range(4):
        runner.allowed.release()
    assert [outcomes.get(timeout=TIMEOUT_S) for _ in range(4)] == [StepResult(7, step) for step in (1, 2, 3, 4)]
    system.stop()


def test_lease_ends_with_its_session() -> None:
    runner = InstantRunner()
    system = System(runner)
    session, outcomes = system.begin(7)
    system.engine.submit(session, StepPlan(7, 1, num_leased_steps=9))
    assert runner.begun.get(timeout=TIMEOUT_S) == 1
    session.end()
    runner.allowed.release()
    system.begin(8)
    assert runner.begun.empty()
    assert outcomes.empty()
    system.stop()


def test_result_tells_of_the_moves_that_are_done() -> None:
    """Moves that finished after the launch of the step are included. A reported move is never taken back."""
    system = System()
    moved = threading.Event()
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    session = EngineSession(outcomes.put, moved.set)
    begun = threading.Event()
    system.engine.begin(session, 1, begun.set)
    assert begun.wait(TIMEOUT_S)
    system.runner.is_moving = True
    system.engine.submit(session, StepPlan(1, 1))
    step = system.runner.launched.get(timeout=TIMEOUT_S)
    system.runner.num_moved, system.runner.is_moving = 1, False
    assert moved.wait(TIMEOUT_S)
    assert session.last_moved_step == 1
    step.done.set()
    assert outcomes.get(timeout=TIMEOUT_S).last_moved_step == 1
    system.stop()


def test_next_epoch_begins_when_every_launched_step_is_done() -> None:
    system = System()
    old, old_outcomes = system.begin(1)
    system.engine.submit(old, StepPlan(1, 1))
    step = system.runner.launched.get(timeout=TIMEOUT_S)
    old.end()
    new_outcomes: SimpleQueue[Outcome] = SimpleQueue()
    new = EngineSession(new_outcomes.put)
    begun = threading.Event()
    system.engine.begin(new, 2, begun.set)
    assert not begun.wait(0.05)
    assert system.runner.log == ["epoch 1", 1]
    step.done.set()
    assert begun.wait(TIMEOUT_S)
    system.engine.submit(new, StepPlan(2, 1))
    system.runner.launched.get(timeout=TIMEOUT_S).done.set()
    assert new_outcomes.get(timeout=TIMEOUT_S).epoch == 2
    assert old_outcomes.empty()
    system.stop()


def test_plan_that_cannot_be_launched_is_told_of_after_the_steps_before() -> None:
    system = System()
    session, outcomes = system.begin(1)
    error = WorkerProtocolError("slot 3 is vacant")
    system.runner.launch_errors[2] = error
    for step in (1, 2, 3):
        system.engine.submit(session, StepPlan(1, step))
    system.runner.launched.get(timeout=TIMEOUT_S).done.set()
    assert outcomes.get(timeout=TIMEOUT_S).step == 1
    assert outcomes.get(timeout=TIMEOUT_S) is error
    system.stop()
    assert system.runner.log == ["epoch 1", 1, 2]


def test_step_that_fails_later_ends_its_session_only() -> None:
    system = System()
    session, outcomes = system.begin(1)
    system.runner.errors[1] = RuntimeError("boom")
    for step in (1, 2):
        system.engine.submit(session, StepPlan(1, step))
    for _ in (1, 2):
        system.runner.launched.get(timeout=TIMEOUT_S).done.set()
    assert outcomes.get(timeout=TIMEOUT_S) is system.runner.errors.pop(1)
    assert session.has_ended
    again, outcomes_again = system.begin(2)
    assert outcomes.empty(), "step 2 is not reported any more"
    system.engine.submit(again, StepPlan(2, 1))
    system.runner.launched.get(timeout=TIMEOUT_S).done.set()
    assert outcomes_again.get(timeout=TIMEOUT_S).step == 1
    system.stop()


@pytest.mark.parametrize(
    ("where", "has_ended"), [("launch", False), ("result", False), ("result", True), ("begin", False)]
)
def test_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch, where: str, has_ended: bool) -> None:
    """The error may occur on any thread, even if no thread waits for the step any more."""
    reasons: SimpleQueue[str] = SimpleQueue()

    def exit_process(reason: str) -> NoReturn:
        reasons.put(reason)
        while True:  # in reality the thread would no longer exist
            threading.Event().wait()

    monkeypatch.setattr(engine_module, "exit_process", exit_process)
    system = System()
    runner = system.runner
    session, _ = system.begin(1)
    runner.fatal = RuntimeError("an illegal memory access was encountered")
    if where == "begin":
        runner.reset_error = runner.fatal
        system.engine.begin(EngineSession(lambda _: None), 2, lambda: None)
    elif where == "launch":
        runner.launch_errors[2] = runner.fatal
        for step in (1, 2):
            system.engine.submit(session, StepPlan(1, step))
        runner.launched.get(timeout=TIMEOUT_S).done.set()
    else:
        runner.errors[1] = runner.fatal
        system.engine.submit(session, StepPlan(1, 1))
        first = runner.launched.get(timeout=TIMEOUT_S)
        if has_ended:
            session.end()
        first.done.set()
    assert "only a new process" in reasons.get(timeout=TIMEOUT_S)


def test_grammar_reports_go_to_the_session_until_it_ends() -> None:
    told: list[GrammarReport] = []
    session = EngineSession(lambda outcome: None, on_grammar=told.append)
    session.report_grammar(GrammarReport(1, 1))
    session.end()
    session.report_grammar(GrammarReport(1, 2))
    assert told == [GrammarReport(1, 1)]


def test_engine_closes_the_workers_other_resources() -> None:
    closed, loaded = threading.Event(), threading.Event()
    engine = Engine(lambda: LoadedWorker(SlowRunner(), READY, closed.set))
    engine.start(lambda error: loaded.set())
    assert loaded.wait(TIMEOUT_S)
    assert not closed.is_set()
    assert engine.stop(TIMEOUT_S)
    assert closed.is_set()
