"""Behavior common to all calls of both clients: names, timeouts, argument errors and closing."""

import asyncio
import contextlib
import gc
import inspect
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import grpc
import numpy
import pytest

import pagewire
from pagewire import AsyncClient, Client, SamplingParams, Session
from pagewire.client import background_loop, channels, client
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, serving

NO_SERVER = "127.0.0.1:1"
HELLO = {"role": "user", "content": "Once"}
# Each call with valid arguments.
CALLS: dict[str, tuple[Any, ...]] = {
    "stream": ("Once",),
    "complete": ("Once",),
    "embed": ("Once",),
    "chat": ([HELLO],),
    "tokenize": ("Once",),
    "detokenize": ([1],),
    "submit": ("Once",),
    "attach": ("id",),
    "result": ("id",),
    "get_request": ("id",),
    "abort": ("id",),
    "info": (),
    "blocks": (),
    "loads": (),
}
# The same calls, and calls with lists of prompts.
WAYS = [*CALLS.items(), ("complete", (["Once", [1]],)), ("embed", (["Once", [1]],))]
FORMER_NAMES = ("generate", "acomplete", "achat", "aembed", "atokenize", "adetokenize", "server_info")


def public_calls(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} - {"close", "aclose"}


async def whole(call: Any) -> Any:
    """Await the result of a call, or read all of its items."""
    if inspect.isasyncgen(call):
        return [item async for item in call]
    return await call


def ask(kind: type, url: str, name: str, *arguments: Any, retry: float = 0.0, **options: Any) -> Any:
    """Make a call with a new client of either kind. Return its result."""
    if kind is AsyncClient:

        async def call() -> Any:
            async with AsyncClient(url, retry=retry) as client:
                return await whole(getattr(client, name)(*arguments, **options))

        return asyncio.run(call())
    with Client(url, retry=retry) as client:
        returned = getattr(client, name)(*arguments, **options)
        return list(returned) if inspect.isgenerator(returned) else returned


def closed() -> Any:
    return pytest.raises(pagewire.Cancelled, match="the client was closed")


kinds = pytest.mark.parametrize("kind", [Client, AsyncClient])


def test_both_have_the_same_calls() -> None:
    assert public_calls(Client) == public_calls(AsyncClient) == set(CALLS)
    for name in CALLS:
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert list(ours.parameters.values())[1:] == list(theirs.parameters.values())[1:]
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__


