"""The parts of an output, in the order in which they come."""

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A call begins, of the function of this name."""

    name: str


class Arguments(NamedTuple):
    """What comes next of the arguments of the call that began last, which are JSON unless the model wrote none."""

    text: str


OutputPart = Content | Reasoning | CallStart | Arguments
