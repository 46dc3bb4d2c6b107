"""Terminal input for a chat: line editing, history, and messages of several lines."""

import atexit
import contextlib
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pagewire.client.errors import CommandError

PROMPT, CONTINUATION = "> ", ". "
BLOCK = '"""'
MAX_HISTORY_LINES = 1000
LOCAL_FLAGS = 3  # the index in the result of `termios.tcgetattr`
# Let a terminal enclose pasted text in escape sequences, so that readline inserts its line ends.
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"


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
    prompts, editing or history.

    Between messages, typed keys are not shown. They wait for the next prompt. Only the main thread may create an
    instance, because it sets a timer signal.
    """

    def __init__(self, history: Path | None, candidates: Callable[[str], Iterable[str]] = lambda line: ()) -> None:
        """Load the lines that the user typed earlier from the file `history`, if possible. Only the user may read the
        file, since it contains conversations.

        `candidates` returns the words that the Tab key may complete at the end of a line.
        """
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = history or Path(os.devnull)
        self._candidates = candidates
        self._readline: Any = None
        self._can_paste = False
        self._settings: list[Any] | None = None
        if self.is_interactive:
            self._settings = termios.tcgetattr(sys.stdin)
            # Python runs signal handlers only if a signal interrupts its wait, for a key or for the next token. A
            # SIGTERM or Ctrl-C that arrives before the wait would stay unnoticed until the next key or token; the timer
            # interrupts the wait again.
            signal.signal(signal.SIGALRM, lambda number, frame: None)
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # SIGALRM ends a process without its handler
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                if signal.getsignal(number) is signal.SIG_DFL:  # it would end the process with its settings
                    signal.signal(number, lambda number, frame: sys.exit(128 + number))
            self._start_readline()

    def close(self) -> None:
        """Restore the terminal's settings."""
        self._show_keys(True)

    def read_message(self) -> str:
        """Read the next chat message. A message is one line, several lines joined by a trailing backslash, a
        triple-quoted block of lines, or a line with pasted line ends.

        Raise EOFError at the end of the input. A block that the end of the input cuts off still counts as a message.
        """
        line = self._read_line(PROMPT)
        is_whole = "\n" not in line or line.rstrip().endswith(BLOCK)
        if is_whole and line.lstrip().startswith(BLOCK):  # other pasted text may begin with a docstring
            return self._read_block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        with contextlib.suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._read_line(CONTINUATION))
        return "\n".join(lines).rstrip("\n")

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
        return answer.strip().lower() in ("", "y", "yes")

    def _read_block(self, first: str) -> str:
        lines = [first]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._read_line(CONTINUATION))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str:
        if not self.is_interactive:
            return read_input(input)
        line = self._ask(prompt)
        self._remember(line)
        return line

    def _ask(self, prompt: str) -> str:
        """Show `prompt` and return the line that the user types."""
        self._show_keys(True)
        # Readline loses output whose write a signal interrupts. Its wait for a key is interrupted all the same.
        signal.siginterrupt(signal.SIGALRM, False)
        try:
            return read_input(lambda: input(prompt))
        finally:
            signal.siginterrupt(signal.SIGALRM, True)
            self._show_keys(False)

    def _show_keys(self, are_shown: bool) -> None:
        """Restore the terminal's settings, or let typed and pasted text wait for the next prompt without showing it."""
        if self._settings is None:
            return
        settings = self._settings.copy()
        if not are_shown:
            settings[LOCAL_FLAGS] &= ~(termios.ECHO | (termios.ICANON if self._can_paste else 0))
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            print((PASTE_OFF if are_shown else PASTE_ON) * self._can_paste, end="", flush=True)
            termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)

    def _start_readline(self) -> None:
        try:
            import readline
        except ImportError:  # Python was built without readline
            return
        self._readline = readline
        is_gnu = "libedit" not in (readline.__doc__ or "")
        readline.parse_and_bind("tab: complete" if is_gnu else "bind ^I rl_complete")
        if is_gnu and os.environ.get("TERM", "dumb") != "dumb":
            self._can_paste = True
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.set_auto_history(False)
        lines: list[bytes] = []
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_RDWR, 0o600))
            lines = self._history.read_bytes().split(b"\n")
            if len(lines) > 2 * MAX_HISTORY_LINES:
                self._history.write_bytes(b"\n".join(lines[-MAX_HISTORY_LINES:]))
        for line in filter(None, lines[-MAX_HISTORY_LINES:]):
            readline.add_history(os.fsdecode(line.replace(b"\0", b"")).replace("\r", "\n"))

    def _complete(self, text: str, state: int) -> str | None:
        """Return completion number `state` of the word `text`, or None after the last one. Readline calls this."""
        line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
        words = [word for word in self._candidates(line) if word.startswith(text)]
        return words[state] if state < len(words) else None

    def _remember(self, line: str) -> None:
        """Add a line to the history and its file, unless the last line is equal. A pasted line end is stored as "\\r",
        which no line contains."""
        if self._readline is None:
            return
        last = self._readline.get_history_item(self._readline.get_current_history_length())
        if line in ("", last):
            return
        self._readline.add_history(line)
        with contextlib.suppress(OSError), self._history.open("ab") as file:
            file.write(os.fsencode(line.replace("\n", "\r") + "\n"))
