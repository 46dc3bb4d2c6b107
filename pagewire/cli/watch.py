"""A view that fills the terminal, is refreshed once a second, and can be scrolled and filtered."""

import asyncio
import contextlib
import os
import re
import select
import signal
import sys
import termios
import textwrap
import tty
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Generic, NoReturn, TypeVar

from pagewire.cli import SUCCESS
from pagewire.client.errors import Unavailable
from pagewire.hosting.printable import printable

State = TypeVar("State")

# Switch to the alternate screen, hide the cursor, and cut long lines instead of wrapping them; and back.
ENTER_SCREEN, LEAVE_SCREEN = "\033[?1049h\033[?25l\033[?7l", "\033[?7h\033[?25h\033[?1049l"
KEY = re.compile("\033\\[[0-9;]*[A-Za-z~]|\033O[A-Z]|.", re.DOTALL)
UP, DOWN, PAGE_UP, PAGE_DOWN = ("\033[A", "\033OA", "k"), ("\033[B", "\033OB", "j"), "\033[5~", "\033[6~"
ESCAPE, ENTER, BACKSPACE = "\033", "\r\n", "\x7f\b"
HELP = "q: end   up/down: scroll   /: filter"
INTERVAL_S, TIMEOUT_S = 1.0, 5.0  # between two refreshes, and for the answers to one refresh
ESCAPE_DELAY_S = 0.05  # between the first byte and the rest of a key's escape sequence


class Watch(Generic[State]):
    """A state that is shown on the whole terminal."""

    def __init__(self, lines: Callable[[State, int, int, str], Sequence[str]]) -> None:
        """Create a view without a state. `lines` returns the lines of a state for a number of columns and a preferred
        number of rows. It leaves out the rows that do not contain the text in its last argument."""
        self._lines = lines
        self._state: State | None = None
        self._problem = "waiting for the server"
        self._text, self._is_typing = "", False  # of the filter
        self._first_line = self._page = 0  # the first line on the screen, and the number of lines on the screen

    async def run(self, read: Callable[[], Awaitable[State]]) -> NoReturn:
        """Read and draw the state once a second, until a key or a signal ends the process. If the server cannot be
        reached, the last state stays on the screen."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            self._open_screen(stack, loop)
            self._draw()
            while True:
                next_at = loop.time() + INTERVAL_S
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        self._state = await read()
                    self._problem = ""
                except (Unavailable, TimeoutError) as error:
                    reason = str(error) or f"the server does not answer within {TIMEOUT_S:.0f} s"
                    self._problem = f"{datetime.now():%H:%M:%S} {printable(reason)}"
                self._draw()
                await asyncio.sleep(next_at - loop.time())

    def _open_screen(self, stack: contextlib.ExitStack, loop: asyncio.AbstractEventLoop) -> None:
        """Switch the terminal to the alternate screen, and read keys unless standard input is not a terminal. `stack`
        always restores the terminal."""
        stack.callback(print, LEAVE_SCREEN, end="", flush=True)
        if sys.stdin.isatty():
            keyboard = sys.stdin.fileno()
            stack.callback(termios.tcsetattr, keyboard, termios.TCSAFLUSH, termios.tcgetattr(keyboard))
            tty.setcbreak(keyboard)
            loop.add_reader(keyboard, self._read_keys, keyboard)
            stack.callback(loop.remove_reader, keyboard)
        # A command that Ctrl-Z stops could not restore the terminal.
        stack.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, signal.SIG_IGN))
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        # An exit in a callback ends the event loop, which cancels `run`.
        loop.add_signal_handler(signal.SIGTERM, sys.exit, 128 + signal.SIGTERM)
        print(ENTER_SCREEN, end="", flush=True)

    def _read_keys(self, keyboard: int) -> None:
        """Process the keys that were typed, and draw the view again. End the command if the terminal was closed."""
        data = os.read(keyboard, 1024)
        if data.endswith(ESCAPE.encode()) and select.select([keyboard], [], [], ESCAPE_DELAY_S)[0]:
            data += os.read(keyboard, 1024)
        for key in KEY.findall(data.decode(errors="replace")) or ["q"]:
            self._press(key)
        self._draw()

    def _press(self, key: str) -> None:
        """React to a key: a character or an escape sequence."""
        if self._is_typing and (key.isprintable() or key in BACKSPACE):
            self._text = self._text[:-1] if key in BACKSPACE else self._text + key
        elif key == "/" or (key == ESCAPE and (self._is_typing or self._text)):
            self._text, self._is_typing = "", key == "/"
        elif key in ("q", ESCAPE):
            sys.exit(SUCCESS)
        else:
            self._is_typing = self._is_typing and key not in ENTER
            self._first_line += (key in DOWN) - (key in UP) + self._page * ((key == PAGE_DOWN) - (key == PAGE_UP))

    def _draw(self) -> None:
        """Draw a problem, the part of the view that fits on the screen, and the keys."""
        # Not the variables COLUMNS and LINES: some programs export them, and they do not follow a resize.
        size = os.get_terminal_size(sys.stdout.fileno())
        columns, rows = size.columns or 80, size.lines or 24
        problem = textwrap.wrap(self._problem, columns)[: rows // 2]
        self._page = max(1, rows - len(problem) - 1)
        lines = [] if self._state is None else self._lines(self._state, columns, self._page, self._text)
        self._first_line = max(0, min(self._first_line, len(lines) - self._page))
        last = min(self._first_line + self._page, len(lines))
        keys = f"{HELP}   lines {self._first_line + 1}-{last} of {len(lines)}" if len(lines) > self._page else HELP
        if self._is_typing:
            keys = f"/{self._text}_   enter: keep the filter   escape: clear it"
        elif self._text:
            keys = f"filter {self._text}   escape: clear it   {keys}"
        # From the top: lines that are each cleared to their end, then an empty rest, then the last line.
        text = "".join(f"{line}\033[K\n" for line in [*problem, *lines[self._first_line : last]])
        print(f"\033[H{text}\033[J\033[{rows}H{keys[:columns]}", end="", flush=True)
