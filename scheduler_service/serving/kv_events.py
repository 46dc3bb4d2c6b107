"""The prefix cache's events on their way from the core to their subscribers."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.kv_event_log import KvEventBatch, KvEventLog
from scheduler_service.serving.observer import Observer


class KvEvents:
    """Keeps the events in a log while there are subscribers; otherwise they are only counted."""

    def __init__(
        self,
        scheduler: Scheduler,
        log: KvEventLog,
        observers: Sequence[Observer],
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._observers = observers
        self._clock = clock
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
        if counts:
            for observer in self._observers:
                observer.kv_events_happened(counts)

    def end(self) -> None:
        """Nothing happens any more; readers that wait for the next batch hear so."""
        self._has_ended = True
        self._tell()

    def _tell(self) -> None:
        self._log_grew.set()
        self._log_grew = asyncio.Event()
