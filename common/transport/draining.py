"""How a service that is told to stop lets what runs come to its end."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_PATIENCE = 0.2  # seconds to drain before that is told


async def drain(drained: Coroutine[Any, Any, None], stop_now: asyncio.Event, limit: float) -> None:
    """Let running requests finish, but not beyond `limit` seconds or `stop_now`."""
    logger.info("stopping")
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(end) for end in (drained, stop_now.wait())]
    patience = min(_PATIENCE, limit)
    done, _ = await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    if not done and limit > patience:
        logger.info("requests are running: they have %g s to end; a second signal ends them at once", limit)
        await asyncio.wait(ends, timeout=limit - patience, return_when=asyncio.FIRST_COMPLETED)
    await cancel(ends)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for their ends, whatever these are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
