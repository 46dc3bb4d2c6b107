"""Parsers that split the streamed text of a chat model into reasoning, content and tool calls.

The parser of each format is a generator over `Unread`. It yields the parts that it finds, and None while it needs more
text. The result depends on the text alone, never on the points where the text was split into pieces. A streamed output
therefore gives the same parts as a complete one. Text that is no valid tool call stays content, character for
character, except for newlines next to tags.
"""

from pagewire.common.chat.chat_output.chat_format import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ChatFormat,
    ChatRules,
    format_of,
)
from pagewire.common.chat.chat_output.output_parser import OutputParser
from pagewire.common.chat.chat_output.parameters import Parameters
from pagewire.common.chat.chat_output.parts import Arguments, CallStart, Content, OutputPart, Reasoning

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "Arguments",
    "CallStart",
    "ChatFormat",
    "ChatRules",
    "Content",
    "OutputParser",
    "OutputPart",
    "Parameters",
    "Reasoning",
    "format_of",
]
