"""Random damage to the content of a file."""

import random


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the content with random damage: truncated, one bit changed, zeros at the end, extended, or empty."""
    place = rng.randrange(len(content))
    overwritten = bytearray(content)
    overwritten[place] ^= 1 << rng.randrange(8)
    zeros = bytes(len(content) - place)
    ways = [content[:place], bytes(overwritten), content[:place] + zeros, content + content[: place + 1], b""]
    return next(way for way in rng.sample(ways, len(ways)) if way != content)
