"""Stopping a service: the signals, and the time that it promises to running requests."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from pagewire.common.process import shutdown


async def test_every_signal_after_the_first_is_another_one() -> None:
    later: asyncio.Queue[int] = asyncio.Queue()
    stop = shutdown.stop_at_signals(later.put_nowait)
    async with asyncio.timeout(20):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert later.empty()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert await later.get() == number


@pytest.mark.parametrize(("limit", "promises"), [(0.0, []), (0.1, []), (60.0, ["60 s"])])
async def test_only_a_service_that_has_time_promises_some(
    limit: float, promises: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_now, told = asyncio.Event(), list[str]()

    def tell(text: str, *arguments: object) -> None:
        told.append(text % arguments)
        if arguments:
            stop_now.set()

    monkeypatch.setattr(shutdown.logger, "info", tell)
    async with asyncio.timeout(20):
        await shutdown.drain(asyncio.Event().wait(), stop_now, limit)
    running = "requests are still running: waiting up to {} for them; a second signal ends them at once"
    assert told == ["stopping", *map(running.format, promises)]


# The handler ends in the same step of the event loop as the loop itself, long after its server.
_LAST_CALL = """
import asyncio, grpc.aio
from pagewire.common.process.shutdown import run_to_completion

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.call)

    async def call(self, requests, context):
        await context.write(b"begun")
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

async def serve():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.stream_stream("/a/b")().read()
        await server.stop(0)
    may_end.set()
    return 7

may_end = asyncio.Event()
print(asyncio.run(run_to_completion(serve())))
"""


def test_the_last_call_of_a_service_ends_without_a_traceback() -> None:
    program = [sys.executable, "-c", _LAST_CALL]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "7\n", "")
