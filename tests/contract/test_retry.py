"""Retries of client calls: of an unavailable or temporarily overloaded server, but never after output has begun."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, Client
from pagewire.client.retry import Attempts
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, serving

STORY = "".join(scripted_scheduler.WORDS)


async def in_asyncio(client: Client, **options: Any) -> str:
    """Complete a prompt with an asynchronous client that has the settings of `client`. Return the text."""
    async with AsyncClient(client.url, retry=client._client._retry_s) as twin:
        return (await twin.complete("Once", **options)).outputs[0].text


# Each way to complete a prompt.
WAYS: dict[str, Callable[[Client], str]] = {
    "complete": lambda client: client.complete("Once").outputs[0].text,
    "stream": lambda client: "".join(output.text for output in client.stream("Once")),
    "asyncio": lambda client: asyncio.run(in_asyncio(client)),
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once an attempt has failed."""
    event = threading.Event()
    delay_after = Attempts.delay_after

    def observed(self: Attempts, failure: pagewire.PagewireError) -> float | None:
        event.set()
        return delay_after(self, failure)

    monkeypatch.setattr(Attempts, "delay_after", observed)
    return event


def refusing(
    num_times: int, code: grpc.StatusCode, *details: object, reason: str = "not now"
) -> scripted_scheduler.Script:
    """Return a script that refuses the first `num_times` requests, then generates the story."""
    remaining = iter(range(num_times))

    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if next(remaining, None) is not None:
            scripted_scheduler.abort(context, code, reason, *details)
        yield from scripted_scheduler.tell_story(request, context)

    return answer


@ways
def test_a_server_that_is_not_there_yet_is_waited_for(way: str, failed: threading.Event) -> None:
    port = free_port("127.0.0.1")
    results: list[str] = []
    client = Client(f"127.0.0.1:{port}", retry=60)
    asking = threading.Thread(target=lambda: results.append(WAYS[way](client)))
    asking.start()
    assert failed.wait(30)
    with serving(ScriptedScheduler(), port=port):
        asking.join(60)
    assert results == [STORY]


@ways
@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
def test_what_is_refused_for_now_is_tried_again(way: str, code: grpc.StatusCode) -> None:
    scheduler = ScriptedScheduler()
    scheduler.script = refusing(3, code, scripted_scheduler.retry_after(0.01))
    with serving(scheduler) as url:
        assert WAYS[way](Client(url, retry=60)) == STORY
        assert len(scheduler.requests) == 4
        scheduler.script = refusing(1, code)
        with pytest.raises(pagewire.PagewireError, match="not now") as caught:
            WAYS[way](Client(url))
        assert caught.value.code is code


@ways
def test_a_server_at_which_too_many_calls_wait_is_tried_again(way: str) -> None:
    """Retry if too many RPCs wait at the server.

    `tests/system/test_rapid_resets.py` shows gRPC's real status in this case.
    """
    scheduler = ScriptedScheduler()
    scheduler.script = refusing(2, grpc.StatusCode.CANCELLED, reason="CANCELLED")
    with serving(scheduler) as url:
        with pytest.raises(pagewire.Unavailable, match="too many calls wait at 127"):
            WAYS[way](Client(url, retry=0))
        assert WAYS[way](Client(url, retry=60)) == STORY
    assert len(scheduler.requests) == 3


@ways
def test_what_will_not_change_is_not_tried_again(way: str) -> None:
    scheduler = ScriptedScheduler()
    scheduler.script = refusing(1, grpc.StatusCode.INVALID_ARGUMENT)
    with serving(scheduler) as url, pytest.raises(pagewire.InvalidRequest):
        WAYS[way](Client(url, retry=60))
    assert len(scheduler.requests) == 1


@ways
def test_output_that_has_begun_is_not_begun_again(way: str) -> None:
    scheduler = ScriptedScheduler()

    def break_off(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield scripted_scheduler.delta(0, 0, [1], "so")
        scripted_scheduler.abort(context, grpc.StatusCode.UNAVAILABLE, "gone")

    scheduler.script = break_off
    with serving(scheduler) as url, pytest.raises(pagewire.Unavailable, match="gone"):
        WAYS[way](Client(url, retry=60))
    assert len(scheduler.requests) == 1


@ways
def test_the_timeout_covers_all_attempts(way: str) -> None:
    scheduler = ScriptedScheduler()
    scheduler.script = refusing(1_000_000, grpc.StatusCode.UNAVAILABLE, scripted_scheduler.retry_after(0.01))
    ask = {
        "complete": lambda client: client.complete("Once", timeout=0.5),
        "stream": lambda client: list(client.stream("Once", timeout=0.5)),
        "asyncio": lambda client: asyncio.run(in_asyncio(client, timeout=0.5)),
    }[way]
    with serving(scheduler) as url, pytest.raises(pagewire.DeadlineExceeded, match="the timeout passed"):
        ask(Client(url, retry=60))
    assert len(scheduler.requests) > 1


def test_delays_are_the_servers_or_grow() -> None:
    attempts = Attempts(1000.0)
    unasked = pagewire.Unavailable("x", code=grpc.StatusCode.UNAVAILABLE)
    delays = [attempts.delay_after(unasked) for _ in range(7)]
    expected = [0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 2.0]
    for delay, around in zip(delays, expected, strict=True):
        assert delay == pytest.approx(around, rel=0.21)
    asked = pagewire.ResourceExhausted("x", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay=30.0)
    # The delays vary in both directions: 100 random delays on one side have a probability of 2 to the power of -99.
    spread = [attempts.delay_after(asked) or 0.0 for _ in range(100)]
    assert spread == pytest.approx([30.0] * 100, rel=0.21)
    assert min(spread) < 30.0 < max(spread)
    soon_over = Attempts(0.05).delay_after(asked)
    assert soon_over is not None
    assert 0 < soon_over <= 0.05
    assert Attempts(0.0).delay_after(unasked) is None
    assert Attempts(1000.0).delay_after(pagewire.InvalidRequest("x")) is None


async def test_other_calls_wait_too(failed: threading.Event) -> None:
    port = free_port("127.0.0.1")
    async with AsyncClient(f"127.0.0.1:{port}", retry=60) as client:
        asking = asyncio.create_task(client.loads())
        assert await asyncio.to_thread(failed.wait, 30)
        with serving(ScriptedScheduler(), port=port):
            assert (await asking).num_running == 3


async def test_a_submission_whose_answer_was_lost_is_not_queued_twice() -> None:
    scheduler = ScriptedScheduler()
    submitted: list[str] = []

    def submit(request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitResponse:
        request_id = request.request.request_id
        if request_id in submitted:
            scripted_scheduler.abort(context, grpc.StatusCode.ALREADY_EXISTS, "it runs")
        submitted.append(request_id)
        scripted_scheduler.abort(context, grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        raise AssertionError

    scheduler.Submit = submit
    with serving(scheduler) as url:
        async with AsyncClient(url, retry=60) as client:
            assert [await client.submit("Once")] == submitted
            with pytest.raises(pagewire.AlreadyExists):
                await client.submit("Once", request_id="mine")
        async with AsyncClient(url) as client:
            with pytest.raises(pagewire.Unavailable):
                await client.submit("Once")


def test_retry_is_a_number_of_seconds() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="retry is"):
            Client("127.0.0.1:1", retry=wrong)
