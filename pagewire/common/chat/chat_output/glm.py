"""Tool calls of GLM-4.5: <tool_call>NAME, then an <arg_key> and an <arg_value> for each argument, then </tool_call>."""

from collections.abc import Mapping
from typing import Any

from pagewire.common.chat.chat_output.lexemes import read_name
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.parts import CallStart, Content
from pagewire.common.chat.chat_output.tagged_arguments import ArgumentTags
from pagewire.common.chat.chat_output.unread import Reading, Unread

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ArgumentTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", END)


def read_calls(functions: Mapping[str, Parameters], unread: Unread) -> Reading[None]:
    """Read the output of a GLM model, and yield its content and tool calls. A tool call lies between <tool_call> and
    </tool_call>.
    """
    marker = yield from unread.until((BEGIN,), Content)
    while marker:
        name = yield from read_name(unread)
        if not name or not (yield from _ARGUMENTS.are_ahead(unread)):
            yield Content(unread.kept())
            marker = yield from unread.until((BEGIN,), Content)
            continue
        unread.forget()
        yield CallStart(name)
        is_ended = yield from _ARGUMENTS.read(unread, functions.get(name))
        marker = END if is_ended else (yield from unread.until((END, BEGIN), Content))
        if marker == END:
            yield from unread.skip("\n")
            marker = yield from unread.until((BEGIN,), Content)


def call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return the part of a structural tag (a grammar in JSON) that allows one tool call of a GLM model to the function
    `name`. The arguments must match the function's JSON Schema.
    """
    return {"type": "tag", "begin": f"{BEGIN}{name}\n", "content": _ARGUMENTS.form(parameters), "end": END}
