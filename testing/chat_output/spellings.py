"""Random outputs with known parts, in which calls are spelled as models of each format spell them."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output import Arguments, CallStart, ChatFormat, Content, OutputPart, Reasoning, format_of
from testing.chat_output.splitting import Functions, merged

_PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "flag": {"type": "boolean"},
    "data": {"type": "object"},
    "list": {"type": ["array", "null"]},
}
FUNCTIONS: Functions = {
    name: {"type": "object", "properties": _PROPERTIES} for name in ("f", "get_weather", "look_up2")
}
# Texts that form no tag of any format, in whatever order they are joined.
_TEXTS = (
    *("Hello", " ", "\n", "\n\n", "I'll look.", "ünïcödé 🙂", '{"nom": "f"}', "}", "]", "[1, 2]", '"', "\\", "\\n"),
    *("<", "<b>", "</", "a < b", "```json\n", ", ", ": ", "x = f(1)", "<tool", "</tool_call", "[TOOL", "<|", "|>"),
)
_FRAGMENTS = (
    *"()[]{},;:='\"\\> \n1f",
    *('"name": ', '"arguments": ', "text", "assistant", "to=functions.f", "analysis", "final", "json"),
    *("<function=", "</function>", "<parameter=", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]

    @property
    def parts(self) -> list[OutputPart]:
        return [CallStart(self.name), Arguments(json.dumps(self.arguments, ensure_ascii=False))]


class Segment(NamedTuple):
    text: str
    parts: list[OutputPart]


class Spelling(NamedTuple):
    """A format in tests: how its models spell calls, and texts that contain the format's tags but are no calls."""

    template: str  # selects the format
    spell: Callable[[list[Call]], str]
    no_calls: tuple[str, ...]
    no_values: tuple[str, ...] = ()  # texts that arguments cannot contain
    thinking: tuple[str, str] | None = None
    spell_first: Callable[[list[Call]], str] | None = None  # spells calls at the beginning of an output
    is_in_channels: bool = False
    before_text: str = ""

    @property
    def chat_format(self) -> ChatFormat:
        return format_of(self.template)

    def draw(self, drawn: random.Random) -> list[Segment]:
        """Draw a random output."""
        if self.is_in_channels:
            return [_message(self, drawn, is_first=place == 0) for place in range(max(1, _num_segments(drawn)))]
        thoughts = list(self.thought(drawn))
        spell = self.spell_first if self.spell_first and drawn.random() < 0.5 and not thoughts else None
        first = [self.called(drawn, spell)] if spell else []
        return [*thoughts, *first, *(self.segment(drawn) for _ in range(_num_segments(drawn)))]

    def draw_broken(self, drawn: random.Random) -> str:
        """Draw pieces of calls and tags in random order, for which no parts are expected."""
        spelled = (self.spell_first or self.spell)([self.call(drawn)])
        pieces = []
        for _ in range(drawn.randint(1, 14)):
            begin = drawn.choice((0, drawn.randrange(len(spelled))))
            part = spelled[begin : begin + drawn.randint(1, 60)]
            pieces.append(drawn.choice((part, drawn.choice((*self.chat_format.tags(FUNCTIONS), *_FRAGMENTS)))))
        return "".join(pieces)

    def thought(self, drawn: random.Random) -> Iterator[Segment]:
        if self.thinking and drawn.random() < 0.5:
            begin, end = self.thinking
            text = drawn_text(drawn) + self.segment(drawn).text
            yield Segment(f"{begin}{text}{end}", [Reasoning(text)])

    def segment(self, drawn: random.Random) -> Segment:
        if drawn.random() < 0.4:
            return self.called(drawn, self.spell)
        text = drawn.choice(self.no_calls) if drawn.random() < 0.3 else drawn_text(drawn)
        return Segment(text, [Content(text)])

    def called(self, drawn: random.Random, spell: Callable[[list[Call]], str]) -> Segment:
        calls = [self.call(drawn) for _ in range(drawn.choice((1, 1, 1, 2, 3)))]
        return Segment(spell(calls), [part for call in calls for part in call.parts])

    def call(self, drawn: random.Random) -> Call:
        values: dict[str, Callable[[], Any]] = {
            "text": lambda: self.value(drawn),
            "number": lambda: drawn.randint(-5, 5000),
            "flag": lambda: drawn.random() < 0.5,
            "data": lambda: {drawn_text(drawn): [self.value(drawn), None, 1.5, {}] for _ in range(drawn.randint(0, 2))},
            "list": lambda: drawn.choice([None, [], [1, "a", [True]]]),
        }
        keys = drawn.sample(sorted(values), drawn.randint(0, len(values)))
        return Call(drawn.choice(sorted(FUNCTIONS)), {key: values[key]() for key in keys})

    def value(self, drawn: random.Random) -> str:
        text = drawn_text(drawn)
        if drawn.random() < 0.3:
            text += drawn.choice(self.no_calls) + drawn_text(drawn)
        return "" if any(word in text for word in self.no_values) else text


