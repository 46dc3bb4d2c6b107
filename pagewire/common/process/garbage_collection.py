"""Settings of Python's garbage collector that keep its pauses short, however many objects a service keeps.

A full collection visits every tracked object. With 500,000 cached blocks it pauses all streams for a quarter of a
second. Services free finished objects by reference counts alone (`tests/contract/test_garbage_collection.py` checks
this), but libraries leave cycles.

While few objects are tracked, each full collection visits all of them. If too many objects survive a collection to
visit them again within a few milliseconds, all of them are hidden with `gc.freeze`. Hidden objects can become garbage
later; that garbage is collected when the service is idle. In a service that is never idle, all objects are unhidden
once there are too many. The limit is twice the number of live objects plus `MAX_HIDDEN_GARBAGE`. Objects that the
service reports as remembered do not count. Cycles therefore use bounded memory, at the cost of one long collection per
million objects.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

# A collection takes up to half a microsecond per object.
MAX_IN_SIGHT = 3_000  # after a full collection
MAX_LOOKED_AT = 8_000  # in any collection except a collection of all live objects
# The number of garbage objects (about 100 MB) that may be hidden, besides as many as are alive, before a busy service
# collects them.
MAX_HIDDEN_GARBAGE = 1_000_000


class _Hidden:
    """The Python objects that are hidden from the garbage collector with `gc.freeze`. The collector does not visit
    hidden objects, so its collections stay short.
    """

    def __init__(self) -> None:
        # The number of allocated memory blocks at the last collection of all objects, without those reported as
        # remembered. They are faster to count than the hidden objects.
        self._num_alive = 0
        self._num_since = 0  # objects hidden since the last count; some of them are freed by now
        self._is_in_sight = True
        self.count_remembered: Callable[[], int] = lambda: 0

    def watch(self, phase: str, info: dict[str, Any]) -> None:
        """Hide objects from the garbage collector before its collections take too long. Python's garbage collector
        calls this method at the start and end of each collection.

        At the start of a collection, hide the objects to visit if they are too many. At the end of a full collection,
        hide the surviving objects if they are too many to visit again.

        Python starts a collection when allocations exceed deallocations by a threshold. If old objects are freed as
        fast as new objects are made, no collection starts, and even the youngest generation grows without bound.
        """
        if phase == "start" and not self._is_in_sight:
            self._hide(range(info["generation"] + 1), MAX_LOOKED_AT)
        elif phase == "stop" and info["generation"] == 2:  # a full collection
            self._hide([2], 0 if self._is_in_sight else MAX_IN_SIGHT)
            if self._is_in_sight or self._num_since > MAX_HIDDEN_GARBAGE:
                self._count()

    def collect(self) -> None:
        """Collect the garbage among the hidden objects, and hide the remaining objects from the garbage collector
        again.

        The duration is proportional to the number of all objects in the process, so only an idle process should call
        this method.
        """
        gc.unfreeze()
        self._is_in_sight = True
        gc.collect()
        # Otherwise the next full collection would not start before new objects reach a quarter of those that the last
        # one saw.
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
    """Report the memory that the service keeps on purpose, such as caches, so that it does not count as possible
    garbage. The growth of a cache, which may be most of the memory, then does not start a long collection of all
    objects.

    `count_remembered` returns the approximate number of memory blocks to exclude. The garbage collector calls it during
    a collection, on the thread in which the collection runs.
    """
    _hidden.count_remembered = count_remembered


def keep_short() -> None:
    """Start to keep Python's garbage collections short, by hiding objects that live long. Call this once per process,
    after all imports.

    The imported objects stay alive, so they are hidden without a first collection, which would take a tenth of a
    second.
    """
    gc.freeze()
    # The first threshold counts allocations minus deallocations; the others count collections of the next younger
    # generation. If as many old objects are freed as new ones are made, many more allocations precede a collection.
    # Small thresholds bound the number of tracked objects, and cost no more, since each collection visits fewer
    # objects.
    gc.set_threshold(100, 5, 1)
    gc.callbacks.append(_hidden.watch)
    gc.collect()  # visits nothing, but Python bases the time of the next full collection on it
