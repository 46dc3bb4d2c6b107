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
    """The interface of a model runner, which carries out the scheduler's step plans in order.

    The engine calls it on the compute thread.
    """

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None]) -> None:
        """Begin an epoch (a session with a scheduler): wait for all started steps, then forget all running sequences.

        When a grammar that a plan of the epoch has added is ready or has failed, `report_grammar` is called, on any
        thread.
        """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step of one plan, after the steps launched earlier. Return the step in progress.

        Raises WorkerProtocolError if the plan is invalid.
        """

    def last_moved_step(self) -> int:
        """Return the number of the last step whose moves of KV cache blocks between device and host have finished.

        The moves of all earlier steps have finished too.
        """

    @property
    def is_moving(self) -> bool:
        """Whether any move of KV cache blocks between device and host is unfinished.

        The value stays True until `last_moved_step` has reported that the moves have finished.
        """

    def is_fatal(self, error: Exception) -> bool:
        """Return whether `error` means that this process cannot compute any more, so that it must be restarted.

        May be called on any thread.
        """


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A worker whose model has been loaded: its runner, and the capacity that it reports to the scheduler.

    `close` ends the worker's other threads, such as the thread that compiles grammars.
    """

    runner: Runner
    ready: WorkerCapacity
    close: Callable[[], None] = lambda: None
    # entered while a plan is launched
    around_launch: Callable[[StepPlan], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class EngineSession:
    """The engine's state of one session with a scheduler: its callbacks and the numbers of its last steps.

    When the session ends, its queued steps are dropped.
    """

    # called on a thread of the engine; an exception means that the session has ended
    deliver: Callable[[Outcome], object]
    on_moved: Callable[[], object] = lambda: None  # called when `last_moved_step` has risen and no result reports it
    on_grammar: Callable[[GrammarReport], object] = lambda report: None  # called on any thread
    has_ended: bool = False
    last_started_step: int = 0
    last_finished_step: int = 0
    last_moved_step: int = 0
    last_ending_step: int = 0  # the step of the last plan that ends the lease before it

    def end(self) -> None:
        self.has_ended = True

    def report_grammar(self, report: GrammarReport) -> None:
        """Report to the scheduler that a grammar is ready or cannot be used. Do nothing if the session has ended."""
        if not self.has_ended:
            self.on_grammar(report)


class Engine:
    """The owner of the compute thread, on which the model is loaded and every step runs.

    Its methods queue commands for the compute thread. They may be called from any other thread.
    """

    def __init__(
        self, load: Callable[[], LoadedWorker], on_step_done: Callable[[StepPlan, int], None] = lambda plan, ns: None
    ) -> None:
        """Create an engine. `load` loads the model; it is called on the compute thread.

        `on_step_done` receives the plan of every finished step and the step's start time in nanoseconds since 1970. It
        is called on the thread that delivers the step's result.
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
        """The capacity that the worker reports to the scheduler, or None until the model is loaded."""
        return self._loaded.ready if self._loaded else None

    @property
    def is_running(self) -> bool:
        """Whether the compute thread is alive: it is loading, computing, or waiting for a command."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, on_loaded: Callable[[Exception | None], object]) -> None:
        """Start the compute thread, which loads the model.

        `on_loaded` is called on the compute thread: with None when the model is loaded, or with the exception if
        loading failed.
        """
        self._thread = threading.Thread(target=self._run, args=(on_loaded,), name="engine", daemon=True)
        self._thread.start()

    def begin(self, session: EngineSession, epoch: int, on_begun: Callable[[], object]) -> None:
        """Queue the beginning of an epoch (a session with a scheduler), which waits for the end of all earlier steps.

        The worker then forgets its sequences, and `on_begun` is called on the compute thread. If this fails, the error
        is passed to `session.deliver`.
        """
        self._commands.put(lambda: self._begin(session, epoch, on_begun))

    def submit(self, session: EngineSession, plan: StepPlan) -> None:
        """Queue the step of a plan for computation. The result or the exception is passed to `session.deliver`."""
        if plan.ends_lease:
            session.last_ending_step = plan.step
        self._commands.put(lambda: self._steps(session, plan))

    def stop(self, timeout_s: float) -> bool:
        """Finish the queued steps and end the compute thread.

        Wait at most `timeout_s` seconds for the end of the thread. Return whether the thread has ended.
        """
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
        """Wait for the next command of the compute thread and return it, or None if the thread must end.

        While waiting, report KV cache block moves that have finished.
        """
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

    def _steps(self, session: EngineSession, plan: StepPlan) -> None:
        """Compute the step of a plan, and the steps of its lease until a queued plan ends the lease."""
        num_left = plan.num_leased_steps
        while not session.has_ended:
            if not self._step(session, plan, num_left) or not num_left:
                return
            plan, num_left = StepPlan(plan.epoch, plan.step + 1), num_left - 1

    def _step(self, session: EngineSession, plan: StepPlan, num_leased_steps: int) -> bool:
        """Compute a step. Return whether the `num_leased_steps` after it are to be computed, too."""
        assert self._loaded is not None
        runner = self._loaded.runner
        session.last_started_step = plan.step
        step = _RunningStep(session, plan, time.time_ns())
        try:
            with self._loaded.around_launch(plan):
                launched = runner.launch(plan)
        except Exception as error:
            self._wait_for_launched()  # delivers the results of earlier steps before the error
            self._fail(session, error, step.name)
            return False
        session.last_moved_step = max(session.last_moved_step, runner.last_moved_step())
        self._moving = session if runner.is_moving else None
        if self._resolver is None and launched.is_done():
            ends_lease = session.last_ending_step > plan.step
            self._resolve(step, launched, num_leased_steps if ends_lease else 0)
            return not ends_lease
        if self._resolver is None:
            self._resolver = _Resolver(self._resolve)
        self._resolver.put(step, launched)
        return True

    def _resolve(self, step: "_RunningStep", launched: LaunchedStep, num_dropped_steps: int = 0) -> None:
        """Wait for the result of a launched step and deliver the result, or the error, to the step's session. The
        `num_dropped_steps` after it are not computed.

        This runs on the resolver's thread if there is a resolver, else on the compute thread.
        """
        session = step.session
        try:
            result = launched.result()  # also for a session that has ended, so that a lost device is noticed
        except Exception as error:
            self._fail(session, error, step.name)
            return
        if session.has_ended:
            return
        session.last_finished_step = step.plan.step
        if num_dropped_steps or result.last_moved_step != session.last_moved_step:
            result = replace(result, last_moved_step=session.last_moved_step, num_dropped_steps=num_dropped_steps)
        session.deliver(result)
        self._on_step_done(step.plan, step.started_ns)

    def _wait_for_launched(self) -> None:
        """Wait until the results of all launched steps have been delivered to their sessions."""
        if self._resolver is not None:
            self._resolver.wait_until_done()

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
    """A step that has been launched: its session, its plan, and its launch time in nanoseconds since 1970."""

    session: EngineSession
    plan: StepPlan
    started_ns: int

    @property
    def name(self) -> str:
        return f"step {self.plan.step} of epoch {self.plan.epoch}"


class _Resolver:
    """A thread that waits for the results of launched steps in order.

    Meanwhile the compute thread can launch the next step.
    """

    def __init__(self, resolve: Callable[[_RunningStep, LaunchedStep], None]) -> None:
        self._resolve = resolve
        self._launched: Queue[tuple[_RunningStep, LaunchedStep] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="resolver", daemon=True)
        self._thread.start()

    def put(self, step: _RunningStep, launched: LaunchedStep) -> None:
        self._launched.put((step, launched))

    def wait_until_done(self) -> None:
        """Wait until the results of all launched steps have been delivered."""
        self._launched.join()

    def stop(self) -> None:
        """Wait for the remaining steps, then end the resolver's thread."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._launched.get()) is not None:
            try:
                self._resolve(*item)
            finally:
                self._launched.task_done()


def exit_process(reason: str) -> NoReturn:
    """End the worker process at once with status 1 and log the reason.

    Used if a thread hangs in a kernel or the device is lost, because then only a new process can compute.
    """
    logger.critical("exiting: %s", reason)
    end_at_once(1)


def end_at_once(code: int) -> NoReturn:
    """End the process with status `code` without waiting for its threads.

    Pending log lines are written first, if the log's target accepts them in time.
    """
    logging.shutdown()
    os._exit(code)
