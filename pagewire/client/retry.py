"""Decides when a call that the server could not take is made again, and for how long it may last in all."""

import random
import time

import grpc

from pagewire.client.arguments import as_seconds
from pagewire.client.errors import DeadlineExceeded, PagewireError, ResourceExhausted, Unavailable

# Before the second, third ... attempt in a row, where the server suggests nothing; the last goes on. Each is spread by
# JITTER in both directions, so that clients which failed together do not come back together.
DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)
JITTER = 0.2
_TIMEOUT_PASSED = "the timeout passed while the call was made again and again; the last time: "


class Attempts:
    """The attempts of one call. `retry_s` is the time after its begin in which it may be made again, `timeout_s` the
    time that it may take in all, or None."""

    def __init__(self, retry_s: float, timeout_s: float | None = None) -> None:
        """Raises TypeError or ValueError for a `timeout_s` that is no time."""
        self.started_at = time.monotonic()
        self._retry_until = self.started_at + retry_s
        self._timeout_at = None
        if timeout_s is not None:
            self._timeout_at = self.started_at + as_seconds("timeout", timeout_s)
        self._num_failures = 0

    @property
    def timeout_s(self) -> float | None:
        """The seconds that are left for the next attempt, or None where there is no limit."""
        return None if self._timeout_at is None else max(0.0, self._timeout_at - time.monotonic())

    def delay_after(self, failure: PagewireError) -> float | None:
        """Returns the seconds to wait before the next attempt, or None if the failure is for the caller."""
        remaining_s = self._retry_until - time.monotonic()
        if not isinstance(failure, Unavailable | ResourceExhausted) or remaining_s <= 0:
            return None
        delay_s = failure.retry_delay
        if delay_s is None:
            delay_s = DELAYS_S[min(self._num_failures, len(DELAYS_S) - 1)]
        self._num_failures += 1
        return min(delay_s * random.uniform(1 - JITTER, 1 + JITTER), remaining_s)

    def next_delay(self, failure: PagewireError) -> float:
        """Returns the seconds to wait before the next attempt. Raises the failure if there is none, and
        DeadlineExceeded once the time of the whole call is over."""
        delay_s = self.delay_after(failure)
        if delay_s is None:
            raise failure
        return self.bounded(delay_s, failure)

    def bounded(self, delay_s: float, failure: PagewireError) -> float:
        """Returns a delay, or what is left of the time if that is less. Raises DeadlineExceeded if nothing is."""
        timeout_s = self.timeout_s
        if timeout_s == 0:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise DeadlineExceeded(f"{_TIMEOUT_PASSED}{failure}", code=code) from failure
        return delay_s if timeout_s is None else min(delay_s, timeout_s)

    def end(self) -> None:
        """Makes this attempt the last one: what has begun is never begun again."""
        self._retry_until = self.started_at
