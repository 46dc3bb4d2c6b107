"""How models of each format spell calls, in random outputs whose parts are known."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pagewire.common.chat_output import Arguments, CallStart, ChatFormat, Content, OutputPart, Reasoning, format_of
from tests.core.chat_output.splitting import Functions, merged

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
# Texts that are part of no tag of any format, however they stand together.
_TEXTS = (
    *("Hello", " ", "\n", "\n\n", "I'll look.", "ünïcödé 🙂", '{"nom": "f"}', "}", "]", "[1, 2]", '"', "\\", "\\n"),
    *("<", "<b>", "</", "a < b", "```json\n", ", ", ": ", "x = f(1)", "<tool", "</tool_call", "[TOOL", "<|", "|>"),
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
    """A format in tests: how its models spell a call, and texts in the format's tags that are no calls."""

    template: str  # which it is told by
    spell: Callable[[Call], str]
    no_calls: tuple[str, ...]
    no_values: tuple[str, ...] = ()  # which texts in arguments cannot have
    has_thoughts: bool = False

    @property
    def chat_format(self) -> ChatFormat:
        return format_of(self.template)

    def draw(self, drawn: random.Random) -> list[Segment]:
        """Draw an output."""
        return [*self.thought(drawn), *(self.segment(drawn) for _ in range(drawn.randint(0, 6)))]

    def thought(self, drawn: random.Random) -> Iterator[Segment]:
        if self.has_thoughts and drawn.random() < 0.5:
            text = drawn_text(drawn) + self.segment(drawn).text
            yield Segment(f"<think>{text}</think>", [Reasoning(text)])

    def segment(self, drawn: random.Random) -> Segment:
        if drawn.random() < 0.4:
            call = self.call(drawn)
            return Segment(self.spell(call), call.parts)
        text = drawn.choice(self.no_calls) if drawn.random() < 0.3 else drawn_text(drawn)
        return Segment(text, [Content(text)])

    def call(self, drawn: random.Random) -> Call:
        values = {
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


def drawn_text(drawn: random.Random) -> str:
    return "".join(drawn.choices(_TEXTS, k=drawn.randint(0, 5)))


def expected(segments: list[Segment]) -> list[OutputPart]:
    return merged(part for segment in segments for part in segment.parts)


def _json(call: Call) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


_JSON_IN_TAGS = ("<tool_call>no JSON</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"nom": "f"}</tool_call>')

SPELLINGS = {
    "hermes": Spelling(
        "<think> </think> <tool_call>",
        lambda call: f"\n<tool_call>\n{_json(call)}\n</tool_call>\n",
        (*_JSON_IN_TAGS, "<tool_call>", '<tool_call>{"name": 1}', "</tool_call>", "<tool_call> {}"),
        has_thoughts=True,
    ),
}
