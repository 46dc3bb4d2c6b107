"""Random inputs that a failed test can draw again."""

import random


def seeded(seed: int | None = None) -> random.Random:
    """Return a generator of random numbers, and print its seed: the given one, or a new one."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print("seed", seed)
    return random.Random(seed)