def _num_segments(drawn: random.Random) -> int:
    """Draw a number of segments. Most outputs are short, because parsing every split takes time quadratic in the
    length."""
    return drawn.randint(0, drawn.choice((1, 1, 1, 2, 2, 2, 6)))


def _message(spelling: Spelling, drawn: random.Random, *, is_first: bool) -> Segment:
    begin = "" if is_first else "<|start|>assistant"
    text, call = drawn_text(drawn), spelling.call(drawn)
    to, parts = f"<|channel|>commentary to=functions.{call.name}", call.parts
    arguments = _dumped(call.arguments)
    return drawn.choice(
        [
            Segment(f"{begin}<|channel|>analysis<|message|>{text}<|end|>", [Reasoning(text)]),
            Segment(f"{begin}<|channel|>commentary<|message|>{text}<|end|>", [Content(text)]),
            Segment(f"{begin}<|channel|>final<|message|>{text}<|return|>", [Content(text)]),
            Segment(f"{begin}{to} <|constrain|>json<|message|>{arguments}<|call|>", parts),
            Segment(f"{begin} to=functions.{call.name}<|channel|>commentary json<|message|>{arguments}<|call|>", parts),
        ]
    )


def drawn_text(drawn: random.Random) -> str:
    return "".join(drawn.choices(_TEXTS, k=drawn.randint(0, 5)))


def expected(segments: list[Segment]) -> list[OutputPart]:
    return merged(part for segment in segments for part in segment.parts)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str = "arguments") -> str:
    return _dumped({"name": call.name, key: call.arguments})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _dumped(value)


def _python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _parameters(call: Call, line: str) -> str:
    return "".join(
        f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n" for key, value in call.arguments.items()
    )


def _glm(call: Call) -> str:
    arguments = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"\n<tool_call>{call.name}\n{''.join(arguments)}</tool_call>\n"


def _harmony(call: Call) -> str:
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
    return f"{header}<|message|>{_dumped(call.arguments)}"


def _each(spell: Callable[[Call], str], before: str = "", between: str = "", behind: str = "") -> Callable[..., str]:
    return lambda calls: f"{before}{between.join(map(spell, calls))}{behind}"


_NO_JSON = ("no JSON", "[1]", '{"nom": "f"}', "[]", "f", "[f(x)]", '{"name": 1}')
_JSON_IN_TAGS = tuple(f"<tool_call>{text}</tool_call>" for text in _NO_JSON)
_THINK = ("<think>", "</think>")

