"""Terminal input for a chat: line editing, history, and messages of several lines."""

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
    """Return the path of the file that stores the typed lines of chats. The path follows the XDG base directory
    specification."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "pagewire" / "chat_history"


def read_input(read: Callable[[], str]) -> str:
    """Call `read`, a function that reads standard input, and return the result. Raise CommandError if standard input
    cannot be read."""
    sys.stdout.flush()  # `input` would flush too, and its error would look like an input error
    try:
        return read()
    except OSError as error:
        raise CommandError(f"cannot read standard input: {error.strerror}") from None


class ChatTerminal:
    """Reads the messages of a chat from standard input. If standard input is not a terminal, lines are read without
    prompts, editing or history."""

    def __init__(self, history: Path | None) -> None:
        """Load the lines that the user typed earlier from the file `history`, if possible. Only the user may read the
        file, since it contains conversations."""
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = history
        self._readline: Any = None
        if self.is_interactive:
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            self._start_readline()

    def read_message(self) -> str:
        """Read the next chat message. A message is one line, several lines joined by a trailing backslash, or a
        triple-quoted block of lines.

        Raise EOFError at the end of the input. A block that the end of the input cuts off still counts as a message.
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
        """Ask the user a yes/no question, and return whether the answer is yes. An empty answer means yes.

        Return True without asking if standard input is not a terminal.
        """
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
        """Show `prompt` and return the line that the user types. Only the main thread may call this method, because it
        sets a timer signal."""
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
        except ImportError:  # Python was built without readline
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
        """Write the lines that the user typed to the history file. This is done after every line, so that closing the
        terminal loses nothing."""
        if self._readline is None or self._history is None:
            return
        try:
            self._readline.write_history_file(self._history)
        except OSError:
            self._history = None

    def _forget_last_line(self) -> None:
        """Remove the last typed line, the answer to a yes/no question, from the history."""
        if self._readline is not None and self._readline.get_current_history_length():
            self._readline.remove_history_item(self._readline.get_current_history_length() - 1)
