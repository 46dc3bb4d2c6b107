"""A queue that computes the token masks of many rows in the background.

The library releases the GIL while it computes a mask, so threads compute masks while the model computes a step. The
past cost of a grammar's masks selects the thread: all slow grammars share one thread. On each thread the cheapest masks
go first, but no mask waits forever. A step that needs masks at once computes those that have not begun.
"""

import ctypes
import threading
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from pagewire.common.grammars.matcher import GrammarError, Matcher

_SLOW_S = 0.0005  # grammars with slower masks share the slow thread
_SLACK = 20  # a mask may wait for later, cheaper masks up to this multiple of its expected time


class MaskJob:
    """A job that computes one token mask for a sequence whose output must match a grammar. The job first advances the
    grammar by `token_ids`. The mask then says which tokens the grammar allows next.

    Attributes:
        mask: one bit per token, from the lowest bit of the first int32. Valid once the job is done.
        error: the reason why the mask could not be computed, or None.
        us: the CPU time of the computation in microseconds, 0 until the job is done.
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


class _ThreadQueue:
    """The queue of token masks that one thread must compute, ordered by due time. The thread skips a job that a caller
    of `MaskQueue.finish` has begun to compute itself.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.has_jobs = threading.Condition(lock)
        self.jobs: list[tuple[float, int, MaskJob]] = []


class MaskQueue:
    """A pool of two threads that compute token masks of grammars in the background. The threads start with the first
    job.

    The caller must submit the jobs of one sequence one after another. The threads have normal priority: they hold the
    GIL while they consume tokens, and the operating system must not delay a thread that holds the GIL.
    """

    def __init__(self, *, has_threads: bool = True) -> None:
        """Create a queue of token masks. Without `has_threads`, no threads are started, and `finish` computes all masks
        on the caller's thread.
        """
        self._has_threads = has_threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_done = threading.Condition(self._lock)
        self._quick, self._slow = _ThreadQueue(self._lock), _ThreadQueue(self._lock)
        self._numbers = count()
        self._is_closed = False

    def put(self, job: MaskJob) -> None:
        """Queue the computation of a token mask. Without threads, do nothing: `finish` then computes the mask."""
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
        """Wait until the token masks of all given jobs are computed, or until the deadline (a time of
        `time.perf_counter`, or None for no deadline).

        Meanwhile, compute jobs that no thread has begun on the caller's thread, the cheapest job first. A job that
        would probably end after the deadline is left to the threads of the pool.
        """
        for job in sorted(jobs, key=lambda job: job.matcher.pace.seconds):
            if deadline is not None and time.perf_counter() + job.matcher.pace.seconds > deadline:
                break
            self._compute(job)
        seconds = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._is_done:
            self._is_done.wait_for(lambda: all(job.is_done for job in jobs), seconds)

    def close(self) -> None:
        """Stop the threads that compute token masks, and wait until they have ended."""
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
        """Compute the token mask of a job on the current thread, unless another thread has begun the job."""
        with self._lock:
            if job.is_begun:
                return
            job.is_begun = True
        job.run()
        with self._is_done:
            job.is_done = True
            self._is_done.notify_all()

    def _run(self, lane: _ThreadQueue) -> None:
        while True:
            with lane.has_jobs:
                lane.has_jobs.wait_for(lambda: lane.jobs or self._is_closed)
                if self._is_closed:
                    return
                _, _, job = heappop(lane.jobs)
            self._compute(job)
