"""One event loop on a background thread, which runs asynchronous code for blocking callers.

Ctrl-C raises KeyboardInterrupt in the main thread at any point. A lock that gRPC or asyncio acquires at that moment
would never be released. Therefore blocking callers never run gRPC or asyncio code. They wait for results in a queue,
which an exception cannot corrupt.
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
from pagewire.common.process.event_loop import call_from_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

# The number of unread items at which the generator on the loop pauses. It continues when half of the items have been
# read.
MAX_READ_AHEAD = 64
# A signal that arrives just before a wait begins does not interrupt it, and its handler runs only after the wait.
_MAX_WAIT_S = 0.5

# The task that keeps the loop running, or None while this process has no loop.
_current: asyncio.Task[None] | None = None
_starting = threading.Lock()


def run(function: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine function on the background event loop from blocking code, and return the result.

    An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine.
    """

    async def result() -> AsyncGenerator[Result, None]:
        yield await function()

    with contextlib.closing(iterate(result())) as results:
        return next(results)


def finish(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a cleanup coroutine on the background event loop and wait for it.

    Do nothing if the loop has not been started, since then nothing is open.
    """
    if _current is not None:
        run(function)


def begin(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start a cleanup coroutine on the background event loop without waiting for it.

    Do nothing if the loop has not been started.
    """
    if _current is not None:
        _call(_current, lambda: asyncio.ensure_future(function()))


def iterate(items: AsyncGenerator[Item, None]) -> Generator[Item, None, None]:
    """Yield the items of an asynchronous generator to blocking code. The asynchronous generator runs on the background
    event loop.

    The loop reads at most MAX_READ_AHEAD items ahead. Closing this generator closes the asynchronous generator. Raise
    PagewireError in a process that was forked after the iteration began.
    """
    background = _started()
    tasks: list[asyncio.Future[None]] = []
    # Each item is wrapped in a tuple. The last entry is the exception that ended the generator, or None.
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
            try:
                taken = inbox.get(timeout=_MAX_WAIT_S)
            except queue.Empty:
                continue
            if taken is None:
                return
            if isinstance(taken, BaseException):
                raise taken
            if inbox.qsize() == MAX_READ_AHEAD // 2:
                _call(background, has_room.set)
            yield taken[0]
    finally:
        _call(background, lambda: [task.cancel() for task in tasks])
    message = "the call began before this process was forked, and continues only in the parent"
    raise PagewireError(message, code=grpc.StatusCode.FAILED_PRECONDITION)


def _call(background: asyncio.Task[None], function: Callable[[], object]) -> None:
    """Schedule a function on the background event loop. Do nothing if the loop belongs to the parent of this forked
    process."""
    if background is _current:
        call_from_thread(background.get_loop(), function)


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
    """Stop the background event loop before the interpreter exits. Otherwise, the exit would stop the loop's thread at
    an arbitrary point."""
    global _current
    if _current is not None:
        _call(_current, _current.cancel)
        _current = None
        for thread in threading.enumerate():
            if thread.name == "pagewire":
                thread.join()


def _drop_inherited_loop() -> None:
    """Drop the background event loop that a forked process inherited from its parent. The thread that runs the loop
    does not exist in the child.

    The tasks of the loop are not cancelled here. An exception handler that does nothing keeps asyncio from reporting
    them.
    """
    global _current, _starting
    if _current is not None:
        _current.get_loop().set_exception_handler(lambda loop, context: None)
    _current = None
    _starting = threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_drop_inherited_loop)
