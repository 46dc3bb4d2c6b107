"""A state that a newcomer's machine may be in, and what is to come of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.first_hour.newcomer import Newcomer, Outcome


class LeftOutError(Exception):
    """A state cannot be brought about here; the text says why."""


@dataclass(frozen=True, slots=True)
class State:
    """What brings a state about is `enter`. All of `words` must be said, and none of `never`."""

    name: str
    code: int
    words: tuple[str, ...]
    never: tuple[str, ...]
    enter: Callable[[Newcomer], Outcome]

    @property
    def expected(self) -> str:
        return f"{self.code}: {' … '.join(self.words)}"

    def fault(self, outcome: Outcome) -> str:
        """Returns what is wrong with an outcome, or nothing."""
        if outcome.code is None:
            return "stuck"
        if "Traceback (most recent call last)" in outcome.said:
            return "traceback"
        if outcome.code != self.code:
            return f"exit code {outcome.code}"
        said = re.sub(r"\s+", " ", outcome.said)
        missing = [f"no {words!r}" for words in self.words if words not in said]
        return "; ".join(missing + [f"says {words!r}" for words in self.never if words in said])


STATES: list[State] = []
Enter = Callable[[Newcomer], Outcome]


def state(name: str, *words: str, code: int = 0, never: tuple[str, ...] = ()) -> Callable[[Enter], Enter]:
    """Names the function that brings a state about. States are tried in the order of their definitions."""

    def add(enter: Enter) -> Enter:
        STATES.append(State(name, code, words, never, enter))
        return enter

    return add


def command_state(name: str, command: str, *words: str, code: int = 0, never: tuple[str, ...] = ()) -> None:
    """Adds a state that a shell command brings about by itself."""
    STATES.append(State(name, code, words, never, lambda newcomer: newcomer.run(command)))
