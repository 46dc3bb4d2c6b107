"""An event loop without sockets and threads, whose clock jumps to the next timer whenever it is idle."""

import asyncio
from collections.abc import Callable
from typing import Any

from scheduler_service.serving.clock import Clock


class StuckError(AssertionError):
    """No event will ever occur again, or events never end."""


class LoopClock(Clock):
    """The time and the timers of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualLoop(asyncio.BaseEventLoop):
    """The virtual event loop. Unhandled exceptions of tasks and callbacks are kept in `errors`."""

    def __init__(self, max_turns: int) -> None:
        """`max_turns`: the number of turns after which events are considered endless."""
        super().__init__()
        self._selector = self
        self._seconds = 0.0
        self._num_turns_left = max_turns
        self.errors: list[BaseException] = []
        self.after_turn: Callable[[], None] = lambda: None
        self.set_exception_handler(self._keep)

    def time(self) -> float:
        return self._seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the time by `timeout`, as the loop's selector; no I/O event ever occurs.

        Raises StuckError.
        """
        self.after_turn()
        self._num_turns_left -= 1
        if timeout is None:
            raise StuckError("L1: nothing happens any more")
        if not self._num_turns_left:
            raise StuckError("L1: events without end")
        self._seconds += timeout
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Call `func` at once: there are no threads."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def end(self) -> None:
        """Cancel all remaining tasks."""
        self.after_turn, self._num_turns_left = lambda: None, 10_000
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())

    def _process_events(self, event_list: list[Any]) -> None:
        """Ignore the list, which is always empty."""

    def _write_to_self(self) -> None:
        """Do nothing: no thread waits for the selector."""

    def _keep(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or AssertionError(context["message"]))
