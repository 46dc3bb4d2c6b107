"""Keeps Python's garbage collector from stopping a service, however much it remembers.

A full collection looks at every object that there is: with 500,000 cached blocks it stops all streams for a quarter of
a second. Services free objects that have ended by reference counts (`tests/contract/test_garbage_collection.py` sees to
it), but libraries leave cycles. So while few objects are in sight, each full collection looks at all of them. Where
more survive one than the next could look at in a few milliseconds, all are hidden, among them such as become garbage
later: that is collected when the service is idle. In one that is never idle all come in sight again once there are
twice as many as lived then, and many more, beside what the service knows that it remembers: cycles take bounded memory,
for one long collection in a million objects.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

# A collection takes up to half a microsecond for each object.
MAX_IN_SIGHT = 3_000  # after a full collection
MAX_LOOKED_AT = 8_000  # in any collection but one of all that lives
# So many objects of garbage, some 100 MB, and as many as live, may be hidden before a service that is busy looks.
MAX_HIDDEN_GARBAGE = 1_000_000


class _Hidden:
    """What no collection looks at."""

    def __init__(self) -> None:
        # Pieces of memory in use when all objects were last looked at, beside what is known to be remembered. They are
        # quicker to count than what is hidden.
        self._num_alive = 0
        self._num_since = 0  # objects hidden since these were last counted; some of them are freed by now
        self._is_in_sight = True
        self.count_remembered: Callable[[], int] = lambda: 0

    def watch(self, phase: str, info: dict[str, Any]) -> None:
        """Hides what a collection is about to look at if it is too much, and what has survived a full one if it is too
        much to look at again. It is a callback of the garbage collector.

        Python counts objects made less those freed. Where old ones are freed as fast as new ones are made, even its
        youngest generation grows without a bound.
        """
        if phase == "start" and not self._is_in_sight:
            self._hide(range(info["generation"] + 1), MAX_LOOKED_AT)
        elif phase == "stop" and info["generation"] == 2:  # of all objects
            self._hide([2], 0 if self._is_in_sight else MAX_IN_SIGHT)
            if self._is_in_sight or self._num_since > MAX_HIDDEN_GARBAGE:
                self._count()

    def collect(self) -> None:
        """Collects what has become garbage since it was hidden, and hides the rest again.

        It takes as long as it takes to look at all that the process remembers, so it is for a process that is idle.
        """
        gc.unfreeze()
        self._is_in_sight = True
        gc.collect()
        # Else the next full collection would wait for a quarter of what the last one saw.
        gc.collect()

    def _hide(self, generations: Iterable[int], at_most: int) -> None:
        number = sum(len(gc.get_objects(generation)) for generation in generations)
        if number > at_most:
            gc.freeze()
            self._num_since += number

    def _count(self) -> None:
        number = sys.getallocatedblocks() - self.count_remembered()
        if self._is_in_sight:
            self._num_alive, self._is_in_sight = number, False
        elif number > 2 * self._num_alive + MAX_HIDDEN_GARBAGE:
            gc.unfreeze()
            self._is_in_sight = True
        self._num_since = 0


_hidden = _Hidden()
collect_hidden = _hidden.collect


def discount(count_remembered: Callable[[], int]) -> None:
    """Takes about so many pieces of memory for no garbage, whenever it counts, in whatever thread collects: what a
    service remembers, and may come to be most of its memory, then brings about no look at all objects."""
    _hidden.count_remembered = count_remembered


def keep_short() -> None:
    """Begins to keep collections short. It is to be called once in a process, when all that it needs is imported: that
    stays, and is hidden unseen, as looking at it would take a tenth of a second."""
    gc.freeze()
    # Objects made beyond those freed before the youngest are looked at; collections of the younger generations before
    # the older is looked at too. Where as many old objects are freed as new ones are made, many more are made before
    # that: small thresholds bound what is in sight, and cost no more, since each collection looks at less.
    gc.set_threshold(100, 5, 1)
    gc.callbacks.append(_hidden.watch)
    gc.collect()  # of nothing: from it Python reckons when the next full collection is due
