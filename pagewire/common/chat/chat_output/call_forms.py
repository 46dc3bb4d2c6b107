"""Structural tag formats that describe outputs with tool calls."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output.parameters import Parameters

Form = dict[str, Any]
# Builds the structural tag part for a call from the function's name and parameters.
CallTag = Callable[[str, Parameters], Form]
ANY_TEXT = "any_text"
FREE_TEXTS = (ANY_TEXT, "regex", "triggered_tags")  # formats with `excludes`


class OutputConstraints(NamedTuple):
    """The limits that a chat request sets for the model's output: the functions that the model may or must call, and
    the formats that its text and its reasoning must have.
    """

    functions: Mapping[str, Parameters]  # by name
    text: Form  # of an output without calls
    thought: Form  # of the reasoning
    is_required: bool  # the output must call a function
    is_parallel: bool


def json_between(begin: str, parameters: Parameters, end: str | list[str]) -> Form:
    """Return the part of a structural tag (a grammar in JSON) that allows a tool call's JSON arguments, with the text
    `begin` in front of the arguments and the text `end` (or one of several texts) after them.
    """
    content = {"type": "json_schema", "json_schema": parameters.schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


class TaggedCalls(NamedTuple):
    """A format of model output in which tags mark each tool call. Calls may occur anywhere within free text. If the
    request requires a text format such as JSON, an output contains either calls or a text in that format, but not both.
    """

    tag: CallTag
    trigger: str  # begins every call and appears in no other text
    separator: str

    def form(self, constraints: OutputConstraints) -> Form:
        ends = _tags(self.tag, constraints)
        if _is_free(constraints.text) and not constraints.is_required:
            excludes = constraints.text.get("excludes", [])
            return {"type": "triggered_tags", "triggers": [self.trigger], "excludes": excludes, **ends}
        calls = {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **ends}
        return calls if constraints.is_required else {"type": "or", "elements": [calls, constraints.text]}


class LeadingCalls(NamedTuple):
    """A format of model output in which an output is either a series of tool calls or a text. The first character shows
    which: the calls begin with a character that no text begins with.
    """

    tag: CallTag
    opener: str
    separator: str
    closer: str
    first: str  # begins every such output and no other one

    def form(self, constraints: OutputConstraints) -> Form:
        ends = _tags(self.tag, constraints)
        calls = {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **ends}
        around = ({"type": "const_string", "value": text} for text in (self.opener, self.closer))
        opener, closer = around
        form = {"type": "sequence", "elements": [opener, calls, closer]}
        text = constraints.text
        if _is_free(text):
            pattern = rf"([^\s{re.escape(self.first)}](?s:.*))?"
            text = {"type": "regex", "pattern": pattern, "excludes": text.get("excludes", [])}
        return form if constraints.is_required else {"type": "or", "elements": [form, text]}


def _is_free(text: Form) -> bool:
    return text["type"] == ANY_TEXT and text.get("max_tokens") is None


def _tags(tag: CallTag, constraints: OutputConstraints) -> Form:
    tags = [tag(name, parameters) for name, parameters in constraints.functions.items()]
    return {"tags": tags, "stop_after_first": not constraints.is_parallel}