SPELLINGS = {
    "hermes": Spelling(
        "<think> </think> <tool_call>",
        _each(lambda call: f"\n<tool_call>\n{_object(call)}\n</tool_call>\n"),
        (*_JSON_IN_TAGS, "<tool_call>", '<tool_call>{"name": 1}', "</tool_call>", "<tool_call> {}"),
        thinking=_THINK,
    ),
    "granite": Spelling(
        "<|tool_call|>",
        _each(_object, "<|tool_call|>[", ", ", "]"),
        ("<|tool_call|>", "<tool_call>", "<|tool_call|>[]", '<|tool_call|>[{"name": 1}]', "<|tool_call|>no"),
    ),
    "nemotron": Spelling(
        "<TOOLCALL>",
        _each(_object, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        ("<TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", '<TOOLCALL>[{"nom": 1}]</TOOLCALL>'),
    ),
    "qwen-coder": Spelling(
        "<tool_call> <function=",
        _each(
            lambda call: f"\n<tool_call>\n<function={call.name}>\n{_parameters(call, chr(10))}</function>\n</tool_call>"
        ),
        (*_JSON_IN_TAGS, "<tool_call>x", "<function=unknown>", "<function>", "<parameter=a>", "<tool_call><function=>"),
        no_values=("</parameter>", "\n<parameter=", "\n</function>"),
    ),
    "seed": Spelling(
        "<seed:think> </seed:think> <seed:tool_call>",
        _each(
            lambda call: (
                f"<seed:tool_call>\n<function={call.name}>\n{_parameters(call, '')}</function>\n</seed:tool_call>"
            )
        ),
        ("<seed:tool_call>x", "<tool_call>", "</seed:tool_call>", "<seed:tool_call><function="),
        no_values=("</parameter>", "\n<parameter=", "\n</function>"),
        thinking=("<seed:think>", "</seed:think>"),
    ),
    "glm": Spelling(
        "<think> </think> <tool_call> <arg_key>",
        _each(_glm),
        ("<tool_call>[1]</tool_call>", "<tool_call>!", "</tool_call>", "<arg_key>a</arg_key>", "<tool_call>f x"),
        no_values=("</arg_value>", "\n<arg_key>", "\n</tool_call>"),
        thinking=_THINK,
    ),
    "mistral": Spelling(
        "[TOOL_CALLS] [THINK] [/THINK] [ARGS]",
        _each(lambda call: f"[TOOL_CALLS]{call.name}[ARGS]{_dumped(call.arguments)}"),
        ("[TOOL_CALLS] !", "[TOOL_CALLS][1]", '[TOOL_CALLS]{"nom": 1}', "[ARGS]", "[TOOL_CALLS]f x", "[TOOL_CALLS]f["),
        thinking=("[THINK]", "[/THINK]"),
    ),
    "mistral-list": Spelling(
        "[TOOL_CALLS]",
        _each(_object, "[TOOL_CALLS][", ", ", "]"),
        ("[TOOL_CALLS] !", "[TOOL_CALLS][1]", '[TOOL_CALLS][{"nom": 1}]', "[ARGS]", "[TOOL_CALLS]f x"),
    ),
    "llama": Spelling(
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        _each(lambda call: _object(call, "parameters"), "<|python_tag|>", "; "),
        ('{"name": "unknown", "parameters": {}}', '{"name": 1}', "<|python_tag|>print(1)", '{"name": "f", "x": ]}'),
        spell_first=_each(lambda call: _object(call, "parameters"), "", "; "),
    ),
    "pythonic": Spelling(
        "[func_name1(params_name1=params_value1)]",
        _each(_python, "<|python_start|>[", ", ", "]<|python_end|>"),
        ("[f(x)]", "[unknown(a=1)]", "[f(a=)]", "<|python_start|>[f(1)]", "<|python_start|>f(a=1)", "[f(a=b)]"),
        spell_first=_each(_python, "[", ", ", "]"),
    ),
    "lfm": Spelling(
        "<|tool_call_start|>",
        _each(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        ("<|tool_call_start|>[f(x)]<|tool_call_end|>", "<|tool_call_start|>[]", "<|tool_call_end|>"),
    ),
    "olmo": Spelling(
        "<function_calls>",
        _each(_python, "<function_calls>\n", "\n", "\n</function_calls>\n"),
        ("<function_calls>f(x)</function_calls>", "<function_calls></function_calls>", "<function_calls>f(a=b)"),
    ),
    "harmony": Spelling(
        "<|channel|> <|message|>",
        _each(_harmony),
        ("<|chan", "<message|>"),
        is_in_channels=True,
        before_text="<|channel|>final<|message|>",
    ),
}
