"""One VllmEngine subscription to the prefix cache, with the scheduler's load.

A subscriber's cursor outlives the server, so sequence numbers begin at the server's start time: no two servers' ranges
meet. A subscriber with no cursor, another server's, or one that the log no longer reaches gets a snapshot. Content of
other tenants and salts is left out: no request of this service can hit it.

Where callers are told apart, a tenant does not learn how much others do: it is told no load, and its batches are
counted by themselves, from the time of its subscription on, so that each subscription begins with a snapshot.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from scheduler_service.api.vllm.report import Load, engine_load, engine_load_in_full
from scheduler_service.core.request import BlockRemoved, BlockStored, CacheCleared, KvEvent, Tier
from scheduler_service.serving.kv_events import KvEventBatch, KvEvents

# Seconds between two looks at the load, and between two records of a load that stays the same.
_LOOK_INTERVAL = 0.25
_HEARTBEAT_INTERVAL = 1.0
_MAX_CHUNK_BLOCKS = 4096  # of a snapshot's message

_TIERS = {Tier.DEVICE: common_pb2.KV_CACHE_TIER_DEVICE, Tier.HOST: common_pb2.KV_CACHE_TIER_HOST}
_LEVELS = {Tier.DEVICE: 0, Tier.HOST: 1}


class KvEventFeed:
    """All that one subscriber is told."""

    def __init__(
        self,
        kv_events: KvEvents,
        first_number: int,
        read_load: Callable[[], Load] | None,
        root: bytes,
    ) -> None:
        """`first_number` is the server's: the sequence number of what happened before its first event. Without
        `read_load` the subscriber is told no load, nor how many batches there are of all tenants. `root` is that of
        the content which the requests that it sends can hit."""
        self._kv_events = kv_events
        self._first_number = first_number
        self._read_load = read_load
        self._root = root
        self._sees_all = read_load is not None
        self._number = time.time_ns() // 1000  # of the last batch that was told
        self._num_records = 0
        self._num_events = 0
        self._last_load: Load | None = None
        self._sent_at = 0.0

    async def batches(
        self, request: common_pb2.SubscribeKvEventsRequest
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yield batches as long as the server lives."""
        with self._kv_events.following():
            last = request.start_sequence_number - self._first_number  # as the log counts
            first_start, last_start = self._kv_events.starts
            is_known = self._sees_all and first_start <= last <= last_start
            if is_known:
                self._number = request.start_sequence_number
            while True:
                if not is_known:
                    snapshot = self._kv_events.snapshot()
                    last, is_known = snapshot.sequence_number, True
                    for batch in self._snapshot(snapshot):
                        yield batch
                try:
                    async with asyncio.timeout(_LOOK_INTERVAL):
                        happened = await self._kv_events.after(last)
                    if happened is None:
                        return
                    last = happened.sequence_number
                    events = [event for event in happened.events if self._is_theirs(event)]
                    if events or self._sees_all:
                        yield self._live(last, events)
                except TimeoutError:
                    if self._is_load_due():
                        yield self._load_only()
                except LookupError:
                    is_known = False

    def _is_theirs(self, event: KvEvent) -> bool:
        return isinstance(event, CacheCleared) or event.root == self._root

    def _live(self, log_number: int, events: Sequence[KvEvent]) -> common_pb2.KvEventBatch:
        self._count(log_number, 1)
        batch = self._batch()
        for event in _encode(events):
            self._num_events += 1
            event.event_id = self._num_events
            batch.events.append(event)
        self._add_load(batch, engine_load)
        return batch

    def _snapshot(self, snapshot: KvEventBatch) -> Iterator[common_pb2.KvEventBatch]:
        blocks = [event for event in snapshot.events if self._is_theirs(event)]
        starts = range(0, max(1, len(blocks)), _MAX_CHUNK_BLOCKS)
        self._count(snapshot.sequence_number, len(starts))
        for index, start in enumerate(starts):
            batch = self._batch(len(starts) - 1 - index)
            batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = index, len(starts), len(blocks)
            if index == 0:
                batch.events.add().cleared.SetInParent()
            batch.events.extend(_encode(blocks[start : start + _MAX_CHUNK_BLOCKS]))
            self._add_load(batch, engine_load_in_full)
            yield batch

    def _load_only(self) -> common_pb2.KvEventBatch:
        batch = self._batch()
        self._add_load(batch, engine_load_in_full)
        batch.load.load_only = True
        return batch

    def _count(self, log_number: int, num_batches: int) -> None:
        """Count so many batches, after which the subscriber knows the log up to a number."""
        self._number = self._first_number + log_number if self._sees_all else self._number + num_batches

    def _batch(self, num_left: int = 0) -> common_pb2.KvEventBatch:
        """Begin a batch that so many follow of those that are told together."""
        return common_pb2.KvEventBatch(sequence_number=self._number - num_left, timestamp=time.time(), dp_rank=0)

    def _is_load_due(self) -> bool:
        if self._read_load is None:
            return False
        is_stale = time.monotonic() - self._sent_at >= _HEARTBEAT_INTERVAL
        return is_stale or self._read_load() != self._last_load

    def _add_load(self, batch: common_pb2.KvEventBatch, encode: Callable[[Load], common_pb2.EngineLoad]) -> None:
        if self._read_load is None:
            return
        load = self._last_load = self._read_load()
        batch.load.CopyFrom(encode(load))
        self._num_records += 1
        batch.load.sample = self._num_records
        self._sent_at = time.monotonic()


def _encode(events: Sequence[KvEvent]) -> list[common_pb2.KvCacheEvent]:
    """Make one message for each run of blocks that follow one another, and for each run of removals."""
    messages: list[common_pb2.KvCacheEvent] = []
    previous: KvEvent | None = None
    for event in events:
        if not _continues(event, previous):
            messages.append(_begin(event))
        if isinstance(event, BlockStored):
            messages[-1].stored.blocks.add(
                block_hash=_signed(event.block_hash),
                token_ids=event.token_ids,
                block_size=len(event.token_ids),
                cache_level=_LEVELS[event.tier],
            )
        elif isinstance(event, BlockRemoved):
            messages[-1].removed.block_hashes.append(_signed(event.block_hash))
        previous = event
    return messages


def _continues(event: KvEvent, previous: KvEvent | None) -> bool:
    if isinstance(event, BlockStored) and isinstance(previous, BlockStored):
        return event.tier is previous.tier and event.parent_hash == previous.block_hash
    if isinstance(event, BlockRemoved) and isinstance(previous, BlockRemoved):
        return event.tier is previous.tier
    return False


def _begin(event: KvEvent) -> common_pb2.KvCacheEvent:
    message = common_pb2.KvCacheEvent()
    if isinstance(event, BlockStored):
        message.stored.tier = _TIERS[event.tier]
        if not event.is_first:
            message.stored.parent_block_hash = _signed(event.parent_hash)
    elif isinstance(event, BlockRemoved):
        message.removed.tier, message.removed.cache_level = _TIERS[event.tier], _LEVELS[event.tier]
    else:
        message.cleared.SetInParent()
    return message


def _signed(block_hash: int) -> int:
    """Read the same 64 bits as a signed number."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
