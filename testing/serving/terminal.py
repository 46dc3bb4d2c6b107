"""The user of a chat at a pseudo-terminal."""

import sys
from pathlib import Path

from testing.serving import scripted_scheduler
from testing.terminal import Terminal

STORY = "".join(scripted_scheduler.WORDS)
CTRL_A, CTRL_C, CTRL_D, UP = "\x01", "\x03", "\x04", "\x1b[A"


class ChatUser(Terminal):
    """The user of a `pagewire` command that chats."""

    def __init__(self, state: Path, *arguments: str, columns: int = 120, rows: int = 24) -> None:
        """Run `pagewire` with these arguments. It stores its state in the folder `state`."""
        command = [sys.executable, "-m", "pagewire", *arguments]
        super().__init__(command, columns=columns, rows=rows, environ={"XDG_STATE_HOME": str(state)})

    def ask(self, message: str) -> None:
        """Type a message at the next prompt."""
        self.expect("> ")
        self.type(message + "\r")

    def say(self, text: str) -> str:
        """Type a message, wait for the answer of `tell_story`, and return the output before this answer."""
        self.ask(text)
        return self.expect(STORY)

    def end(self) -> int:
        """End the chat at the next prompt, and return the exit code."""
        self.expect("> ")
        self.type(CTRL_D)
        return self.wait()
