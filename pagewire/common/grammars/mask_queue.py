"""Masks of many rows, computed beside whatever else their process does.

The library gives Python's lock up while it computes a mask, so threads do that while a step is computed. What the masks
of a grammar have taken says on which: those of grammars that are a burden share one thread, and the cheapest go first,
but none waits for ever. A step that needs masks at once computes those that have not begun.
"""

import ctypes
import threading
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from pagewire.common.grammars.matcher import GrammarError, Matcher

_SLOW_S = 0.0005  # masks of which a burden is made
_SLACK = 20  # times as long as a mask is thought to take, it may wait for cheaper ones that come later


class MaskJob:
    """What a matcher allows behind further tokens.

    Attributes:
        mask: a bit for each token, the lowest of int32 number 0 first, once the job is done.
        error: why there is no mask.
        us: microseconds that a processor took for it, 0 until it is done.
    """

    def __init__(self, matcher: Matcher, token_ids: Sequence[int], mask_bytes: int) -> None:
        self.matcher = matcher
        self.token_ids = token_ids
        self.mask = (ctypes.c_int32 * (mask_bytes // 4))()
        self.error: GrammarError | None = None
        self.us = 0
        self.is_begun = False
        self.is_done = False

    def run(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            self.matcher.consume(self.token_ids)
            self.matcher.fill_mask(ctypes.addressof(self.mask), ctypes.sizeof(self.mask))
        except GrammarError as error:
            self.error = error
        ns = time.thread_time_ns() - began_ns
        self.us = max(1, ns // 1000)
        self.matcher.pace.observe(ns / 1e9)


class _Lane:
    """Jobs that wait, the one that is due first on top. Some were begun by those who needed them."""

    def __init__(self, lock: threading.Lock) -> None:
        self.has_jobs = threading.Condition(lock)
        self.jobs: list[tuple[float, int, MaskJob]] = []


class MaskQueue:
    """Computes masks on two threads, which begin with the first job. A row's jobs are put one after the other.

    Their priority is that of all others: moving a grammar on needs Python's lock, and the thread that holds that must
    not be kept off the processors.
    """

    def __init__(self, *, has_threads: bool = True) -> None:
        """`has_threads`: if not, all is computed by those who need it."""
        self._has_threads = has_threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_done = threading.Condition(self._lock)
        self._quick, self._slow = _Lane(self._lock), _Lane(self._lock)
        self._numbers = count()
        self._is_closed = False

    def put(self, job: MaskJob) -> None:
        """Have a mask computed."""
        if not self._has_threads:
            return
        seconds = job.matcher.pace.seconds
        lane = self._slow if seconds > _SLOW_S else self._quick
        with self._lock:
            heappush(lane.jobs, (time.perf_counter() + _SLACK * seconds, next(self._numbers), job))
            lane.has_jobs.notify()
            if not self._threads and not self._is_closed:
                self._start()

    def finish(self, jobs: Sequence[MaskJob], deadline: float | None) -> None:
        """Return when these are done, or at the deadline, a time of `time.perf_counter`: those that are not begun are
        computed here, the cheapest first, as far as that will take no longer."""
        for job in sorted(jobs, key=lambda job: job.matcher.pace.seconds):
            if deadline is not None and time.perf_counter() + job.matcher.pace.seconds > deadline:
                break
            self._compute(job)
        seconds = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._is_done:
            self._is_done.wait_for(lambda: all(job.is_done for job in jobs), seconds)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._is_closed = True
            self._quick.has_jobs.notify_all()
            self._slow.has_jobs.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for lane in (self._quick, self._slow):
            thread = threading.Thread(target=self._run, args=(lane,), name="masks", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _compute(self, job: MaskJob) -> None:
        """Compute it, unless another thread does."""
        with self._lock:
            if job.is_begun:
                return
            job.is_begun = True
        job.run()
        with self._is_done:
            job.is_done = True
            self._is_done.notify_all()

    def _run(self, lane: _Lane) -> None:
        while True:
            with lane.has_jobs:
                lane.has_jobs.wait_for(lambda: lane.jobs or self._is_closed)
                if self._is_closed:
                    return
                _, _, job = heappop(lane.jobs)
            self._compute(job)
