"""The number of source files through which a request passes in client and scheduler.

It equals the number of files that a reader must open in order to follow a request.
"""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.common.wire.messages import StepPlan
from scheduler_service import front_end, server
from scheduler_service.serving.activity import Activity
from testing import fake_worker
from testing.scheduler_stack import serve
from testing.serving.http_server import make_chat_checkpoint, serve_http
from testing.sources import ROOT

PRODUCT = tuple(f"{ROOT}/{folder}/" for folder in ("pagewire", "scheduler_service"))
MAX_FILES_OF_A_TOKEN = 34
# Including `turns.py`, the queue for all work on texts, and `messages.py`, which only the fake worker enters.
MAX_FILES_OF_A_REQUEST = 51
# Of a chat over HTTP, in front end and scheduler together: before the worker gets its plan, for a token, and in total.
MAX_FILES_OF_A_CHAT = 60, 43, 67
# The service to which the running code belongs. Tasks and callbacks inherit the context of the code that starts them.
SERVICES = ("front end", "scheduler")
SERVICE: ContextVar[str] = ContextVar("service", default="neither")


class Entered:
    """Records the product's files in which a function is called, on any thread.

    Attributes:
        files: pairs of the service that called the function and the file.
    """

    def __init__(self) -> None:
        self.files: set[tuple[str, str]] = set()

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.files}

    def take(self) -> set[tuple[str, str]]:
        """Return the files recorded so far, and start an empty record."""
        files, self.files = self.files, set()
        return files

    def called(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PRODUCT) and "/gen/" not in name:
            self.files.add((SERVICE.get(), name.removeprefix(f"{ROOT}/")))


@contextmanager
def entered() -> Iterator[Entered]:
    """Record the product's files that are entered inside the block, on this thread and threads started in the block."""
    files = Entered()
    before = sys.getprofile()
    threading.setprofile(files.called)
    sys.setprofile(files.called)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@pytest.fixture(autouse=True)
def activity_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the timer that reads the scheduler's counters every second. On a slow machine each request takes longer than
    a second, so that every request would seem to enter the timer's files."""

    async def wait(_: Activity) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Activity, "run", wait)


async def test_a_request_enters_few_files(checkpoint: Path) -> None:
    """Count the files that every one of several requests enters, because timers of the server enter
    others at any time.
    """
    sampling = SamplingParams(max_tokens=60, temperature=0.5, seed=1, ignore_eos=True)
    requests, tokens = [], []
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        await client.complete("once", sampling)  # so that work done only once is complete
        stack.worker.step_seconds = 0.005
        for prompt in ("once upon", "a little", "hello"):
            with entered() as beginning:
                stream = client.stream(prompt, sampling)
                for _ in range(10):
                    await anext(stream)
            with entered() as steady:
                for _ in range(20):
                    await anext(stream)
            with entered() as end:
                async for _ in stream:
                    pass
            requests.append(beginning.names | steady.names | end.names)
            tokens.append(steady.names)
    of_request, of_token = set.intersection(*requests), set.intersection(*tokens)
    print(*sorted(of_request), sep="\n")
    print(f"{len(of_token)} files of a token, {len(of_request)} of a request")
    assert len(of_token) <= MAX_FILES_OF_A_TOKEN
    assert len(of_request) <= MAX_FILES_OF_A_REQUEST
    assert "scheduler_service/core/scheduler.py" in of_token
    assert "scheduler_service/serving/intake.py" in of_request - of_token


def in_service(name: str, run: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
    """Return `run` with the service's name in its context."""

    async def run_named(*args: Any, **named: Any) -> int:
        SERVICE.set(name)
        return await run(*args, **named)

    return run_named


def submit_in_context(
    threads: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, submit: Any = ThreadPoolExecutor.submit
) -> Future[Any]:
    return submit(threads, copy_context().run, work, *args)


@pytest.fixture
def services_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the code of each service the service's name in its context, on other threads too."""
    monkeypatch.setattr(server, "run", in_service("scheduler", server.run))
    monkeypatch.setattr(front_end, "run", in_service("front end", front_end.run))
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_in_context)


@pytest.mark.usefixtures("services_are_known")
async def test_a_chat_over_http_enters_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the files that every one of several streamed chats enters.

    The files are counted before the worker receives its first plan, while tokens arrive, and in total.
    """
    before, tokens, chats = [], [], []
    decode = fake_worker.decode_request

    def decode_noted(message: Any) -> StepPlan:
        plan = decode(message)
        if plan.openings:
            before.append(files.take())
        return plan

    # Also record threads that start before the first chat.
    with entered() as files:
        async with serve_http(make_chat_checkpoint(tmp_path / "chatty")) as http:
            await http.chat("once")  # so that work done only once is complete
            http.stack.worker.step_seconds = 0.005
            monkeypatch.setattr(fake_worker, "decode_request", decode_noted)
            for content in ("once upon", "a little", "hello"):
                files.take()
                asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, "stream": True}
                async with http.client.stream("POST", "/v1/chat/completions", json=asked | {"seed": 1}) as answer:
                    events = (line async for line in answer.aiter_lines() if line.startswith("data: {"))
                    for _ in range(10):
                        await anext(events)
                    beginning = files.take()
                    for _ in range(20):
                        await anext(events)
                    tokens.append(files.take())
                    async for _ in events:
                        pass
                chats.append(before[-1] | beginning | tokens[-1] | files.take())
    counts = [count_shown(*each) for each in (("before the worker", before), ("a token", tokens), ("a chat", chats))]
    assert all(count <= most for count, most in zip(counts, MAX_FILES_OF_A_CHAT, strict=True)), counts
    of_chat = set.intersection(*chats)
    assert {
        ("front end", f"scheduler_service/{name}.py") for name in ("api/http/answering", "serving/intake")
    } < of_chat
    assert ("scheduler", "scheduler_service/core/scheduler.py") in set.intersection(*tokens)


def count_shown(title: str, found: Sequence[set[tuple[str, str]]]) -> int:
    """Print the files that are in every set of `found`. Return the number of these files."""
    entered_in = {name: {file for each, file in set.intersection(*found) if each == name} for name in SERVICES}
    for name, files in entered_in.items():
        print(f"{title}: {len(files)} files of the {name}", *sorted(files), sep="\n  ")
    files = set.union(*entered_in.values())
    print(f"{title}: {len(files)} files in all")
    return len(files)
