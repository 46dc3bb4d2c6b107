"""How the processor time of some work grows with its size. Only ratios are compared: they hold on any machine."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

STEP = 4  # from a size to the next one that is compared with it
MAX_RATIO = 6  # of their times: 4 where time grows with the size, 16 where it grows with its square
NUM_TRIES = 3
_LONG_ENOUGH_S = 0.02  # for a comparison that no noise decides
# Prepares work, which is measured without its preparation.
Prepare = Callable[[], Callable[[], object]]


@dataclass
class Costs:
    """The least processor times of some work at two sizes, of all tries so far, in seconds."""

    max_ratio: float = MAX_RATIO
    short: float = 0.0  # shorter times are not compared
    small: float = math.inf
    large: float = math.inf

    def add(self, small: float, large: float) -> None:
        """Add a try. Other processes slow long work more than short work: unless the times are short, the small work
        is to be measured for as long as the large one takes, as a mean of several runs."""
        self.small, self.large = min(self.small, small), min(self.large, large)

    @property
    def are_too_high(self) -> bool:
        return self.large > max(self.short, self.max_ratio * self.small)


def check_growth(what: object, prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Fail if what is prepared for four times a size takes more than `MAX_RATIO` times the processor time of this
    thread."""
    check_costs(f"{what} of {size} and {STEP * size}", partial(prepare, size), partial(prepare, STEP * size))


def check_costs(what: str, small: Prepare, large: Prepare) -> None:
    """Fail if `large` takes more than `MAX_RATIO` times the processor time of `small`. What one run of each does not
    show is decided by the best of three tries, each of runs that take long enough together."""
    small()()  # what is computed once
    costs = Costs()
    costs.add(_seconds(small), _seconds(large))
    if costs.are_too_high:
        costs = Costs()
        for _ in range(NUM_TRIES):
            costs.add(_seconds(small, _LONG_ENOUGH_S), _seconds(large, _LONG_ENOUGH_S))
    assert not costs.are_too_high, f"{what}: {costs.small:.6f} s and {costs.large:.6f} s"


def _seconds(prepare: Prepare, least: float = 0.0) -> float:
    """Return the mean of as many runs as take `least` seconds together, at least one."""
    total, num_runs = 0.0, 0
    while total < least or not num_runs:
        run = prepare()
        began = time.thread_time()
        run()
        total += time.thread_time() - began
        num_runs += 1
    return total / num_runs
