"""Event loops: one that stays responsive when many connections have events at once, and calls from other threads."""

import asyncio
import contextlib
import os
import select
import selectors
from collections.abc import Callable

MAX_EVENTS = 64  # the most events that are handled before timers and callbacks get their turn


class _FewEvents(selectors.EpollSelector):
    """An epoll selector for asyncio that returns at most `MAX_EVENTS` events at once.

    The remaining events come first in the next call, because the kernel moves returned events to the end of its list.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events = select.epoll.fromfd(os.dup(self.fileno()))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        try:
            found = self._events.poll(-1 if timeout is None else max(timeout, 0), MAX_EVENTS)
        except InterruptedError:
            return []
        ready, keys = [], self.get_map()
        for descriptor, events in found:
            if descriptor in keys:
                key = keys[descriptor]
                mask = selectors.EVENT_WRITE * bool(events & ~select.EPOLLIN)
                mask |= selectors.EVENT_READ * bool(events & ~select.EPOLLOUT)
                ready.append((key, mask & key.events))
        return ready

    def close(self) -> None:
        self._events.close()
        super().close()


def few_events_loop() -> asyncio.AbstractEventLoop:
    """Return an asyncio event loop that processes only a few I/O events before it checks its timers and thread
    callbacks again. With asyncio's default loop, a client that closes thousands of connections at once could delay
    timers and callbacks for a tenth of a second.
    """
    return asyncio.SelectorEventLoop(_FewEvents())


def call_from_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call a function on an event loop soon. May be called from any thread. Do nothing if the loop is closed, as it is
    while a process exits: nothing waits for the call any more.
    """
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
