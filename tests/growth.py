"""How the processor time of some work grows with its size. Only ratios are looked at: they hold on any machine."""

import math
import time
import timeit
from collections.abc import Callable

MAX_RATIO = 6  # at four times the size: 4 where time grows with the size, 16 where it grows with its square
NUM_TRIES = 3
_LONG_ENOUGH_S = 0.01  # for a comparison that no noise decides
_ROUND_S = 0.02  # that a round of `cost_ratio` takes at least
# Prepares work of a size.
Prepare = Callable[[int], Callable[[], object]]


def check_growth(what: object, prepare: Prepare, size: int) -> None:
    """Do what is prepared for a size and for four times that size, and compare the processor times.

    If the longer work took too long, compare again, the best of three tries at twice the size, each repeated until it
    takes long enough; and once more at twice that, since what grows too fast does at any size.
    """
    short, long = (_seconds(prepare, each) for each in (size, 4 * size))
    for _ in range(2):
        if long <= MAX_RATIO * short:
            break
        size *= 2
        tries = [[_seconds(prepare, each, _LONG_ENOUGH_S) for _ in range(NUM_TRIES)] for each in (size, 4 * size)]
        short, long = map(min, tries)
    assert long <= MAX_RATIO * short, f"{what}: {short:.6f} s at {size}, but {long:.6f} s at {4 * size}"


def _seconds(prepare: Prepare, size: int, least: float = 0.0) -> float:
    """Return the mean of as many runs as take a number of seconds together, at least one."""
    total, num_runs = 0.0, 0
    while total < least or not num_runs:
        run = prepare(size)
        began = time.thread_time()
        run()
        total += time.thread_time() - began
        num_runs += 1
    return total / num_runs


def cost_ratio(small: Callable[[], object], large: Callable[[], object]) -> float:
    """Return how many times the processor time of one call another takes: the best of three rounds, in each of which
    one follows the other, so that what else the machine does slows both."""

    def seconds(run: Callable[[], object], number: int) -> float:
        return timeit.timeit(run, timer=time.process_time, number=number)

    number = math.ceil(_ROUND_S / max(seconds(small, 1), 1e-4))
    rounds = [(seconds(small, number), seconds(large, number)) for _ in range(3)]
    return min(taken_by_large / taken_by_small for taken_by_small, taken_by_large in rounds)
