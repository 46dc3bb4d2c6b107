"""The clock and the timers of the step loop."""

import asyncio
import time
from collections.abc import Callable


class Clock:
    """The clock and the timers of the running event loop. A simulation overrides all of them.

    Attributes:
        now: Return the time in seconds since an arbitrary moment. It never goes back.
        soon: Call a function in the next iteration of the event loop.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.soon: Callable[[Callable[[], None]], object] = asyncio.get_running_loop().call_soon

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        """Schedule a call of `action` on the event loop after `seconds`. Return a function that cancels this call."""
        return asyncio.get_running_loop().call_later(seconds, action).cancel
