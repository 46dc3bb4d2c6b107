"""Run the simulator of outputs: `python -m tests.sim.outputs --seeds 1000`, or `--first SEED --trace`."""

import argparse
import os
import sys
import time

from tests.sim.outputs.campaign import CAMPAIGN


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.outputs", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--trace", action="store_true", help="print the history of the first seed, and no other")
    arguments = parser.parse_args()
    if arguments.trace:
        return 0 if CAMPAIGN.trace_seed(arguments.first) else 1
    started = time.perf_counter()
    summary = CAMPAIGN.run(arguments.first, arguments.seeds, arguments.jobs)
    seconds = time.perf_counter() - started
    for what in sorted(summary.reached):
        print(f"{summary.reached[what]:>10,}  {what}")
    print(
        f"{summary.num_seeds:,} seeds, {summary.numbers['num_events']:,} events that clients saw in {seconds:.1f} s: "
        f"{summary.num_seeds / seconds / arguments.jobs:.0f} seeds/s a core; log hash {summary.log_hash:016x}"
    )
    print(CAMPAIGN.failed(summary), end="")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
