"""How the cost of something grows with its size, in processor time."""

import math
import time
import timeit
from collections.abc import Callable

MAX_RATIO = 6  # of processor time at four times the size: less than a square's 16
_SECONDS = 0.02  # that a round takes at least


def cost_ratio(small: Callable[[], object], large: Callable[[], object]) -> float:
    """Return how many times the processor time of one call another takes: the best of three rounds, in each of which
    one follows the other, so that what else the machine does slows both."""

    def seconds(run: Callable[[], object], number: int) -> float:
        return timeit.timeit(run, timer=time.process_time, number=number)

    number = math.ceil(_SECONDS / max(seconds(small, 1), 1e-4))
    rounds = [(seconds(small, number), seconds(large, number)) for _ in range(3)]
    return min(taken_by_large / taken_by_small for taken_by_small, taken_by_large in rounds)
