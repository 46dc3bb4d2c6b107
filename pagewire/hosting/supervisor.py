"""The supervision of a child process, a worker or a front end: start, restart after a failure, and termination."""

import asyncio
import contextlib
import logging
import os
import random
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pagewire.common.process.child_process import (
    ANNOUNCING_WORD,
    EXIT_REFUSED,
    EXIT_WITH_PARENT,
    MEMORY_PREFIX,
    READY_PREFIX,
    REFUSAL_PREFIX,
)
from pagewire.hosting.child_output import READ_BYTES, ChildOutput

log = logging.getLogger(__name__)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Below Linux's ephemeral ports. No outgoing connection of another process can occupy the port while the worker
# restarts, and a client that dials the port meanwhile cannot connect to itself.
WORKER_PORTS = range(20_000, 32_768)
_found: deque[int] = deque(maxlen=1000)  # ports found recently, which may not be bound yet


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays and limits with which a supervisor restarts a child process.

    The delay before a restart doubles each time the child exits, up to `max_delay_s`. If the child has run for at least
    `steady_s` seconds, the delay is `first_delay_s` again.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    steady_s: float = 30.0
    max_failed_starts: int = 3
    stop_timeout_s: float = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Exit:
    """The outcome of one run of the child.

    - `code`: the exit code, negative for a signal.
    - `was_ready`: whether the child reported that it was ready.
    - `ran_s`: the duration of the run in seconds.
    - `refusal`: the reason why the child can never start, or an empty text.
    - `failure`: the reason why the child could not be launched this time, or an empty text.
    - `memory`: the child's report of its memory use, or an empty text.
    - `was_replaced`: whether the supervisor killed the child to restart it.
    """

    code: int
    was_ready: bool
    ran_s: float
    refusal: str = ""
    failure: str = ""
    memory: str = ""
    was_replaced: bool = False

    def __str__(self) -> str:
        if self.refusal or self.failure:
            return self.refusal or self.failure
        if self.code == -signal.SIGKILL and self.memory and not self.was_replaced:
            return f"signal SIGKILL, probably because the system ran out of memory; {self.memory}"
        return f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"


class Restarts:
    """Decides whether and when a supervisor restarts a child process that has exited. The class only counts the exits;
    it does not start or stop a process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._delay_s = policy.first_delay_s
        self._ever_ready = False
        self._num_failed_starts = 0

    def delay_after(self, ended: Exit) -> float | None:
        """Return the seconds to wait before the next start of the child process. Return None to give up on the child.
        This happens only if the child was never ready, and if it refused to start or failed too many times in a row."""
        self._ever_ready |= ended.was_ready
        if ended.code == EXIT_REFUSED and not self._ever_ready:
            return None
        failed = not self._ever_ready and not ended.was_replaced
        self._num_failed_starts = self._num_failed_starts + 1 if failed else 0
        if self._num_failed_starts >= self._policy.max_failed_starts:
            return None
        if ended.ran_s >= self._policy.steady_s:
            self._delay_s = self._policy.first_delay_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._policy.max_delay_s)
        return delay_s


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The outcome if a supervisor gives up on a child process: the reason, and the exit code for this process."""

    reason: str
    code: int


