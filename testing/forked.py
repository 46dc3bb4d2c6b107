"""Services that start as forks of a process in which their modules are already imported.

A fork takes a tenth of the time of a new process. Otherwise a service behaves as if `services.py` had started `pagewire
VERB`: flags, signals, exit code and output are the same. `test_serve.py`, `test_bench.py`, `test_peers.py` and
`tests/worker/test_worker_service.py` start services without a fork.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from testing import services
from testing.services import Process, System

# Modules that the forking process imports once. No import may start a thread; torch starts threads when it first
# computes. Schedulers and front ends never have torch in their processes.
PRELOADED = {
    "scheduler": ["pagewire.cli.services", "scheduler_service.server"],
    "frontend": [
        "pagewire.cli.services",
        "scheduler_service.front_end",
        "scheduler_service.api.http.transport.http_server",
    ],
    "worker": ["torch", "pagewire.cli.services", "worker_service.server", "worker_service.startup.loader"],
}
FORKSERVER = multiprocessing.get_context("forkserver")
SERVERS = {verb: forkserver.ForkServer() for verb in PRELOADED}
for _verb, _modules in PRELOADED.items():
    SERVERS[_verb].set_forkserver_preload([*_modules, __name__])
_starting = threading.Lock()  # serializes starts, because multiprocessing knows only one fork server


class ForkedProcess:
    """The part of `subprocess.Popen` that a service needs."""

    def __init__(self, arguments: Sequence[str], log: Path | None = None) -> None:
        """Fork `pagewire ARGUMENTS`. `log` receives its standard error; None: the standard error of the tests."""
        printed, output = FORKSERVER.Pipe(duplex=False)
        # A daemon process ends with the tests, even if a test leaves it running.
        self._process = FORKSERVER.Process(target=_run, args=(arguments, output, log), daemon=True)
        connect = SERVERS[arguments[0]].connect_to_new_process
        with _starting, mock.patch.object(forkserver, "connect_to_new_process", connect):
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


class LoggingStart:
    """A starter of services whose standard error is written to log files in a folder, one file per verb."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, arguments: Sequence[str]) -> Process:
        return ForkedProcess(arguments, self._folder / f"{arguments[0]}.log")

    def lines(self) -> list[str]:
        """Return all logged lines, each with the name of its log."""
        return [f"{log.stem}: {line}" for log in self._folder.glob("*.log") for line in log.read_text().splitlines()]


def running(model: Path, **flags: Sequence[object]) -> AbstractContextManager[System]:
    return services.running(model, start=ForkedProcess, **flags)


def _run(arguments: Sequence[str], output: Connection, log: Path | None) -> None:
    from pagewire.cli.command import main

    os.environ.update(services.ENVIRON)  # for child processes of the service
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    os.dup2(output.fileno(), sys.stdout.fileno())
    # The old standard output may have been a file, which is seekable. A pipe is not.
    sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)  # noqa: SIM115
    with ending():
        sys.exit(main(arguments))


@contextmanager
def ending() -> Iterator[None]:
    """End a multiprocessing process as Python ends a normal process.

    This waits for threads and calls the functions registered with `atexit`, which wait until the last lines are
    written.
    """
    try:
        yield
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
