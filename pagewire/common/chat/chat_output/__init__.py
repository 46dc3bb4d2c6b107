"""What a chat model's output says: reasoning, content, and calls of tools, read from its text as it comes.

Each format is a generator over `Unread`: it yields the parts that it finds, and None where it needs more text. What it
does follows from the text alone and not from where the text was cut, so that an answer that is streamed is the same as
a whole one. Text that turns out to be no call stays content, character for character, but for newlines beside tags.
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
