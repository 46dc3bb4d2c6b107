"""Simulated time: all that is to happen, in order, and the turns of the step loop in between."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from scheduler_service.serving.clock import Clock
from scheduler_service.serving.step_loop import StepLoop


class Timeline(Clock):
    """One heap of (time, number) orders all events: those of one time happen in the order in which they were set."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_events = 0  # that were ever set
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._turn_is_due = False

    def now(self) -> float:
        return self.time

    def soon(self, action: Callable[[], None]) -> None:
        self.at(self.time, action)

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        actions = [action]
        self.after(seconds, lambda: [left() for left in actions])
        return actions.clear

    def at(self, time: float, action: Callable[..., object], *args: Any) -> None:
        self.num_events += 1
        heappush(self._heap, (time, self.num_events, action, args))

    def after(self, delay: float, action: Callable[..., object], *args: Any) -> None:
        self.at(self.time + delay, action, *args)

    def drive(self, loop: StepLoop, wake_seconds: Callable[[], float]) -> None:
        """Let everything happen, until nothing is left. A turn of the step loop comes so long after it was due."""
        while self._heap:
            self.time, _, action, args = heappop(self._heap)
            action(*args)
            if loop.is_due and not self._turn_is_due:
                self._turn_is_due = True
                self.after(wake_seconds(), self._take_turn, loop)

    def catch_up(self) -> None:
        """Let everything happen that is to happen now, before the step loop goes on with its turn."""
        while self._heap and self._heap[0][0] <= self.time:
            _, _, action, args = heappop(self._heap)
            action(*args)

    def _take_turn(self, loop: StepLoop) -> None:
        self._turn_is_due = False
        loop.run_once()
