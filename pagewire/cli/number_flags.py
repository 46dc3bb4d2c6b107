"""Parses the values of flags that are numbers."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from pagewire.errors import InvalidRequest
from pagewire.sampling import INTEGER_FIELDS, SamplingParams


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


def sampled(name: str) -> Callable[[str], float]:
    """Makes a parser of the numbers that `SamplingParams` takes for a field."""

    def parse(text: str) -> float:
        value = _whole(text) if name in INTEGER_FIELDS else number(text)
        given: Any = {name: value}
        try:
            SamplingParams(**given)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _integer(text: str, minimum: int) -> int:
    value = _whole(text)
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
    return value
