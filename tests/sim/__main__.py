"""Run the simulator: `python -m tests.sim --seeds 5000`, `python -m tests.sim --first SEED --trace`."""

import argparse
import os
import sys
import time

from tests.sim.campaign import CAMPAIGN
from tests.sim.compiled import CompilationError, run_compiled
from tests.sim.reach import STATES
from tests.sim.seeds import Summary

# With fewer seeds, a rare state may be missed by chance.
_MIN_SEEDS_FOR_REACH = 5000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000, help="how many (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--trace", action="store_true", help="print the history of the first seed, and no other")
    parser.add_argument("--compiled", action="store_true", help="compile all with mypyc first: for long campaigns")
    arguments = parser.parse_args()
    if arguments.compiled:
        try:
            return run_compiled([argument for argument in sys.argv[1:] if argument != "--compiled"])
        except CompilationError as error:
            print(f"cannot run compiled: {error}", file=sys.stderr)
            return 1
    if arguments.trace:
        return 0 if CAMPAIGN.trace_seed(arguments.first) else 1
    started = time.perf_counter()
    summary = CAMPAIGN.run(arguments.first, arguments.seeds, arguments.jobs)
    _report(summary, time.perf_counter() - started, arguments.jobs)
    missing = [state for state in STATES if not summary.reached[state]]
    if missing and arguments.seeds >= _MIN_SEEDS_FOR_REACH:
        print(f"never reached: {'; '.join(missing)}")
    return 1 if summary.failures or (missing and arguments.seeds >= _MIN_SEEDS_FOR_REACH) else 0


def _report(summary: Summary, seconds: float, num_jobs: int) -> None:
    for state in sorted({*STATES, *summary.reached}):
        print(f"{summary.reached[state]:>10,}  {state}")
    per_core = summary.num_seeds / seconds / num_jobs
    num_events = summary.numbers["num_audits"]
    print(
        f"{summary.num_seeds:,} seeds, {num_events:,} audited events ({num_events / summary.num_seeds:.0f} a seed), "
        f"{summary.numbers['num_steps']:,} plans in {seconds:.1f} s: {per_core:.0f} seeds/s and "
        f"{num_events / seconds / num_jobs:,.0f} events/s a core; log hash {summary.log_hash:016x}"
    )
    print(CAMPAIGN.failed(summary), end="")


if __name__ == "__main__":
    sys.exit(main())
