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
    """The data that the server keeps for one request id: a record of bytes that a client has stored, and the request if
    it is a detached request. The server does not interpret the record."""

    record: bytes
    active: ActiveRequest | None


class DetachedRequests:
    """A store of detached requests, which run whether or not a client is connected. It also stores records (bytes that
    clients send), with or without a request.

    Ended requests and records remain for a limited time. Their number and total size are limited too.
    """

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """Create an empty store. `retention` is the time in seconds for which an ended request or a record is kept.
        `max_bytes` limits the memory of all ended requests and records, and `max_ended` limits their number. The last
        remaining one is kept even if it is larger than `max_bytes`."""
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
        """Reserve memory for a tenant's record while the block runs. The caller may call `add` in the block. Raise
        RefusedError if the records of running and admitted requests use too much memory.

        A record of any size is accepted if no other running or admitted request has a record. Otherwise the records of
        all tenants may use `max_bytes` together. A tenant may exceed this limit up to its own share: `max_bytes`
        divided by the number of tenants that have records. So no tenant can use the memory that another tenant needs.
        In total, n tenants use at most `max_bytes` times 1 + 1/2 + ... + 1/n: 3 times for 11 tenants, 6 times for 227.
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
        """Add a running detached request and its client's record. The id of the request must not be in use. When the
        request ends, its output remains in the store for the retention time."""
        key = (active.request.tenant, active.request.request_id)
        self.by_name[key] = Kept(record, active)
        _count(self._running_bytes, key[0], len(record))
        active.on_end = partial(self._end, key)

    def add_record(self, tenant: str, request_id: str, record: bytes) -> None:
        """Store a client's record under this request id for the retention time, without a request. Raise RefusedError
        if the id is in use."""
        if (tenant, request_id) in self.by_name:
            raise name_taken(request_id)
        self.by_name[tenant, request_id] = Kept(record, None)
        self._keep((tenant, request_id), len(record))

    def kept(self, tenant: str, request_id: str) -> Kept:
        """Return the record and the detached request with this id. Raise RefusedError if the tenant has no record and
        no detached request with this id. The error does not reveal whether the id never existed, has expired or belongs
        to another tenant."""
        try:
            return self.by_name[tenant, request_id]
        except KeyError:
            raise unknown_result(request_id) from None

    def find(self, tenant: str, request_id: str) -> ActiveRequest:
        """Return the tenant's detached request with this id. Raise RefusedError if the request does not exist or was
        deleted after its retention time."""
        active = self.kept(tenant, request_id).active
        if active is None:
            raise unknown_result(request_id)
        return active

    def forget(self, tenant: str, request_id: str) -> None:
        """Delete the record and the detached request with this id, and abort the request if it is running. Raise
        RefusedError if the tenant has no record and no detached request with this id."""
        record, active = self.kept(tenant, request_id)
        if (tenant, request_id) in self._ended:
            self._forget((tenant, request_id))
        elif active is not None:
            del self.by_name[tenant, request_id]
            _count(self._running_bytes, tenant, -len(record))
            active.on_end = None
            active.abort()

    def _end(self, key: tuple[str, str]) -> None:
        """Start the retention time of a detached request that has ended or failed, and end its remaining samples."""
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
            self._forget(self._next_to_drop(self._num_ended))
        while self.num_bytes > self._max_bytes and len(self._ended) > 1:
            self._forget(self._next_to_drop(self._ended_bytes))

    def _next_to_drop(self, amounts: Counter[str]) -> tuple[str, str]:
        """Return the key of the ended request or record to delete when the store is full: the oldest entry of the
        tenant with the largest amount in `amounts`. An amount is a tenant's number or size of ended entries. So no
        tenant can displace the results of other tenants."""
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
    """Add `change` to a tenant's amount in a counter. Delete the tenant's entry if the amount becomes 0."""
    amounts[tenant] += change
    if not amounts[tenant]:
        del amounts[tenant]


def name_taken(request_id: str) -> RefusedError:
    """Return the error for a new request or record whose request id is already in use."""
    return RefusedError(
        Reason.ALREADY_EXISTS,
        f"request_id {request_id!r} is in use by a kept result or response; choose another request_id, or delete that "
        "result",
        "request_id",
    )


def unknown_result(request_id: str) -> RefusedError:
    """Return the error for an operation on a detached request that does not exist, has expired or belongs to another
    tenant."""
    return RefusedError(
        Reason.NOT_FOUND,
        f"no detached request {request_id!r} exists for this tenant; results are kept only for a limited time",
        "request_id",
    )
