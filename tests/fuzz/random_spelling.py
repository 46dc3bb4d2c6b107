"""Random texts in grammars of every kind, with tokenizers of every shape: each text is spelled in tokens or refused."""

import random
import tempfile
import traceback
from pathlib import Path

from testing.grammars.spelled import NAMES, TEXTS, Speller
from testing.grammars.tokenizer_shapes import SHAPES

NUM_TEXTS = 12  # of each shape
SCRIPTS = ("abcXYZ 019", "éÅçß", "日本語", "ﬁ①Ⅷ", "\u0301\u0308\u200d", "😀", "\n\t", '"\\/{}[]<>|', "▁Ġ")


def spell_randomly(seed: int) -> tuple[int, list[str]]:
    """Return how many texts were spelled for a seed, and the faults."""
    faults, num_texts = [], 0
    for name, shape in SHAPES.items():
        rng = random.Random(f"{seed} {name}")
        parts = [*shape.shown, *shape.special, *NAMES, *TEXTS]
        with tempfile.TemporaryDirectory() as folder:
            speller = Speller(shape, Path(folder))
        for _ in range(NUM_TEXTS):
            text = "".join(_part(rng, parts) for _ in range(rng.randint(1, 4)))
            num_texts += 1
            try:
                speller.spell(text, rng)
            except Exception:
                faults.append(f"{text!r} by the tokenizer {name!r}: {traceback.format_exc(limit=-1)}")
    return num_texts, faults


def _part(rng: random.Random, parts: list[str]) -> str:
    """Return a token name, the beginning of one, or a few characters of a script."""
    if rng.random() < 0.6:
        part = rng.choice(parts)
        return part if rng.random() < 0.8 else part[: rng.randrange(len(part)) + 1]
    return "".join(rng.choices(rng.choice(SCRIPTS), k=rng.randint(1, 4)))
