"""A user with a fresh home directory, and without any rights if this process may change its user."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
NOBODY = 65534
# If the superuser's own Python is under /root, the user can run it but cannot write there.
_RIGHTS = (
    f"--reuid={NOBODY}",
    f"--regid={NOBODY}",
    "--clear-groups",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)
# Variables kept from this process, such as where packages come from. Other variables would hide a newcomer's problems.
_KEPT = ("PATH", "LANG", "TERM")
# A prefix that runs a command with the loopback interface only.
NO_NETWORK = ("unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command.

    `code` is None if the command had not ended in time. `silence_s` is the longest time without output, in seconds.
    """

    code: int | None
    said: str
    seconds: float
    silence_s: float


class NotReachedError(Exception):
    """A command did not reach the point at which the state's event should have happened."""


class Newcomer:
    """A user that runs shell commands in a home of its own, with this Python's `pagewire` and `python`."""

    def __init__(self, home: Path, cache: Path) -> None:
        """Create the home directory. Kernels are compiled into `cache`, which all users share."""
        self.home, self.cache = home, cache
        self.has_no_rights = os.geteuid() == 0 and shutil.which("setpriv") is not None
        for folder in (home, cache):
            folder.mkdir(parents=True, exist_ok=True)
            self.give(folder)

    def give(self, path: Path) -> None:
        """Make the user the owner of a file or folder."""
        if self.has_no_rights:
            for inner in (path, *path.rglob("*")):
                os.chown(inner, NOBODY, NOBODY, follow_symlinks=False)

    def can_unshare(self) -> bool:
        """Return whether a command can get a network and a mount namespace of its own."""
        return self.has_no_rights and subprocess.run(["unshare", "-nm", "true"], check=False).returncode == 0

    def start(
        self, command: str, environ: Mapping[str, str] = MappingProxyType({}), *, within: tuple[str, ...] = ()
    ) -> "Running":
        """Start a shell command. `within`: a command prefix that prepares the surroundings as this process's user."""
        rights = ["setpriv", *_RIGHTS] if self.has_no_rights else []
        kept = {name: value for name, value in os.environ.items() if name in _KEPT}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
        own = {"HOME": str(self.home), "PAGEWIRE_CACHE": str(self.cache), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            [*within, *rights, "sh", "-c", command],
            cwd=self.home,
            env={**kept, **own, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Running(process)

    def run(
        self,
        command: str,
        environ: Mapping[str, str] = MappingProxyType({}),
        *,
        timeout_s: float = 90.0,
        within: tuple[str, ...] = (),
    ) -> Outcome:
        return self.start(command, environ, within=within).end(timeout_s)


class Running:
    """A started command, in a process session of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._started = self._heard = time.monotonic()
        self._silence_s, self._said = 0.0, b""
        assert process.stdout is not None
        self._output = process.stdout.fileno()
        os.set_blocking(self._output, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def interrupt(self) -> None:
        """Send SIGINT to the command's process group, as Ctrl-C in a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until `is_so` returns true. Raises NotReachedError if the time is up or the command ends first."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise NotReachedError(f"was not reached: {self.end(0.1)}")
            self._hear()

    def has_said(self, words: str) -> bool:
        return words in self._said.decode(errors="replace")

    def end(self, timeout_s: float = 90.0) -> Outcome:
        """Wait until the command has ended and all processes that it left running have closed its output."""
        deadline = time.monotonic() + timeout_s
        while self._hear() and time.monotonic() < deadline:
            pass
        try:
            code = self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        with self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        said = self._said.decode(errors="backslashreplace")
        return Outcome(code, said, time.monotonic() - self._started, self._silence_s)

    def _hear(self) -> bool:
        """Read new output, if there is any; return whether more may follow."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            data = None
            time.sleep(0.02)
        now = time.monotonic()
        self._silence_s = max(self._silence_s, now - self._heard)
        if data:
            self._said, self._heard = self._said + data, now
        return data != b""
