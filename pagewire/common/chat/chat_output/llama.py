"""Tool calls of Llama 3.1: JSON objects separated by semicolons, with or without a tag in front."""

import json
from collections.abc import Mapping
from typing import Any

from pagewire.common.chat.chat_output.call_forms import json_between
from pagewire.common.chat.chat_output.call_object import read_call
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.parts import Content
from pagewire.common.chat.chat_output.unread import Reading, Unread

TAG = "<|python_tag|>"
_BRACE = "{"


def read_calls(functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
    """Read the output of a Llama model, and yield its content and tool calls. Even without a tag, a JSON object
    anywhere in the text may be a call.
    """
    marker = yield from unread.until((TAG, _BRACE), Content)
    while marker:
        rest = yield from read_call(unread, functions, is_open=marker == _BRACE)
        if rest is None:
            yield Content(unread.kept())
        elif rest is Content and (yield from unread.begins_with(";")):
            yield from unread.skip()
        marker = yield from unread.until((TAG, _BRACE), rest or Content)


def call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return the part of a structural tag (a grammar in JSON) that allows one tool call of a Llama model to the
    function `name`. The arguments must match the function's JSON Schema.
    """
    return json_between(f'{{"name": {json.dumps(name)}, "parameters": ', parameters, "}")
