"""A step that the worker has launched."""

from dataclasses import dataclass
from typing import Protocol

from pagewire.common.wire.messages import StepResult


class LaunchedStep(Protocol):
    """A step under way, or done. Its methods may be called on any thread."""

    def is_done(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> StepResult:
        """Wait for the step's result. To be called once, and in the order in which steps were launched."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was done when it was launched."""

    finished: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished
