"""A ledger of the detached results that must be kept and those that may be forgotten.

Results are kept for a limited time, and up to a number and a size. A tenant with the most results loses results first.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from scheduler_service.serving.detached import DetachedRequests
from tests.sim.outputs.scenario import Scenario

Key = tuple[str, str]


class DetachedLedger:
    """A ledger that compares the server's results with the rules after each turn of the event loop."""

    def __init__(
        self,
        detached: DetachedRequests,
        scenario: Scenario,
        keys: Sequence[Key],
        is_served: Callable[[Key], bool],
    ) -> None:
        self._detached = detached
        self._is_served = is_served
        self._scenario = scenario
        self._keys = keys
        self._taken: set[Key] = set()
        self._ended: dict[Key, tuple[float, int]] = {}  # kept results: time of the end and bytes; oldest first
        self.forgotten: set[Key] = set()
        self.num_pushed_out = 0

    def audit(self) -> None:
        ended, gone = [], []
        for key in self._keys:
            if key not in self._detached.by_name:
                if key in self._taken and key not in self.forgotten:
                    gone.append(key)
                continue
            assert key not in self.forgotten, "a result comes back"
            self._taken.add(key)
            if key not in self._ended and self._detached.find(*key).has_ended:
                ended.append(key)
        if ended or gone:
            self._account(ended, gone)

    def _account(self, ended: list[Key], gone: list[Key]) -> None:
        now, scenario = asyncio.get_running_loop().time(), self._scenario
        for key in ended:
            assert not self._is_served(key), "a result that is kept holds blocks"
            num_bytes = sum(output.num_bytes for output in self._detached.find(*key).outputs)
            self._ended[key] = now, num_bytes
        # A result that is evicted in the same turn in which it ends is not seen.
        unseen = [key for key in gone if key not in self._ended]
        before = dict(self._ended)
        for key in gone:
            self.forgotten.add(key)
            self._ended.pop(key, None)
        if len(ended) + len(unseen) <= 1:
            for key in gone:
                if key in unseen or now < before[key][0] + scenario.retention - 1e-6:
                    self.num_pushed_out += 1
                    self._check_pushed_out(key, before, bool(unseen))
        assert len(self._ended) <= scenario.max_ended, "more results are kept than may be"
        num_bytes = sum(num_bytes for _, num_bytes in self._ended.values())
        assert self._detached.num_bytes == num_bytes, "the bytes of results are counted wrong"
        assert num_bytes <= scenario.max_bytes or len(self._ended) == 1, "results take more bytes than they may"

    def _check_pushed_out(self, key: Key, before: dict[Key, tuple[float, int]], has_unseen: bool) -> None:
        """Check that a limit was exceeded, and that the evicted result was the oldest of a tenant with the most
        results.

        `has_unseen`: another result ended and was evicted in the same turn, so its number of bytes is unknown.
        """
        scenario = self._scenario
        num_before = len(before) + has_unseen
        if num_before > scenario.max_ended:
            kept = Counter(tenant for tenant, _ in self._ended)
            assert kept[key[0]] + 1 >= max(kept.values(), default=0), "a tenant pushes out what others keep"
        else:
            num_bytes = sum(num_bytes for _, num_bytes in before.values())
            assert num_bytes > scenario.max_bytes or has_unseen, "a result is lost"
        if key in before:
            older = [other for other in self._ended if other[0] == key[0] and before[other][0] < before[key][0]]
            assert not older, "a result is pushed out by one that is older"
