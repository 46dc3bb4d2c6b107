"""Wakes the one task of a call that waits for something to tell its client."""

import asyncio


class News:
    """An event for one waiter, at half the price of asyncio's. It refers to neither side, so that those who tell it and
    the one who waits do not refer to each other through it."""

    def __init__(self) -> None:
        self._is_told = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self._is_told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there has been news since the last wait."""
        if not self._is_told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_told = False
