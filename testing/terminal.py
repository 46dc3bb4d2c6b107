"""A command that runs on a pseudo-terminal, and the screen that its user sees."""

import codecs
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyte

ROOT = Path(__file__).parents[1]
# The new session gets the terminal as its controlling terminal, so that Ctrl-C reaches the command. Tests may run under
# nohup, which ignores SIGHUP, or in the background of a shell, which ignores SIGINT.
PROGRAM = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
TIMEOUT_S = 280.0  # below the time limit of a test, in which `pagewire run` starts beside three other tests
_ESCAPE = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A command on a pseudo-terminal of the given size. Use it in a `with` block, which kills the command at its end.

    Attributes:
        process: The process of the command.
        lines: The rows of the screen without trailing spaces, updated by the methods that wait.
        output: The output that `expect` has not consumed, without escape sequences.
    """

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, rows: int = 24, environ: Mapping[str, str] | None = None
    ) -> None:
        """Run the command, with `environ` added to the environment of this process. Its packages are those of this
        checkout."""
        self._leader, follower = pty.openpty()
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.output = ""
        self.resize(columns, rows)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(environ or {})}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *command],
                env=variables,
                stdin=follower,
                stdout=follower,
                stderr=follower,
                start_new_session=True,
            )
        finally:
            os.close(follower)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def settings(self) -> list[Any]:
        """The terminal's settings, as `termios.tcgetattr` returns them."""
        return termios.tcgetattr(self._leader)

    def type(self, keys: str) -> None:
        """Send keys to the command. Enter is "\\r"."""
        os.write(self._leader, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        termios.tcsetwinsize(self._leader, (rows, columns))
        self._screen.resize(rows, columns)

    def wait_for(self, wanted: str | Callable[[list[str]], bool]) -> list[str]:
        """Wait until a text is on the screen within one row, or until a function of `lines` is true. Return `lines`.

        A text may end with spaces, for example a prompt.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not (wanted(self.lines) if callable(wanted) else any(wanted in row for row in self._screen.display)):
            self._read(deadline, wanted)
        return self.lines

    def expect(self, text: str) -> str:
        """Wait until the command writes a text, and return the output before this text. Later calls see only the output
        after it."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.output:
            self._read(deadline, text)
        before, _, self.output = self.output.partition(text)
        return before

    def wait(self) -> int:
        """Read the output until the command ends. Return its exit code, which is negative for a signal."""
        deadline = time.monotonic() + TIMEOUT_S
        with suppress(EOFError):
            while True:
                self._read(deadline, "the end of the command")
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """Kill the command."""
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _read(self, deadline: float, wanted: object) -> None:
        """Read some output. Raise EOFError if no process has the terminal open."""
        ready, _, _ = select.select([self._leader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            shown = "\n".join(self.lines).rstrip()
            raise AssertionError(f"{wanted!r} did not come, but the output {self.output!r} and the screen\n{shown}")
        try:
            text = self._decoder.decode(os.read(self._leader, 4096))
        except OSError:
            raise EOFError(f"the command ended before {wanted!r}, with the output {self.output!r}") from None
        self._stream.feed(text)
        self.output = _ESCAPE.sub("", self.output + text)
