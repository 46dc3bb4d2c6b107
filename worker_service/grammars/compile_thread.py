"""The thread on which grammars are prepared, beside the one that computes."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from pagewire.common.grammars import Matcher

Compile = Callable[[str, str, tuple[int, ...]], Matcher]  # of a kind, a text and end tokens; raises GrammarError

_NICENESS = 10  # the threads of steps get about nine tenths of a core that they share with this one


class CompileThread:
    """Makes what compiles grammars, and then compiles in the order that was asked for."""

    def __init__(self, make_compile: Callable[[], Compile]) -> None:
        """`make_compile` is called on the thread, at once: reading a large vocabulary takes a second."""
        self._make_compile = make_compile
        self._compile: Future[Compile] = Future()
        self._jobs: SimpleQueue[Callable[[Compile], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when grammars can be compiled. Raises what `make_compile` raised."""
        self._compile.result()

    def submit(self, job: Callable[[Compile], None]) -> None:
        """Have a job done behind those that were submitted before. It may raise nothing."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Return when the job in progress is done; the others are dropped."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Linux has a priority for each thread, and takes this for the thread's own; others have one for a process.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._compile.set_result(self._make_compile())
        except Exception as error:
            self._compile.set_exception(error)
            return
        while (job := self._jobs.get()) is not None:
            job(self._compile.result())
