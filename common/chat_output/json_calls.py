"""Calls as the templates of Hermes and Qwen write them: <tool_call>, an object of JSON, </tool_call>; relatives too."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagewire.common.chat_output.call_object import read_one_or_several
from pagewire.common.chat_output.parts import Content
from pagewire.common.chat_output.unread import Reading, Unread


class JsonCalls(NamedTuple):
    begins: tuple[str, ...]
    end: str
    is_list: bool = False  # of objects behind one tag
    is_ended: bool = True  # by a tag

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, self.end)

    def read_calls(self, _functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
        """Tell content, and the calls in it: an object or a list of some between tags, of which the last may lack."""
        marker = yield from unread.until(self.begins, Content)
        while marker:
            rest = yield from read_one_or_several(unread)
            if rest is None:
                yield Content(unread.kept())
                marker = yield from unread.until(self.begins, Content)
                continue
            marker = yield from unread.begins_with(self.end)
            if not marker and self.is_ended and unread.ends_within(self.end):
                return
            # There may be something behind a call, as a brace too many.
            marker = marker or (yield from unread.until((self.end, *self.begins), rest))
            if marker == self.end:
                yield from unread.skip("\n")
                marker = yield from unread.until(self.begins, Content)

    def call_tag(self, name: str, parameters: Any) -> dict[str, Any]:
        """Return a call of a function, whose arguments match a JSON Schema, as a structural tag's part."""
        opener, closer = "[]" if self.is_list else ("\n", "\n")
        return {
            "type": "tag",
            "begin": f'{self.begins[0]}{opener}{{"name": {json.dumps(name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": parameters},
            "end": f"}}{closer}{self.end if self.is_ended else ''}",
        }


HERMES = JsonCalls(("<tool_call>",), "</tool_call>")
GRANITE = JsonCalls(
    ("<|tool_call|>", "<tool_call>", "functools"), "<|/tool_call|>", is_list=True, is_ended=False
)  # Phi-4 ends them
NEMOTRON = JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", is_list=True)
