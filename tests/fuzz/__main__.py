"""Send random requests to real services with small caches, and spell random texts in grammars.

Each request's outputs over gRPC or HTTP are compared with its outputs when it runs alone. `python -m tests.fuzz
--minutes 30`, `python -m tests.fuzz --seed SEED --rounds 1`.
"""

import argparse
import asyncio
import secrets
import sys
import time

from tests.fuzz.fuzz_round import Report, run_round
from tests.fuzz.random_spelling import spell_randomly


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long to begin rounds (default 30)")
    parser.add_argument("--rounds", type=int, help="how many rounds at most (default: as many as there is time for)")
    parser.add_argument("--seed", type=int, help="of the first round; those of others follow (default: drawn)")
    parser.add_argument("--requests", type=int, default=80, help="how many a round sends (default 80)")
    arguments = parser.parse_args()
    first = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    ends_at, total = time.monotonic() + 60 * arguments.minutes, Report(first)
    while time.monotonic() < ends_at and total.num_rounds != arguments.rounds:
        seed = first + total.num_rounds
        print(f"seed {seed}", flush=True)
        report = await run_round(seed, arguments.requests)
        report.num_spelled, faults = spell_randomly(seed)
        report.faults += faults
        print(f"    {report}", flush=True)
        for fault in report.faults:
            print(f"    {fault}\n    python -m tests.fuzz --seed {seed} --rounds 1 --requests {arguments.requests}")
        total += report
    print(f"in all {total.num_rounds} rounds from seed {first} on: {total}")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
