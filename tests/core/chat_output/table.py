"""A helper that compares the parts parsed from a text with the expected parts, for several splits into pieces."""

import random

from pagewire.common.chat.chat_output import ChatFormat, OutputPart
from testing.chat_output.spellings import FUNCTIONS
from testing.chat_output.splitting import in_two, parts_of, some_splits

Row = tuple[str, list[OutputPart]]


def hold(chat_format: ChatFormat, prompt: str, text: str, parts: list[OutputPart]) -> None:
    assert parts_of(chat_format, FUNCTIONS, prompt, [text]) == parts
    for pieces in (*in_two(text), *some_splits(text, random.Random(text))):
        assert parts_of(chat_format, FUNCTIONS, prompt, pieces) == parts, pieces
