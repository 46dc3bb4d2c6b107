"""Calls as the templates of Hermes and Qwen write them: <tool_call>, an object of JSON, </tool_call>."""

import json
from collections.abc import Mapping
from typing import Any

from pagewire.common.chat_output.call_object import read_call
from pagewire.common.chat_output.parts import Content
from pagewire.common.chat_output.unread import Reading, Unread

BEGIN = "<tool_call>"
_END = "</tool_call>"


def read_calls(_functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
    """Tell content, and the calls in it."""
    marker = yield from unread.until((BEGIN,), Content)
    while marker:
        rest = yield from read_call(unread)
        if rest is None:
            yield Content(unread.kept())
            marker = yield from unread.until((BEGIN,), Content)
            continue
        yield from unread.skip()
        # A call may lack its end, and may have something behind its object, as a brace too many.
        marker = yield from unread.until((_END, BEGIN), rest, tells_cut=False)
        if marker == _END:
            yield from unread.skip("\n")
            marker = yield from unread.until((BEGIN,), Content)


def call_tag(name: str, parameters: Any) -> dict[str, Any]:
    """Return a call of a function, whose arguments match a JSON Schema, as a structural tag's part."""
    return {
        "type": "tag",
        "begin": f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": f"}}\n{_END}",
    }
