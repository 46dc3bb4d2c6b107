"""The parts of an output, in the order in which they occur."""

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """The beginning of a call of the function `name`."""

    name: str


class Arguments(NamedTuple):
    """The next piece of the arguments of the latest call. The pieces form JSON unless the model wrote invalid JSON."""

    text: str


OutputPart = Content | Reasoning | CallStart | Arguments
