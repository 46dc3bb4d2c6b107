"""No request costs a server more than its size allows: CPU time is compared between a size and four times that size.

Each route gets the bodies of `hostile_bodies`. Times are compared as in `growth`. Times too short to compare are
ignored.
"""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio

from scheduler_service.api.http.body import MAX_BODY_BYTES
from scheduler_service.api.http.openapi import TypedRoute
from scheduler_service.api.http.routes import NAMED, POSTED
from scheduler_service.api.http.transport.connection import MAX_HEAD_BYTES
from testing.chat_output.spellings import SPELLINGS
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http
from tests.contract.http.hostile_bodies import HostileBody, bodies_of, format_bodies_of
from tests.contract.http.scripted import TEMPLATE
from tests.contract.pooling import write_pooling
from tests.growth import MAX_TRIES, STEP, Costs

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

SEED = 60
PATHS = [route.path for route in POSTED]
SMALL_SIZE = 256
SIZES = [128 * STEP**power for power in range(4)]  # up to 64 KiB
# With room for the JSON around the large field.
LARGE_SIZES = [(MAX_BODY_BYTES - 4096) // STEP**power for power in (1, 0)]
HEAD_SIZES = [(MAX_HEAD_BYTES - 1024) // STEP**power for power in (2, 1, 0)]
NUM_LARGE = 4  # randomly drawn bodies of each route that are sent at these sizes, in addition to the listed bodies
# Shorter times are not compared, because every request has most of such a cost.
SHORT_S = 0.02
# After a request that takes longer, including waiting, larger sizes are not tried.
LONG_S = 0.5
# A request may block the event loop for a limited time only: above some size, the time must not grow.
MAX_HELD_RATIO = 2.0
# Fields and shapes that are always tried, because the server decodes their values or builds other values from them.
LISTED = {
    *(("metadata", shape) for shape in ("lists within", "deep lists within", "keys")),
    *(("allowed_token_ids", shape) for shape in ("zeros", "its own")),
    *(("stop_token_ids", "its own"), ("bad_words", "texts"), ("stop", "texts"), ("logit_bias", "tokens")),
    *(("tokens", shape) for shape in ("zeros", "its own")),
    *(("prompt", shape) for shape in ("lists", "zeros", "texts")),
    *(("input", shape) for shape in ("lists", "zeros", "items of texts")),
    *(("messages", shape) for shape in ("messages", "calls", "keys")),
    *(("", shape) for shape in ("a long key", "a long key and a line", "keys")),
}
# The repeated part and the end of a path or a query.
PARTS: dict[str, tuple[str, str]] = {
    "one character": ("a", ""),
    "escaped": ("%41", ""),
    "slashes": ("/", ""),
    "escaped slashes": ("%2F", ""),
    "surrogates": ("%ED%A0%80", ""),
    "places": (quote("` - at `$`"), ""),
    "places and a line": (quote(" - at `$"), "%0A"),
    "fields": ("a=1&", ""),
}
Bodies = dict[str, list[HostileBody]]
Measure = Callable[[int], Awaitable[float]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpServer]:
    """A server of an embedding model, with one template for each tool call format."""
    print(f"seed {SEED}")
    named = {name: f"{{{{ messages[0].content }}}}{{# {each.template} #}}" for name, each in SPELLINGS.items()}
    model = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty", **named)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    write_pooling(model, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    gc.collect()
    gc.freeze()  # otherwise collections would scan all objects of earlier tests
    async with serve_http(model) as server:
        yield server
    gc.unfreeze()


def by_path(bodies: Iterable[HostileBody]) -> Bodies:
    found: Bodies = {path: [] for path in PATHS}
    for body in bodies:
        found[body.route.path].append(body)
    return found


def dealt(bodies: Iterable[HostileBody]) -> Bodies:
    """Return bodies by route. If several routes share a field, only one of them gets its body."""
    rng = random.Random(SEED)
    found: dict[tuple[str, str], list[HostileBody]] = {}
    for body in bodies:
        found.setdefault((body.place, body.shape), []).append(body)
    return by_path(rng.choice(each) for each in found.values())


def drawn() -> Bodies:
    """Return the bodies that are sent at many sizes, by route: each shape in one random field, and the
    listed bodies.
    """
    rng = random.Random(SEED)
    found: dict[tuple[str, str], list[HostileBody]] = {}
    listed = []
    for body in ALL:
        found.setdefault((body.route.path, body.shape), []).append(body)
        if (body.place, body.shape) in LISTED:
            listed.append(body)
    return by_path(dict.fromkeys((*listed, *(rng.choice(each) for each in found.values()))))


ALL = [body for route in POSTED for body in bodies_of(route)]
OF_FORMATS = dealt(body for route in POSTED for body in format_bodies_of(route))
DEALT, DRAWN = dealt(ALL), drawn()


class Ladder:
    """Sends one kind of request at increasing sizes.

    Attributes:
        faults: descriptions of wrong responses and of excessive costs.
    """

    def __init__(self, server: HttpServer, name: str, make: Callable[[int], bytes]) -> None:
        self._server = server
        self._name = name
        self._make = make
        self.faults: list[str] = []

    async def climb(self, sizes: Sequence[int]) -> bool:
        """Compare the CPU time of each size with the previous size. Return whether larger sizes may be tried."""
        before = await self._seconds(sizes[0])
        for size, next_size in pairwise(sizes):
            begun = time.monotonic()
            costs = Costs(short=SHORT_S)
            costs.add(before, before := await self._seconds(next_size))
            is_long = time.monotonic() - begun > LONG_S
            await self._compare("take", costs, size, next_size, self._mean_seconds, self._seconds)
            if self.faults or is_long:
                return False
        return True

    async def hold(self, size: int, next_size: int, short: float) -> None:
        """Compare for how long requests of two sizes block the event loop."""
        costs = Costs(MAX_HELD_RATIO, short)
        costs.add(await self._held(size), await self._held(next_size))
        await self._compare("hold the event loop for", costs, size, next_size, self._held, self._held)

    async def _compare(
        self, what: str, costs: Costs, size: int, next_size: int, measure_small: Measure, measure_large: Measure
    ) -> None:
        """Repeat the measurement if the first one exceeds the limit. Record a fault if every attempt exceeds it."""
        if costs.are_too_high:
            costs = Costs(costs.max_ratio, costs.short)
            for _ in range(MAX_TRIES):
                gc.collect()  # otherwise the time would include collecting garbage of other requests
                costs.add(await measure_small(size), await measure_large(next_size))
                if not costs.are_too_high:
                    break
        if costs.are_too_high:
            before, after = costs.small * 1000, costs.large * 1000
            self.faults.append(
                f"{self._name}: {size} bytes {what} {before:.1f} ms, {next_size} bytes {after:.1f} ms, "
                f"{after / before:.1f} times as long"
            )

    async def _mean_seconds(self, size: int) -> float:
        """Return the mean CPU time of `STEP` requests, whose total size equals the next size."""
        return sum([await self._seconds(size) for _ in range(STEP)]) / STEP

    async def try_size(self, size: int) -> None:
        self._judge(size, await ask(self._server, self._make(size)))

    async def _seconds(self, size: int) -> float:
        """Return the CPU seconds that a request costs this process, including all threads."""
        content = self._make(size)
        before = time.process_time()
        status = await ask(self._server, content)
        spent = time.process_time() - before
        self._judge(size, status)
        return spent

    async def _held(self, size: int) -> float:
        content = self._make(size)
        heart = asyncio.create_task(_longest_beat())
        await asyncio.sleep(0)
        self._judge(size, await ask(self._server, content))
        heart.cancel()
        return await heart

    def _judge(self, size: int, status: str) -> None:
        if not status or (status >= "500" and status != "503"):
            self.faults.append(f"{self._name}, {size} bytes: answered by {status or 'nothing'}")


async def _longest_beat() -> float:
    """Measure until cancelled. Return the longest CPU time of this process between two turns of the event loop."""
    longest, last = 0.0, time.process_time()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


async def ask(server: HttpServer, content: bytes) -> str:
    """Send a request on a new connection, read the whole response, and return its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    answer = b""
    try:
        writer.write(content)
        answer = await reader.read(64)
        while await reader.read(1 << 20):
            pass
    except ConnectionError:
        pass  # the server closed the connection after its response, without reading the rest of the request
    finally:
        writer.close()
    return answer[9:12].decode()


def request(method: str, target: str, body: bytes = b"") -> bytes:
    assert len(body) <= MAX_BODY_BYTES
    lines = (f"{method} {target} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def ladder(server: HttpServer, body: HostileBody) -> Ladder:
    return Ladder(server, body.name, lambda size: request("POST", body.route.path, body.make(size)))


async def check(server: HttpServer, faults: Sequence[str]) -> None:
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
    assert await ask(server, request("GET", "/health")) == "200"


def decoding_seconds() -> float:
    """Return the CPU seconds in which this machine decodes a body of maximum size that consists of numbers."""
    content, seconds = b"[" + b"0," * (MAX_BODY_BYTES // 2 - 1) + b"0]", []
    for _ in range(MAX_TRIES):
        before = time.process_time()
        msgspec.json.decode(content)
        seconds.append(time.process_time() - before)
    return min(seconds)


posted = pytest.mark.parametrize("path", PATHS)


@posted
async def test_every_small_body_is_answered(server: HttpServer, path: str) -> None:
    faults: list[str] = []
    for body in DEALT[path]:
        each = ladder(server, body)
        await each.try_size(SMALL_SIZE)
        faults += each.faults
    await check(server, faults)


@posted
async def test_no_body_costs_more_than_its_size(server: HttpServer, path: str) -> None:
    faults: list[str] = []
    for body in (*DRAWN[path], *OF_FORMATS[path]):
        each = ladder(server, body)
        await each.climb(SIZES)
        faults += each.faults
    await check(server, faults)


@posted
async def test_no_large_body_holds_the_event_loop(server: HttpServer, path: str) -> None:
    short = 2 * decoding_seconds()
    listed = [body for body in DRAWN[path] if (body.place, body.shape) in LISTED]
    others = [body for body in DRAWN[path] if body not in listed]
    faults: list[str] = []
    for body in (*listed, *random.Random(SEED).sample(others, min(NUM_LARGE, len(others)))):
        each = ladder(server, body)
        # A body that is too expensive already fails in the test above.
        if await each.climb(SIZES[-2:]) and await each.climb(LARGE_SIZES):
            await each.hold(*LARGE_SIZES[-2:], short)
        faults += each.faults
    await check(server, faults)


@pytest.mark.parametrize("route", NAMED, ids=lambda route: f"{route.method} {route.path}")
async def test_no_head_costs_more_than_its_size(server: HttpServer, route: TypedRoute) -> None:
    """These requests consist of a path and a query only."""
    before, _, after = route.path.partition("{")
    after = after.partition("}")[2]
    forms = {"the id": f"{before}#{after}", "a field that is not known": f"{before}x{after}?#=1"}
    fields = (each.encode_name for each in msgspec.structs.fields(route.request))
    forms |= {name: f"{before}x{after}?{name}=#" for name in fields if not name.endswith("_id")}
    faults: list[str] = []
    for place, form in forms.items():
        for shape, (part, end) in PARTS.items():

            def make(size: int, form: str = form, part: str = part, end: str = end) -> bytes:
                return request(route.method, form.replace("#", part * (size // len(part)) + end))

            each = Ladder(server, f"{route.method} {route.path}: {shape} in {place}", make)
            await each.climb(HEAD_SIZES)
            faults += each.faults
    await check(server, faults)
