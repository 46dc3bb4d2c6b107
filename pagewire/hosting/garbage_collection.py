"""Keeps Python's garbage collector from stopping a service, however much it remembers.

A full collection looks at every object that there is: with 500,000 cached blocks it stops all streams for a quarter of
a second. Services free objects that have ended by reference counts (`tests/contract/test_garbage_collection.py` sees to
it). Objects that have survived one full collection are therefore taken out of the collector's sight, and the next full
one is as short as the first.
"""

import gc
from typing import Any

# Objects made and not freed before the youngest are looked at; collections of the younger generations before the older
# is looked at too. So a full collection looks at some 10,000 objects, which takes a millisecond or two.
THRESHOLDS = (700, 5, 2)
_OLDEST_GENERATION = 2


def keep_short() -> None:
    """Begins to keep collections short. It is to be called once in a process, when all that it needs is imported."""
    gc.set_threshold(*THRESHOLDS)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_hide_survivors)


def _hide_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST_GENERATION:
        gc.freeze()
