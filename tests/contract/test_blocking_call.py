"""Blocking calls of the client can be interrupted by Ctrl-C at any point, and the client stays usable."""

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import AsyncGenerator, Iterator

import grpc
import pytest

from pagewire import Client, SamplingParams
from pagewire.client import background_loop
from pagewire.client.errors import Unavailable
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.seeds import seeded
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, serving

NUM_INTERRUPTS = 100
TIMEOUT_S = 30.0


@pytest.fixture
def _interruptible() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def talk(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """Yield tokens as fast as the client reads them."""
    for number in itertools.takewhile(lambda _: context.is_active(), itertools.count()):
        yield delta(0, number, [1], " so")


def interrupt_after(seconds: float) -> None:
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()


@pytest.mark.usefixtures("_interruptible")
def test_a_client_goes_on_after_any_interrupt() -> None:
    rng = seeded()
    scheduler = ScriptedScheduler()
    with serving(scheduler) as url, Client(url) as client:
        scheduler.script = talk
        for _ in range(NUM_INTERRUPTS):
            with contextlib.suppress(KeyboardInterrupt):
                for number, _output in enumerate(client.stream("on and on", SamplingParams(), timeout=TIMEOUT_S)):
                    if number == 0:
                        interrupt_after(rng.uniform(0.0, 0.01))
        scheduler.script = scripted_scheduler.tell_story
        told = client.complete("Once upon a time", SamplingParams(), timeout=TIMEOUT_S)
    assert told.outputs[0].text == "".join(scripted_scheduler.WORDS)


@pytest.mark.usefixtures("_interruptible")
def test_a_signal_that_does_not_wake_the_call_ends_it() -> None:
    """Another thread receives the signal, so that it does not interrupt the main thread's wait, as if it had arrived
    just before the wait."""

    async def nothing() -> AsyncGenerator[int, None]:
        waiting.set()
        await asyncio.Event().wait()
        yield 0

    def receive() -> None:
        waiting.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    waiting, receiver = threading.Event(), threading.Thread(target=receive)
    receiver.start()
    with pytest.raises(KeyboardInterrupt):
        list(background_loop.iterate(nothing()))
    receiver.join()


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_failures_come_after_what_was_answered(in_main_thread: bool) -> None:
    def fail(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for number in range(40):
            yield delta(0, number, [1], " so")
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    texts: list[str] = []

    def read(client: Client) -> None:
        with pytest.raises(Unavailable, match=r"^gone$"):
            texts.extend(output.text for output in client.stream("x", SamplingParams()))

    scheduler = ScriptedScheduler()
    scheduler.script = fail
    with serving(scheduler) as url, Client(url) as client:
        if in_main_thread:
            read(client)
        else:
            thread = threading.Thread(target=read, args=(client,))
            thread.start()
            thread.join()
    assert texts == [" so"] * 40
