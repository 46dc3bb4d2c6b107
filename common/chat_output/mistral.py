"""Calls as Mistral's models write them: [TOOL_CALLS], and a list of objects, or else NAME[ARGS] and the arguments."""

import json
from collections.abc import Mapping
from typing import Any

from pagewire.common.chat_output.call_object import read_one_or_several
from pagewire.common.chat_output.parts import Arguments, CallStart, Content
from pagewire.common.chat_output.unread import Reading, Unread, told

BEGIN = "[TOOL_CALLS]"
_ARGUMENTS, _NUMBER = "[ARGS]", "[CALL_ID]"
TAGS = (BEGIN, _ARGUMENTS, _NUMBER)


def read_calls(_functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
    """Tell content, and the calls in it."""
    marker = yield from unread.until((BEGIN,), Content)
    while marker:
        is_list = bool((yield from unread.ahead("[", "{")))
        rest = yield from (read_one_or_several if is_list else _read_named)(unread)
        if rest is None:
            yield Content(unread.kept())
        elif rest is Content:
            yield from unread.skip("\n")
        marker = yield from unread.until((BEGIN,), rest or Content)


def _read_named(unread: Unread) -> Reading[type[Content | Arguments] | None]:
    name = yield from unread.word()
    if name and (yield from unread.begins_with(_NUMBER)):
        yield from unread.word()
    if not name or not ((yield from unread.begins_with(_ARGUMENTS)) or (yield from unread.ahead("{"))):
        return None
    unread.forget()
    yield CallStart(name)
    is_whole = yield from told(Arguments, unread.value())
    return Content if is_whole else Arguments


def named_call_tag(name: str, parameters: Any) -> dict[str, Any]:
    """Return a call of a function, whose arguments match a JSON Schema, as a structural tag's part."""
    content = {"type": "json_schema", "json_schema": parameters}
    return {"type": "tag", "begin": f"{BEGIN}{name}{_ARGUMENTS}", "content": content, "end": ""}


def listed_call_tag(name: str, parameters: Any) -> dict[str, Any]:
    """The same of a call in a list."""
    content = {"type": "json_schema", "json_schema": parameters}
    begin = f'{BEGIN}[{{"name": {json.dumps(name)}, "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}]"}
