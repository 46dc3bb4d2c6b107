"""The one thread that computes. Loading and every step happen on it; the event loop never waits for it.

A second thread that calls torch brings a second team of OpenMP threads, which fight over the cores. So commands go in
by a queue, and what came of them goes back through the callback that came with the command. This module itself needs no
torch: the process can listen and answer before that is imported.

A runner may be done with a step when `launch` returns, as on a CPU, or later, as on a GPU. Then the thread goes on to
launch the next plan, and a second one, the resolver, waits for the steps under way and delivers them in order.
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
    """A runner of plans, which carries them out one behind the other."""

    def reset(self, epoch: int, report_grammar: Callable[[GrammarReport], None]) -> None:
        """Begin an epoch: forget every row, after everything that was started has finished. `report_grammar` is called
        on any thread, for each grammar that its plans add."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start to carry out one plan, behind those launched before. Raises WorkerProtocolError for a bad one."""

    def last_moved_step(self) -> int:
        """The moves of all plans up to this step are done."""

    @property
    def is_moving(self) -> bool:
        """Whether moves are under way that no result has told of."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether only a new process can compute again. May be called on any thread."""


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A runner, what the worker says of itself, and what ends the threads that it has beside the engine's."""

    runner: Runner
    ready: WorkerCapacity
    close: Callable[[], None] = lambda: None
    around_launch: Callable[[StepPlan], AbstractContextManager[object]] = nullcontext  # entered while it is launched


@dataclass(slots=True)
class EngineSession:
    """One epoch's steps. Whatever is still queued when it ends is dropped."""

    deliver: Callable[[Outcome], object]  # called on a thread of the engine; after an exception the session has ended
    on_moved: Callable[[], object] = lambda: None  # called when `last_moved_step` has risen and no result says so
    on_grammar: Callable[[GrammarReport], object] = lambda report: None  # called on any thread
    has_ended: bool = False
    last_started_step: int = 0
    last_finished_step: int = 0
    last_moved_step: int = 0

    def end(self) -> None:
        self.has_ended = True

    def report_grammar(self, report: GrammarReport) -> None:
        """A grammar that the session's plans have added is ready, or cannot be used."""
        if not self.has_ended:
            self.on_grammar(report)


class Engine:
    """Owns the thread that computes. Its methods may be called from any other."""

    def __init__(
        self, load: Callable[[], LoadedWorker], on_step_done: Callable[[StepPlan, int], None] = lambda plan, ns: None
    ) -> None:
        """`on_step_done` gets every plan that was carried out, on the thread that delivers it, and when that began, in
        nanoseconds since 1970."""
        self._load = load
        self._on_step_done = on_step_done
        self.loading = "importing torch"  # what is done until it is loaded, for people: `load` begins with this
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loaded: LoadedWorker | None = None
        self._thread: threading.Thread | None = None
        self._moving: EngineSession | None = None  # its moves are under way
        self._resolver: _Resolver | None = None  # from the first step on that was not done when it was launched

    @property
    def ready(self) -> WorkerCapacity | None:
        """The capacity that the worker reports, or None until it is loaded."""
        return self._loaded.ready if self._loaded else None

    @property
    def is_running(self) -> bool:
        """Whether the thread loads or computes, or waits for something to compute."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, on_loaded: Callable[[Exception | None], object]) -> None:
        """Begin to load. `on_loaded` is called on the engine's thread, with the exception if loading failed."""
        self._thread = threading.Thread(target=self._run, args=(on_loaded,), name="engine", daemon=True)
        self._thread.start()

    def begin(self, session: EngineSession, epoch: int, on_begun: Callable[[], object]) -> None:
        """Forget every row, after all earlier steps have finished; then `on_begun` is called on the engine's thread."""
        self._commands.put(lambda: self._begin(session, epoch, on_begun))

    def submit(self, session: EngineSession, plan: StepPlan) -> None:
        """Compute a step; its outcome goes to `session.deliver`."""
        self._commands.put(lambda: self._step(session, plan))

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread. False if it did not end in time."""
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
        self._loaded = None  # connections to other ranks end before the interpreter does

    def _next_command(self) -> Callable[[], None] | None:
        """Wait for the next command, and meanwhile tell of moves that are done."""
        while self._moving is not None and not self._moving.has_ended:
            try:
                return self._commands.get(timeout=_MOVE_POLL_INTERVAL_S)
            except Empty:
                self._look_after_moves(self._moving)
        return self._commands.get()

    def _look_after_moves(self, session: EngineSession) -> None:
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
        self._settle()
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
            self._settle()  # what was launched before is told of before
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
        """Wait for a step and deliver what came of it. Called on the resolver's thread if there is one."""
        session = step.session
        try:
            result = launched.result()  # also of a session that has ended: a lost device is to be noticed
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

    def _settle(self) -> None:
        """Return when every step that was launched has been delivered."""
        if self._resolver is not None:
            self._resolver.settle()

    def _fail(self, session: EngineSession, error: Exception, what: str) -> None:
        assert self._loaded is not None
        had_ended = session.has_ended
        session.end()
        if not isinstance(error, WorkerProtocolError):
            logger.error("%s failed", what, exc_info=error)
        if self._loaded.runner.is_fatal(error):
            exit_process("the device is in an error state that only a new process gets out of")
        if not had_ended:
            session.deliver(error)


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """A plan that was launched, and when, in nanoseconds since 1970."""

    session: EngineSession
    plan: StepPlan
    started_ns: int

    @property
    def name(self) -> str:
        return f"step {self.plan.step} of epoch {self.plan.epoch}"


class _Resolver:
    """The thread that waits for launched steps, one after the other, so that the engine's need not."""

    def __init__(self, resolve: Callable[[_RunningStep, LaunchedStep], None]) -> None:
        self._resolve = resolve
        self._launched: Queue[tuple[_RunningStep, LaunchedStep] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="resolver", daemon=True)
        self._thread.start()

    def put(self, step: _RunningStep, launched: LaunchedStep) -> None:
        self._launched.put((step, launched))

    def settle(self) -> None:
        """Return when everything that was put has been resolved."""
        self._launched.join()

    def stop(self) -> None:
        """Resolve what is left and end the thread."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._launched.get()) is not None:
            try:
                self._resolve(*item)
            finally:
                self._launched.task_done()


def exit_process(reason: str) -> NoReturn:
    """End the process at once with status 1: a thread hangs in a kernel, or the device is lost."""
    logger.critical("exiting: %s", reason)
    end_at_once(1)


def end_at_once(code: int) -> NoReturn:
    """End the process whatever its threads do, once its last log lines are written or were not taken in time."""
    logging.shutdown()
    os._exit(code)
