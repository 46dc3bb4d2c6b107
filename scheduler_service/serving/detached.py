"""Requests that run whether or not a client is there, and are kept for a while after their end; and records of
others."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.refusal import Reason, RefusedError

MAX_ENDED = 4096


class Kept(NamedTuple):
    """What is kept under a request's name: bytes that only clients understand, and the request, if it is detached."""

    record: bytes
    active: ActiveRequest | None


class DetachedRequests:
    """The detached requests of all tenants. Those that have ended are kept for a time, up to a number and a size, and
    so are records alone."""

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """`retention` is in seconds. One request alone is kept however many bytes it has."""
        self._retention = retention
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self.by_name: dict[tuple[str, str], Kept] = {}  # by tenant and request id
        self._ended: dict[tuple[str, str], tuple[asyncio.TimerHandle, int]] = {}  # and bytes; oldest first
        self._num_ended: Counter[str] = Counter()  # by tenant; none is 0
        self._ended_bytes: Counter[str] = Counter()  # by tenant; none is 0
        self.num_bytes = 0  # of all that have ended
        self._running_bytes: Counter[str] = Counter()  # of the records of the others, by tenant; none is 0

    @contextlib.contextmanager
    def room(self, tenant: str, record: bytes) -> Iterator[None]:
        """Hold room for a tenant's record inside the block, which ends with `add` or with nothing. Raises RefusedError
        if the records of what runs, or may, leave none.

        One alone has room. Of more, all may have `max_bytes` together, and beyond that each tenant its share:
        `max_bytes` by the number of tenants that have some. So no tenant can shut out another, and n tenants have at
        most `max_bytes` times 1 + 1/2 + ... + 1/n: 3 times for 11, 6 times for 227.
        """
        running, num_bytes = self._running_bytes, len(record)
        share = self._max_bytes // len(running.keys() | {tenant})
        is_full = running.total() + num_bytes > self._max_bytes and running[tenant] + num_bytes > share
        if record and running and is_full:
            raise RefusedError(
                Reason.RESOURCE_EXHAUSTED,
                f"the records of detached requests that run leave no room for one of {num_bytes} bytes "
                "(--max-detached-bytes); try again later",
            )
        _count(running, tenant, num_bytes)
        try:
            yield
        finally:
            _count(running, tenant, -num_bytes)

    def add(self, active: ActiveRequest, record: bytes = b"") -> None:
        """Take a request that runs, of a name that is not here."""
        key = (active.request.tenant, active.request.request_id)
        self.by_name[key] = Kept(record, active)
        _count(self._running_bytes, key[0], len(record))
        active.on_end = partial(self._end, key)

    def add_record(self, tenant: str, request_id: str, record: bytes) -> None:
        """Keep a record alone for a while. Raises RefusedError if something of that name is here."""
        if (tenant, request_id) in self.by_name:
            raise name_taken(request_id)
        self.by_name[tenant, request_id] = Kept(record, None)
        self._keep((tenant, request_id), len(record))

    def kept(self, tenant: str, request_id: str) -> Kept:
        """Return what has that name. Raises RefusedError if nothing has, but not whether it never was, is another
        tenant's or has expired."""
        try:
            return self.by_name[tenant, request_id]
        except KeyError:
            raise unknown_result(request_id) from None

    def find(self, tenant: str, request_id: str) -> ActiveRequest:
        """Return the request of that name. Raises RefusedError if there is none, as `kept` does."""
        active = self.kept(tenant, request_id).active
        if active is None:
            raise unknown_result(request_id)
        return active

    def forget(self, tenant: str, request_id: str) -> None:
        """Forget what has that name, and abort it if it runs. Raises RefusedError if nothing has."""
        record, active = self.kept(tenant, request_id)
        if (tenant, request_id) in self._ended:
            self._forget((tenant, request_id))
        elif active is not None:
            del self.by_name[tenant, request_id]
            _count(self._running_bytes, tenant, -len(record))
            active.on_end = None
            active.abort()

    def _end(self, key: tuple[str, str]) -> None:
        """Keep a request that has ended, or that has failed: then what is left of it ends now."""
        active = self.find(*key)
        active.cancel()
        num_record_bytes = len(self.by_name[key].record)
        _count(self._running_bytes, key[0], -num_record_bytes)
        self._keep(key, num_record_bytes + sum(output.num_bytes for output in active.outputs))

    def _keep(self, key: tuple[str, str], num_bytes: int) -> None:
        timer = asyncio.get_running_loop().call_later(self._retention, self._forget, key)
        self._ended[key] = timer, num_bytes
        _count(self._num_ended, key[0], 1)
        _count(self._ended_bytes, key[0], num_bytes)
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
        del self.by_name[key]
        self.num_bytes -= num_bytes
        _count(self._num_ended, key[0], -1)
        _count(self._ended_bytes, key[0], -num_bytes)


def _count(amounts: Counter[str], tenant: str, change: int) -> None:
    """Change what a tenant has of something, and forget a tenant that has none."""
    amounts[tenant] += change
    if not amounts[tenant]:
        del amounts[tenant]


def name_taken(request_id: str) -> RefusedError:
    """Return the refusal of a request, or of a record, under a name that something here has."""
    return RefusedError(
        Reason.ALREADY_EXISTS,
        f"a result or a response of request_id {request_id!r} is kept; choose another request_id, or delete it",
        "request_id",
    )


def unknown_result(request_id: str) -> RefusedError:
    """Return the refusal of what is asked of a detached request that is not there, or is another tenant's."""
    return RefusedError(
        Reason.NOT_FOUND,
        f"no detached request {request_id!r} is known for this tenant; results are kept for a while only",
        "request_id",
    )
