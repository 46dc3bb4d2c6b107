"""The time of the step loop, and what it has done later."""

import asyncio
import time
from collections.abc import Callable


class Clock:
    """The clock and the timers of the event loop that runs. A simulation has others, and overrides all of them.

    Attributes:
        now: returns the seconds since any moment in the past. They never go back.
        soon: has something done in the next iteration of the event loop.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.soon: Callable[[Callable[[], None]], object] = asyncio.get_running_loop().call_soon

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        """Have something done after so many seconds. Returns what prevents it."""
        return asyncio.get_running_loop().call_later(seconds, action).cancel
