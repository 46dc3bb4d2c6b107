"""Requests of a step loop of which only the end matters, since nothing reads what comes of them."""

import asyncio

from scheduler_service.serving.token_stream import Delta


class EndCounter:
    """Receives what comes of many requests, and waits for their ends alone."""

    ready_list = None
    label = 0
    keeps_all = True

    def __init__(self, num_requests: int) -> None:
        self._num_open = num_requests
        self.has_all = asyncio.Event()

    def deliver(self, delta: Delta) -> None:
        if delta.end is not None:
            self._num_open -= 1
            if not self._num_open:
                self.has_all.set()

    def fail(self, code: int, message: str, field: str = "") -> None:
        raise RuntimeError(f"a step loop refuses at once: {message}")
