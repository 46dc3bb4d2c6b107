"""What outputs with calls match, as formats of structural tags."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Form = dict[str, Any]
# Of a call of a function, by its parameters' schema.
CallTag = Callable[[str, Any], Form]


def json_between(begin: str, schema: Any, end: str | list[str]) -> Form:
    """Return the form of JSON between two texts that matches a JSON Schema."""
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


class TaggedCalls(NamedTuple):
    """Calls between tags, anywhere in text."""

    tag: CallTag
    trigger: str  # what no text but a call has
    separator: str

    def form(self, functions: Mapping[str, Any], *, is_required: bool, is_parallel: bool) -> Form:
        ends = _tags(self.tag, functions, is_parallel=is_parallel)
        if is_required:
            return {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **ends}
        return {"type": "triggered_tags", "triggers": [self.trigger], **ends}


class LeadingCalls(NamedTuple):
    """Calls that are all of an output, which shows by its first character."""

    tag: CallTag
    opener: str
    separator: str
    closer: str
    first: str  # what no other output begins with

    def form(self, functions: Mapping[str, Any], *, is_required: bool, is_parallel: bool) -> Form:
        ends = _tags(self.tag, functions, is_parallel=is_parallel)
        calls = {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **ends}
        around = ({"type": "const_string", "value": text} for text in (self.opener, self.closer))
        opener, closer = around
        form = {"type": "sequence", "elements": [opener, calls, closer]}
        text = {"type": "regex", "pattern": rf"([^\s\{self.first}](?s:.*))?"}
        return form if is_required else {"type": "or", "elements": [form, text]}


def _tags(tag: CallTag, functions: Mapping[str, Any], *, is_parallel: bool) -> Form:
    tags = [tag(name, parameters) for name, parameters in functions.items()]
    return {"tags": tags, "stop_after_first": not is_parallel}
