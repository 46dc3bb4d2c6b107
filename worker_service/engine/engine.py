"""The compute thread of the worker. Loading and every step run on it, and the event loop never waits for it.

A second thread that calls torch would start a second team of OpenMP threads, and both teams would compete for the
cores. So commands arrive by a queue, and each outcome is returned by the callback that came with the command. This
module does not import torch: the process can listen and answer before torch is imported.

A step may be done when `launch` returns, as on a CPU, or later, as on a GPU. In the latter case the compute thread
launches the next plan, and a second thread, the resolver, waits for the steps in progress and delivers their results in
order.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from queue import Empty, Queue, SimpleQueue
from typing import NoReturn, Protocol

from pagewire.common.wire.messages import GrammarReport, StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from worker_service.step import LaunchedStep

logger = logging.getLogger(__name__)

Outcome = StepResult | Exception

_MOVE_POLL_INTERVAL_S = 0.001


class Runner(Protocol):
    """A runner, which carries out plans in order."""

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None]) -> None:
        """Begin an epoch: wait until all started work has finished, then forget every row.

        `report_grammar` is called for each grammar that the epoch's plans add. It may be called on any thread.
        """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one plan, after the plans launched earlier. Raises WorkerProtocolError for an invalid plan."""

    def last_moved_step(self) -> int:
        """Return the last step for which all moves, of it and of earlier plans, are done."""

    @property
    def is_moving(self) -> bool:
        """Whether some moves in progress have not yet been reported as done."""

    def is_fatal(self, error: Exception) -> bool:
        """Return whether only a new process can compute again. May be called on any thread."""


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A runner, the worker's reported capacity, and a function that ends the runner's other threads."""

    runner: Runner
    ready: WorkerCapacity
    close: Callable[[], None] = lambda: None
    # entered while a plan is launched
    around_launch: Callable[[StepPlan], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class EngineSession:
    """The steps of one epoch. When the session ends, its queued steps are dropped."""

    # called on a thread of the engine; an exception means that the session has ended
    deliver: Callable[[Outcome], object]
    on_moved: Callable[[], object] = lambda: None  # called when `last_moved_step` has risen and no result reports it
    on_grammar: Callable[[GrammarReport], object] = lambda report: None  # called on any thread
    has_ended: bool = False
    last_started_step: int = 0
    last_finished_step: int = 0
    last_moved_step: int = 0

    def end(self) -> None:
        self.has_ended = True

    def report_grammar(self, report: GrammarReport) -> None:
        """Report that a grammar added by the session's plans is ready or cannot be used."""
        if not self.has_ended:
            self.on_grammar(report)


