"""Many seeds on many processes, and what came of them."""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.outputs.simulation import Simulation

_CHUNK = 10
MAX_FAILURES = 5


@dataclass(slots=True)
class Summary:
    """What a number of seeds did. `log_hash` does not depend on their order."""

    num_seeds: int = 0
    num_events: int = 0
    log_hash: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by seed: the error

    def add(self, other: "Summary") -> None:
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.log_hash = (self.log_hash + other.log_hash) % 2**64
        self.reached.update(other.reached)
        self.failures.update(other.failures)


def run_seed(seed: int) -> Summary:
    simulation = Simulation(seed)
    failures = {}
    try:
        simulation.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failures[seed] = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return Summary(1, simulation.num_events, simulation.log_hash, simulation.reached, failures)


def run_seeds(seeds: range) -> Summary:
    summary = Summary()
    for seed in seeds:
        summary.add(run_seed(seed))
    return summary


def run_campaign(first: int, num_seeds: int, num_jobs: int) -> Summary:
    """Stops early after some failures."""
    summary = Summary()
    chunks = [range(seed, min(seed + _CHUNK, first + num_seeds)) for seed in range(first, first + num_seeds, _CHUNK)]
    for part in _each(chunks, num_jobs):
        summary.add(part)
        if len(summary.failures) >= MAX_FAILURES:
            break
    return summary


def _each(chunks: list[range], num_jobs: int) -> Iterator[Summary]:
    if num_jobs == 1:
        yield from map(run_seeds, chunks)
        return
    with get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(run_seeds, chunks)


def trace_seed(seed: int) -> bool:
    """Print one history. Whether it went well."""
    simulation = Simulation(seed, trace=print)
    try:
        simulation.run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    return True


def command_for(seed: int) -> str:
    return f"python -m tests.sim.outputs --first {seed} --trace"
