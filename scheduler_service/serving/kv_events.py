"""The events of the prefix cache, from the core to subscribers who come, go and come back, in numbered batches.

Nothing is kept without a subscriber, since a subscriber begins with a snapshot; what is kept is bounded in batches and
in bytes, and the oldest goes first.
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
# Seconds for which events are kept for a follower who may come back.
RETENTION = 60.0
# What an event takes in memory, more or less, and each token of it.
_EVENT_BYTES = 200
_TOKEN_BYTES = 40


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Changes of the cache that happened at once; or, as a snapshot, its content after the batch of this number."""

    sequence_number: int
    events: tuple[KvEvent, ...]


class KvEventLog:
    """A ring of batches, whose numbers begin at 1 and rise by 1. It is pure: the writer wakes the waiting readers."""

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
        """The smallest number after which every batch is held; the greatest is `last_sequence_number`."""
        return self.last_sequence_number - len(self._batches)

    def follow(self) -> None:
        """A subscriber reads what is appended from now on."""
        self._num_followers += 1

    def leave(self, now: float) -> None:
        """A follower has gone, and may come back. `now` is in seconds of any monotonic clock."""
        self._num_followers -= 1
        self._kept_until = now + self._retention

    def is_kept(self, now: float) -> bool:
        """Whether events are to be appended; if not, `skip` is called when there were some."""
        return self._num_followers > 0 or now < self._kept_until

    def skip(self) -> None:
        """Something happened that no subscriber saw: what was held before leads nowhere."""
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
        """Find the batch after this one; None while there is none. Raises LookupError outside the range of starts."""
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
    """Keeps the events in a log while there are subscribers; otherwise they are only counted."""

    def __init__(
        self,
        scheduler: Scheduler,
        log: KvEventLog,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._clock = clock
        self.num_events: KvEventCounts = Counter()  # that there were, by their kinds
        self._log_grew = asyncio.Event()  # a new one for each batch
        self._has_ended = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside the block, what happens to the cache is kept. Otherwise there is no reader."""
        self.take()
        self._log.follow()
        try:
            yield
        finally:
            self._log.leave(self._clock.now())

    def snapshot(self) -> KvEventBatch:
        """Return what is cached now, under the number of the last batch."""
        self.take()
        return KvEventBatch(self._log.last_sequence_number, tuple(self._scheduler.kv_snapshot()))

    @property
    def starts(self) -> tuple[int, int]:
        """The smallest and the greatest number that `after` takes."""
        return self._log.first_start, self._log.last_sequence_number

    async def after(self, sequence_number: int) -> KvEventBatch | None:
        """The batch after this one, as soon as there is one; None when there will be none any more. Raises LookupError
        if it is no longer held, or if this one has not been yet."""
        while (batch := self._log.after(sequence_number)) is None and not self._has_ended:
            await self._log_grew.wait()
        return batch

    def take(self) -> None:
        """Take from the core what has happened since the last time."""
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
        """Nothing happens any more; readers that wait for the next batch hear so."""
        self._has_ended = True
        self._tell()

    def _tell(self) -> None:
        self._log_grew.set()
        self._log_grew = asyncio.Event()
