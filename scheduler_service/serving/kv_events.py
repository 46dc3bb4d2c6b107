"""The KV cache events of the core, in numbered batches for subscribers that may disconnect and return.

Without subscribers no events are kept, since a subscriber begins with a snapshot. The kept events are limited to a
number of batches and to a number of bytes. The oldest batch is dropped first.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from scheduler_service.core.request import BlockStored, KvEvent, KvEventCounts
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.clock import Clock

MAX_BATCHES = 10_000
MAX_BYTES = 64 * 1024 * 1024
# How long events are kept for a subscriber that may return, in seconds.
RETENTION = 60.0
# The approximate memory of an event, and of each token in an event, in bytes.
_EVENT_BYTES = 200
_TOKEN_BYTES = 40


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """One or more changes of the prefix cache, sent to subscribers as one batch. A snapshot also has this type: its
    events describe the whole content of the cache after the batch with the same number."""

    sequence_number: int
    events: tuple[KvEvent, ...]


class KvEventLog:
    """A bounded log of batches of KV cache events. The batches are numbered from 1 on. The log has no means to wait for
    a new batch: the writer must wake up the waiting readers."""

    def __init__(
        self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES, retention: float = RETENTION
    ) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._retention = retention
        self._batches: deque[KvEventBatch] = deque()
        self._num_followers = 0
        self._kept_until = float("-inf")
        self.num_bytes = 0
        self.last_sequence_number = 0

    @property
    def first_start(self) -> int:
        """The smallest batch number after which a subscriber can continue, because the log still contains all later
        batches. The largest such number is `last_sequence_number`."""
        return self.last_sequence_number - len(self._batches)

    def follow(self) -> None:
        """Add a subscriber. From now on, new KV cache events must be appended to the log."""
        self._num_followers += 1

    def leave(self, now: float) -> None:
        """Remove a subscriber. The subscriber may return, so new events are still appended to the log for a limited
        time. `now` is a time in seconds of any monotonic clock."""
        self._num_followers -= 1
        self._kept_until = now + self._retention

    def is_kept(self, now: float) -> bool:
        """Return whether new KV cache events must be appended to the log, because a subscriber is connected or may
        return. If the result is False, the writer calls `skip` instead of `append`."""
        return self._num_followers > 0 or now < self._kept_until

    def skip(self) -> None:
        """Record that KV cache events occurred that were not appended to the log. Drop all batches in the log, because
        a subscriber that continued from them would miss these events."""
        self.last_sequence_number += 1
        self._batches.clear()
        self.num_bytes = 0

    def append(self, events: Sequence[KvEvent]) -> None:
        self.last_sequence_number += 1
        self._batches.append(KvEventBatch(self.last_sequence_number, tuple(events)))
        self.num_bytes += _num_bytes(events)
        while len(self._batches) > self._max_batches or (self.num_bytes > self._max_bytes and self._batches):
            self.num_bytes -= _num_bytes(self._batches.popleft().events)

    def after(self, sequence_number: int) -> KvEventBatch | None:
        """Return the batch that follows the batch with this number, or None if it does not exist yet. Raise LookupError
        if the number is less than `first_start` or greater than `last_sequence_number`."""
        if not self.first_start <= sequence_number <= self.last_sequence_number:
            raise LookupError(sequence_number)
        if sequence_number == self.last_sequence_number:
            return None
        return self._batches[sequence_number - self.first_start]


def _num_bytes(events: Sequence[KvEvent]) -> int:
    return sum(
        _EVENT_BYTES + _TOKEN_BYTES * (len(event.token_ids) if isinstance(event, BlockStored) else 0)
        for event in events
    )


class KvEvents:
    """The events of a scheduler's KV cache: blocks stored in the prefix cache, and blocks removed from it. The events
    are written to a log if a subscriber is connected or may return. Otherwise they are only counted."""

    def __init__(
        self,
        scheduler: Scheduler,
        log: KvEventLog,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._clock = clock
        self.num_events: KvEventCounts = Counter()  # since the start, by type
        self._log_grew = asyncio.Event()  # replaced at each batch
        self._has_ended = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context manager for a block in which a subscriber reads the KV cache's events. The events are written to
        the log while the block runs."""
        self.take()
        self._log.follow()
        try:
            yield
        finally:
            self._log.leave(self._clock.now())

    def snapshot(self) -> KvEventBatch:
        """Return the whole content of the prefix cache as one batch. The batch has the number of the last batch in the
        log, so that a subscriber can continue with `after`."""
        self.take()
        return KvEventBatch(self._log.last_sequence_number, tuple(self._scheduler.kv_snapshot()))

    @property
    def starts(self) -> tuple[int, int]:
        """The smallest and the largest batch number that a subscriber can pass to `after`."""
        return self._log.first_start, self._log.last_sequence_number

    async def after(self, sequence_number: int) -> KvEventBatch | None:
        """Wait for the batch of events that follows the batch with this number, and return it. Return None if the
        server shuts down, because no more batches follow. Raise LookupError if the log no longer contains the batch, or
        if no batch with this number exists yet."""
        while (batch := self._log.after(sequence_number)) is None and not self._has_ended:
            await self._log_grew.wait()
        return batch

    def take(self) -> None:
        """Collect the new KV cache events from the scheduler core, and count them by type. Append them to the log if a
        subscriber is connected or may return."""
        if self._log.is_kept(self._clock.now()):
            events = self._scheduler.take_kv_events()
            counts = Counter(map(type, events))
            if events:
                self._log.append(events)
                self._tell()
        else:
            counts = self._scheduler.drop_kv_events()
            if counts:
                self._log.skip()
        self.num_events.update(counts)

    def end(self) -> None:
        """End all subscriptions, because the server shuts down. Readers that wait for the next batch return."""
        self._has_ended = True
        self._tell()

    def _tell(self) -> None:
        self._log_grew.set()
        self._log_grew = asyncio.Event()
