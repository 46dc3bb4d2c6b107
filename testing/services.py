"""The services as separate processes, started as `pagewire worker` and `pagewire scheduler`."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from pagewire.hosting.supervisor import free_port

HOST = "127.0.0.1"
READY_PREFIX = "ready on grpc://"
_PATHS = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}


def children_of(pid: int) -> list[int]:
    """Return the child processes of all threads of a process, without the scheduler's process that tries grammars."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if b"pagewire.common.grammars.trial" not in command_line(child)]


def command_line(pid: int) -> bytes:
    """Return the command line of a process, or b"" if it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Process(Protocol):
    """The part of `subprocess.Popen` that a service needs."""

    stdout: IO[str]

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[str]], Process]


def start_process(arguments: Sequence[str], stderr: IO[bytes] | None = None) -> Process:
    """Start `pagewire ARGUMENTS`."""
    command = [sys.executable, "-m", "pagewire", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=ENVIRON)


class Service:
    """A service process that prints a line when it is ready."""

    def __init__(self, verb: str, flags: Sequence[object], start: Start = start_process) -> None:
        self._process = start([verb, *map(str, flags)])
        self._is_terminated = False
        self._address = ""  # set when the process has printed that it is ready

    def wait_until_ready(self) -> str:
        """Return the address of the service, HOST:PORT."""
        if not self._address:
            line = self._process.stdout.readline().strip()
            assert line.startswith(READY_PREFIX), f"the process ended with {self._process.wait()} and said {line!r}"
            self._address = line.removeprefix(READY_PREFIX)
        return self._address

    def be_ready(self) -> None:
        """Wait until the process is ready, so that SIGTERM ends it with exit code 0.

        Does nothing if SIGTERM has already been sent.
        """
        if not self._is_terminated:
            self._process.send_signal(signal.SIGCONT)
            self.wait_until_ready()

    def next_line(self) -> str:
        """Return the next line that the process prints."""
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        return self._memory("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The peak resident memory in bytes since `forget_peak`."""
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _memory(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
        return kib * 1024

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)
        self._is_terminated |= number == signal.SIGTERM

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self) -> int:
        """End the process as an operator would, with one SIGTERM, and return its exit code."""
        self._process.send_signal(signal.SIGCONT)
        if not self._is_terminated:
            self.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self.kill()


class System:
    """The worker, with one or several ranks, and the scheduler of a model.

    Ranks can be killed and restarted at their addresses.
    """

    def __init__(
        self,
        model: Path,
        *,
        worker: Sequence[object] = (),
        scheduler: Sequence[object] = (),
        start: Start = start_process,
        num_ranks: int = 1,
    ) -> None:
        ports = [free_port(HOST) for _ in range(num_ranks)]
        self._start = start
        self._addresses = [f"{HOST}:{port}" for port in ports]
        self._flags = [["--model", model, "--port", port, "--log-level", "warning", *worker] for port in ports]
        if num_ranks > 1:
            # A port outside the range of outgoing connections, which could use it while rank 0 is not running.
            shared = ["--tensor-parallel-size", num_ranks, "--tensor-parallel-address", f"{HOST}:{free_port(HOST)}"]
            for rank, flags in enumerate(self._flags):
                flags += [*shared, "--tensor-parallel-rank", rank, "--num-threads", 1]
        self.workers: list[Service] = []
        try:
            for flags in self._flags:
                self.workers.append(Service("worker", flags, start))
            link = ["--worker", ",".join(self._addresses), "--model", model, "--port", 0, "--metrics-port", 0]
            self.scheduler = Service("scheduler", [*link, "--log-level", "error", *scheduler], start)
            try:
                for service in self.workers:
                    service.wait_until_ready()
                self.url = self.scheduler.wait_until_ready()
            except BaseException:
                self.scheduler.kill()
                raise
        except BaseException:
            for service in self.workers:
                service.kill()
            raise

    @property
    def worker(self) -> Service:
        """The service of rank 0."""
        return self.workers[0]

    @property
    def worker_address(self) -> str:
        """The address of rank 0, HOST:PORT."""
        return self._addresses[0]

    def restart_worker(self, rank: int = 0) -> None:
        """Start a rank again, without waiting until it is ready."""
        self.workers[rank] = Service("worker", self._flags[rank], self._start)

    def stop(self) -> None:
        try:
            exit_codes = [self.scheduler.stop()]
        finally:
            for worker in self.workers:
                worker.be_ready()
            worker_exit_codes = [worker.stop() for worker in self.workers]
        assert {*exit_codes, *worker_exit_codes} == {0}


@contextmanager
def running(model: Path, **options: Any) -> Iterator[System]:
    """Run a `System` with these options until the context ends."""
    system = System(model, **options)
    try:
        yield system
    finally:
        system.stop()
