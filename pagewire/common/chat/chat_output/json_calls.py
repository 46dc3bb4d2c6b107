"""Tool calls of Hermes, Qwen and similar models: a JSON object between <tool_call> and </tool_call>."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output.call_forms import json_between
from pagewire.common.chat.chat_output.call_object import read_one_or_several
from pagewire.common.chat.chat_output.call_tags import CallTags
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.unread import Reading, Unread


class JsonCalls(NamedTuple):
    begins: tuple[str, ...]
    end: str
    is_list: bool = False  # a list of objects follows one tag
    is_ended: bool = True  # an end tag follows the calls

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, self.end)

    def read_calls(self, _functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
        """Read the model's output, and yield its content and tool calls. A call is a JSON object, or a list of JSON
        objects, between tags. The end tag may be missing.
        """
        tags = CallTags(self.begins, (self.end,), is_ended=self.is_ended)
        yield from tags.read(unread, lambda _: read_one_or_several(unread))

    def call_tag(self, name: str, parameters: Parameters) -> dict[str, Any]:
        """Return the part of a structural tag (a grammar in JSON) that allows one tool call, written as a JSON object,
        to the function `name`. The arguments must match the function's JSON Schema.
        """
        opener, closer = "[]" if self.is_list else ("\n", "\n")
        begin = f'{self.begins[0]}{opener}{{"name": {json.dumps(name)}, "arguments": '
        return json_between(begin, parameters, f"}}{closer}{self.end if self.is_ended else ''}")


HERMES = JsonCalls(("<tool_call>",), "</tool_call>")
GRANITE = JsonCalls(
    ("<|tool_call|>", "<tool_call>", "functools"), "<|/tool_call|>", is_list=True, is_ended=False
)  # Phi-4 writes the end tag
NEMOTRON = JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", is_list=True)
