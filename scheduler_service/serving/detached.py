"""Detached requests, which run whether or not a client is connected, and records of other requests.

Both are kept for a limited time after their end.
"""

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
    """The entry of one request id: a record and the request, if it is detached. Only clients interpret the record's
    bytes."""

    record: bytes
    active: ActiveRequest | None


class DetachedRequests:
    """The detached requests of all tenants, and records without a request.

    Ended requests and records are kept for a limited time, up to a maximum number and a maximum size.
    """

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """`retention` is in seconds. A single ended entry is kept even if it is larger than `max_bytes`."""
        self._retention = retention
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self.by_name: dict[tuple[str, str], Kept] = {}  # by tenant and request id
        self._ended: dict[tuple[str, str], tuple[asyncio.TimerHandle, int]] = {}  # and size; oldest first
        self._num_ended: Counter[str] = Counter()  # by tenant; never 0
        self._ended_bytes: Counter[str] = Counter()  # by tenant; never 0
        self.num_bytes = 0  # of all ended entries
        self._running_bytes: Counter[str] = Counter()  # of records of running requests, by tenant; never 0

    @contextlib.contextmanager
    def room(self, tenant: str, record: bytes) -> Iterator[None]:
        """Reserve room for a tenant's record inside the block, where the caller may call `add`. Raise RefusedError if
        the records of running and admitted requests leave no room.

        A single record always has room. Otherwise the records of all tenants may have `max_bytes` together. Beyond this
        limit each tenant may have its share: `max_bytes` divided by the number of tenants that have records. So no
        tenant can shut out another tenant. In total, n tenants have at most `max_bytes` times 1 + 1/2 + ... + 1/n: 3
        times for 11 tenants, 6 times for 227.
        """
        running, num_bytes = self._running_bytes, len(record)
        share = self._max_bytes // len(running.keys() | {tenant})
        is_full = running.total() + num_bytes > self._max_bytes and running[tenant] + num_bytes > share
        if record and running and is_full:
            raise RefusedError(
                Reason.RESOURCE_EXHAUSTED,
                f"the records of running detached requests leave no room for a record of {num_bytes} bytes "
                "(--max-detached-bytes); try again later",
            )
        _count(running, tenant, num_bytes)
        try:
            yield
        finally:
            _count(running, tenant, -num_bytes)

    def add(self, active: ActiveRequest, record: bytes = b"") -> None:
        """Add a running request and its record. The id of the request must not be in use."""
        key = (active.request.tenant, active.request.request_id)
        self.by_name[key] = Kept(record, active)
        _count(self._running_bytes, key[0], len(record))
        active.on_end = partial(self._end, key)

    def add_record(self, tenant: str, request_id: str, record: bytes) -> None:
        """Keep a record without a request for the retention time. Raise RefusedError if its id is in use."""
        if (tenant, request_id) in self.by_name:
            raise name_taken(request_id)
        self.by_name[tenant, request_id] = Kept(record, None)
        self._keep((tenant, request_id), len(record))

    def kept(self, tenant: str, request_id: str) -> Kept:
        """Return the entry of a request id. Raise RefusedError if the tenant has no such entry. The error does not
        reveal whether the entry never existed, has expired or belongs to another tenant."""
        try:
            return self.by_name[tenant, request_id]
        except KeyError:
            raise unknown_result(request_id) from None

    def find(self, tenant: str, request_id: str) -> ActiveRequest:
        """Return the detached request with this id. Raise RefusedError if it does not exist, as `kept` does."""
        active = self.kept(tenant, request_id).active
        if active is None:
            raise unknown_result(request_id)
        return active

    def forget(self, tenant: str, request_id: str) -> None:
        """Delete the entry of a request id, and abort its request if it is running. Raise RefusedError if the entry
        does not exist."""
        record, active = self.kept(tenant, request_id)
        if (tenant, request_id) in self._ended:
            self._forget((tenant, request_id))
        elif active is not None:
            del self.by_name[tenant, request_id]
            _count(self._running_bytes, tenant, -len(record))
            active.on_end = None
            active.abort()

    def _end(self, key: tuple[str, str]) -> None:
        """Keep a request that has ended or failed, and end its remaining samples."""
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
        """Return the oldest entry of the tenant with the largest amount. So no tenant can displace the entries of other
        tenants."""
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
    """Add `change` to the tenant's amount, and delete the amount if it becomes 0."""
    amounts[tenant] += change
    if not amounts[tenant]:
        del amounts[tenant]


def name_taken(request_id: str) -> RefusedError:
    """Return the refusal of a request or a record whose id is in use."""
    return RefusedError(
        Reason.ALREADY_EXISTS,
        f"request_id {request_id!r} is in use by a kept result or response; choose another request_id, or delete that "
        "result",
        "request_id",
    )


def unknown_result(request_id: str) -> RefusedError:
    """Return the refusal of an operation on a detached request that does not exist or belongs to another tenant."""
    return RefusedError(
        Reason.NOT_FOUND,
        f"no detached request {request_id!r} exists for this tenant; results are kept only for a limited time",
        "request_id",
    )
