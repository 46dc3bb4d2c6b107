"""Workers as processes of their own that need not import torch first: they are forked from a process that has.

That takes a tenth of the time. Everything else is as if `services.py` had started `pagewire worker`: its flags, its
signals, its exit code, what it prints. In `test_serve.py`, `test_bench.py`, `test_peers.py` and
`tests/worker/test_worker_service.py` workers start from nothing.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

from testing import services
from testing.services import Process, System

# Imported once, by the process that forks. None of them starts a thread: torch does so when it first computes.
PRELOADED = ["torch", "pagewire.cli.services", "worker_service.server", "worker_service.startup.loader", __name__]
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(PRELOADED)


class ForkedProcess:
    """As much of `subprocess.Popen` as a service needs."""

    def __init__(self, arguments: Sequence[str], log: Path | None = None) -> None:
        """`log`: a file for its standard error, in place of that of the tests."""
        printed, output = FORKSERVER.Pipe(duplex=False)
        # A daemon: what a test leaves behind ends with the tests.
        self._process = FORKSERVER.Process(target=_run, args=(arguments, output, log), daemon=True)
        self._process.start()
        output.close()
        self.stdout = os.fdopen(os.dup(printed.fileno()))
        printed.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode


def start_forked(arguments: Sequence[str]) -> Process:
    """`pagewire ARGUMENTS`; a scheduler never has torch in its process."""
    return ForkedProcess(arguments) if arguments[0] == "worker" else services.start_process(arguments)


class LoggingStart:
    """Starts services as `start_forked` does, with a file of a folder for what each of them logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, arguments: Sequence[str]) -> Process:
        log = self._folder / f"{arguments[0]}.log"
        if arguments[0] == "worker":
            return ForkedProcess(arguments, log)
        with log.open("ab") as file:
            return services.start_process(arguments, stderr=file)

    def lines(self) -> list[str]:
        """Return what has been logged."""
        return [f"{log.stem}: {line}" for log in self._folder.glob("*.log") for line in log.read_text().splitlines()]


def running(model: Path, **flags: Sequence[object]) -> AbstractContextManager[System]:
    return services.running(model, start=start_forked, **flags)


def _run(arguments: Sequence[str], output: Connection, log: Path | None) -> None:
    from pagewire.cli.command import main

    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    os.dup2(output.fileno(), sys.stdout.fileno())
    # What was there may have been a file, which can be sought; a pipe cannot.
    sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)  # noqa: SIM115
    sys.exit(main(arguments))
