"""The activity of the scheduler: its throughput in tokens per second and a periodic log line, from the core's
counters."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from scheduler_service.core.request import SchedulerStats

logger = logging.getLogger(__name__)

_WINDOW = 10.0  # seconds
_SAMPLE_INTERVAL = 1.0
_MAX_OVERDUE_SHARE = 0.1  # of the newly admitted requests; above it, arrival decides the order


class Activity:
    """The recent throughput of the scheduler in tokens per second, for a log line and for reports. It reads the
    scheduler's counters every second and stores the values of the last ten seconds."""

    def __init__(
        self,
        read_stats: Callable[[], SchedulerStats],
        clock: Callable[[], float],
        rest: Callable[[], None],
    ) -> None:
        """Begin to measure the scheduler's throughput. `read_stats` returns the scheduler's counters, and `clock`
        returns the time in seconds. `rest` is called once after each period of activity, when the scheduler has been
        idle for ten seconds."""
        self._read_stats = read_stats
        self._clock = clock
        self._rest = rest
        self._has_rested = True
        self._reported_at = clock()
        self._samples: deque[tuple[float, SchedulerStats]] = deque([(clock(), read_stats())])

    @property
    def generation_throughput(self) -> float:
        """The average number of output tokens per second over the last ten seconds."""
        started_at, first = self._samples[0]
        return share(self._read_stats().num_generation_tokens - first.num_generation_tokens, self._clock() - started_at)

    async def run(self) -> NoReturn:
        """Read the scheduler's counters every second until cancelled. Every ten seconds, log the throughput unless the
        scheduler was idle."""
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL)
            line = self.sample()
            if line:
                logger.info("%s", line)

    def sample(self) -> str:
        """Read and store the scheduler's counters. Every ten seconds, return a log line about the throughput;
        otherwise, or if the scheduler was idle in these seconds, return an empty string. Call `rest` when the scheduler
        has become idle."""
        now, stats = self._clock(), self._read_stats()
        self._samples.append((now, stats))
        while now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()
        if now - self._reported_at < _WINDOW:
            return ""
        self._reported_at = now
        line = self._describe(now, stats)
        if not line and not self._has_rested:
            self._rest()
        self._has_rested = not line
        return line

    def _describe(self, now: float, stats: SchedulerStats) -> str:
        started_at, first = self._samples[0]
        num_prompt_tokens = stats.num_prompt_tokens - first.num_prompt_tokens
        num_generation_tokens = stats.num_generation_tokens - first.num_generation_tokens
        num_sequences = stats.num_running + stats.num_waiting
        if not num_prompt_tokens and not num_generation_tokens and not num_sequences:
            return ""
        seconds = now - started_at
        num_overdue = stats.num_overdue_requests - first.num_overdue_requests
        num_admitted = stats.num_admitted_requests - first.num_admitted_requests
        overdue = ""
        if share(num_overdue, num_admitted) > _MAX_OVERDUE_SHARE:
            overdue = (
                f"; overloaded: {num_overdue} of {num_admitted} requests began after --max-wait, in order of arrival"
            )
        return (
            f"Avg prompt throughput: {share(num_prompt_tokens, seconds):.1f} tokens/s, "
            f"Avg generation throughput: {share(num_generation_tokens, seconds):.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {share(stats.num_held_blocks, stats.num_device_blocks):.1%}, "
            f"Prefix cache hit rate: {share(stats.num_cached_prompt_tokens, stats.num_prompt_tokens):.1%}{overdue}"
        )


def share(count: float, total: float) -> float:
    """Return the quotient `count / total`, or 0 if `total` is not positive."""
    return count / total if total > 0 else 0.0
