"""Simulated time: a queue of future events, and the runs of the step loop between them."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from scheduler_service.serving.clock import Clock
from scheduler_service.serving.step_loop import StepLoop


class Timeline(Clock):
    """A clock of simulated time with a queue of future events. Events at the same time happen in the order in which
    they were added, because the heap orders events by (time, number)."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_events = 0  # events added so far
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
        """Run all events in order of simulated time, until no event is left. The step loop runs `wake_seconds()`
        simulated seconds after it has work to do."""
        while self._heap:
            self.time, _, action, args = heappop(self._heap)
            action(*args)
            if loop.is_due and not self._turn_is_due:
                self._turn_is_due = True
                self.after(wake_seconds(), self._take_turn, loop)

    def catch_up(self) -> None:
        """Run all events up to the present simulated time, before the step loop continues."""
        while self._heap and self._heap[0][0] <= self.time:
            _, _, action, args = heappop(self._heap)
            action(*args)

    def _take_turn(self, loop: StepLoop) -> None:
        self._turn_is_due = False
        loop.run_once()
