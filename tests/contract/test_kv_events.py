"""The event stream about blocks that enter and leave the prefix cache."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import grpc
import pytest

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import server
from scheduler_service.api.grpc.kv_event_stream import kv_event_messages
from scheduler_service.core.request import BlockRemoved, BlockStored, KvEvent, Tier
from scheduler_service.serving.kv_events import KvEventBatch, KvEventLog
from scheduler_service.serving.refusal import Reason, RefusedError
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Stack, details, expected_tokens, request, serve
from testing.seeds import seeded
from testing.serving.failures import failure_of

BLOCK_SIZE = 4


class Mirror:
    """A copy of the prefix cache's content that is maintained from events, as a router would do."""

    def __init__(self) -> None:
        self.instance_id = ""
        self.last = 0
        self.cached: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # keyed by hash and tier: parent, tokens
        self.num_continued = 0

    def add(self, message: pb.SubscribeKvEventsResponse) -> None:
        if not self.instance_id:
            assert message.instance_id
            self.instance_id = message.instance_id
            if message.is_snapshot:
                self.last = message.sequence_number
        else:
            assert not message.instance_id
        if not message.is_snapshot and not self.num_continued:
            assert message.sequence_number == self.last + 1
            assert message.events
            self.last += 1
        self.num_continued = self.num_continued + 1 if message.is_continued else 0
        for event in message.events:
            self._apply(event)

    def _apply(self, event: pb.KvEvent) -> None:
        if event.HasField("stored"):
            stored = event.stored
            assert stored.block_size == len(stored.token_ids) == BLOCK_SIZE
            tokens = tuple(stored.token_ids)
            assert (stored.block_hash, stored.tier) not in self.cached
            self.cached[stored.block_hash, stored.tier] = (stored.parent_hash, tokens)
        elif event.HasField("removed"):
            del self.cached[event.removed.block_hash, event.removed.tier]
        else:
            assert event.HasField("cleared")
            self.cached.clear()

    def prefixes(self, tier: int = pb.KV_TIER_DEVICE) -> set[tuple[int, ...]]:
        """Return the cached token prefixes of a tier, following the chain of parents."""
        return {self._prefix(key) for key in self.cached if key[1] == tier}

    def _prefix(self, key: tuple[int, int]) -> tuple[int, ...]:
        parent_hash, tokens = self.cached[key]
        above = [
            (parent_hash, tier) for tier in (pb.KV_TIER_DEVICE, pb.KV_TIER_HOST) if (parent_hash, tier) in self.cached
        ]
        return (self._prefix(above[0]) if above else ()) + tokens


async def follow(stack: Stack, mirror: Mirror, **start: object) -> None:
    async for message in stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(**start)):
        mirror.add(message)


@contextlib.asynccontextmanager
async def following(stack: Stack, mirror: Mirror, **start: object):
    task = asyncio.create_task(follow(stack, mirror, **start))
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def snapshot(stack: Stack) -> Mirror:
    mirror = Mirror()
    call = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
    while True:
        message = await call.read()
        assert message.is_snapshot
        mirror.add(message)
        if not message.is_continued:
            call.cancel()
            return mirror


async def until_equal(stack: Stack, mirror: Mirror) -> None:
    """Wait until the mirror equals a new snapshot. The server has no event for a subscriber that is up to date."""
    async with asyncio.timeout(10):
        while True:
            now = await snapshot(stack)
            if (now.last, now.cached) == (mirror.last, mirror.cached):
                return
            await asyncio.sleep(0.01)


async def refusal_of(stack: Stack, **start: object) -> grpc.aio.AioRpcError:
    return await failure_of(
        stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(**start)).read(), grpc.StatusCode.OUT_OF_RANGE
    )


