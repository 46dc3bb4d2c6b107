"""SIGTERM and SIGINT, which tell a service to stop."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from pagewire.common.process import announce_ready


def stop_at_signals(again: Callable[[int], None]) -> asyncio.Event:
    """Make the event that the first signal sets from now on. `again` gets the number of every later one."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            again(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def stops() -> tuple[asyncio.Event, asyncio.Event]:
    """Make the events of the first signal, at which a service drains, and of the second, at which it ends at once."""
    stop_now = asyncio.Event()
    return stop_at_signals(lambda number: stop_now.set()), stop_now


async def serve_until_signalled(run: Callable[..., Coroutine[Any, Any, int]]) -> int:
    """Call `run`, which ends at SIGTERM or SIGINT, and at once at a second one; return its exit code."""
    stop, stop_now = stops()
    return await run(stop=stop, ready=announce_ready, stop_now=stop_now)
