"""Runs asynchronous code for threads that block, on one event loop in the background of the process.

Ctrl-C raises its exception in the main thread wherever that is, and a lock that gRPC or asyncio takes just then is
never freed. So a thread waits for what comes from the loop in a queue, which no exception harms.
"""

import asyncio
import atexit
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

import grpc

from pagewire.client.errors import PagewireError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items that wait for the thread that takes them. The loop is told of room once half of them are taken.
MAX_READ_AHEAD = 64

# The task that keeps the loop running, as long as this process has one.
_current: asyncio.Task[None] | None = None
_starting = threading.Lock()


def run(function: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs the coroutine of a function on the loop, where it is made. An exception in this thread cancels it."""

    async def result() -> AsyncGenerator[Result, None]:
        yield await function()

    with contextlib.closing(iterate(result())) as results:
        return next(results)


def finish(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs what closes things of the loop, if there is one: without, nothing is open."""
    if _current is not None:
        run(function)


def begin(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Does the same in the background, for what must not wait."""
    if _current is not None:
        _call(_current, lambda: asyncio.ensure_future(function()))


def iterate(items: AsyncGenerator[Item, None]) -> Generator[Item, None, None]:
    """Yields what an asynchronous generator yields on the loop, where it is read a bounded number of items ahead. It
    ends with this one."""
    background = _started()
    tasks: list[asyncio.Future[None]] = []
    # Items, each in a tuple, and at the end the exception that ended them, or None.
    inbox: queue.SimpleQueue[tuple[Item] | BaseException | None] = queue.SimpleQueue()
    has_room = asyncio.Event()

    async def read() -> None:
        failure: BaseException | None = None
        try:
            async with contextlib.aclosing(items):
                async for item in items:
                    inbox.put((item,))
                    if inbox.qsize() >= MAX_READ_AHEAD:
                        has_room.clear()
                        await has_room.wait()
        except BaseException as error:
            failure = error
        inbox.put(failure)

    try:
        _call(background, lambda: tasks.append(asyncio.ensure_future(read())))
        while background is _current:
            taken = inbox.get()
            if taken is None:
                return
            if isinstance(taken, BaseException):
                raise taken
            if inbox.qsize() == MAX_READ_AHEAD // 2:
                _call(background, has_room.set)
            yield taken[0]
    finally:
        _call(background, lambda: [task.cancel() for task in tasks])
    message = "the call was begun before this process was forked, and goes on in its parent alone"
    raise PagewireError(message, code=grpc.StatusCode.FAILED_PRECONDITION)


def _call(background: asyncio.Task[None], function: Callable[[], object]) -> None:
    """Calls a function on a loop, if this process still has it."""
    if background is _current:
        background.get_loop().call_soon_threadsafe(function)


def _started() -> asyncio.Task[None]:
    global _current
    with _starting:
        if _current is None:
            started: queue.SimpleQueue[asyncio.Task[None]] = queue.SimpleQueue()
            threading.Thread(target=asyncio.run, args=(_run(started),), name="pagewire", daemon=True).start()
            _current = started.get()
        return _current


async def _run(started: "queue.SimpleQueue[Any]") -> None:
    started.put(asyncio.current_task())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def _end() -> None:
    """Ends the loop before the interpreter ends, which would stop its thread anywhere."""
    global _current
    if _current is not None:
        _call(_current, _current.cancel)
        _current = None
        for thread in threading.enumerate():
            if thread.name == "pagewire":
                thread.join()


def _forget() -> None:
    """Forgets, in a process that was just forked, the loop of its parent: its thread is not here. Nor does this process
    end its tasks, of which asyncio would complain."""
    global _current, _starting
    if _current is not None:
        _current.get_loop().set_exception_handler(lambda loop, context: None)
    _current = None
    _starting = threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
