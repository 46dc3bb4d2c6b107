"""Compares the scheduler core with that of another checkout: its time per decoding sequence and step.

    git worktree add ../before COMMIT
    python -m bench scheduler-pairs --against ../before

One process for each checkout runs on the same CPU core, and the two time decode steps in turns. So other work on the
machine slows down both: a checkout against itself gives 0.95 to 1.05 with 32 sequences, and 0.99 to 1.01 with 256.
The raw numbers are written to bench/results/scheduler_pairs.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.goals import verdict
from bench.measure import in_turns

ROOT = Path(__file__).parents[2]
GOAL = 1.02
NUM_STEPS = 32  # of one turn


class Checkout:
    """A process that runs the scheduler core of one checkout."""

    def __init__(self, folder: Path, num_sequences: int) -> None:
        """Start the process, and wait until all its sequences decode. Raises RuntimeError if it ends before."""
        command = [
            sys.executable,
            "-P",
            Path(__file__).with_name("decode_turns.py"),
            str(num_sequences),
            str(NUM_STEPS),
        ]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})
        if self._read() != "ready":
            raise RuntimeError(f"the scheduler core of {folder} does not run")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def turn(self) -> list[float]:
        """Return the microseconds of schedule() and complete() per sequence and step, in one turn."""
        assert self._process.stdin is not None
        print("turn", file=self._process.stdin, flush=True)
        return [float(us) for us in self._read().split()]

    def end(self) -> None:
        self._process.communicate()


def measure(arguments: argparse.Namespace) -> dict:
    figures = []
    for num_sequences in arguments.sequences:
        checkouts = [Checkout(folder.resolve(), num_sequences) for folder in (arguments.against, ROOT)]
        turns: list[list[list[float]]] = [[], []]
        for number, i in in_turns([0, 1], arguments.rounds):
            us = checkouts[i].turn()
            if number > 0:
                turns[i].append(us)
        for checkout in checkouts:
            checkout.end()
        figures.append({"num_sequences": num_sequences, "other_us": turns[0], "us": turns[1]})
    return {"load": {"rounds": arguments.rounds, "steps": NUM_STEPS}, "sizes": figures}


def report(figures: dict) -> None:
    print("time per sequence and step, to the other checkout's: median of the pairs")
    for size in figures["sizes"]:
        pairs = list(zip(size["us"], size["other_us"], strict=True))
        schedule, complete = (statistics.median(us[i] / other[i] for us, other in pairs) for i in range(2))
        both = statistics.median(sum(us) / sum(other) for us, other in pairs)
        print(
            f"  {size['num_sequences']:5,} sequences: schedule() {schedule:.3f}, complete() {complete:.3f}, "
            f"both {both:.3f} {verdict(both, GOAL, at_least=False)}"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, required=True, help="the folder of the other checkout")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256], help="sequences (default: 32 256)")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each, at most 240 (default: 60)")
