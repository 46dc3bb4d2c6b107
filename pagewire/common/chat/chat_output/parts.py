"""The parts of an output, in the order in which they occur."""

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A part of a parsed model output: the beginning of a tool call of the function `name`."""

    name: str


class Arguments(NamedTuple):
    """A part of a parsed model output: the next piece of the arguments of the latest tool call. The pieces together
    form JSON, unless the model wrote invalid JSON.
    """

    text: str


OutputPart = Content | Reasoning | CallStart | Arguments
