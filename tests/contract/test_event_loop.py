"""The front end's event loop handles a few ready sockets at a time, and then looks at all other due callbacks.

Threads may call a loop at any time, also after its end.
"""

import asyncio
import socket
import threading
import time

import pytest

from pagewire.common.process.event_loop import MAX_EVENTS, call_from_thread, few_events_loop
from worker_service.engine import Engine, LoadedWorker


async def _count_while_all_are_ready(num: int) -> tuple[list[int], list[bytes]]:
    """Let `num` sockets become readable at once.

    Returns how many sockets were read between two iterations of the loop, and the bytes in the order of reading.
    """
    loop = asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(num)]
    read: list[bytes] = []
    counts: list[int] = []

    def take(end: socket.socket) -> None:
        read.append(end.recv(8))
        loop.remove_reader(end)

    for number, (mine, other) in enumerate(pairs):
        mine.setblocking(False)
        other.send(str(number).encode())
        loop.add_reader(mine, take, mine)
    async with asyncio.timeout(10):
        while len(read) < num:
            before = len(read)
            await asyncio.sleep(0)
            counts.append(len(read) - before)
    for pair in pairs:
        for end in pair:
            end.close()
    return counts, read


def test_a_crowd_that_is_ready_at_once_is_served_a_few_at_a_time() -> None:
    num = 5 * MAX_EVENTS
    with asyncio.Runner(loop_factory=few_events_loop) as runner:
        counts, read = runner.run(_count_while_all_are_ready(num))
    assert max(counts) <= MAX_EVENTS
    assert sorted(read, key=int) == [str(number).encode() for number in range(num)]


def test_always_ready_sockets_do_not_starve_others() -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(2 * MAX_EVENTS)]
        seen: set[socket.socket] = set()
        for mine, other in pairs:
            other.send(b"x")  # the byte is never read
            loop.add_reader(mine, seen.add, mine)
        rounds = 0
        async with asyncio.timeout(10):
            while len(seen) < len(pairs):
                await asyncio.sleep(0)
                rounds += 1
        for pair in pairs:
            loop.remove_reader(pair[0])
            for end in pair:
                end.close()
        return rounds

    with asyncio.Runner(loop_factory=few_events_loop) as runner:
        assert runner.run(run()) <= 4


def test_timers_and_writes_are_not_delayed() -> None:
    async def run() -> bytes:
        begun = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - begun >= 0.01
        server = await asyncio.start_server(lambda reader, writer: writer.write(b"x" * 4_000_000), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(10):
                return await reader.readexactly(4_000_000)
        finally:
            writer.close()
            server.close()

    with asyncio.Runner(loop_factory=few_events_loop) as runner:
        assert runner.run(run()) == b"x" * 4_000_000


def test_a_thread_calls_a_loop() -> None:
    async def run() -> str:
        loop = asyncio.get_running_loop()
        called: asyncio.Future[str] = loop.create_future()
        thread = threading.Thread(target=call_from_thread, args=(loop, called.set_result, "from a thread"))
        thread.start()
        async with asyncio.timeout(10):
            return await called

    assert asyncio.run(run()) == "from a thread"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_is_loaded_after_the_loops_end_is_no_error() -> None:
    """As at Ctrl-C while a worker loads."""
    has_ended = threading.Event()
    errors: list[Exception | None] = []

    def load() -> LoadedWorker:
        has_ended.wait(10)
        raise ValueError("the model cannot be loaded")

    async def run() -> Engine:
        loop = asyncio.get_running_loop()
        engine = Engine(load)
        engine.start(lambda error: call_from_thread(loop, errors.append, error))
        return engine

    engine = asyncio.run(run())
    has_ended.set()
    assert engine.stop(10)
