"""A clock of the step loop whose last timer ends when the test says so."""

from collections.abc import Callable

from scheduler_service.serving.clock import Clock


class HandClock(Clock):
    """Timers before the last one are never due. It needs no event loop."""

    def __init__(self) -> None:
        self.end_last: Callable[[], None] = lambda: None

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        self.end_last = action
        return lambda: None
