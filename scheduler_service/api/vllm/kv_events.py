"""A VllmEngine subscription to the events of the prefix cache, with the scheduler's load.

A subscriber's cursor can outlive the server. Sequence numbers therefore begin at the server's start time in
microseconds, so that the ranges of two servers do not overlap. A subscriber gets a snapshot if it has no cursor, has a
cursor of another server, or has one that the event log no longer covers. Content of other tenants and cache salts is
omitted, because no request of this subscriber can hit it.

If the server has tenants, a tenant must not see how much the others do. Its batches contain no load. They have their
own sequence numbers, which start at the time of the subscription, so each subscription begins with a snapshot.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from scheduler_service.api.vllm.report import Load, engine_load, engine_load_in_full
from scheduler_service.core.request import BlockRemoved, BlockStored, CacheCleared, KvEvent, Tier
from scheduler_service.serving.kv_events import KvEventBatch, KvEvents

# Seconds between two checks of the load, and between two reports of an unchanged load.
_LOOK_INTERVAL = 0.25
_HEARTBEAT_INTERVAL = 1.0
_MAX_CHUNK_BLOCKS = 4096  # in one message of a snapshot

_TIERS = {Tier.DEVICE: common_pb2.KV_CACHE_TIER_DEVICE, Tier.HOST: common_pb2.KV_CACHE_TIER_HOST}
_LEVELS = {Tier.DEVICE: 0, Tier.HOST: 1}


class KvEventFeed:
    """The stream of batches of prefix cache events for one subscription of a router."""

    def __init__(
        self,
        kv_events: KvEvents,
        first_number: int,
        read_load: Callable[[], Load] | None,
        root: bytes,
    ) -> None:
        """Create the stream of cache events for one subscription. `first_number` is the first sequence number of this
        server, before any event. `read_load` returns the scheduler's load, which is added to the batches. `root` is the
        hash at the root of the cached content that the subscriber's requests can hit.

        Without `read_load`, the subscriber must not see the activity of other tenants: the batches contain no load, and
        are numbered for this subscription only.
        """
        self._kv_events = kv_events
        self._first_number = first_number
        self._read_load = read_load
        self._root = root
        self._sees_all = read_load is not None
        self._number = time.time_ns() // 1000  # of the last batch
        self._num_records = 0
        self._num_events = 0
        self._last_load: Load | None = None
        self._sent_at = 0.0

    async def batches(
        self, request: common_pb2.SubscribeKvEventsRequest
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Yield batches of prefix cache events to a subscriber until the server shuts down. Begin with a snapshot of
        the whole cache, unless the request continues an earlier subscription."""
        with self._kv_events.following():
            last = request.start_sequence_number - self._first_number  # in the log's numbers
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
                    events = [event for event in happened.events if self._is_visible(event)]
                    if events or self._sees_all:
                        yield self._live(last, events)
                except TimeoutError:
                    if self._is_load_due():
                        yield self._load_only()
                except LookupError:
                    is_known = False

    def _is_visible(self, event: KvEvent) -> bool:
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
        blocks = [event for event in snapshot.events if self._is_visible(event)]
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
        """Advance the sequence number of the subscription before `num_batches` batches are sent. `log_number` is the
        number of the last batch in the log whose events they contain."""
        self._number = self._first_number + log_number if self._sees_all else self._number + num_batches

    def _batch(self, num_left: int = 0) -> common_pb2.KvEventBatch:
        """Return an empty batch with its sequence number. If `_count` was called for several batches at once,
        `num_left` is the number of these batches that follow this one."""
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
    """Encode cache events as messages. Consecutive stored blocks of one chain share a message, and so do consecutive
    removed blocks."""
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
    """Return the signed 64-bit integer that has the same bits as an unsigned block hash."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
