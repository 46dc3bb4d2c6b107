"""VllmEngine's event stream about the prefix cache, with load reports, and the FlushCache RPC."""

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import server
from scheduler_service.api.vllm.kv_events import KvEventFeed
from scheduler_service.api.vllm.report import Load
from scheduler_service.core import explain
from scheduler_service.core.request import BlockStored, KvEvent, Tier
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving.kv_events import KvEventBatch, KvEventLog
from testing import scheduler_stack
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Stack, expected_tokens, serve
from testing.seeds import seeded
from testing.serving.failures import failure_of
from tests.contract.vllm_client import generate, request, stub_of

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
HOST = common_pb2.KV_CACHE_TIER_HOST
DEVICE = common_pb2.KV_CACHE_TIER_DEVICE


class Mirror:
    """A copy of the prefix cache's content that is maintained from events, as a router does it."""

    def __init__(self) -> None:
        self.cursor = 0
        self.cached: dict[tuple[int, int], tuple[int | None, tuple[int, ...]]] = {}  # keyed by hash and tier
        self.num_snapshots = 0
        self.loads: list[common_pb2.EngineLoad] = []
        self.changed = asyncio.Event()
        self.following: asyncio.Task[None] | None = None
        self._next_chunk = 0

    def add(self, batch: common_pb2.KvEventBatch) -> None:
        if batch.HasField("load"):
            self.loads.append(batch.load)
            assert [load.sample for load in self.loads] == list(range(1, len(self.loads) + 1))
        if batch.load.load_only:
            assert batch.sequence_number == self.cursor
            assert not batch.events
        elif batch.HasField("snapshot"):
            assert batch.snapshot.index == self._next_chunk
            self._next_chunk = (batch.snapshot.index + 1) % batch.snapshot.count
            assert batch.snapshot.unknown_before == 0
            assert (batch.events[0].WhichOneof("data") == "cleared") == (batch.snapshot.index == 0)
            self.num_snapshots += self._next_chunk == 0
        else:
            assert self._next_chunk == 0
            assert batch.sequence_number == self.cursor + 1
        self.cursor = batch.sequence_number
        for event in batch.events:
            assert bool(event.event_id) != batch.HasField("snapshot")
            self._apply(event)
        if batch.HasField("snapshot") and self._next_chunk == 0:
            assert batch.snapshot.blocks == len(self.cached)
        self.changed.set()

    def _apply(self, event: common_pb2.KvCacheEvent) -> None:
        if event.HasField("stored"):
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            assert event.stored.blocks
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids) == 4
                assert (block.block_hash, event.stored.tier) not in self.cached
                self.cached[block.block_hash, event.stored.tier] = (parent, tuple(block.token_ids))
                parent = block.block_hash
        elif event.HasField("removed"):
            for block_hash in event.removed.block_hashes:
                del self.cached[block_hash, event.removed.tier]
        else:
            self.cached.clear()

    def prefixes(self, tier: int = DEVICE) -> set[tuple[int, ...]]:
        """Return the complete cached token prefixes of a tier, following the chain of parents."""
        return {self._prefix(*key) for key in self.cached if key[1] == tier} - {()}

    def _prefix(self, block_hash: int, tier: int) -> tuple[int, ...]:
        """Return the tokens of a block and all its parents, or an empty tuple if a parent was evicted."""
        parent: int | None = block_hash
        parts: list[tuple[int, ...]] = []
        while parent is not None:
            found = (
                self.cached.get((parent, tier)) or self.cached.get((parent, DEVICE)) or self.cached.get((parent, HOST))
            )
            if found is None:
                return ()
            parent = found[0]
            parts.append(found[1])
        return tuple(token for part in reversed(parts) for token in part)

    async def until(self, holds) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                if self.following is not None and self.following.done():
                    self.following.result()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def following(stack: Stack, mirror: Mirror):
    """Subscribe at the mirror's cursor, and apply all batches during the block."""
    call = stub_of(stack).SubscribeKvEvents(
        common_pb2.SubscribeKvEventsRequest(start_sequence_number=mirror.cursor, load_records_before_first_batch=True)
    )

    async def follow() -> None:
        async for batch in call:
            mirror.add(batch)

    mirror.loads.clear()  # each subscription numbers its loads from 1
    mirror.following = task = asyncio.create_task(follow())
    task.add_done_callback(lambda _: mirror.changed.set())
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_new_subscriber_gets_what_is_there_and_then_what_happens(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        known = [*PROMPT, *expected_tokens(PROMPT, 8)]
        await generate(stack, request(PROMPT, max_tokens=8))
        mirror = Mirror()
        async with following(stack, mirror):
            await mirror.until(lambda: mirror.num_snapshots)
            assert mirror.prefixes() == {tuple(known[:end]) for end in range(4, 17, 4)}
            await generate(stack, request([99, *PROMPT], max_tokens=1))
            await mirror.until(lambda: (99, 1, 2, 3, 4, 5, 6, 7) in mirror.prefixes())
            assert mirror.num_snapshots == 1


async def test_a_mirror_is_the_cache_through_evictions_host_blocks_and_a_lost_worker(checkpoint: Path) -> None:
    seed = 5
    rng = seeded(seed)
    async with serve(
        checkpoint,
        worker=await FakeWorker.started(checkpoint, num_device_blocks=60, num_host_blocks=60, swap_bandwidth=1e12),
        preemption="swap",
    ) as stack:
        mirror = Mirror()
        async with following(stack, mirror):
            for _ in range(3):
                prompts = [[rng.randrange(299) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
                await asyncio.gather(*(generate(stack, request(each, max_tokens=20)) for each in prompts))
            await stack.until_idle()
            loads = await stack.loads()
            await mirror.until(lambda: sum(tier == HOST for _, tier in mirror.cached) == loads.num_cached_host_blocks)
            fresh = Mirror()
            async with following(stack, fresh):
                await fresh.until(lambda: fresh.num_snapshots)
                await mirror.until(lambda: mirror.cached == fresh.cached)
            assert mirror.prefixes(HOST)
            await stack.worker.kill()
            await mirror.until(lambda: not mirror.cached)
            assert mirror.num_snapshots == 1


async def test_a_subscriber_resumes_where_it_was(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        mirror = Mirror()
        async with following(stack, mirror):
            await generate(stack, request(PROMPT, max_tokens=1))
            await mirror.until(lambda: len(mirror.cached) == 2)
        await generate(stack, request([99, *PROMPT], max_tokens=1))
        async with following(stack, mirror):
            await mirror.until(lambda: len(mirror.cached) == 4)
            assert mirror.num_snapshots == 1


@pytest.mark.parametrize("cursor", [1, 10**15, 2**63])
async def test_another_servers_cursor_gets_a_snapshot(checkpoint: Path, cursor: int) -> None:
    async with serve(checkpoint) as stack:
        await generate(stack, request(PROMPT, max_tokens=1))
        mirror = Mirror()
        mirror.cursor = cursor
        async with following(stack, mirror):
            await mirror.until(lambda: mirror.num_snapshots)
            assert len(mirror.cached) == 2
            assert mirror.cursor > 10**15


async def test_a_restarted_server_counts_on_above_its_predecessor(checkpoint: Path) -> None:
    mirror = Mirror()
    async with serve(checkpoint) as stack, following(stack, mirror):
        await generate(stack, request(PROMPT, max_tokens=1))
        await mirror.until(lambda: len(mirror.cached) == 2)
    old = mirror.cursor
    async with serve(checkpoint) as stack, following(stack, mirror):
        await mirror.until(lambda: mirror.num_snapshots == 2)
        assert mirror.cursor > old
        assert not mirror.cached


async def test_a_subscriber_that_falls_behind_gets_a_snapshot(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KvEventLog", partial(KvEventLog, 2))
    async with serve(checkpoint) as stack:
        mirror = Mirror()
        async with following(stack, mirror):
            await generate(stack, request(PROMPT, max_tokens=1))
            await mirror.until(lambda: len(mirror.cached) == 2)
        for first in range(100, 108):
            await generate(stack, request([first, *PROMPT], max_tokens=1))
        async with following(stack, mirror):
            await mirror.until(lambda: mirror.num_snapshots == 2)
            assert len(mirror.cached) == 18


async def test_content_of_tenants_and_salts_is_left_out(checkpoint: Path) -> None:
    """Cached content of tenants and salts is left out of the events, because requests of this API cannot hit it."""
    async with serve(checkpoint) as stack:
        mirror = Mirror()

        async def store(first: int, **fields: str) -> None:
            message = scheduler_stack.request([first, *PROMPT], max_tokens=1)
            message.MergeFrom(pb.GenerateRequest(**fields))
            await stack.generate(message)

        await store(50, tenant="red")
        async with following(stack, mirror):
            await mirror.until(lambda: mirror.num_snapshots)
            await store(51, tenant="red")
            await store(52, cache_salt="salt")
            await store(53)
            await mirror.until(lambda: mirror.cached)
            assert mirror.prefixes() == {(53, 1, 2, 3), (53, 1, 2, 3, 4, 5, 6, 7)}


async def test_the_load_comes_with_the_events_and_alone(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=2) as stack:
        mirror = Mirror()
        async with following(stack, mirror):
            await mirror.until(lambda: mirror.loads)
            first = mirror.loads[0]
            assert (first.running_requests, first.token_usage, first.max_running_requests) == (0, 0, 2)
            assert first.max_total_num_tokens == 1600
            stack.worker.step_seconds = 0.01
            calls = [asyncio.create_task(generate(stack, request(PROMPT, max_tokens=200))) for _ in range(3)]
            await mirror.until(lambda: (mirror.loads[-1].running_requests, mirror.loads[-1].waiting_requests) == (2, 1))
            busy = mirror.loads[-1]
            assert busy.waiting_uncached_tokens == len(PROMPT)
            assert 0 < busy.active_token_usage == busy.token_usage < 1
            for call in calls:
                call.cancel()
            await mirror.until(lambda: mirror.loads[-1].running_requests == 0)
            num_loads = len(mirror.loads)
            await mirror.until(lambda: len(mirror.loads) >= num_loads + 2)
            assert mirror.loads[-1].load_only
            assert mirror.loads[-1].token_usage == 0


class FakeSource:
    """An event source with a snapshot of `num_blocks` blocks and no later events."""

    def __init__(self, num_blocks: int) -> None:
        self._events: tuple[KvEvent, ...] = tuple(
            BlockStored(i + 1, i, (i,) * 4, Tier.DEVICE, is_first=i == 0) for i in range(num_blocks)
        )

    starts = (0, 3)

    def snapshot(self) -> KvEventBatch:
        return KvEventBatch(3, self._events)

    def following(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def after(self, sequence_number: int) -> KvEventBatch:
        assert sequence_number == 3
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("num_blocks", "num_chunks"), [(0, 1), (1, 1), (4096, 1), (4097, 2), (10_000, 3)])
async def test_a_big_snapshot_comes_in_chunks(num_blocks: int, num_chunks: int) -> None:
    scheduler = Scheduler(SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256))
    load = Load(explain.stats(scheduler.state), 0, 4, 0.0)
    feed = KvEventFeed(FakeSource(num_blocks), 1000, lambda: load, b"")
    mirror, numbers = Mirror(), []
    async with contextlib.aclosing(feed.batches(common_pb2.SubscribeKvEventsRequest())) as batches:
        async for batch in batches:
            numbers.append(batch.sequence_number)
            mirror.add(batch)
            if mirror.num_snapshots:
                break
    assert numbers == list(range(1003 - num_chunks + 1, 1004))
    assert len(mirror.cached) == num_blocks
    assert all(mirror.cached[i + 1, DEVICE] == (i or None, (i,) * 4) for i in range(num_blocks))


async def test_a_snapshot_comes_with_the_load_in_full() -> None:
    scheduler = Scheduler(SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256))
    stats = replace(explain.stats(scheduler.state), num_device_blocks=10, num_held_blocks=5)
    load = Load(stats, block_size=4, max_num_seqs=4, generation_throughput=0.0)
    feed = KvEventFeed(FakeSource(1), 1000, lambda: load, b"")
    async with contextlib.aclosing(feed.batches(common_pb2.SubscribeKvEventsRequest())) as batches:
        sent = (await anext(batches)).load
    assert (sent.sample, sent.num_used_tokens, sent.max_total_num_tokens, sent.token_usage) == (1, 20, 40, 0.5)


async def test_flush_empties_the_cache_once_nothing_runs(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stub, mirror = stub_of(stack), Mirror()
        async with following(stack, mirror):
            await generate(stack, request(PROMPT, max_tokens=8))
            await mirror.until(lambda: mirror.cached)
            stack.worker.step_seconds = 0.005
            call = asyncio.create_task(generate(stack, request(PROMPT, max_tokens=40)))
            await stack.until(lambda loads: loads.num_running == 1)
            refused = await stub.FlushCache(common_pb2.FlushCacheRequest())
            assert not refused.success
            assert "1 sequences run" in refused.message
            waited = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20))
            assert waited.success
            assert (await call).complete.completion_tokens == 40
            await mirror.until(lambda: not mirror.cached)
        assert (await stack.loads()).num_cached_blocks == 0
        again = await generate(stack, request(PROMPT, max_tokens=8))
        assert again.complete.cached_tokens == 0
        assert list(again.complete.output_ids) == expected_tokens(PROMPT, 8)


@pytest.mark.parametrize("seconds", [-1.0, 601.0, float("nan"), float("inf")])
async def test_a_flush_waits_for_a_sane_time(checkpoint: Path, seconds: float) -> None:
    async with serve(checkpoint) as stack:
        await failure_of(
            stub_of(stack).FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds)), grpc.StatusCode.INVALID_ARGUMENT
        )