class Supervisor:
    """Runs `command` as a child process and restarts it after a failure. The child has its own process group, so that
    Ctrl-C reaches only the parent.

    The child writes to the standard error of this process. The child's standard output is read line by line: a "ready
    on" line means that the child is ready, and other lines are logged. Announcements, such as the "ready on" line,
    begin with a random word that only the two processes know. Without the word, text that a client has sent and the
    child prints could pass for an announcement.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        policy: RestartPolicy | None = None,
        *,
        name: str = "worker",
        on_ready: Callable[[str], None] = lambda url: None,
    ) -> None:
        """`name` is the name of the child process in log lines. `on_ready` is called with the child's URL each time the
        child becomes ready."""
        self._command = command
        self._environ = environ
        self._policy = policy or RestartPolicy()
        self._name = name
        self._on_ready = on_ready
        self._process: asyncio.subprocess.Process | None = None
        self._announcing_word = f"{os.urandom(16).hex()} "
        self._refusal = self._memory = ""
        self._was_replaced = False

    def restart(self, reason: str) -> None:
        """Kill the running child process, so that `run` starts a new one. `reason` is logged."""
        if self._process is not None and self._process.returncode is None:
            log.warning("killing the %s, process %d: %s", self._name, self._process.pid, reason)
            self._was_replaced = True
            self._process.kill()

    async def run(self) -> "GivenUp":
        """Keep the child process running until this coroutine is cancelled. Cancellation terminates the child. Return
        the reason if the supervisor gives up on restarting the child."""
        restarts = Restarts(self._policy)
        while True:
            ended = await self.run_once()
            delay_s = restarts.delay_after(ended)
            if delay_s is None and ended.code == EXIT_REFUSED:
                return GivenUp(f"the {self._name} cannot start: {ended}", EXIT_REFUSED)
            if delay_s is None:
                reason = f"the {self._name} failed to start {self._policy.max_failed_starts} times in a row ({ended})"
                return GivenUp(f"{reason}: giving up", 1)
            log.warning("the %s ended (%s) after %.1f s; next start in %.1f s", self._name, ended, ended.ran_s, delay_s)
            await asyncio.sleep(delay_s)

    async def run_once(self) -> Exit:
        """Start the child process once and wait for its end. Return how the child ended. Cancellation terminates the
        child."""
        started_at = time.monotonic()
        try:
            process = await self._start()
        except OSError as error:
            # No file descriptor, process or memory is available. This may be temporary, so a restart may succeed.
            return Exit(1, was_ready=False, ran_s=0.0, failure=f"it could not be started: {error}")
        self._process, self._refusal, self._memory, self._was_replaced = process, "", "", False
        log.info("the %s is process %d", self._name, process.pid)
        ready = asyncio.Event()
        watching = asyncio.create_task(self._watch(process, ready))
        try:
            code = await process.wait()
            # Output from before the child's end may still be in the pipe.
            await asyncio.wait({watching}, timeout=1.0)
        finally:
            watching.cancel()
            await self._terminate(process)
        code = EXIT_REFUSED if self._refusal else code
        return Exit(
            code,
            ready.is_set(),
            time.monotonic() - started_at,
            self._refusal,
            memory=self._memory,
            was_replaced=self._was_replaced,
        )

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            env={**self._environ, ANNOUNCING_WORD: self._announcing_word},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
        )

    async def _watch(self, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        """Read the child process's standard output to its end, and set `ready` when the child announces that it is
        ready.

        Nothing may stop the reading. A child blocks if its output is not read, and asyncio does not report the end of
        such a child.
        """
        assert process.stdout is not None
        output = ChildOutput()
        while data := await process.stdout.read(READ_BYTES):
            for line in output.add(data):
                self._process_line(line, process, ready)
        for line in output.end():
            self._process_line(line, process, ready)

    def _process_line(self, line: str, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        text = _COLOURS.sub("", line).rstrip()
        announced = text.partition(self._announcing_word)[2]
        if announced.startswith(REFUSAL_PREFIX):
            self._refusal = announced.removeprefix(REFUSAL_PREFIX)
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the orderly shutdown of the child would take seconds
            return
        if announced.startswith(MEMORY_PREFIX):
            self._memory = announced.removeprefix(MEMORY_PREFIX)
        # Ready lines are reported by the listener. The memory report matters only if the child is killed.
        is_reported_elsewhere = announced.startswith((READY_PREFIX, MEMORY_PREFIX))
        log.log(logging.DEBUG if is_reported_elsewhere else logging.INFO, "%s: %s", self._name, announced or text)
        if announced.startswith(READY_PREFIX):
            ready.set()
            self._on_ready(announced.removeprefix(READY_PREFIX))

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._policy.stop_timeout_s)
        except TimeoutError:
            log.warning(
                "the %s did not stop within %.0f s of SIGTERM: killing it", self._name, self._policy.stop_timeout_s
            )
            process.kill()
            await process.wait()


def free_port(host: str, promised: Collection[int] = ()) -> int:
    """Return a free TCP port of WORKER_PORTS on `host`, for a worker process to listen on. Raise OSError if 100 random
    ports are in use.

    The ports in `promised` are not returned, because other processes are going to bind them.
    """
    # The system's random source, so that neither a seed nor a fork makes two processes draw the same ports.
    drawn = random.SystemRandom().choices(WORKER_PORTS, k=100)
    for port in {*drawn}.difference(promised, _found):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            _found.append(port)
            return port
    raise OSError(f"no free port on {host} among 100 of {WORKER_PORTS.start} to {WORKER_PORTS.stop - 1}")


def child_environ(environ: Mapping[str, str], option_variables: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for a child process. The variables for the parent's own options are removed. The
    parent's process id is added, so that the child ends when the parent ends."""
    inherited = {name: value for name, value in environ.items() if name not in option_variables}
    return inherited | {EXIT_WITH_PARENT: str(os.getpid())}
