"""The harmony format of gpt-oss: an output is a list of messages in channels, and some messages are tool calls.

A message is <|channel|>CHANNEL to=functions.NAME <|constrain|>json<|message|>TEXT<|end|>, and <|start|>assistant begins
the next message. The prompt ends with <|start|>assistant. The last message of an output ends with <|return|> or
<|call|>.
"""

import re
from collections.abc import Mapping
from typing import Any

from pagewire.common.chat.chat_output.call_forms import ANY_TEXT, Form, OutputConstraints, json_between
from pagewire.common.chat.chat_output.call_object import NO_ARGUMENTS
from pagewire.common.chat.chat_output.lexemes import read_value
from pagewire.common.chat.chat_output.parts import Arguments, CallStart, Content, Reasoning
from pagewire.common.chat.chat_output.unread import Reading, Unread, as_parts, collected

START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = TAGS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
_ENDS = (END, RETURN, CALL, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/-]+)")
_ANALYSIS = "analysis"


def read_messages(functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
    """Read the output of a gpt-oss model, and yield the parts of its messages: reasoning, content and tool calls. Text
    outside of any message is content.
    """
    seen_kinds: set[type[Content | Reasoning]] = set()
    header = [(yield from unread.begins_with("to="))]
    marker = START if header[0] else (yield from as_parts(Content, unread.pieces_until(TAGS)))
    while marker:
        if marker in (START, CHANNEL, CONSTRAIN, MESSAGE):
            while marker and marker != MESSAGE:
                text, marker = yield from collected(unread.pieces_until((CHANNEL, CONSTRAIN, MESSAGE)))
                header += (text, " ")
            said, header = "".join(header), []
            recipient, is_analysis = _RECIPIENT.search(said), _ANALYSIS in said.split()
            if marker and recipient and functions and (recipient[1] or recipient[2] in functions):
                marker = yield from _read_call_text(unread, recipient[2])
                continue
            kind = Reasoning if is_analysis else Content
            if marker and kind in seen_kinds:
                yield kind("\n")
            seen_kinds.add(kind)
            reading = as_parts(kind, unread.pieces_until(_ENDS))
            marker = yield from unread.thoughts(reading) if kind is Reasoning else reading
        else:
            marker = yield from as_parts(Content, unread.pieces_until(TAGS))


def _read_call_text(unread: Unread, name: str) -> Reading[str]:
    yield CallStart(name)
    if (yield from unread.ahead(*_ENDS)):
        yield Arguments(NO_ARGUMENTS)
        return (yield from unread.until(_ENDS, Content))
    is_whole = yield from as_parts(Arguments, read_value(unread))
    yield from unread.skip()
    return (yield from unread.until(_ENDS, Content if is_whole else Arguments))


def form(constraints: OutputConstraints) -> Form:
    """Return the structural tag format (JSON) that constrains the output of a gpt-oss model, which writes messages in
    channels.

    A tool call is always the last message, so an output has at most one call. If the reasoning has a token budget, at
    most one message may precede the last message.
    """
    calls = [
        json_between(f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", parameters, ["", CALL])
        for name, parameters in constraints.functions.items()
    ]
    before = {
        "type": "tags_with_separator",
        "separator": f"{START}assistant",
        "tags": [
            {"type": "tag", "begin": f"{CHANNEL}{channel}{MESSAGE}", "content": content, "end": END}
            for channel, content in ((_ANALYSIS, constraints.thought), ("commentary", {"type": ANY_TEXT}))
        ],
        "at_least_one": True,
        "stop_after_first": "max_tokens" in constraints.thought,
    }
    final = {"type": "tag", "begin": f"{CHANNEL}final{MESSAGE}", "content": constraints.text, "end": ["", RETURN]}
    last = {"type": "or", "elements": calls if constraints.is_required else [*calls, final]}
    goes_on = {"type": "const_string", "value": f"{START}assistant"}
    return {"type": "or", "elements": [last, {"type": "sequence", "elements": [before, goes_on, last]}]}
