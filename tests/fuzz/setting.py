"""The settings of a campaign: the families of its models, the share of memory, and the number of kills."""

import argparse
from collections.abc import Collection
from dataclasses import dataclass

# The flags of a worker by the format of its weights. "int8" and "int4" store codes like GGUF's Q8_0 and Q4_0.
WEIGHTS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8": ["--dtype", "float32", "--quantization", "int8"],
    "int4": ["--dtype", "float32", "--quantization", "int4"],
}
_TEXT = "_text"  # the suffix of transformers' name for the text model of a family that also reads images


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one round.

    Attributes:
        families: the families from which the model is drawn, under the names of `testing.checkpoints`. Empty: the
            bundled model, a model with a sliding window, or a model with experts.
        memory: the share of the KV cache blocks that the requests in flight need together. 0: all of them if there are
            families, else a size drawn at random.
        num_kills: how often the worker is killed during the round.
        weights: the formats from which that of the weights is drawn, of WEIGHTS.
    """

    families: tuple[str, ...] = ()
    memory: float = 0.0
    num_kills: int = 0
    weights: tuple[str, ...] = ("float32",)

    @property
    def is_tight(self) -> bool:
        """Whether requests are long compared with the steps of the worker."""
        return bool(self.families or self.memory)

    @property
    def flags(self) -> str:
        """The flags of `python -m tests.fuzz` that select these settings for one round."""
        families = f" --family {','.join(self.families)}" if self.families else ""
        memory = f" --memory {self.memory:g}" if self.memory else ""
        weights = f" --weights {','.join(self.weights)}" if self.weights != ("float32",) else ""
        return families + memory + (f" --kills {self.num_kills}" if self.num_kills else "") + weights


def parse_weights(text: str) -> tuple[str, ...]:
    """Return the formats in a list separated by commas. Raises argparse.ArgumentTypeError if one is not in WEIGHTS."""
    found = tuple(text.split(","))
    for name in found:
        if name not in WEIGHTS:
            raise argparse.ArgumentTypeError(f"format {name!r} is not known; use {', '.join(WEIGHTS)}")
    return found


def parse_families(text: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the families in a list separated by commas. "gemma3" also selects "gemma3_text".

    Raises argparse.ArgumentTypeError if a name is not in `known`.
    """
    found = []
    for name in text.split(","):
        family = name if name in known else name + _TEXT
        if family not in known:
            raise argparse.ArgumentTypeError(f"family {name!r} is not known; use {', '.join(sorted(known))}")
        found.append(family)
    return tuple(found)


def parse_families_of_checkpoints(text: str) -> tuple[str, ...]:
    """Return the families in a list separated by commas: see `parse_families`."""
    from testing.checkpoints.families import FAMILIES  # with torch

    return parse_families(text, FAMILIES)


def parse_memory(text: str) -> float:
    """Return a share of memory as a float. Raises argparse.ArgumentTypeError unless it is positive and at most 10."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; use a number above 0 and up to 10, such as 0.33")
    return share


def parse_count(text: str) -> int:
    """Return a count as an int. Raises argparse.ArgumentTypeError unless it is a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; use a whole number from 0")
    return int(text)
