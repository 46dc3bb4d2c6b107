"""Random inputs that can be reproduced after a failed test."""

import random


def seeded(seed: int | None = None) -> random.Random:
    """Return a random number generator and print its seed: `seed`, or a new one if it is None."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print("seed", seed)
    return random.Random(seed)
