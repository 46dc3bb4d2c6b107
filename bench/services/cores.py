"""Tells how much of the machine others take while something is measured."""

import os
import time
from pathlib import Path


class Cores:
    """The cores that this process may use: which share of their time others took, who were at work beside it."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._at, self._busy, self._own = time.perf_counter(), self._busy_s(), self._own_s()

    def share_of_others(self) -> float:
        """Returns the share since the start, of 1 for all cores. What we started counts as ours once it has ended."""
        others = (self._busy_s() - self._busy) - (self._own_s() - self._own)
        return max(0.0, others) / (time.perf_counter() - self._at) / len(os.sched_getaffinity(0))

    def _busy_s(self) -> float:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # All but the fourth and fifth, which are idle, and guests, which are counted twice.
        ticks = sum(int(tick) for row in rows if row[0] in names for tick in [*row[1:4], *row[6:9]])
        return ticks / self._ticks

    def _own_s(self) -> float:
        return sum(os.times()[:4])
