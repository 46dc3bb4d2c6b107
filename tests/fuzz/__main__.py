"""Send random requests to real services with small caches, and spell random texts in grammars.

Each request's outputs over gRPC or HTTP are compared with its outputs when it runs alone. `python -m tests.fuzz
--minutes 30`, `python -m tests.fuzz --seed SEED --rounds 1`, `python -m tests.fuzz --family llama,gpt_oss --memory 0.33
--kills 20`.
"""

import argparse
import asyncio
import math
import secrets
import sys
import time
from dataclasses import replace
from typing import NoReturn

from tests.fuzz.fuzz_round import run_round
from tests.fuzz.random_spelling import spell_randomly
from tests.fuzz.report import Report
from tests.fuzz.setting import (
    WEIGHTS,
    Setting,
    parse_count,
    parse_families_of_checkpoints,
    parse_memory,
    parse_weights,
)

FIRST_KILLS = 4  # at most in the first round, if the number of rounds is not given


class _Parser(argparse.ArgumentParser):
    """A parser that reports an invalid argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long to begin rounds (default 30)")
    parser.add_argument("--rounds", type=int, help="how many rounds at most (default: as many as there is time for)")
    parser.add_argument("--seed", type=int, help="of the first round; those of others follow (default: drawn)")
    parser.add_argument("--requests", type=int, default=80, help="how many a round sends (default 80)")
    families = "families of random models, separated by commas (default: three kinds of models)"
    parser.add_argument("--family", type=parse_families_of_checkpoints, default=(), help=families)
    memory = "the share of the blocks that the requests in flight need (default: 1 with --family, else drawn)"
    parser.add_argument("--memory", type=parse_memory, default=0.0, help=memory)
    kills = "how often to kill the worker while it runs requests; rounds go on until all kills are done (default 0)"
    parser.add_argument("--kills", type=parse_count, default=0, help=kills)
    weights = f"formats of the weights, separated by commas: {', '.join(WEIGHTS)} (default float32)"
    parser.add_argument("--weights", type=parse_weights, default=("float32",), help=weights)
    return parser


def num_kills_of_round(num_left: int, num_rounds_left: float | None) -> int:
    """Return how often to kill the worker in the next round, so that rounds have about the same number of kills.

    `num_rounds_left`: the number of rounds including the next one; None: not known yet.
    """
    if num_rounds_left is None:
        return min(num_left, FIRST_KILLS)
    return math.ceil(num_left / max(1.0, num_rounds_left))


async def main() -> int:
    arguments = parser().parse_args()
    first = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    setting = Setting(arguments.family, arguments.memory, weights=arguments.weights)
    started, total = time.monotonic(), Report(first)
    ends_at = started + 60 * arguments.minutes

    def num_rounds_left() -> float | None:
        if arguments.rounds is not None:
            return arguments.rounds - total.num_rounds
        now = time.monotonic()
        return (ends_at - now) / (now - started) * total.num_rounds if total.num_rounds else None

    def may_begin() -> bool:
        must_kill = total.num_kills < arguments.kills and not total.faults
        return total.num_rounds != arguments.rounds and (time.monotonic() < ends_at or must_kill)

    while may_begin():
        seed = first + total.num_rounds
        num_kills = num_kills_of_round(arguments.kills - total.num_kills, num_rounds_left())
        own = replace(setting, num_kills=num_kills)
        print(f"seed {seed}, after {time.monotonic() - started:.0f} s", flush=True)
        report = await run_round(seed, arguments.requests, own)
        report.num_spelled, faults = spell_randomly(seed)
        report.faults += faults
        print(f"    {report}", flush=True)
        command = f"python -m tests.fuzz --seed {seed} --rounds 1 --requests {arguments.requests}{own.flags}"
        for fault in report.faults:
            print(f"    {fault}\n    {command}", flush=True)
        total += report
    if 0 < setting.memory < 1 and (unused := total.unused()):
        total.faults.append(f"the share of memory {setting.memory:g} caused no {', no '.join(unused)}")
        own = replace(setting, num_kills=arguments.kills)
        command = f"--seed {first} --rounds {total.num_rounds} --requests {arguments.requests}{own.flags}"
        print(f"    {total.faults[-1]}\n    python -m tests.fuzz {command}", flush=True)
    result = "see above" if total.faults else "no token differs"
    print(f"in all {total.num_rounds} rounds from seed {first} on: {total}: {result}")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
