"""Outputs of the formats other than Hermes: unusual cases and the expected parts."""

import pytest

from pagewire.common.chat.chat_output import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    Arguments,
    CallStart,
    Content,
    OutputPart,
    Reasoning,
    format_of,
)
from testing.chat_output.spellings import SPELLINGS
from tests.core.chat_output.table import hold

F = CallStart("f")
X = Arguments('{"text": "x"}')
NO_ARGUMENTS = Arguments("{}")
IN_XML = "<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ROWS: list[tuple[str, str, list[OutputPart]]] = [
    ("granite", '<tool_call> [{"name": "f"}, {"arguments": {}, "name": "f"}]', [F, NO_ARGUMENTS] * 2),
    ("granite", '<|tool_call|>[{"name": "f"}, 1] A', [F, NO_ARGUMENTS, Content(", 1] A")]),
    ("granite", '<|tool_call|>[{"name": "f"}]<|/tool_call|>', [F, NO_ARGUMENTS]),
    ("granite", 'functools[{"name": "f"}]', [F, NO_ARGUMENTS]),
    ("qwen-coder", f"A\n<tool_call>\n{IN_XML}\nB", [Content("A"), F, X, Content("B")]),
    ("qwen-coder", f"A\n{IN_XML}", [Content("A"), F, X]),
    ("qwen-coder", f"<tool_call>{IN_XML.replace('=f>', '=g>')}", [CallStart("g"), X]),
    ("qwen-coder", "<tool_call><function=f></function>", [F, NO_ARGUMENTS]),
    (
        "qwen-coder",
        "<tool_call><function=f><parameter=text>\n\n a\n\n</parameter><parameter=number>\n1\n</parameter></function>",
        [F, Arguments('{"text": "\\n a\\n", "number": 1}')],
    ),
    (
        "qwen-coder",  # values of other types than the schema's, or of unknown type
        "<tool_call><function=f><parameter=number>a</parameter><parameter=flag>True</parameter>"
        "<parameter=data>{'a': None}</parameter><parameter=other>1</parameter>"
        "<parameter=list>NaN</parameter></function>",
        [F, Arguments('{"number": "a", "flag": true, "data": {"a": null}, "other": "1", "list": "NaN"}')],
    ),
    (
        "qwen-coder",  # values without an end tag
        "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=number>\n1\n</function>\n</tool_call>",
        [F, Arguments('{"text": "a", "number": 1}')],
    ),
    ("qwen-coder", "<tool_call><function=f>A</tool_call>B", [F, NO_ARGUMENTS, Content("AB")]),
    ("qwen-coder", "<tool_call>\n<function=f", [Content("<tool_call>\n<function=f")]),
    ("qwen-coder", "<tool_call>\n<function=f>\n<parameter=te", [F, Arguments('{"te')]),
    ("qwen-coder", '<tool_call>\n<function=f>\n<parameter=text>\n"a', [F, Arguments('{"text": "\\"a')]),
    ("qwen-coder", "<tool_call><function=f><parameter=text>a</parameter>", [F, Arguments('{"text": "a"')]),
    ("glm", "<tool_call>f</tool_call>", [F, NO_ARGUMENTS]),
    (
        "glm",
        "<tool_call>f\n<arg_key>text</arg_key><arg_value> x\n</arg_value></tool_call>",
        [F, Arguments('{"text": " x\\n"}')],
    ),
    ("glm", "<think>A</think>\n<tool_call>f\nx</tool_call>", [Reasoning("A"), Content("<tool_call>f\nx</tool_call>")]),
    (
        "seed",
        "<seed:think>A</seed:think><seed:tool_call><function=f></function></seed:tool_call>",
        [Reasoning("A"), F, NO_ARGUMENTS],
    ),
    ("mistral", '[TOOL_CALLS]f{"text": "x"}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}', [F, X, F, NO_ARGUMENTS]),
    ("mistral", '[THINK]A[/THINK]B[TOOL_CALLS]f[ARGS]{"a": ]', [Reasoning("A"), Content("B"), F, Arguments('{"a": ]')]),
    ("mistral", "[TOOL_CALLS]f", [Content("[TOOL_CALLS]f")]),
    ("llama", '{"name": "f", "parameters": {"text": "x"}}', [F, X]),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [F, NO_ARGUMENTS]),
    (
        "llama",
        'A {"name": "f", "parameters": {}} ; {"name": "f", "parameters": {}} B',
        [Content("A "), *[F, NO_ARGUMENTS] * 2, Content(" B")],
    ),
    ("llama", '{"name": "f"}', [Content('{"name": "f"}')]),
    ("llama", '{"name": "Bob", "parameters": {}}', [Content('{"name": "Bob", "parameters": {}}')]),
    ("pythonic", " [f(text='x',), f()]\n", [F, X, F, NO_ARGUMENTS, Content("\n")]),
    (
        "pythonic",
        "[f(flag=true, list=[null, (1, 'a)\\d')])]",
        [F, Arguments('{"flag": true, "list": [null, [1, "a)\\\\d"]]}')],
    ),
    ("pythonic", "[f(text=g())]", [Content("[f(text=g())]")]),
    ("pythonic", "[f(text='x'), f(x)]", [F, X, Content(", f(x)]")]),
    ("pythonic", "[f(text='x', number=", [F, Arguments('{"text": "x" number=')]),
    ("olmo", "A\n<function_calls>\nf()\nf(text='x')\n</function_calls>", [Content("A"), F, NO_ARGUMENTS, F, X]),
    ("lfm", '<|tool_call_start|>[f(text="x")]<|tool_call_end|>A', [F, X, Content("A")]),
    ("lfm", "<|tool_call_start|>[f(text='a\n\"b')]<|tool_call_end|>", [F, Arguments('{"text": "a\\n\\"b"}')]),
    ("lfm", "<|tool_call_start|>[f(text='a\0b')]<|tool_call_end|>", [F, Arguments('{"text": "a\\u0000b"}')]),
    ("lfm", "<|tool_call_start|>[f(text={'b', 'a'})]<|tool_call_end|>", [F, Arguments('{"text": ["b", "a"]}')]),
    ("lfm", "<|tool_call_start|>[f(text=-007)]<|tool_call_end|>", [F, Arguments('{"text": -7}')]),
    ("lfm", '<|tool_call_start|>[f(text="a\r\nb")]<|tool_call_end|>', [F, Arguments('{"text": "a\\r\\nb"}')]),
    ("harmony", "A", [Content("A")]),
    ("harmony", "<|channel|>final<|message|>A\n\n", [Content("A\n\n")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>",
        [Reasoning("A"), Content("B")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B",
        [Content("A\nB")],
    ),
    ("harmony", f'{TO_F}{{"text": "x"}}<|call|>', [F, X]),
    ("harmony", f"{TO_F}<|call|>", [F, NO_ARGUMENTS]),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"text": "x"}', [F, X]),
    ("harmony", "<|channel|>analysis to=python<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    ("harmony", "<|channel|>analysis<|message|>A<|end|><|start|>assist", [Reasoning("A")]),
]


@pytest.mark.parametrize(("name", "text", "parts"), ROWS)
def test_what_is_read(name: str, text: str, parts: list[OutputPart]) -> None:
    hold(SPELLINGS[name].chat_format, "", text, parts)


def test_reasoning_begun_in_the_prompt_continues_with_any_tags() -> None:
    hold(SPELLINGS["seed"].chat_format, "<seed:think>\n", "A</seed:think>B", [Reasoning("A"), Content("B")])
    hold(SPELLINGS["mistral"].chat_format, "[THINK]", "A[/THINK]\nB", [Reasoning("A"), Content("B")])


@pytest.mark.parametrize("template", ["<think> <function_calls>", "</think> <|tool_call_start|>"])
def test_reasoning_is_known_by_either_tag(template: str) -> None:
    hold(format_of(template), "<think>", "A</think>B", [Reasoning("A"), Content("B")])
    hold(format_of(template), "", "<think>A</think>B", [Reasoning("A"), Content("B")])


def test_channels_are_read_where_there_are_no_functions() -> None:
    parser = SPELLINGS["harmony"].chat_format.parser("", {})
    assert parser.feed(f"{TO_F}1<|call|>") == [Content("1")]


@pytest.mark.parametrize("name", SPELLINGS)
def test_format_name_takes_precedence_over_template(name: str) -> None:
    """If several formats share a parser name, such as Mistral's, the template decides between them."""
    own, others = SPELLINGS[name], {other.template for other in SPELLINGS.values()}
    found = {parser for parser in TOOL_CALL_PARSERS if format_of(own.template, parser).calls == own.chat_format.calls}
    assert found
    for template in {"", *others}:
        named = {format_of(template, parser).calls for parser in found}
        assert len(named) == 1, template
        assert own.chat_format.calls in named or name.startswith("mistral")
    assert format_of(own.template, "none").calls is None


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        ("qwen3", ("<think>", "</think>")),
        ("seed_oss", ("<seed:think>", "</seed:think>")),
        ("mistral", ("[THINK]", "[/THINK]")),
        ("none", None),
        ("openai_gptoss", None),
    ],
)
def test_reasoning_parser_name_takes_precedence_over_template(name: str, thinking: tuple[str, str] | None) -> None:
    for template in ("", *(spelling.template for spelling in SPELLINGS.values())):
        chat_format = format_of(template, None, name)
        assert chat_format.thinking == thinking
        if name == "openai_gptoss":
            assert chat_format == format_of(SPELLINGS["harmony"].template)
        else:
            assert chat_format.calls == format_of(template).calls
    assert name in REASONING_PARSERS


def test_a_template_without_calls_has_none() -> None:
    chat_format = format_of("{{ messages }}")
    hold(chat_format, "", " <tool_call>{}\n", [Content(" <tool_call>{}\n")])
    assert not chat_format.tags({"f": {}})
    with pytest.raises(ValueError, match="no tool calls"):
        chat_format.structural_tag({"f": {}}, "", is_required=True, is_parallel=True)
