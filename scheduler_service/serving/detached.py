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
    """What the server keeps for one request id: the client's record, and the request if it is a detached request. Only
    clients interpret the bytes of the record."""

    record: bytes
    active: ActiveRequest | None


class DetachedRequests:
    """The detached requests of all tenants, which run whether or not a client is connected, and records that clients
    store without a request.

    Ended requests and records are kept for a limited time, up to a maximum number and a maximum size.
    """

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """Create an empty store of detached requests and records. `retention` is how long an ended request or a record
        is kept, in seconds. `max_bytes` limits the memory of all ended requests and records, and `max_ended` limits
        their number. A single one is kept even if it is larger than `max_bytes`."""
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
        """Reserve memory for a tenant's record inside the block, where the caller may call `add`. Raise RefusedError if
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
        """Add a running detached request and its client's record. The id of the request must not be in use. When the
        request ends, it is kept for the retention time."""
        key = (active.request.tenant, active.request.request_id)
        self.by_name[key] = Kept(record, active)
        _count(self._running_bytes, key[0], len(record))
        active.on_end = partial(self._end, key)

    def add_record(self, tenant: str, request_id: str, record: bytes) -> None:
        """Keep a client's record under this request id, without a request, for the retention time. Raise RefusedError
        if the id is in use."""
        if (tenant, request_id) in self.by_name:
            raise name_taken(request_id)
        self.by_name[tenant, request_id] = Kept(record, None)
        self._keep((tenant, request_id), len(record))

    def kept(self, tenant: str, request_id: str) -> Kept:
        """Return the record and the detached request with this id. Raise RefusedError if the tenant has neither. The
        error does not reveal whether the id never existed, has expired or belongs to another tenant."""
        try:
            return self.by_name[tenant, request_id]
        except KeyError:
            raise unknown_result(request_id) from None

    def find(self, tenant: str, request_id: str) -> ActiveRequest:
        """Return the tenant's detached request with this id. Raise RefusedError if the request does not exist or is no
        longer kept."""
        active = self.kept(tenant, request_id).active
        if active is None:
            raise unknown_result(request_id)
        return active

    def forget(self, tenant: str, request_id: str) -> None:
        """Delete the record and the detached request with this id, and abort the request if it is running. Raise
        RefusedError if the tenant has neither."""
        record, active = self.kept(tenant, request_id)
        if (tenant, request_id) in self._ended:
            self._forget((tenant, request_id))
        elif active is not None:
            del self.by_name[tenant, request_id]
            _count(self._running_bytes, tenant, -len(record))
            active.on_end = None
            active.abort()

    def _end(self, key: tuple[str, str]) -> None:
        """Keep a detached request that has ended or failed for the retention time, and end its remaining samples."""
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
        """Return the key of the ended request or record that is dropped next. It is the oldest one of the tenant with
        the largest amount in `amounts`. So no tenant can displace the results of other tenants."""
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
    """Add `change` to the tenant's amount in a counter, and delete the tenant's entry if the amount becomes 0."""
    amounts[tenant] += change
    if not amounts[tenant]:
        del amounts[tenant]


def name_taken(request_id: str) -> RefusedError:
    """Return the RefusedError for a request or a record whose request id is already in use."""
    return RefusedError(
        Reason.ALREADY_EXISTS,
        f"request_id {request_id!r} is in use by a kept result or response; choose another request_id, or delete that "
        "result",
        "request_id",
    )


def unknown_result(request_id: str) -> RefusedError:
    """Return the RefusedError for an operation on a detached request that does not exist, has expired or belongs to
    another tenant."""
    return RefusedError(
        Reason.NOT_FOUND,
        f"no detached request {request_id!r} exists for this tenant; results are kept only for a limited time",
        "request_id",
    )
