"""The interface of a step that the worker has launched, and a step that is already done."""

from dataclasses import dataclass
from typing import Protocol

from pagewire.common.wire.messages import StepResult


class LaunchedStep(Protocol):
    """A step that is in progress or done. Its methods may be called on any thread."""

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""

    def result(self) -> StepResult:
        """Wait for the step's result and return it. Call this once per step, in the order of the launches."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was already done when `launch` returned."""

    finished: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished
