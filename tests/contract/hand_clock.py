"""A clock of the step loop whose last timer ends when the test says so."""

from collections.abc import Callable

from scheduler_service.serving.clock import Clock


class HandClock(Clock):
    """Timers before the last one are never due."""

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        self.end_last = action
        return lambda: None
