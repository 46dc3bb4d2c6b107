"""Requests that run whether or not a client is there, and are kept for a while after their end."""

import asyncio
from collections import Counter
from functools import partial

from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.refusal import Reason, RefusedError

MAX_ENDED = 4096


class DetachedRequests:
    """The detached requests of all tenants. Those that have ended are kept for a time, up to a number and a size."""

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """`retention` is in seconds. One request alone is kept however many bytes it has."""
        self._retention = retention
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._requests: dict[tuple[str, str], ActiveRequest] = {}  # by tenant and request id
        self._ended: dict[tuple[str, str], tuple[asyncio.TimerHandle, int]] = {}  # and bytes; oldest first
        self._num_ended: Counter[str] = Counter()  # by tenant; none is 0
        self._ended_bytes: Counter[str] = Counter()  # by tenant; none is 0
        self.num_bytes = 0  # of all that have ended

    def add(self, active: ActiveRequest) -> None:
        """Take a request that runs, of a name that is not here."""
        key = (active.request.tenant, active.request.request_id)
        self._requests[key] = active
        active.on_end = partial(self._keep, key)

    def has(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self._requests

    def find(self, tenant: str, request_id: str) -> ActiveRequest:
        """Return the request of that name. Raises RefusedError if there is none, but not whether it never was, is
        another tenant's or has expired."""
        try:
            return self._requests[tenant, request_id]
        except KeyError:
            raise RefusedError(
                Reason.NOT_FOUND,
                f"no detached request {request_id!r} is known for this tenant; results are kept for a while only",
                "request_id",
            ) from None

    def _keep(self, key: tuple[str, str]) -> None:
        """Keep a request for a while that has ended, or that has failed: then what is left of it ends now."""
        active = self._requests[key]
        active.cancel()
        num_bytes = sum(output.num_bytes for output in active.outputs)
        timer = asyncio.get_running_loop().call_later(self._retention, self._forget, key)
        self._ended[key] = timer, num_bytes
        self._num_ended[key[0]] += 1
        self._ended_bytes[key[0]] += num_bytes
        self.num_bytes += num_bytes
        if len(self._ended) > self._max_ended:
            self._forget(self._dispensable(self._num_ended))
        while self.num_bytes > self._max_bytes and len(self._ended) > 1:
            self._forget(self._dispensable(self._ended_bytes))

    def _dispensable(self, amounts: Counter[str]) -> tuple[str, str]:
        """Choose the oldest of the tenant that has most: no tenant can push out what others keep."""
        most = max(amounts.values())
        return next(key for key in self._ended if amounts[key[0]] == most)

    def _forget(self, key: tuple[str, str]) -> None:
        timer, num_bytes = self._ended.pop(key)
        timer.cancel()
        del self._requests[key]
        self.num_bytes -= num_bytes
        for amounts, amount in ((self._num_ended, 1), (self._ended_bytes, num_bytes)):
            amounts[key[0]] -= amount
            if not amounts[key[0]]:
                del amounts[key[0]]
