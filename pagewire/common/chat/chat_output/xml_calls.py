"""Tool calls of Qwen3-Coder: <tool_call>, <function=NAME>, a <parameter=KEY> for each argument, and the end tags.

Seed-OSS uses other outer tags, and does not put values on separate lines.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output.call_object import Rest
from pagewire.common.chat.chat_output.call_tags import CallTags
from pagewire.common.chat.chat_output.lexemes import read_name
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.parts import CallStart, Content
from pagewire.common.chat.chat_output.tagged_arguments import ArgumentTags
from pagewire.common.chat.chat_output.unread import Reading, Unread

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"


class XmlCalls(NamedTuple):
    begin: str
    end: str
    arguments: ArgumentTags

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def read_calls(self, functions: Mapping[str, Parameters], unread: Unread) -> Reading[None]:
        """Read the model's output, and yield its content and tool calls. The outer tag of a call may be missing if the
        request has a function of the call's name.
        """
        tags = CallTags((self.begin, _FUNCTION), (self.end,), is_ended=True)
        yield from tags.read(unread, partial(self._read_call, functions, unread))

    def _read_call(self, functions: Mapping[str, Parameters], unread: Unread, tag: str) -> Reading[Rest]:
        is_inner = tag == _FUNCTION
        is_begun = is_inner or (yield from unread.begins_with(_FUNCTION))
        name = (yield from read_name(unread)) if is_begun else ""
        if not name or not (yield from unread.accept(">")) or (is_inner and name not in functions):
            return None
        unread.forget()
        yield CallStart(name)
        yield from self.arguments.read(unread, functions.get(name))
        return Content

    def call_tag(self, name: str, parameters: Parameters) -> dict[str, Any]:
        """Return the part of a structural tag (a grammar in JSON) that allows one tool call, written in XML-like tags,
        to the function `name`. The arguments must match the function's JSON Schema.
        """
        return {
            "type": "tag",
            "begin": f"{self.begin}\n{_FUNCTION}{name}>\n",
            "content": self.arguments.form(parameters),
            "end": f"{_END_OF_FUNCTION}\n{self.end}",
        }


QWEN = XmlCalls("<tool_call>", "</tool_call>", ArgumentTags("<parameter=", ">\n", "\n</parameter>", _END_OF_FUNCTION))
SEED = XmlCalls(
    "<seed:tool_call>", "</seed:tool_call>", ArgumentTags("<parameter=", ">", "</parameter>", _END_OF_FUNCTION)
)
