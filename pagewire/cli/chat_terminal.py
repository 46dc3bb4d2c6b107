"""Reads what a user types into a chat: lines with editing and history, and messages of several lines."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagewire.client.errors import CommandError

PROMPT, CONTINUATION = "> ", ". "
BLOCK = '"""'
MAX_HISTORY_LINES = 1000


def history_path(environ: Mapping[str, str]) -> Path:
    """Returns the path of the history, which is where the XDG base directory specification says."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "pagewire" / "chat_history"


def read_input(read: Callable[[], str]) -> str:
    """Returns what a function reads from standard input. Raises CommandError where that is closed or broken."""
    sys.stdout.flush()  # which `input` does too: what cannot be written is no fault of the input
    try:
        return read()
    except OSError as error:
        raise CommandError(f"cannot read standard input: {error.strerror}") from None


class ChatTerminal:
    """Reads standard input. Where that is no terminal, lines are read without prompts, editing and history."""

    def __init__(self, history: Path | None) -> None:
        """Reads the `history` and keeps it, if it can be; no other user may read it, since it holds what was said."""
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = history
        self._readline: Any = None
        if self.is_interactive:
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            self._start_readline()

    def read_message(self) -> str:
        """Returns the next message: a line, or several that a backslash joins, or a block in triple quotes.

        Raises EOFError at the end of the input. A block that the end cuts off is a message.
        """
        line = self._read_line(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return self._read_block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        with contextlib.suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._read_line(CONTINUATION))
        return "\n".join(lines)

    def confirms(self, question: str) -> bool:
        """Asks a question and returns whether the answer is yes, which is the default. Without a terminal, it is
        yes."""
        if not self.is_interactive:
            return True
        try:
            answer = self._ask(f"{question} [Y/n] ")
        except EOFError:
            print()
            return False
        self._forget_last_line()
        return answer.strip().lower() in ("", "y", "yes")

    def _read_block(self, first: str) -> str:
        lines = [first]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._read_line(CONTINUATION))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str:
        line = self._ask(prompt) if self.is_interactive else read_input(input)
        self._keep_history()
        return line

    def _ask(self, prompt: str) -> str:
        """Returns the line that is typed at this prompt. This is for the main thread."""
        # Python's line editing runs signal handlers only if a signal interrupts its wait for a key. A SIGTERM or Ctrl-C
        # that arrives before the wait would stay unnoticed until the next key; the timer interrupts the wait again.
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        try:
            return read_input(lambda: input(prompt))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _start_readline(self) -> None:
        try:
            import readline
        except ImportError:  # a Python that was built without it
            return
        self._readline = readline
        readline.set_history_length(MAX_HISTORY_LINES)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_RDWR, 0o600))
            readline.read_history_file(self._history)
        except OSError:
            self._history = None

    def _keep_history(self) -> None:
        """Writes the history after every line, so that nothing is lost when the terminal is closed."""
        if self._readline is None or self._history is None:
            return
        try:
            self._readline.write_history_file(self._history)
        except OSError:
            self._history = None

    def _forget_last_line(self) -> None:
        """Takes the answer to a question out of the history."""
        if self._readline is not None and self._readline.get_current_history_length():
            self._readline.remove_history_item(self._readline.get_current_history_length() - 1)
