"""Takes turns between the arms of a benchmark, makes medians of what they yield, and reads what processes took."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Arm = TypeVar("Arm")


def in_turns(arms: Sequence[Arm], num_rounds: int, *, num_warm_ups: int = 1) -> Iterator[tuple[int, Arm]]:
    """Yields every arm once a round, with the number of the round: 0 and below it for what only warms up.

    Each round has the opposite order of the one before, so that a machine that slows down favours no arm.
    """
    for index in range(1 - num_warm_ups, num_rounds + 1):
        for arm in arms if index % 2 else arms[::-1]:
            yield index, arm


def medians(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns the median of each figure over the rounds of each arm. A figure that a round lacks is 0 there."""
    return {
        arm: {key: statistics.median(figures.get(key, 0.0) for figures in of_arm) for key in of_arm[0]}
        for arm, of_arm in rounds.items()
    }


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process so far, that of its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
