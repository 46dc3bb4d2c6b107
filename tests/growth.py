"""Checks of how the CPU time of some work grows with its size.

Only ratios are compared, so that the checks hold on any machine.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

STEP = 8  # ratio between the two compared sizes
# Of the two times: linear growth gives 8, quadratic growth gives 64. Larger work misses more caches and is interrupted
# more often, so that linear work has been seen to take 1.6 times as long as its size says.
MAX_RATIO = 24
MAX_TRIES = 6
_LONG_ENOUGH_S = 0.02  # measured time per try, so that noise does not decide the comparison
# Prepares the work and returns it; the preparation is not measured.
Prepare = Callable[[], Callable[[], object]]


@dataclass
class Costs:
    """The lowest CPU times of some work at two sizes over all tries so far, in seconds."""

    max_ratio: float = MAX_RATIO
    short: float = 0.0  # shorter times are not compared
    small: float = math.inf
    large: float = math.inf

    def add(self, small: float, large: float) -> None:
        """Add a try.

        Other processes slow down long work more than short work. Unless the times are short, the caller must measure
        the small work for as long as the large work takes, as the mean of several runs.
        """
        self.small, self.large = min(self.small, small), min(self.large, large)

    @property
    def are_too_high(self) -> bool:
        return self.large > max(self.short, self.max_ratio * self.small)


def check_growth(what: object, prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Fail if the prepared work of size `STEP * size` takes more than `MAX_RATIO` times the CPU time of size `size`.

    The CPU time is the time of this thread.
    """
    check_costs(f"{what} of {size} and {STEP * size}", partial(prepare, size), partial(prepare, STEP * size))


def check_costs(what: str, small: Prepare, large: Prepare, max_ratio: float = MAX_RATIO) -> None:
    """Fail if `large` takes more than `max_ratio` times the CPU time of `small`.

    If one run of each exceeds the ratio, the best of up to `MAX_TRIES` tries decides. Each try repeats the runs until
    they take long enough in total.
    """
    small()()  # run once without measuring, so that caches are filled
    costs = Costs(max_ratio)
    costs.add(_seconds(small), _seconds(large))
    if costs.are_too_high:
        costs = _repeated(small, large, max_ratio)
    assert not costs.are_too_high, f"{what}: {costs.small:.6f} s and {costs.large:.6f} s"


def _repeated(small: Prepare, large: Prepare, max_ratio: float) -> Costs:
    """Return the costs after up to `MAX_TRIES` tries, which stop as soon as they are not too high."""
    costs = Costs(max_ratio)
    gc.collect()
    gc.freeze()  # else collections during the long work would also visit the objects of earlier tests
    try:
        for _ in range(MAX_TRIES):
            costs.add(_seconds(small, _LONG_ENOUGH_S), _seconds(large, _LONG_ENOUGH_S))
            if not costs.are_too_high:
                break
    finally:
        gc.unfreeze()
    return costs


def _seconds(prepare: Prepare, least: float = 0.0) -> float:
    """Return the mean CPU seconds of a run.

    The work runs at least once, and until all runs together take `least` seconds.
    """
    total, num_runs = 0.0, 0
    while total < least or not num_runs:
        run = prepare()
        began = time.thread_time()
        run()
        total += time.thread_time() - began
        num_runs += 1
    return total / num_runs
