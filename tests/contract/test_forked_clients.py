"""Clients in a forked process open new connections, or raise an error that explains why they cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagewire.client import channels
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, serving

ROOT = Path(__file__).parents[2]
NUM_FORKS = 3
# Each program has `url`, sets `use`, which each child calls, and sets a function for the parent to call afterwards.
BEGIN = """
import asyncio, os, sys, threading
from pagewire import AsyncClient, Client, PagewireError
url = sys.argv[1]
text = lambda client: client.complete("Once").outputs[0].text

async def ask():
    async with AsyncClient(url) as client:
        return (await client.complete("Once")).outputs[0].text
"""
END = """
for _ in range(%d):
    child = os.fork()
    if child == 0:
        try:
            print(use(), flush=True)
        except PagewireError as error:
            print("error:", error, flush=True)
        sys.exit(5)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 5, status
    assert after()
"""
FRESH = {
    "a client that is idle": "client = Client(url); text(client); use = after = lambda: text(client)",
    "another client": "client = Client(url); text(client); use = lambda: text(Client(url)); after = client.info",
    "with asyncio, closed": "asyncio.run(ask()); use = after = lambda: asyncio.run(ask())",
    "with asyncio, of a loop that has ended": (
        "client = AsyncClient(url); asyncio.run(client.complete('Once')); "
        "use = lambda: asyncio.run(client.complete('Once')).outputs[0].text; after = lambda: asyncio.run(ask())"
    ),
    "never used before": "client = Client(url); use = lambda: text(client); after = lambda: True",
    "another call": "client = Client(url); text(client); use = lambda: client.info().version; after = client.info",
    "with asyncio, calls that shared one": (
        "async def ask():\n    async with AsyncClient(url) as client:\n"
        "        await asyncio.gather(*(client.complete('Once') for _ in range(3)))\n"
        "        return (await client.complete('Once')).outputs[0].text\n"
        "asyncio.run(ask()); use = after = lambda: asyncio.run(ask())"
    ),
    "a list that failed": (
        "client = Client(url)\ntry: client.complete(['Once', 'Once'])\nexcept PagewireError: pass\n"
        "use = after = lambda: text(client)"
    ),
    "closed": "client = Client(url); text(client); use = lambda: client.close() or text(client); after = use",
}
REFUSED = {
    "a stream is read": (
        "client = Client(url); stream = client.stream('on and on'); next(stream); "
        "use = lambda: text(client); after = lambda: next(stream)"
    ),
    "by the stream itself": (
        "client = Client(url); stream = client.stream('on and on'); next(stream); "
        "use = lambda: [None for _ in stream]; after = lambda: next(stream)"
    ),
    "an AsyncClient is open": (
        "client = AsyncClient(url); loop = asyncio.new_event_loop(); run = loop.run_until_complete; "
        "run(client.complete('Once')); use = after = lambda: run(client.complete('Once'))"
    ),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    def answer(request: object, context: object) -> object:
        endless = request.text == "on and on"
        return (scripted_scheduler.never_end if endless else scripted_scheduler.tell_story)(request, context)

    scheduler = ScriptedScheduler()
    scheduler.script = answer
    with serving(scheduler) as address:
        yield address


def run(url: str, program: str) -> list[str]:
    """Run a program that forks. Return the lines that its children print."""
    command = [
        sys.executable,
        "-W",
        "ignore:This process:DeprecationWarning",
        "-c",
        f"{BEGIN}\n{program}\n{END % NUM_FORKS}",
        url,
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    # gRPC itself logs the forks that it does not support.
    assert [line for line in ended.stderr.splitlines() if "fork_posix.cc" not in line] == []
    return ended.stdout.splitlines()


@pytest.mark.parametrize("case", FRESH)
def test_a_child_has_connections_of_its_own(url: str, case: str) -> None:
    story = "1" if case == "another call" else "".join(scripted_scheduler.WORDS)
    assert run(url, FRESH[case]) == [story] * NUM_FORKS


@pytest.mark.parametrize("case", REFUSED)
def test_a_child_that_cannot_have_any_says_so(url: str, case: str) -> None:
    lines = run(url, REFUSED[case])
    assert len(lines) == NUM_FORKS
    assert all(line.startswith("error: ") and "this process was forked" in line for line in lines)


def test_what_calls_leave_late_is_collected_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the last object of a call may become garbage after its channel was closed.

    Until it is collected, it keeps gRPC's threads running, which then need some time to end.
    """
    collected: list[None] = []
    slept: list[float] = []
    monkeypatch.setattr(channels.gc, "collect", lambda: collected.append(None))
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    monkeypatch.setattr(channels, "_has_grpc_threads", lambda: len(collected) < 3 or sum(slept) < 0.95)
    monkeypatch.setattr(channels, "_has_opened", True)
    monkeypatch.setattr(channels, "_open_connections", set())
    channels._before_fork()
    channels._forking.release()
    assert not channels._inherits
