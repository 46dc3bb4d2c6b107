"""Parses the values of flags that are numbers."""

import argparse
import math


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    return _integer(text, 1)


def count_or_zero(text: str) -> int:
    """Parses an integer of at least 0."""
    return _integer(text, 0)


def number(text: str) -> float:
    """Parses any number; "inf" is one too."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def positive(text: str) -> float:
    """Parses a number above 0; "inf" is one too."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _integer(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
    return value
