"""Limits on the time and memory of work that client input causes.

On the event loop a call processes pieces of at most PIECE_SIZE bytes or JSON values, which take a few milliseconds.
Only one such piece runs at a time, over all calls, unless it is small. Larger pieces run on a thread, where the tenants
take turns (`Turns`).

A C function that holds the interpreter's lock blocks the event loop even from a thread. Therefore each such call is
limited as well: request bodies by the number of their values (`strict_json.MAX_VALUES`), and responses because they are
written in pieces. The number of waiting bytes is limited for each tenant and in total (`TenantBytes`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from scheduler_service.serving.refusal import Reason, RefusedError

PIECE_SIZE = 64 * 1024
_SMALL_SIZE = 4 * 1024  # smaller pieces run without yielding to the event loop
_NUM_SHORT = 2  # threads for short pieces, and pieces of one tenant on these threads
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class TenantBytes:
    """A counter of the bytes of memory that each tenant's HTTP requests and RPCs use. It enforces a limit for one
    tenant and a limit for all tenants."""

    def __init__(self, what: str, max_bytes: int, max_tenant_bytes: int) -> None:
        """Create a counter that begins at 0 for each tenant. `max_bytes` is the limit for all tenants and
        `max_tenant_bytes` the limit for one tenant. An item of any size is accepted if there is no other item. `what`
        is the plural name of the counted items, such as "texts", for error messages."""
        self._what = what
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._held: Counter[str] = Counter()  # by tenant; absent if 0
        self.num_bytes = 0

    @contextmanager
    def held(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` bytes for the tenant while the block runs. If this would exceed the limit of the tenant or of
        all tenants, raise RefusedError without running the block."""
        self.add(tenant, size)
        try:
            yield
        finally:
            self.remove(tenant, size)

    def add(self, tenant: str, size: int) -> None:
        """Count `size` more bytes for the tenant. Raise RefusedError if this would exceed the limit of the tenant or of
        all tenants."""
        for whose, held, limit in (
            ("this tenant", self._held.get(tenant, 0), self._max_tenant_bytes),
            ("all tenants", self.num_bytes, self._max_bytes),
        ):
            if held and held + size > limit:
                raise RefusedError(
                    Reason.RESOURCE_EXHAUSTED,
                    f"{self._what} of {whose} hold {held} bytes, this one needs {size} more, and the limit is {limit}; "
                    "try again later",
                )
        self._change(tenant, size)

    def remove(self, tenant: str, size: int) -> None:
        self._change(tenant, -size)

    def _change(self, tenant: str, size: int) -> None:
        self.num_bytes += size
        self._held[tenant] += size
        if not self._held[tenant]:
            del self._held[tenant]


@dataclass(slots=True)
class _Queues:
    """The queues of one tenant's work, such as texts to tokenize. A piece of work waits until earlier pieces in its
    queue have ended."""

    short: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _NUM_SHORT))
    long: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))
    on_loop: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))
    num_pieces: int = 0  # waiting and running


class Turns:
    """Threads for CPU work that client input causes, such as tokenization. The tenants use the threads in turn.

    A thread's queue contains at most one piece of work of each tenant. So a piece waits for at most one piece of each
    other tenant, even if another tenant has many. Pieces larger than PIECE_SIZE have a thread of their own.
    """

    def __init__(self, waiting: TenantBytes) -> None:
        self.waiting = waiting
        self._queues: dict[str, _Queues] = {}  # of tenants that have work
        self._loop_piece = asyncio.Lock()  # held by the piece that runs on the event loop
        self._short_threads = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="short work")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="long work")

    def close(self) -> None:
        for threads in (self._short_threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def turn(self, tenant: str, *, is_long: bool) -> AsyncIterator[None]:
        """A context manager for a block that is one piece of a tenant's work. The block begins when it is the tenant's
        turn. Pieces with `is_long` wait in a separate queue."""
        with self._queued(tenant) as queues:
            async with queues.long if is_long else queues.short:
                yield

    @contextmanager
    def _queued(self, tenant: str) -> Iterator[_Queues]:
        """A context manager for a block in which a piece of the tenant's work waits or runs. Its value is the tenant's
        queues, which exist until the tenant's last piece has ended."""
        queues = self._queues.setdefault(tenant, _Queues())
        queues.num_pieces += 1
        try:
            yield queues
        finally:
            queues.num_pieces -= 1
            if not queues.num_pieces:
                del self._queues[tenant]

    async def call(
        self, tenant: str, work: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call `work` on the thread for long work when it is the tenant's turn, and return its result. The method does
        not count the memory of the work; the caller must count it."""
        async with self.turn(tenant, is_long=True):
            return await on_thread(self._long_thread, partial(work, *args, **named))

    async def run(
        self, tenant: str, size: int, work: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call `work` on a thread when it is the tenant's turn, and return its result. `size` is the memory of the work
        in bytes, which counts until `work` returns. Raise RefusedError if the waiting work already has too many
        bytes."""
        with self.waiting.held(tenant, size):
            if size > PIECE_SIZE:
                return await self.call(tenant, work, *args, **named)
            async with self.turn(tenant, is_long=False):
                return await on_thread(self._short_threads, partial(work, *args, **named))

    async def run_in_turn(
        self, tenant: str, size: int, work: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call `work` and return its result. If `size` is at most PIECE_SIZE bytes, `work` runs on the event loop;
        otherwise it runs on a thread, as in `run`. Raise RefusedError if the work waiting for threads already has too
        many bytes."""
        if size > PIECE_SIZE:
            return await self.run(tenant, size, work, *args, **named)
        if size > _SMALL_SIZE:
            with self._queued(tenant) as queues:
                async with queues.on_loop, self._loop_piece:
                    await asyncio.sleep(0)  # let other tasks run between two pieces
                    return work(*args, **named)
        return work(*args, **named)


async def on_thread(threads: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
    """Call `work` on a thread of the pool and return its result.

    If the calling task is cancelled before the work begins, the work never runs, and its objects are freed. If the work
    has begun, the cancellation takes effect only after the work has ended. So the caller does not release its locks and
    memory counts while the work runs.
    """
    waiting = [work]
    submitted = threads.submit(lambda: waiting.pop()())
    try:
        return await asyncio.shield(running := asyncio.wrap_future(submitted))
    except asyncio.CancelledError:
        if submitted.cancel():
            waiting.clear()
        else:
            await asyncio.wait([running])
        raise
