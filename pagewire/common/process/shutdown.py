"""Graceful shutdown of a service: SIGTERM and SIGINT stop it, and running requests may finish."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_QUIET_S = 0.2  # seconds of draining before a log line reports it


def stop_at_signals(again: Callable[[int], None]) -> asyncio.Event:
    """Register handlers for SIGTERM and SIGINT, and return an event that the first signal sets. `again` is called with
    the number of every later signal.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            again(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def stops() -> tuple[asyncio.Event, asyncio.Event]:
    """Register handlers for SIGTERM and SIGINT. Return an event that the first signal sets, and an event that the
    second signal sets. At the first signal a service lets running requests finish. At the second signal the service
    ends at once.
    """
    stop_now = asyncio.Event()
    return stop_at_signals(lambda number: stop_now.set()), stop_now


async def drain(drained: Coroutine[Any, Any, None], stop_now: asyncio.Event, limit: float) -> None:
    """Wait until the running requests of a service have ended. `drained` is a coroutine that returns when no request is
    running.

    The wait ends after `limit` seconds, or as soon as `stop_now` is set. `drained` is then cancelled.
    """
    logger.info("stopping")
    text = "requests are still running: waiting up to %g s for them; a second signal ends them at once"
    promise = asyncio.get_running_loop().call_later(_QUIET_S, logger.info, text, limit)
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(end) for end in (drained, stop_now.wait())]
    await asyncio.wait(ends, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    promise.cancel()
    await cancel(ends)


async def run_to_completion(serving: Coroutine[Any, Any, int]) -> int:
    """Run a service to its end, and return its exit code. First wait up to a second for the asyncio tasks of gRPC's
    RPCs, which end shortly after the server.

    If a task were still running at the end of the event loop, gRPC would treat its RPC as failed and log a traceback.
    """
    try:
        return await serving
    finally:
        if calls := [task for task in asyncio.all_tasks() if "coro=<_schedule_rpc_coro" in repr(task)]:
            await asyncio.wait(calls, timeout=1.0)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel asyncio tasks, and wait until they have ended. The results and exceptions of the tasks are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
