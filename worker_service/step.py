"""The interface of a step that the worker has launched, and a step that is already done."""

from dataclasses import dataclass
from typing import Protocol

from pagewire.common.wire.messages import StepResult


class LaunchedStep(Protocol):
    """The interface of a step that has been launched. The step is in progress or done.

    The methods may be called on any thread.
    """

    def is_done(self) -> bool:
        """Return whether the step is done, so that `result` returns without waiting."""

    def result(self) -> StepResult:
        """Wait until the step is done and return its result. Call this once per step, in the order of the launches."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that has finished before its launch returns, for example because a CPU computed it."""

    finished: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished
