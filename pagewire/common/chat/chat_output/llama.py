"""Calls as Llama 3.1 writes them: objects of JSON, several between semicolons, behind a tag or not."""

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
    """Tell content, and the calls in it: without a tag an object may be one wherever it stands."""
    marker = yield from unread.until((TAG, _BRACE), Content)
    while marker:
        rest = yield from read_call(unread, functions, is_open=marker == _BRACE)
        if rest is None:
            yield Content(unread.kept())
        elif rest is Content and (yield from unread.begins_with(";")):
            yield from unread.skip()
        marker = yield from unread.until((TAG, _BRACE), rest or Content)


def call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return a call of a function, whose arguments match a JSON Schema, as a structural tag's part."""
    return json_between(f'{{"name": {json.dumps(name)}, "parameters": ', parameters, "}")
