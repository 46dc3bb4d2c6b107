"""Measures the share of the machine that other processes use during a measurement."""

import os
import time
from pathlib import Path


class Cores:
    """The cores that this process may use, and the share of their time that other processes have used."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._at, self._busy, self._own = time.perf_counter(), self._busy_s(), self._own_s()

    def share_of_others(self) -> float:
        """Return the share since the start; 1 means all cores. A child process counts as our own only after it has
        ended."""
        others = (self._busy_s() - self._busy) - (self._own_s() - self._own)
        return max(0.0, others) / (time.perf_counter() - self._at) / len(os.sched_getaffinity(0))

    def _busy_s(self) -> float:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # All times except idle and iowait (the fourth and fifth), and guest times, which are already included in
        # others.
        ticks = sum(int(tick) for row in rows if row[0] in names for tick in [*row[1:4], *row[6:9]])
        return ticks / self._ticks

    def _own_s(self) -> float:
        return sum(os.times()[:4])
