"""A state of a newcomer's machine, and the expected result."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.first_hour.newcomer import Newcomer, Outcome


class LeftOutError(Exception):
    """A state cannot be produced here; the text states the reason."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of a machine.

    `enter` produces the state. The output must contain all of `words` and none of `never`.
    """

    name: str
    code: int
    words: tuple[str, ...]
    never: tuple[str, ...]
    enter: Callable[[Newcomer], Outcome]

    @property
    def expected(self) -> str:
        return f"{self.code}: {' … '.join(self.words)}"

    def fault(self, outcome: Outcome) -> str:
        """Return what is wrong with an outcome, or an empty text."""
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
    """Decorate the function that produces a state with its name. States are tried in the order of their definitions."""

    def add(enter: Enter) -> Enter:
        STATES.append(State(name, code, words, never, enter))
        return enter

    return add


def command_state(name: str, command: str, *words: str, code: int = 0, never: tuple[str, ...] = ()) -> None:
    """Add a state that a single shell command produces."""
    STATES.append(State(name, code, words, never, lambda newcomer: newcomer.run(command)))
