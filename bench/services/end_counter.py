"""Requests of a step loop for which only the end matters, and a helper to run work next to background tasks."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from scheduler_service.core.request import EndReason, Request
from scheduler_service.serving.active_request import ActiveRequest, RequestEngine
from scheduler_service.serving.output import SampleRecord

Result = TypeVar("Result")


async def while_running(work: Coroutine[Any, Any, Result], *beside: asyncio.Future[Any]) -> Result:
    """Return the result of `work`. If a task in `beside` fails first, cancel the work and raise its error.

    The tasks in `beside` are expected to run forever. Raises RuntimeError if one of them ends without an error.
    """
    working = asyncio.ensure_future(work)
    await asyncio.wait((working, *beside), return_when=asyncio.FIRST_COMPLETED)
    for each in beside:
        if each.done():
            working.cancel()
            each.result()
            raise RuntimeError("a background task that the work needs has ended")
    return working.result()


class EndCounter:
    """Submits many requests, and waits only for their ends."""

    def __init__(self, engine: RequestEngine, num_requests: int) -> None:
        self._engine = engine
        self._num_open = num_requests
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit(self, request: Request) -> None:
        output = SampleRecord(0)
        active = ActiveRequest(request, [output], self._engine)
        active.on_end = partial(self._take_end, output)
        self._engine.submit(active, {})

    def _take_end(self, output: SampleRecord) -> None:
        if output.published_end.reason is not EndReason.LENGTH:
            self._fail(f"a request ended with {output.published_end.reason.value}")
        self._num_open -= 1
        if not self._num_open and not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> None:
        """Wait until all requests have ended. Raises RuntimeError if a request ended before its length limit."""
        await self._ended

    def _fail(self, message: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(message))
