"""Bounds on the work that what clients send causes, in time and memory.

The rule: a call works on the event loop with pieces of at most PIECE_SIZE bytes or JSON values, which take some
milliseconds, one piece of all calls at a time unless it is small. Everything larger runs on a thread, in turns by
tenant (`Turns`). A C function that keeps the interpreter's lock stops the event loop from a thread too, so each such
call is bounded as well: bodies by the number of their values (`strict_json.MAX_VALUES`), answers by being written in
pieces. The bytes that wait are limited for each tenant and for all (`TenantBytes`).
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
_SMALL_SIZE = 4 * 1024  # of pieces that any number of may run before the event loop does anything else
_NUM_SHORT = 2  # threads of short pieces, and pieces of one tenant on them
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class TenantBytes:
    """The bytes that the calls of each tenant hold, with a limit for one tenant and for all."""

    def __init__(self, what: str, max_bytes: int, max_tenant_bytes: int) -> None:
        """`what` names the things counted, in the plural. A single one is admitted whatever its size."""
        self._what = what
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._held: Counter[str] = Counter()  # by tenant; absent if 0
        self.num_bytes = 0

    @contextmanager
    def held(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` bytes inside the block. Raises RefusedError for the tenant that would exceed its limit."""
        self.add(tenant, size)
        try:
            yield
        finally:
            self.remove(tenant, size)

    def add(self, tenant: str, size: int) -> None:
        """Raises RefusedError."""
        for whose, held, limit in (
            ("this tenant", self._held.get(tenant, 0), self._max_tenant_bytes),
            ("all tenants", self.num_bytes, self._max_bytes),
        ):
            if held and held + size > limit:
                raise RefusedError(
                    Reason.RESOURCE_EXHAUSTED,
                    f"{self._what} of {whose} with {held} bytes wait, this one has {size}, and the limit is {limit}; "
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
    """One tenant's pieces of work, each of which waits for those before it."""

    short: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _NUM_SHORT))
    long: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))
    on_loop: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))
    num_pieces: int = 0  # waiting and running


class Turns:
    """Threads that tenants use in turn.

    Each thread's queue holds one piece of a tenant at most, so another tenant's piece waits for one of them, however
    many that tenant has. Pieces larger than PIECE_SIZE are long, and have a thread of their own.
    """

    def __init__(self, waiting: TenantBytes) -> None:
        self.waiting = waiting
        self._queues: dict[str, _Queues] = {}  # of tenants that have work
        self._loop_piece = asyncio.Lock()  # of the one that runs on the event loop
        self._short_threads = ThreadPoolExecutor(_NUM_SHORT, thread_name_prefix="short work")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="long work")

    def close(self) -> None:
        for threads in (self._short_threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def turn(self, tenant: str, *, is_long: bool) -> AsyncIterator[None]:
        """Wait until one more piece of the tenant may run, and run it inside the block."""
        with self._queued(tenant) as queues:
            async with queues.long if is_long else queues.short:
                yield

    @contextmanager
    def _queued(self, tenant: str) -> Iterator[_Queues]:
        """Count a piece of the tenant inside the block."""
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
        """Call `work`, a long piece whose bytes are counted elsewhere, on a thread in the tenant's turn."""
        async with self.turn(tenant, is_long=True):
            return await on_thread(self._long_thread, partial(work, *args, **named))

    async def run(
        self, tenant: str, size: int, work: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call `work` on a thread in the tenant's turn, with `size` bytes counted until it returns. Raises
        RefusedError."""
        with self.waiting.held(tenant, size):
            if size > PIECE_SIZE:
                return await self.call(tenant, work, *args, **named)
            async with self.turn(tenant, is_long=False):
                return await on_thread(self._short_threads, partial(work, *args, **named))

    async def carry_out(
        self, tenant: str, size: int, work: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call `work` on the event loop if its size is at most PIECE_SIZE, else as `run` does. Raises RefusedError."""
        if size > PIECE_SIZE:
            return await self.run(tenant, size, work, *args, **named)
        if size > _SMALL_SIZE:
            with self._queued(tenant) as queues:
                async with queues.on_loop, self._loop_piece:
                    await asyncio.sleep(0)  # between two pieces others have their turn
                    return work(*args, **named)
        return work(*args, **named)


async def on_thread(threads: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
    """Call `work` on a thread. If the caller is cancelled, work that has not begun is dropped with all that it holds;
    work that has begun is waited for, so that its turn and its bytes are not given back while it goes on."""
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
