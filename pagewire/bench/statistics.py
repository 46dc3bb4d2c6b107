"""Statistics of many values. It is pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` per cent of the values lie, interpolated linearly as numpy does.

    Raises ValueError without a value.
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
    """Statistics of many values. `std` is that of the whole population, `percentiles` are (per cent, value)."""

    mean: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


def summarize(values: Sequence[float], percents: Sequence[float]) -> Summary | None:
    """Returns the statistics of some values, or None if there are none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return Summary(mean, std, tuple((p, percentile(values, p)) for p in percents))
