"""Starts the two services as processes of their own, as `pagewire worker` and `pagewire scheduler`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

READY_PREFIX = "ready on grpc://"
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Process(Protocol):
    """What a service needs of `subprocess.Popen`."""

    stdout: IO[str]

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[str]], Process]


def start_process(arguments: Sequence[str]) -> Process:
    """`pagewire ARGUMENTS`."""
    command = [sys.executable, "-m", "pagewire", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON)


class Service:
    """A process that says when it is ready."""

    def __init__(self, verb: str, flags: Sequence[object], start: Start = start_process) -> None:
        self._process = start([verb, *map(str, flags)])
        self._is_terminated = False

    def wait_until_ready(self) -> str:
        """Its address, HOST:PORT."""
        line = self._process.stdout.readline().strip()
        assert line.startswith(READY_PREFIX), f"the process ended with {self._process.wait()} and said {line!r}"
        return line.removeprefix(READY_PREFIX)

    def next_line(self) -> str:
        """What it prints next."""
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)
        self._is_terminated |= number == signal.SIGTERM

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self) -> int:
        """End it as an operator would, with one SIGTERM; its exit code."""
        self._process.send_signal(signal.SIGCONT)
        if not self._is_terminated:
            self.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self.kill()


class System:
    """A worker and a scheduler of a model. The worker can be killed and started again at its address."""

    def __init__(
        self,
        model: Path,
        *,
        worker: Sequence[object] = (),
        scheduler: Sequence[object] = (),
        start: Start = start_process,
    ) -> None:
        port = free_port()
        self._start = start
        self._worker_flags = ["--model", model, "--port", port, "--log-level", "warning", *worker]
        self.worker = Service("worker", self._worker_flags, start)
        try:
            link = ["--worker", f"127.0.0.1:{port}", "--model", model, "--port", 0, "--metrics-port", 0]
            self.scheduler = Service("scheduler", [*link, "--log-level", "error", *scheduler], start)
            try:
                self.worker.wait_until_ready()
                self.url = self.scheduler.wait_until_ready()
            except BaseException:
                self.scheduler.kill()
                raise
        except BaseException:
            self.worker.kill()
            raise

    def restart_worker(self) -> None:
        """Without waiting until it is ready."""
        self.worker = Service("worker", self._worker_flags, self._start)

    def stop(self) -> None:
        try:
            exit_code = self.scheduler.stop()
        finally:
            worker_exit_code = self.worker.stop()
        assert (exit_code, worker_exit_code) == (0, 0)


@contextmanager
def running(model: Path, **options: Any) -> Iterator[System]:
    """Options are those of `System`."""
    system = System(model, **options)
    try:
        yield system
    finally:
        system.stop()
