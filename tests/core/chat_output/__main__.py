"""Read random outputs of every format, split in two at every position.

The command is `python -m tests.core.chat_output --outputs 10000`.
"""

import argparse
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from testing.chat_output.spellings import SPELLINGS
from tests.core.chat_output.campaign import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.chat_output", description=__doc__)
    parser.add_argument("--outputs", type=int, default=10_000, help="how many of each format (default 10,000)")
    parser.add_argument("--first", type=int, help="the first seed (default: drawn)")
    parser.add_argument("--formats", nargs="*", default=list(SPELLINGS), help="which (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    arguments = parser.parse_args()
    first = random.randrange(1 << 32) if arguments.first is None else arguments.first
    seeds = range(first, first + arguments.outputs)
    num_failed = 0
    with ProcessPoolExecutor(arguments.jobs) as processes:
        for name in arguments.formats:
            faults = list(filter(None, processes.map(partial(_fault, name), seeds, chunksize=50)))
            print(f"{name}: {len(seeds):,} outputs from seed {first} on, {len(faults)} read wrongly", flush=True)
            for fault in faults[:3]:
                print(f"    {fault}")
            num_failed += len(faults)
    return 1 if num_failed else 0


def _fault(name: str, seed: int) -> str | None:
    try:
        check(name, seed, every_split=True)
    except AssertionError as error:
        text = str(error).splitlines()[:1]
        return f"{text}: python -m tests.core.chat_output --formats {name} --outputs 1 --first {seed}"
    return None


if __name__ == "__main__":
    sys.exit(main())
