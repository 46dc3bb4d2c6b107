"""Keeps Python's garbage collector from stopping a service, however much it remembers.

A full collection looks at every object that there is: with 500,000 cached blocks it stops all streams for a quarter of
a second. Services free objects that have ended by reference counts (`tests/contract/test_garbage_collection.py` sees to
it), but libraries leave cycles. So while few objects are in sight, each full collection looks at all of them. Where
more survive one than the next could look at in a few milliseconds, all are hidden, among them such as become garbage
later: that is collected when the service is idle. In one that is never idle all come in sight again once the hidden are
twice as many as lived then, and many more: cycles take bounded memory, for a long collection in a million objects,
behind which come one of a quarter as many and one of a sixteenth.
"""

import gc
from typing import Any

# Objects made and not freed before the youngest are looked at; collections of the younger generations before the older
# is looked at too. A full collection looks at what survived the last one and some 701 * 3 * 2 objects beyond that.
THRESHOLDS = (700, 2, 1)
# A collection takes a quarter of a microsecond for each object.
MAX_IN_SIGHT = 7_000
# So many objects of garbage, some 100 MB, and as many as live, may be hidden before a service that is busy looks.
MAX_HIDDEN_GARBAGE = 1_000_000
_OLDEST_GENERATION = 2


class _Hidden:
    """What no collection looks at."""

    def __init__(self) -> None:
        self._num_alive = 0  # when all were last in sight
        self._num_since = 0  # hidden since all were last counted; some of them are freed by now
        self._is_in_sight = False

    def hide_survivors(self, phase: str, info: dict[str, Any]) -> None:
        """Hides what has survived a full collection if it is much, and all that is hidden with it. It is a callback of
        the garbage collector."""
        if phase != "stop" or info["generation"] != _OLDEST_GENERATION:
            return
        num_survivors = len(gc.get_objects(_OLDEST_GENERATION))
        if num_survivors <= MAX_IN_SIGHT:
            return
        gc.freeze()
        if self._is_in_sight:
            self._set_alive(num_survivors)
            return
        self._num_since += num_survivors
        if self._num_since > MAX_HIDDEN_GARBAGE:
            self._num_since = 0
            if gc.get_freeze_count() > 2 * self._num_alive + MAX_HIDDEN_GARBAGE:
                gc.unfreeze()
                self._is_in_sight = True

    def collect(self) -> None:
        gc.unfreeze()
        _look_at_all()
        self._set_alive(gc.get_freeze_count())

    def _set_alive(self, number: int) -> None:
        self._num_alive, self._num_since, self._is_in_sight = number, 0, False


def _look_at_all() -> None:
    gc.collect()
    gc.freeze()
    # Else the next full collection would wait for a quarter of what the last one saw.
    gc.collect()


_hidden = _Hidden()


def keep_short() -> None:
    """Begins to keep collections short. It is to be called once in a process, when all that it needs is imported."""
    gc.set_threshold(*THRESHOLDS)
    _look_at_all()
    gc.callbacks.append(_hidden.hide_survivors)


def collect_hidden() -> None:
    """Collects what has become garbage since it was hidden, and hides the rest again.

    It takes as long as it takes to look at all that the process remembers, so it is for a process that is idle.
    """
    _hidden.collect()
