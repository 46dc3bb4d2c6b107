"""Tool calls of Mistral models: [TOOL_CALLS], then a list of JSON objects, or NAME[ARGS] and the arguments."""

import json
from collections.abc import Mapping
from typing import Any

from pagewire.common.chat.chat_output.call_forms import json_between
from pagewire.common.chat.chat_output.call_object import Rest, read_one_or_several
from pagewire.common.chat.chat_output.lexemes import read_name, read_value
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.parts import Arguments, CallStart, Content
from pagewire.common.chat.chat_output.unread import Reading, Unread, as_parts

BEGIN = "[TOOL_CALLS]"
_ARGUMENTS, _NUMBER = "[ARGS]", "[CALL_ID]"
TAGS = (BEGIN, _ARGUMENTS, _NUMBER)


def read_calls(_functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
    """Read the output of a Mistral model, and yield its content and tool calls."""
    marker = yield from unread.until((BEGIN,), Content)
    while marker:
        is_list = bool((yield from unread.ahead("[", "{")))
        rest = yield from (read_one_or_several if is_list else _read_named)(unread)
        if rest is None:
            yield Content(unread.kept())
        elif rest is Content:
            yield from unread.skip("\n")
        marker = yield from unread.until((BEGIN,), rest or Content)


def _read_named(unread: Unread) -> Reading[Rest]:
    name = yield from read_name(unread)
    if name and (yield from unread.begins_with(_NUMBER)):
        yield from read_name(unread)
    if not name or not ((yield from unread.begins_with(_ARGUMENTS)) or (yield from unread.ahead("{"))):
        return None
    unread.forget()
    yield CallStart(name)
    is_whole = yield from as_parts(Arguments, read_value(unread))
    return Content if is_whole else Arguments


def named_call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return the part of a structural tag (a grammar in JSON) that allows one tool call of a newer Mistral model:
    NAME[ARGS], followed by the arguments. The arguments must match the function's JSON Schema.
    """
    return json_between(f"{BEGIN}{name}{_ARGUMENTS}", parameters, "")


def listed_call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return the part of a structural tag (a grammar in JSON) that allows one tool call of an older Mistral model: a
    list that contains one JSON object. The arguments must match the function's JSON Schema.
    """
    return json_between(f'{BEGIN}[{{"name": {json.dumps(name)}, "arguments": ', parameters, "}]")
