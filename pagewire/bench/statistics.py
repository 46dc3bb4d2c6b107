"""Statistics over lists of values. All functions are pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile `percent` of the values, interpolated linearly as in numpy.

    Raise ValueError if there are no values.
    """
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean, standard deviation and percentiles of a list of measured values.

    `std` is the population standard deviation. `percentiles` has pairs of a percentage and the value at this
    percentage.
    """

    mean: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


def summarize(values: Sequence[float], percents: Sequence[float]) -> Summary | None:
    """Return the mean, standard deviation and percentiles of the measured values, or None if there are no values."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return Summary(mean, std, tuple((p, percentile(values, p)) for p in percents))
