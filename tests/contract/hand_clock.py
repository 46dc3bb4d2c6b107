"""A clock for the step loop that lets a test fire the last timer."""

from collections.abc import Callable

from scheduler_service.serving.clock import Clock


class ManualClock(Clock):
    """A clock whose timers never fire by themselves. `end_last` fires the last one. No event loop is needed."""

    def __init__(self) -> None:
        self.end_last: Callable[[], None] = lambda: None

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        self.end_last = action
        return lambda: None
