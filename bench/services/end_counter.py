"""Requests of a step loop of which only the end matters, and work that fails with what runs beside it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from scheduler_service.core.request import EndReason
from scheduler_service.serving.refusal import RefusedError
from scheduler_service.serving.token_stream import Delta

Result = TypeVar("Result")


async def while_running(work: Coroutine[Any, Any, Result], *beside: asyncio.Future[Any]) -> Result:
    """Returns what the work returns. What runs beside it never ends but by failing: then that is raised at once."""
    working = asyncio.ensure_future(work)
    await asyncio.wait((working, *beside), return_when=asyncio.FIRST_COMPLETED)
    for each in beside:
        if each.done():
            working.cancel()
            each.result()
            raise RuntimeError("what the work needs beside it has ended")
    return working.result()


class EndCounter:
    """Receives what comes of many requests, and waits for their ends alone."""

    ready_list = None
    label = 0
    keeps_all = True

    def __init__(self, num_requests: int) -> None:
        self._num_open = num_requests
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(self, delta: Delta) -> None:
        if delta.end is None:
            return
        if delta.end.reason is not EndReason.LENGTH:
            self._fail(f"a request ended with {delta.end.reason.value}")
        self._num_open -= 1
        if not self._num_open and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, refusal: RefusedError) -> None:
        self._fail(f"a step loop refuses at once: {refusal}")

    async def wait(self) -> None:
        """Returns when all requests have ended. Raises RuntimeError where one did not reach its length."""
        await self._ended

    def _fail(self, message: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(message))
