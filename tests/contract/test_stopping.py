"""A service that is told to stop: by which signals, and what it promises to requests that run."""

import asyncio
import os
import signal

import pytest

from pagewire.common import stopping


async def test_every_signal_after_the_first_is_another_one() -> None:
    later: asyncio.Queue[int] = asyncio.Queue()
    stop = stopping.stop_at_signals(later.put_nowait)
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

    monkeypatch.setattr(stopping.logger, "info", tell)
    async with asyncio.timeout(20):
        await stopping.drain(asyncio.Event().wait(), stop_now, limit)
    running = "requests are running: they have {} to end; a second signal ends them at once"
    assert told == ["stopping", *map(running.format, promises)]