class Engine:
    """The owner of the compute thread. Its methods may be called from any other thread."""

    def __init__(
        self, load: Callable[[], LoadedWorker], on_step_done: Callable[[StepPlan, int], None] = lambda plan, ns: None
    ) -> None:
        """Create an engine. `load` builds the worker on the compute thread.

        `on_step_done` receives every finished plan and its start time in nanoseconds since 1970. It
        is called on the thread that delivers the plan's result.
        """
        self._load = load
        self._on_step_done = on_step_done
        # the current phase of loading, as text for people; `load` starts with this phase
        self.loading = "importing torch"
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loaded: LoadedWorker | None = None
        self._thread: threading.Thread | None = None
        self._moving: EngineSession | None = None  # the session whose moves are in progress
        self._resolver: _Resolver | None = None  # created for the first step that is not done when `launch` returns

    @property
    def ready(self) -> WorkerCapacity | None:
        """The capacity that the worker reports, or None until it is loaded."""
        return self._loaded.ready if self._loaded else None

    @property
    def is_running(self) -> bool:
        """Whether the thread is loading, computing, or waiting for a command."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, on_loaded: Callable[[Exception | None], object]) -> None:
        """Start loading. `on_loaded` is called on the compute thread, with the exception if loading failed, or None."""
        self._thread = threading.Thread(target=self._run, args=(on_loaded,), name="engine", daemon=True)
        self._thread.start()

    def begin(self, session: EngineSession, epoch: int, on_begun: Callable[[], object]) -> None:
        """Forget every row after all earlier steps have finished, then call `on_begun` on the compute thread."""
        self._commands.put(lambda: self._begin(session, epoch, on_begun))

    def submit(self, session: EngineSession, plan: StepPlan) -> None:
        """Queue a step for computation. Its outcome is passed to `session.deliver`."""
        self._commands.put(lambda: self._step(session, plan))

    def stop(self, timeout_s: float) -> bool:
        """Finish the queued commands and end the thread. Return False if it did not end within `timeout_s` seconds."""
        assert self._thread is not None
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, on_loaded: Callable[[Exception | None], object]) -> None:
        try:
            self._loaded = self._load()
        except Exception as error:
            on_loaded(error)
            return
        on_loaded(None)
        while (command := self._next_command()) is not None:
            command()
        if self._resolver is not None:
            self._resolver.stop()
        self._loaded.close()
        self._loaded = None  # closes connections to other ranks before the interpreter exits

    def _next_command(self) -> Callable[[], None] | None:
        """Wait for the next command and return it, or None if the worker is to end. While waiting, report finished
        block moves."""
        while self._moving is not None and not self._moving.has_ended:
            try:
                return self._commands.get(timeout=_MOVE_POLL_INTERVAL_S)
            except Empty:
                self._poll_moves(self._moving)
        return self._commands.get()

    def _poll_moves(self, session: EngineSession) -> None:
        assert self._loaded is not None
        try:
            last_moved_step = self._loaded.runner.last_moved_step()
        except Exception as error:
            self._fail(session, error, f"moves after step {session.last_moved_step}")
            return
        if not self._loaded.runner.is_moving:
            self._moving = None
        if last_moved_step > session.last_moved_step:
            session.last_moved_step = last_moved_step
            session.on_moved()

    def _begin(self, session: EngineSession, epoch: int, on_begun: Callable[[], object]) -> None:
        assert self._loaded is not None
        self._wait_for_launched()
        if session.has_ended:
            return
        try:
            self._loaded.runner.reset(epoch, session.report_grammar)
        except Exception as error:
            self._fail(session, error, "beginning an epoch")
            return
        on_begun()

    def _step(self, session: EngineSession, plan: StepPlan) -> None:
        assert self._loaded is not None
        if session.has_ended:
            return
        runner = self._loaded.runner
        session.last_started_step = plan.step
        step = _RunningStep(session, plan, time.time_ns())
        try:
            with self._loaded.around_launch(plan):
                launched = runner.launch(plan)
        except Exception as error:
            self._wait_for_launched()  # delivers the results of earlier steps before the error
            self._fail(session, error, step.name)
            return
        session.last_moved_step = max(session.last_moved_step, runner.last_moved_step())
        self._moving = session if runner.is_moving else None
        if self._resolver is None and launched.is_done():
            self._resolve(step, launched)
            return
        if self._resolver is None:
            self._resolver = _Resolver(self._resolve)
        self._resolver.put(step, launched)

    def _resolve(self, step: "_RunningStep", launched: LaunchedStep) -> None:
        """Wait for a step and deliver its outcome. Runs on the resolver's thread if there is a resolver."""
        session = step.session
        try:
            result = launched.result()  # also for a session that has ended, so that a lost device is noticed
        except Exception as error:
            self._fail(session, error, step.name)
            return
        if session.has_ended:
            return
        session.last_finished_step = step.plan.step
        if result.last_moved_step != session.last_moved_step:
            result = replace(result, last_moved_step=session.last_moved_step)
        session.deliver(result)
        self._on_step_done(step.plan, step.started_ns)

    def _wait_for_launched(self) -> None:
        """Wait until every launched step has been delivered."""
        if self._resolver is not None:
            self._resolver.settle()

    def _fail(self, session: EngineSession, error: Exception, what: str) -> None:
        assert self._loaded is not None
        had_ended = session.has_ended
        session.end()
        if not isinstance(error, WorkerProtocolError):
            logger.error("%s failed", what, exc_info=error)
        if self._loaded.runner.is_fatal(error):
            exit_process("the device is in an error state, and only a new process can use it again")
        if not had_ended:
            session.deliver(error)


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """A launched plan and its launch time in nanoseconds since 1970."""

    session: EngineSession
    plan: StepPlan
    started_ns: int

    @property
    def name(self) -> str:
        return f"step {self.plan.step} of epoch {self.plan.epoch}"


class _Resolver:
    """The thread that waits for launched steps in order, so that the compute thread need not wait."""

    def __init__(self, resolve: Callable[[_RunningStep, LaunchedStep], None]) -> None:
        self._resolve = resolve
        self._launched: Queue[tuple[_RunningStep, LaunchedStep] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="resolver", daemon=True)
        self._thread.start()

    def put(self, step: _RunningStep, launched: LaunchedStep) -> None:
        self._launched.put((step, launched))

    def settle(self) -> None:
        """Wait until every queued step has been resolved."""
        self._launched.join()

    def stop(self) -> None:
        """Resolve the remaining steps and end the thread."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._launched.get()) is not None:
            try:
                self._resolve(*item)
            finally:
                self._launched.task_done()


def exit_process(reason: str) -> NoReturn:
    """End the process at once with status 1, because a thread hangs in a kernel or the device is lost."""
    logger.critical("exiting: %s", reason)
    end_at_once(1)


def end_at_once(code: int) -> NoReturn:
    """End the process with status `code`, whatever its threads do.

    Pending log lines are written first, if the log's target accepts them in time.
    """
    logging.shutdown()
    os._exit(code)
