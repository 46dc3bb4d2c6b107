"""Keeps Python's garbage collector from stopping a service, however much it remembers.

A full collection looks at every object that there is: with 500,000 cached blocks it stops all streams for a quarter of
a second. Services free objects that have ended by reference counts (`tests/contract/test_garbage_collection.py` sees to
it), but libraries leave cycles. So while few objects are in sight, each full collection looks at all of them. Where
more survive one than the next could look at in a few milliseconds, all are hidden, among them such as become garbage
later: that is collected when the service is idle.
"""

import gc
from typing import Any

# Objects made and not freed before the youngest are looked at; collections of the younger generations before the older
# is looked at too. A full collection looks at what survived the last one and some 701 * 6 * 3 objects beyond that.
THRESHOLDS = (700, 5, 2)
# A collection takes a quarter of a microsecond for each object.
MAX_IN_SIGHT = 8_000
_OLDEST_GENERATION = 2


def keep_short() -> None:
    """Begins to keep collections short. It is to be called once in a process, when all that it needs is imported."""
    gc.set_threshold(*THRESHOLDS)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_hide_survivors)


def collect_hidden() -> None:
    """Collects what has become garbage since it was hidden, and hides the rest again.

    It takes as long as it takes to look at all that the process remembers, so it is for a process that is idle.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _hide_survivors(phase: str, info: dict[str, Any]) -> None:
    has_seen_all = phase == "stop" and info["generation"] == _OLDEST_GENERATION
    if has_seen_all and len(gc.get_objects(_OLDEST_GENERATION)) > MAX_IN_SIGHT:
        gc.freeze()
