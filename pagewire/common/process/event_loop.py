"""An event loop that no crowd of connections holds up."""

import asyncio
import os
import select
import selectors

MAX_EVENTS = 64  # between two looks at all else that is due


class _FewEvents(selectors.EpollSelector):
    """Tells of few events at once. Those that it leaves out come first the next time, since the kernel puts what it has
    told of behind them."""

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
    """Make a loop that handles few events between two looks at its timers and at what its threads have done: a client
    that ends thousands of connections at once would otherwise hold it for a tenth of a second."""
    return asyncio.SelectorEventLoop(_FewEvents())
