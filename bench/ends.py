"""Waits for the ends of requests whose tokens nobody reads."""

import asyncio

from scheduler_service.core.request import SequenceEnd
from scheduler_service.serving.token_stream import Delta


class Ends:
    """Receives what comes of requests, and keeps the end of each of their samples (`serving.token_stream.Receiver`)."""

    outlet, label = None, 0

    def __init__(self) -> None:
        self._ends: asyncio.Queue[SequenceEnd | str] = asyncio.Queue()

    def deliver(self, delta: Delta) -> None:
        if delta.end is not None:
            self._ends.put_nowait(delta.end)

    def fail(self, code: int, message: str, field: str = "") -> None:
        self._ends.put_nowait(message)

    async def wait_for(self, num_samples: int) -> None:
        """Waits until so many samples have ended. Raises RuntimeError for a request that failed."""
        for _ in range(num_samples):
            end = await self._ends.get()
            if isinstance(end, str):
                raise RuntimeError(end)
