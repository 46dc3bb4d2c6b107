"""A user at a pseudo-terminal that runs a real process of the command."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.serving import scripted_scheduler

ROOT = Path(__file__).parents[2]
STORY = "".join(scripted_scheduler.WORDS)
# The first terminal that the new session opens becomes its controlling terminal, so Ctrl-C reaches the process. Tests
# that run under nohup ignore SIGHUP.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "pagewire", *sys.argv[2:]])
"""
CTRL_A, CTRL_C, CTRL_D, UP = "\x01", "\x03", "\x04", "\x1b[A"
TIMEOUT_S = 280.0  # seconds; below the time limit of a test: both services start in it, beside three other tests


class Terminal:
    """The input and output of a user at a terminal."""

    def __init__(self, leader: int, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._leader = leader
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str) -> str:
        """Wait until `text` is shown, and return the output before it. Later calls do not see this output again."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self._shown:
            ready, _, _ = select.select([self._leader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come, but {self._shown!r}"
            try:
                self._shown += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", os.read(self._leader, 4096).decode())
            except OSError:
                raise AssertionError(f"{text!r} did not come before the end, but {self._shown!r}") from None
        before, _, self._shown = self._shown.partition(text)
        return before

    def ask(self, message: str) -> None:
        """Type a message at the next prompt."""
        self.wait_for("> ")
        self.type(message + "\r")

    def say(self, text: str) -> str:
        """Type a message, wait for the answer of `tell_story`, and return the output before this answer."""
        self.ask(text)
        return self.wait_for(STORY)

    def end(self) -> int:
        self.wait_for("> ")
        self.type(CTRL_D)
        return self.process.wait(TIMEOUT_S)


@contextmanager
def on_terminal(state: Path, *arguments: str) -> Iterator[Terminal]:
    """Run `pagewire` with these arguments on a new terminal. It stores its state in the folder `state`."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "TERM": "xterm"}
    command = [sys.executable, "-c", PROGRAM, os.ttyname(follower), *arguments]
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        yield Terminal(leader, process)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
        os.close(follower)
