"""Running many seeds of a simulation in several processes, and a summary of the results."""

import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

MAX_FAILURES = 5
_CHUNK = 10
_MAX_CPU_SECONDS = 10.0  # of a seed, which normally takes some hundredths of a second


class EndlessError(BaseException):
    """A seed does not end. A BaseException, because the simulated code catches no such error."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise EndlessError inside the block after `_MAX_CPU_SECONDS` of CPU time."""

    def give_up(*_: object) -> None:
        raise EndlessError(f"no end in {_MAX_CPU_SECONDS:.0f} seconds of a processor")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(slots=True)
class Summary:
    """The results of a number of seeds. `log_hash` does not depend on their order."""

    num_seeds: int = 0
    log_hash: int = 0
    numbers: Counter[str] = field(default_factory=Counter)  # the numbers that the campaign names
    reached: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # the error, by seed

    def add(self, other: "Summary") -> None:
        self.num_seeds += other.num_seeds
        self.log_hash = (self.log_hash + other.log_hash) % 2**64
        self.numbers.update(other.numbers)
        self.reached.update(other.reached)
        self.failures.update(other.failures)


@dataclass(frozen=True, slots=True)
class Campaign:
    """Seeds of one simulation."""

    simulate: Callable[..., Any]  # creates the simulation of a seed, with the attributes `log_hash` and `reached`
    program: str  # the command that runs it
    numbers: tuple[str, ...]  # the simulation's attributes that are added up

    def run_seed(self, seed: int) -> Summary:
        simulation = self.simulate(seed)
        failures = {}
        try:
            with _bounded():
                simulation.run()
        except (Exception, EndlessError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures[seed] = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        log_hash = hash((seed, simulation.log_hash)) % 2**64
        numbers = Counter({name: getattr(simulation, name) for name in self.numbers})
        return Summary(1, log_hash, numbers, simulation.reached, failures)

    def run_seeds(self, seeds: range) -> Summary:
        summary = Summary()
        for seed in seeds:
            summary.add(self.run_seed(seed))
        return summary

    def run(self, first: int, num_seeds: int, num_jobs: int) -> Summary:
        """Run the seeds and return a summary. Stops early after `MAX_FAILURES` failures."""
        summary, end = Summary(), first + num_seeds
        chunks = [range(seed, min(seed + _CHUNK, end)) for seed in range(first, end, _CHUNK)]
        for part in self._each(chunks, num_jobs):
            summary.add(part)
            if len(summary.failures) >= MAX_FAILURES:
                break
        return summary

    def _each(self, chunks: list[range], num_jobs: int) -> Iterator[Summary]:
        if num_jobs == 1:
            yield from map(self.run_seeds, chunks)
            return
        with get_context("spawn").Pool(num_jobs) as pool:
            yield from pool.imap(self.run_seeds, chunks)

    def trace_seed(self, seed: int) -> bool:
        """Print the history of a seed; return whether it passed."""
        simulation = self.simulate(seed, trace=print)
        try:
            simulation.run()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            return False
        return True

    def failed(self, summary: Summary) -> str:
        """Return a line for each failed seed, with the command that shows its history."""
        return "".join(
            f"seed {seed} failed: {error}\n    {self.program} --first {seed} --trace\n"
            for seed, error in sorted(summary.failures.items())
        )
