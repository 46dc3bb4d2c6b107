"""Unpaired surrogates become U+FFFD, however a text is split."""

import json
import random

import pytest

from pagewire.common.chat.chat_output import Arguments, CallStart, format_of
from pagewire.common.strict_json import from_json
from pagewire.common.surrogates import HalfEscapes, without_half_escapes, without_halves
from testing.chat_output.splitting import at_random, merged
from testing.seeds import seeded

PARTS = (
    *(r"\ud83d", r"\uDE00", r"\uDBFF", r"\udfff", r"\ud83d\ude00", r"\ud7ff", r"\ue000", r"\u0041"),
    *(r"\\", r"\n", r"\"", "ud83d", "x", "é", "😀"),
)
BROKEN = ("\\", "u", "d", "D", "8", "e", "0", "x")


def as_utf_16_has_it(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def in_pieces(text: str, drawn: random.Random) -> str:
    escapes = HalfEscapes()
    return "".join([*map(escapes.feed, at_random(text, drawn)), escapes.feed("", is_last=True)])


def test_escapes_of_halves_are_replaced() -> None:
    drawn = seeded()
    for _ in range(3000):
        text = f'"{"".join(drawn.choices(PARTS, k=drawn.randrange(8)))}"'
        mended = without_half_escapes(text)
        assert json.loads(mended) == from_json(text) == as_utf_16_has_it(json.loads(text)), text
        json.loads(mended).encode()
        assert in_pieces(text, drawn) == mended, text


def test_no_text_is_lost_that_is_no_json() -> None:
    drawn = seeded()
    for _ in range(3000):
        text = "".join(drawn.choices(BROKEN, k=drawn.randrange(14)))
        mended = without_half_escapes(text)
        assert len(mended) == len(text)
        assert in_pieces(text, drawn) == mended, text


@pytest.mark.parametrize("text", ["", "x", "é😀", "\ud83d", "\ude00x", "\ud83d\ude00", "a\ud83d\ud83d\ude00\ude00"])
def test_halves_are_replaced(text: str) -> None:
    assert without_halves(text) == as_utf_16_has_it(text)
    without_halves(text).encode()


OUTPUTS = {
    "<tool_call>": r'<tool_call>{"name": "f\ud83d", "arguments": {"a": "\ud83d\ude00\ud83d", "\uDE00": 1}}</tool_call>',
    "in a text": '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>',
    "<|tool_call_start|>": r"<|tool_call_start|>[f(a='\ud83d', b='\ud83d\ude00')]<|tool_call_end|>",
    "<tool_call> <function=": "<tool_call><function=f><parameter=a>['\\ud83d']</parameter></function></tool_call>",
    "cut": '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d',
}


@pytest.mark.parametrize("template", OUTPUTS)
def test_calls_can_be_sent_and_read(template: str) -> None:
    drawn = random.Random(5)
    text = OUTPUTS[template]
    chat_format = format_of(template if template.startswith("<") else "<tool_call>")
    functions = {"f": {"properties": {"a": {"type": "array"}}}}

    def parts(pieces: list[str]) -> list[object]:
        parser = chat_format.parser("", functions)
        return merged([part for piece in [*pieces, None] for part in parser.feed(piece or "", is_last=piece is None)])

    whole = parts([text])
    start, arguments = whole
    assert isinstance(start, CallStart)
    assert isinstance(arguments, Arguments)
    for sent in (start.name, arguments.text):
        sent.encode()
        assert not any(half in sent for half in (r"\ud83d" + '"', r"\uDE00"))
    if template != "cut":
        json.dumps(json.loads(arguments.text), ensure_ascii=False).encode()
    for _ in range(50):
        assert parts(at_random(text, drawn)) == whole
