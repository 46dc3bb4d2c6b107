"""Outputs of Hermes and Qwen and the expected parts."""

import pytest

from pagewire.common.chat.chat_output import Arguments, CallStart, Content, OutputPart, Reasoning, format_of
from testing.chat_output.spellings import FUNCTIONS, SPELLINGS
from testing.chat_output.splitting import merged, parts_of
from tests.core.chat_output.table import Row, hold

F = CallStart("f")
NO_ARGUMENTS = Arguments("{}")
TAGS_WITHIN = '{"a": "</tool_call> <tool_call> {\\"name\\": \\"g\\"} \\\\"}'
OTHER_ORDER = '<tool_call>{"arguments": {"a": 1}, "id": [1, {"b": "}"}], "name": "f"}</tool_call>'

CALLS: dict[str, Row] = {
    "no call": ("Hi, a < b.\n", [Content("Hi, a < b.\n")]),
    "nothing": ("", []),
    "a call": ('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>', [F, Arguments('{"a": [1]}')]),
    "tags in a string": (
        f'<tool_call>{{"name":"f","arguments":{TAGS_WITHIN}}}</tool_call>',
        [F, Arguments(TAGS_WITHIN)],
    ),
    "arguments first": (OTHER_ORDER, [F, Arguments('{"a": 1}')]),
    "arguments in a string": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [F, Arguments('{"a": 1}')]),
    "a string that is no JSON": ('<tool_call>{"name": "f", "arguments": "a b"}', [F, Arguments('"a b"')]),
    "null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [F, NO_ARGUMENTS]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [F, NO_ARGUMENTS]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [F, NO_ARGUMENTS]),
    "escapes in the name": ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [F, NO_ARGUMENTS]),
    "no end": ('<tool_call>{"name": "f", "arguments": {}}', [F, NO_ARGUMENTS]),
    "no end before the next": ('<tool_call>{"name": "f"}\n<tool_call>{"name": "f"}', [F, NO_ARGUMENTS] * 2),
    "a brace too many": (
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>Hi',
        [F, NO_ARGUMENTS, Content("}Hi")],
    ),
    "text between calls": (
        'A\n\n<tool_call>{"name": "f"}</tool_call>\nB\n<tool_call>{"name": "f"}</tool_call>\n\nC\n',
        [Content("A"), F, NO_ARGUMENTS, Content("B"), F, NO_ARGUMENTS, Content("C\n")],
    ),
    "broken before the name": (
        'A\n<tool_call>\n{"nom": "f"}\n</tool_call>\nB',
        [Content('A\n<tool_call>\n{"nom": "f"}\n</tool_call>\nB')],
    ),
    "broken in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": ]}}', [F, Arguments('{"a": ]}}')]),
    "broken, then a call": (
        '<tool_call>{"name": }</tool_call><tool_call>{"name": "f"}</tool_call>',
        [Content('<tool_call>{"name": }</tool_call>'), F, NO_ARGUMENTS],
    ),
    "cut in the tag": ("A\n<tool_ca", [Content("A\n<tool_ca")]),
    "cut in the name": ('<tool_call>\n{"name": "f', [Content('<tool_call>\n{"name": "f')]),
    "cut in arguments": ('<tool_call>\n{"name": "f", "arguments": {"a": "x', [F, Arguments('{"a": "x')]),
    "cut before arguments": ('<tool_call>\n{"name": "f", "arg', [Content('<tool_call>\n{"name": "f", "arg')]),
}
THOUGHTS: dict[str, Row] = {
    "thought": ("<think>\nA\n</think>\n\nB", [Reasoning("A"), Content("B")]),
    "an empty thought": ("<think>\n\n</think>\n\nB", [Content("B")]),
    "never closed": ("<think>A <tool_call>", [Reasoning("A <tool_call>")]),
    "a call thought of": (
        '<think><tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "f"}</tool_call>',
        [Reasoning('<tool_call>{"name": "f"}</tool_call>'), F, NO_ARGUMENTS],
    ),
    "no thought": ("A <think>B</think>", [Content("A <think>B</think>")]),
}
BEGUN: dict[str, Row] = {
    "thought": ("A\n</think>\n\nB", [Reasoning("A"), Content("B")]),
    "begun again": ("<think>A</think>B", [Reasoning("A"), Content("B")]),
    "never closed": ("A </thin", [Reasoning("A </thin")]),
    "nothing": ("</think>", []),
}


@pytest.mark.parametrize(("text", "parts"), CALLS.values(), ids=CALLS)
def test_calls(text: str, parts: list[OutputPart]) -> None:
    hold(format_of("<tool_call>"), "", text, parts)


@pytest.mark.parametrize(("text", "parts"), [*CALLS.values(), *THOUGHTS.values()], ids=[*CALLS, *THOUGHTS])
def test_reasoning(text: str, parts: list[OutputPart]) -> None:
    hold(SPELLINGS["hermes"].chat_format, "", text, parts)


@pytest.mark.parametrize(("text", "parts"), BEGUN.values(), ids=BEGUN)
def test_reasoning_that_the_prompt_began(text: str, parts: list[OutputPart]) -> None:
    hold(SPELLINGS["hermes"].chat_format, "<|im_start|>assistant\n<think>\n", text, parts)


def test_calls_are_text_where_there_are_no_functions() -> None:
    text = '<think>A</think><tool_call>{"name": "f"}</tool_call>'
    parts = [Reasoning("A"), Content(text.partition("</think>")[2])]
    assert parts_of(SPELLINGS["hermes"].chat_format, {}, "", [text]) == parts
    assert not format_of("<tool_call>").tags({})


def test_certain_text_is_emitted_immediately() -> None:
    parser = format_of("<tool_call>").parser("", FUNCTIONS)
    text = 'A <tool_call>{"name": "f", "arguments": {"a": "x <tool_call> y"'
    told = [merged(parser.feed(character)) for character in text]
    begun = text.index('{"a"')
    assert told[:2] == [[Content("A")], [Content(" ")]]
    assert [parts for parts in told[2:begun] if parts] == [[F]]
    assert told[begun] == [Arguments("{")]
    assert told[begun + 1 :] == [[Arguments(character)] for character in text[begun + 1 :]]
