"""How a service is told to stop, by SIGTERM and SIGINT, and lets what runs come to its end."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_PATIENCE = 0.2  # seconds to drain before that is told


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


async def drain(drained: Coroutine[Any, Any, None], stop_now: asyncio.Event, limit: float) -> None:
    """Let running requests finish, but not beyond `limit` seconds or `stop_now`."""
    logger.info("stopping")
    text = "requests are running: they have %g s to end; a second signal ends them at once"
    promise = asyncio.get_running_loop().call_later(_PATIENCE, logger.info, text, limit)
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(end) for end in (drained, stop_now.wait())]
    await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    promise.cancel()
    await cancel(ends)


async def run_out(serving: Coroutine[Any, Any, int]) -> int:
    """Run a service to its end, and gRPC's tasks of its calls, which end a little after their server has. One that ends
    just as the loop does gRPC would take for a failed call, and write a traceback."""
    try:
        return await serving
    finally:
        if calls := [task for task in asyncio.all_tasks() if "coro=<_schedule_rpc_coro" in repr(task)]:
            await asyncio.wait(calls, timeout=1.0)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for their ends, whatever these are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
