"""Rounds that alternate between the arms of a benchmark, medians over rounds, and the CPU time of processes."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Arm = TypeVar("Arm")


def in_turns(arms: Sequence[Arm], num_rounds: int, *, num_warm_ups: int = 1) -> Iterator[tuple[int, Arm]]:
    """Yield every arm once per round, with the number of the round. Numbers of 0 and below are warm-up rounds.

    The order of the arms is reversed in every round, so that a machine that slows down over time favours no arm.
    """
    for index in range(1 - num_warm_ups, num_rounds + 1):
        for arm in arms if index % 2 else arms[::-1]:
            yield index, arm


def medians(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure over the rounds of each arm. A figure that is missing in a round counts as 0."""
    return {
        arm: {key: statistics.median(figures.get(key, 0.0) for figures in of_arm) for key in of_arm[0]}
        for arm, of_arm in rounds.items()
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
