"""The retry policy: when a failed call is repeated, and how long all attempts may take."""

import random
import time

import grpc

from pagewire.client.arguments import as_seconds
from pagewire.client.errors import DeadlineExceeded, PagewireError, ResourceExhausted, Unavailable

# The delays in seconds before the second, third ... consecutive attempt, if the server suggests no delay. The last
# value repeats. Each delay varies randomly by JITTER in both directions, so that clients that failed together do not
# retry together.
DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)
JITTER = 0.2
_TIMEOUT_PASSED = "the timeout passed after repeated attempts; the last failure: "


class Attempts:
    """Decides whether and when a failed client call is retried.

    `retry_s` is the time after the start of the call during which the call may be retried. `timeout_s` limits the total
    time of all attempts; None means no limit. Both times are in seconds.
    """

    def __init__(self, retry_s: float, timeout_s: float | None = None) -> None:
        """Start the clock for the retries and the timeout of one call. Raise TypeError or ValueError for an invalid
        `timeout_s`."""
        self.started_at = time.monotonic()
        self._retry_until = self.started_at + retry_s
        self._timeout_at = None
        if timeout_s is not None:
            self._timeout_at = self.started_at + as_seconds("timeout", timeout_s)
        self._num_failures = 0

    @property
    def timeout_s(self) -> float | None:
        """The remaining time for the next attempt of the call in seconds, or None if the call has no timeout."""
        return None if self._timeout_at is None else max(0.0, self._timeout_at - time.monotonic())

    def delay_after(self, failure: PagewireError) -> float | None:
        """Return the time to wait before the next attempt of the failed call in seconds. Return None if the call must
        not be retried."""
        remaining_s = self._retry_until - time.monotonic()
        if not isinstance(failure, Unavailable | ResourceExhausted) or remaining_s <= 0:
            return None
        delay_s = failure.retry_delay
        if delay_s is None:
            delay_s = DELAYS_S[min(self._num_failures, len(DELAYS_S) - 1)]
        self._num_failures += 1
        return min(delay_s * random.uniform(1 - JITTER, 1 + JITTER), remaining_s)

    def next_delay(self, failure: PagewireError) -> float:
        """Return the time to wait before the next attempt of the failed call, in seconds.

        Raise `failure` if the call must not be retried, and DeadlineExceeded if the time for all attempts has passed.
        """
        delay_s = self.delay_after(failure)
        if delay_s is None:
            raise failure
        return self.bounded(delay_s, failure)

    def bounded(self, delay_s: float, failure: PagewireError) -> float:
        """Return the delay before the next attempt in seconds, shortened to the remaining time of the call. Raise
        DeadlineExceeded if no time remains."""
        timeout_s = self.timeout_s
        if timeout_s == 0:
            raise DeadlineExceeded(f"{_TIMEOUT_PASSED}{failure}", code=grpc.StatusCode.DEADLINE_EXCEEDED) from failure
        return delay_s if timeout_s is None else min(delay_s, timeout_s)
