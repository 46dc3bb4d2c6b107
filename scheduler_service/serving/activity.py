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
    """The recent throughput of the scheduler in tokens per second, for the log and for reports. It samples the
    scheduler's counters every second and keeps the samples of the last ten seconds."""

    def __init__(
        self,
        read_stats: Callable[[], SchedulerStats],
        clock: Callable[[], float],
        rest: Callable[[], None],
    ) -> None:
        """Begin to measure the scheduler's throughput. `read_stats` returns the scheduler's counters, and `clock`
        returns the time in seconds. `rest` is called after ten seconds without activity, once after each period of
        activity."""
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
        """Sample the scheduler's counters every second until cancelled. Log a line about the throughput for every ten
        seconds with activity."""
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL)
            line = self.sample()
            if line:
                logger.info("%s", line)

    def sample(self) -> str:
        """Sample the scheduler's counters. Return a log line about the last ten seconds, or an empty string if no line
        is due or the scheduler was idle. Call `rest` if a line is due and activity has stopped since the previous
        line."""
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
