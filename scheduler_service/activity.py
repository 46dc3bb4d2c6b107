"""How busy the scheduler is, from the counters it keeps: tokens per second, and a line in the log now and then."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from scheduler_service.core.request import SchedulerStats

logger = logging.getLogger(__name__)

_WINDOW = 10.0  # seconds
_SAMPLE_INTERVAL = 1.0


class Activity:
    """Samples the counters every second and keeps those of the last ten."""

    def __init__(self, read_stats: Callable[[], SchedulerStats], clock: Callable[[], float]) -> None:
        self._read_stats = read_stats
        self._clock = clock
        self._samples: deque[tuple[float, SchedulerStats]] = deque([(clock(), read_stats())])

    @property
    def generation_throughput(self) -> float:
        """Output tokens per second over the window."""
        started_at, first = self._samples[0]
        return _rate(self._read_stats().num_generation_tokens - first.num_generation_tokens, self._clock() - started_at)

    async def run(self) -> NoReturn:
        """Sample, and log a line every ten seconds in which something happened. Until cancelled."""
        logged_at = self._clock()
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL)
            now, stats = self._clock(), self._read_stats()
            if now - logged_at >= _WINDOW:
                self._log(now, stats)
                logged_at = now
            self._samples.append((now, stats))
            while len(self._samples) > 1 and now - self._samples[0][0] > _WINDOW:
                self._samples.popleft()

    def _log(self, now: float, stats: SchedulerStats) -> None:
        started_at, first = self._samples[0]
        num_prompt_tokens = stats.num_prompt_tokens - first.num_prompt_tokens
        num_generation_tokens = stats.num_generation_tokens - first.num_generation_tokens
        num_sequences = stats.num_running + stats.num_waiting
        if not num_prompt_tokens and not num_generation_tokens and not num_sequences:
            return
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            _rate(num_prompt_tokens, now - started_at),
            _rate(num_generation_tokens, now - started_at),
            stats.num_running,
            stats.num_waiting,
            100 * _rate(stats.num_held_blocks, stats.num_device_blocks),
            100 * _rate(stats.num_cached_prompt_tokens, stats.num_prompt_tokens),
        )


def _rate(count: float, total: float) -> float:
    return count / total if total > 0 else 0.0