@kinds
@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_former_name_says_the_new_one(kind: type, name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use (stream|info|{name[1:]})") as caught:
        getattr(kind(NO_SERVER), name)
    assert caught.value.name == name
    assert not hasattr(kind(NO_SERVER), "unheard_of")


async def test_wrong_client_kind_has_a_helpful_error() -> None:
    with pytest.raises(TypeError, match="for `async with`, use AsyncClient"):
        async with Client(NO_SERVER):
            pass
    with pytest.raises(TypeError, match="for `with`, use Client"), AsyncClient(NO_SERVER):
        pass
    with pytest.raises(AttributeError, match="use close, or aclose of AsyncClient"):
        await Client(NO_SERVER).aclose()
    with pytest.raises(AttributeError, match="use aclose"):
        AsyncClient(NO_SERVER).close()


@kinds
@pytest.mark.parametrize(("name", "arguments"), WAYS)
def test_the_timeout_wins_over_retry(kind: type, name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(pagewire.DeadlineExceeded, match="the timeout passed"):
        ask(kind, NO_SERVER, name, *arguments, retry=3600, timeout=0.15)


@kinds
def test_the_timeout_wins_over_the_delay_that_a_server_asks_for(kind: type) -> None:
    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        delay = scripted_scheduler.retry_after(3600)
        scripted_scheduler.abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", delay)
        yield from ()

    scheduler = ScriptedScheduler()
    scheduler.script = refuse
    with serving(scheduler) as url, pytest.raises(pagewire.DeadlineExceeded, match="the timeout passed"):
        ask(kind, url, "complete", "Once", retry=3600, timeout=0.1)


@kinds
@pytest.mark.parametrize(("name", "arguments"), WAYS)
@pytest.mark.parametrize(
    ("timeout", "error"),
    [("1", TypeError), (True, TypeError), ([1], TypeError), (float("nan"), ValueError), (-1, ValueError)],
)
def test_a_timeout_is_a_number_of_seconds(
    kind: type, name: str, arguments: tuple[Any, ...], timeout: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^timeout (must be a number of seconds, got|is .*, but must be a number)"):
        ask(kind, NO_SERVER, name, *arguments, timeout=timeout)


@kinds
def test_a_timeout_without_an_end_is_none(kind: type) -> None:
    with serving(ScriptedScheduler()) as url:
        for timeout in (float("inf"), 1e300, 10**400, numpy.float32(100)):
            assert ask(kind, url, "complete", "Once", timeout=timeout).outputs[0].finish_reason == "length"
            assert ask(kind, url, "loads", timeout=timeout).num_running == 3


@pytest.mark.parametrize(
    ("name", "arguments", "options", "text"),
    [
        ("complete", (b"abc",), {}, "^prompt must be a text, or a list of texts and token ids; got b'abc'"),
        ("complete", (bytearray(b"abc"),), {}, "^prompt must be"),
        ("complete", (memoryview(b"abc"),), {}, "^prompt must be"),
        ("complete", ({"prompt": "Once"},), {}, "^prompt must be"),
        ("complete", (5,), {}, "^prompt must be"),
        ("complete", (numpy.array(5),), {}, "^prompt must be"),
        ("complete", ([[1, [2]]],), {}, "^prompt 0 of the list is"),
        ("complete", ([bytearray(b"a")],), {}, "^prompt 0 of the list is"),
        ("complete", ([numpy.ones((2, 2), int)],), {}, "^prompt 0 of the list is"),
        ("complete", ([iter([1, 2])],), {}, "^prompt 0 of the list is"),
        ("complete", ("a\ud800",), {}, "^text has .* from prompt$"),
        ("complete", (["a", "\udfff"],), {}, "^prompt 1: text has"),
        ("stream", ({"prompt": "Once"},), {}, "^prompt must be a text"),
        ("stream", (), {"prompt_token_ids": b"abc"}, "^prompt_token_ids must be"),
        ("stream", (), {"prompt_token_ids": iter([1])}, "^prompt_token_ids must be"),
        ("embed", (b"abc",), {}, "^prompt must be"),
        (
            "embed",
            ("Once",),
            {"temperature": 0},
            "embed has no option 'temperature'; the options are request_id, priority",
        ),
        ("chat", (5,), {}, "^messages must be"),
        ("chat", ({"role": "user"},), {}, "^messages must be"),
        ("chat", ([5],), {}, "^messages must be"),
        ("tokenize", (b"abc",), {}, "^text must be"),
        ("tokenize", (5,), {}, "^text must be"),
        ("tokenize", (["a", "\ud800"],), {}, r"^texts\[1\] has"),
        ("detokenize", (b"abc",), {}, "^token_ids must be"),
        ("detokenize", ("abc",), {}, "^token_ids must be"),
        ("detokenize", (5,), {}, "^token_ids must be"),
        ("result", (5,), {}, "^request_id must be a text, got 5"),
        ("complete", ("a",), {"session": Session(None)}, "^session.id must be a text, got None"),  # type: ignore[arg-type]
        ("attach", ("id",), {"from_token": "x"}, "^from_token must be an integer, got 'x'"),
        ("attach", ("id",), {"max_reconnects": -1}, "^max_reconnects must be an integer from 0, got -1"),
        ("attach", ("id",), {"max_reconnects": None}, "^max_reconnects must be"),
        ("attach", (None,), {}, "^request_id must be a text, got None"),
        ("result", (None,), {}, "^request_id must be a text, got None"),
        ("abort", (b"id",), {}, "^request_id must be a text, got b'id'"),
        ("abort", (["id"],), {}, r"^request_id must be a text, got \['id'\]"),
        ("complete", ({"a", "b"},), {}, "^prompt must be"),
        ("complete", (["a"], "abc"), {}, "^sampling must be SamplingParams, .*; got 'abc'"),
        ("complete", ("a",), {"cache_salt": b"x"}, "^cache_salt must be a text, got b'x'"),
        ("complete", ("a",), {"tenant": bytearray(b"x")}, "^tenant must be a text"),
        ("complete", ("a",), {"priority": numpy.array(5)}, r"^priority must be an integer, got array\(5\)"),
        ("complete", ("a",), {"session": Session("a", will_return=5)}, "^session.will_return must be a bool, got 5"),
        ("complete", ("a",), {"beam_width": 2, "length_penalty": 10**400}, "^sampling.length_penalty cannot be 1000"),
        ("tokenize", ([5],), {}, "^text 0 of the list must be a text, got 5"),
        ("tokenize", ([b"a"],), {}, "^text 0 of the list must be a text, got b'a'"),
        ("tokenize", ({"a", "b"},), {}, "^text must be"),
        ("detokenize", ({1, 2},), {}, "^token_ids must be"),
        ("detokenize", ([1],), {"skip_special_tokens": 5}, "^skip_special_tokens must be a bool, got 5"),
        ("chat", ("abc",), {}, "^messages must be"),
        ("chat", ([b"abc"],), {}, "^messages must be"),
        ("chat", ([[5]],), {}, "^messages must be"),
        ("chat", ([HELLO, 5],), {}, "^messages must be"),
        ("chat", ([HELLO], 5), {}, "^sampling must be"),
        ("chat", ([HELLO],), {"max_token": 4}, "did you mean max_tokens"),
        ("chat", ([HELLO],), {"chat_template": b"{{"}, "^chat_template must be a text or None, got b'{{'"),
        ("chat", ([HELLO],), {"add_generation_prompt": "no"}, "^add_generation_prompt must be a bool, got 'no'"),
        ("chat", ([HELLO],), {"template_variables": [1]}, r"^template_variables must be a mapping or None, got \[1\]"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(name: str, arguments: Any, options: dict[str, Any], text: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match=text):
            ask(kind, NO_SERVER, name, *arguments, **options)


def test_an_option_that_is_none_is_left_out() -> None:
    options = {"tenant": None, "priority": None, "cache_salt": None, "session": None, "timeout": None}
    given = client._requests("a", None, None, options)  # type: ignore[arg-type]
    assert given == client._requests("a", None, None, {})


def test_a_client_needs_an_address() -> None:
    with pytest.raises(TypeError, match=r"^url must be a text"):
        Client(5)
    with pytest.raises(TypeError, match=r"^retry must be a number of seconds, got '1'"):
        Client(NO_SERVER, retry="1")
    with pytest.raises(
        TypeError, match=r"^a client has no option 'tls_cacert'; the options are tls_ca, tls_cert, tls_key, api_key"
    ):
        AsyncClient(NO_SERVER, tls_cacert="ca.pem")
    with pytest.raises(TypeError, match=r"^tls_ca must be the path of a PEM file, got b'ca'"):
        Client(NO_SERVER, tls_ca=b"ca")
    with pytest.raises(TypeError, match=r"^url has '\\ud800' at 0"):
        Client("\ud800:1")


def test_parameters_are_cloned_whole() -> None:
    params = SamplingParams(stop=["a"], logit_bias={5: 1.0}, structured_outputs={"json": {"type": "object"}})
    clone = params.clone()
    assert clone == params
    assert clone is not params
    assert clone.stop is not params.stop


class Silent(ScriptedScheduler):
    """A server that answers no RPC. `waiting` counts the RPCs that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)
        self.script = self._wait
        self.GetServerInfo = self.GetLoads = self.Tokenize = self._wait_once
        self.Attach = self._wait

    def _wait(self, request: object, context: grpc.ServicerContext) -> Iterator[Any]:
        self._wait_once(request, context)
        yield from ()

    def _wait_once(self, request: object, context: grpc.ServicerContext) -> Any:
        over = threading.Event()
        context.add_callback(over.set)
        self.waiting.release()
        over.wait()
        return pb.GetServerInfoResponse()

    def GenerateMany(self, requests: object, context: grpc.ServicerContext) -> Iterator[Any]:
        return self._wait(requests, context)


UNDER_WAY = [("stream", ("Once",)), ("complete", ("Once",)), ("complete", (["Once", "Once"],)), ("embed", ("Once",))]
UNDER_WAY += [("info", ()), ("loads", ()), ("tokenize", ("Once",)), ("attach", ("id",)), ("chat", CALLS["chat"])]
under_way = pytest.mark.parametrize(("name", "arguments"), UNDER_WAY)


@under_way
async def test_closing_ends_what_runs_with_an_error(name: str, arguments: tuple[Any, ...]) -> None:
    """Closing a client fails its running calls.

    The error is not CancelledError, because a TaskGroup would take that for its own cancellation.
    """
    scheduler = Silent()

    async def run(client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(whole(getattr(client, name)(*arguments)))
            await asyncio.to_thread(scheduler.waiting.acquire)
            await client.aclose()

    with serving(scheduler) as url:
        with pytest.raises(ExceptionGroup) as caught:
            await run(AsyncClient(url, retry=3600))
        with closed():
            raise caught.value.exceptions[0]


@under_way
async def test_cancelling_is_still_cancelling(name: str, arguments: tuple[Any, ...]) -> None:
    scheduler = Silent()
    with serving(scheduler) as url:
        async with AsyncClient(url) as client:
            task = asyncio.create_task(whole(getattr(client, name)(*arguments)))
            await asyncio.to_thread(scheduler.waiting.acquire)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@under_way
def test_closing_in_another_thread_ends_what_runs(name: str, arguments: tuple[Any, ...]) -> None:
    scheduler = Silent()
    with serving(scheduler) as url:
        client = Client(url)
        closing = threading.Thread(target=lambda: (scheduler.waiting.acquire(), client.close()))
        closing.start()
        with closed():
            returned = getattr(client, name)(*arguments)
            list(returned)
        closing.join()


@pytest.mark.parametrize("arguments", [("Once",), (["Once"],)])
async def test_closing_ends_what_waits_for_its_next_attempt(
    arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()
    wait = channels.Connection.wait

    async def observed(self: Any, seconds: float) -> None:
        waits.set()
        await wait(self, 3600)

    monkeypatch.setattr("pagewire.client.channels.Connection.wait", observed)
    client = AsyncClient(NO_SERVER, retry=3600)
    call = asyncio.create_task(client.complete(*arguments))
    await waits.wait()
    await client.aclose()
    with closed():
        await call


async def test_closing_ends_a_chat_whose_prompt_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    with serving(ScriptedScheduler()) as url:
        client = AsyncClient(url)

        def make_prompts(*arguments: object) -> list[str]:
            asyncio.run_coroutine_threadsafe(client.aclose(), loop).result()
            return ["Once"]

        monkeypatch.setattr("pagewire.client.conversation.prompts_of", make_prompts)
        with closed():
            await client.chat([HELLO])


def test_unread_items_are_limited() -> None:
    sent = threading.Semaphore(0)
    ended = threading.Event()

    async def numbers() -> Any:
        try:
            for number in range(10 * background_loop.MAX_READ_AHEAD):
                sent.release()
                yield number
        finally:
            ended.set()

    items = background_loop.iterate(numbers())
    assert next(items) == 0
    for _ in range(background_loop.MAX_READ_AHEAD):
        sent.acquire()
    assert not ended.wait(0.05)
    assert list(items) == list(range(1, 10 * background_loop.MAX_READ_AHEAD))
    assert ended.is_set()


def test_reading_goes_on_once_half_of_what_waits_is_taken() -> None:
    made: list[int] = []

    async def numbers() -> Any:
        for number in itertools.count():
            made.append(number)
            yield number

    def num_made() -> int:
        background_loop.run(lambda: asyncio.sleep(0))  # the loop has run all earlier callbacks when this returns
        return len(made)

    with contextlib.closing(background_loop.iterate(numbers())) as items:
        next(items)
        full = num_made()
        assert full in (background_loop.MAX_READ_AHEAD, background_loop.MAX_READ_AHEAD + 1)
        for _ in range(full - 1 - background_loop.MAX_READ_AHEAD // 2 - 1):
            next(items)
            assert num_made() == full
        next(items)
        assert num_made() == full + background_loop.MAX_READ_AHEAD // 2


def test_a_client_that_is_dropped_closes_its_connection() -> None:
    """A client that is dropped closes its connection, but not while one of its streams is being read."""
    scheduler = ScriptedScheduler()
    scheduler.script = scripted_scheduler.never_end
    with serving(scheduler) as url:
        outputs = Client(url).stream("Once")
        next(outputs)
        gc.collect()
        next(outputs)
        assert not scheduler.ended.is_set()
        del outputs
        assert scheduler.ended.wait(10)
        before = set(channels._open_connections)
        client = Client(url)
        client.loads()
        (opened,) = set(channels._open_connections) - before
        del client
        background_loop.run(opened._closed.wait)


def test_an_early_interrupt_leaves_no_unawaited_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    client = Client("127.0.0.1:1")
    monkeypatch.setattr(background_loop, "_started", interrupt)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            client.info()
        gc.collect()
    assert not told


def test_one_delta_at_a_time_is_handed_on_at_once() -> None:
    told = threading.Event()

    def talk(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield delta(0, 0, [1], "so")
        told.wait()
        yield delta(0, 1, [1], " it goes", last=True)

    scheduler = ScriptedScheduler()
    scheduler.script = talk
    with serving(scheduler) as url, Client(url) as client:
        outputs = client.stream("Once")
        assert next(outputs).text == "so"
        told.set()
        assert next(outputs).text == " it goes"