async def test_a_mirror_is_the_cache(checkpoint: Path) -> None:
    """The mirror stays correct through evictions, host blocks and the loss of a worker."""
    seed = 3
    rng = seeded(seed)
    worker = await FakeWorker.started(checkpoint, num_device_blocks=60, num_host_blocks=60, swap_bandwidth=1e12)
    async with serve(checkpoint, worker=worker, preemption="swap") as stack:
        mirror = Mirror()
        async with following(stack, mirror):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
            await stack.generate(request(prompt, max_tokens=8))
            await until_equal(stack, mirror)
            known = [*prompt, *expected_tokens(prompt, 8)]
            assert mirror.prefixes() == {tuple(known[:end]) for end in range(4, 17, 4)}
            for _ in range(3):
                prompts = [[rng.randrange(299) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
                await asyncio.gather(*(stack.generate(request(each, max_tokens=20)) for each in prompts))
            await until_equal(stack, mirror)
            assert mirror.prefixes(pb.KV_TIER_HOST)
            await stack.worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            await until_equal(stack, mirror)
            assert not mirror.cached
            await stack.worker.start()
            await stack.generate(request(prompt, max_tokens=8))
            await until_equal(stack, mirror)
            assert tuple(known[:8]) in mirror.prefixes()


async def test_hashes_are_chained_and_depend_on_tenant_and_salt(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        prompt = list(range(1, 10))
        for tenant, salt in (("", ""), ("me", ""), ("", "salt")):
            message = request(prompt, max_tokens=1)
            message.tenant, message.cache_salt = tenant, salt
            await stack.generate(message)
        mirror = await snapshot(stack)
    assert len(mirror.cached) == 6
    assert len(mirror.prefixes()) == 2
    for (block_hash, _), (parent_hash, tokens) in mirror.cached.items():
        assert block_hash not in (0, parent_hash)
        assert len(tokens) == BLOCK_SIZE
    first_parents = {parent for parent, tokens in mirror.cached.values() if tokens == (1, 2, 3, 4)}
    assert len(first_parents) == 3


async def test_a_subscriber_goes_on_where_it_was(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        first, again, late = Mirror(), Mirror(), Mirror()
        await snapshot(stack)  # from here on, events are kept
        async with following(stack, first):
            await stack.generate(request([1, 2, 3, 4, 5], max_tokens=8))
            await until_equal(stack, first)
        assert first.last > 0
        await stack.generate(request([6, 7, 8, 9, 10], max_tokens=8))
        middle = first.last
        again.last, again.cached = middle, dict(first.cached)
        async with following(stack, again, start_sequence_number=middle, instance_id=first.instance_id):
            await until_equal(stack, again)
            async with following(stack, late, start_sequence_number=0):
                await until_equal(stack, late)
        assert again.last > middle
        info = await stack.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert {first.instance_id, again.instance_id, late.instance_id} == {info.instance_id}


async def test_numbers_that_are_not_held(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KvEventLog", partial(KvEventLog, 3))
    async with serve(checkpoint) as stack:
        error = await refusal_of(stack, start_sequence_number=1)
        assert "start after 0 to 0" in error.details()
        for start in range(5):
            await stack.generate(request([start, 2, 3, 4, 5], max_tokens=8))
        last = (await snapshot(stack)).last
        assert last > 5
        for start in (0, last - 4, last + 1, 2**64 - 1):
            error = await refusal_of(stack, start_sequence_number=start)
            assert f"start after {last - 3} to {last}" in error.details()
            assert details(error)[0].field_violations[0].field == "start_sequence_number"
        oldest = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=last - 3))
        assert [(await oldest.read()).sequence_number for _ in range(3)] == [last - 2, last - 1, last]
        newest = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=last))
        await stack.generate(request([99, 2, 3, 4, 5], max_tokens=1))
        for call in (oldest, newest):
            assert (await call.read()).sequence_number == last + 1
            call.cancel()
        error = await refusal_of(stack, start_sequence_number=last, instance_id="another")
        assert "another" in error.details()


# The event log, and a single subscription


def stored(number: int, num_tokens: int = 4) -> BlockStored:
    return BlockStored(number, number - 1, tuple(range(num_tokens)), Tier.DEVICE)


def test_the_log_is_a_ring_with_numbers() -> None:
    log = KvEventLog(3)
    assert (log.first_start, log.last_sequence_number, log.after(0)) == (0, 0, None)
    for number in range(1, 8):
        log.append([stored(number)])
        assert log.last_sequence_number == number
        assert log.first_start == max(0, number - 3)
        for start in range(log.first_start, number):
            assert log.after(start) == KvEventBatch(start + 1, (stored(start + 1),))
        assert log.after(number) is None
        for start in (log.first_start - 1, number + 1):
            with pytest.raises(LookupError):
                log.after(start)


def test_the_log_is_bounded_in_bytes_too() -> None:
    log = KvEventLog(100, max_bytes=5 * 1000)
    for number in range(1, 20):
        log.append([stored(number), *[BlockRemoved(number, Tier.DEVICE)] * 3])
        assert log.last_sequence_number - log.first_start == min(number, 5)
    log.append([stored(20, num_tokens=200)])
    assert log.first_start == log.last_sequence_number == 20
    assert log.num_bytes == 0


def test_the_log_keeps_nothing_without_a_subscriber() -> None:
    log = KvEventLog(100, retention=60.0)
    assert not log.is_kept(0.0)
    log.skip()
    log.follow()
    assert log.is_kept(1.0)
    log.append([stored(1)])
    log.leave(10.0)
    assert log.is_kept(69.0)
    assert log.after(1) == KvEventBatch(2, (stored(1),))
    assert not log.is_kept(70.0)
    log.skip()
    assert (log.first_start, log.last_sequence_number, log.num_bytes) == (3, 3, 0)
    for start in (1, 2):
        with pytest.raises(LookupError):
            log.after(start)


async def test_events_without_a_subscriber_are_only_counted(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        await stack.generate(request([1, 2, 3, 4, 5], max_tokens=8))
        unseen = await snapshot(stack)
        assert unseen.last > 0
        error = await refusal_of(stack, start_sequence_number=unseen.last - 1)
        assert f"start after {unseen.last} to {unseen.last}" in error.details()
        await stack.generate(request([6, 7, 8, 9, 10], max_tokens=8))
        seen = Mirror()
        seen.last, seen.cached = unseen.last, dict(unseen.cached)
        async with following(stack, seen, start_sequence_number=unseen.last):
            await until_equal(stack, seen)
        assert len(seen.cached) > len(unseen.cached)


class Source:
    """A substitute for the KvEvents of a step loop."""

    def __init__(self, log: KvEventLog, content: tuple[KvEvent, ...] = ()) -> None:
        self._log = log
        self._content = content

    @property
    def starts(self) -> tuple[int, int]:
        return self._log.first_start, self._log.last_sequence_number

    def snapshot(self) -> KvEventBatch:
        return KvEventBatch(self._log.last_sequence_number, self._content)

    def following(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def after(self, sequence_number: int) -> KvEventBatch | None:
        batch = self._log.after(sequence_number)
        assert batch is not None
        return batch


async def test_a_slow_subscriber_is_told_so() -> None:
    log = KvEventLog(2)
    log.append([stored(1)])
    messages = kv_event_messages(pb.SubscribeKvEventsRequest(start_sequence_number=0), Source(log), "here")
    assert (await anext(messages)).sequence_number == 1
    for number in (2, 3, 4):
        log.append([stored(number)])
    with pytest.raises(RefusedError, match="after sequence number 1 are not available; start after 2 to 4") as caught:
        await anext(messages)
    assert caught.value.reason is Reason.OUT_OF_RANGE


async def test_a_long_batch_comes_in_several_messages() -> None:
    content = tuple(stored(number, 1000) for number in range(1, 201))
    log = KvEventLog(10)
    messages = kv_event_messages(pb.SubscribeKvEventsRequest(), Source(log, content), "here")
    received = [await anext(messages)]
    while received[-1].is_continued:
        received.append(await anext(messages))
    assert len(received) == 4
    assert [message.instance_id for message in received] == ["here", "", "", ""]
    assert {(message.is_snapshot, message.sequence_number) for message in received} == {(True, 0)}
    assert max(message.ByteSize() for message in received) < 2**20
    hashes = [event.stored.block_hash for message in received for event in message.events]
    assert hashes == list(range(1, 201))
    log.append(content)
    batch = [await anext(messages)]
    while batch[-1].is_continued:
        batch.append(await anext(messages))
    assert {(message.is_snapshot, message.sequence_number) for message in batch} == {(False, 1)}
