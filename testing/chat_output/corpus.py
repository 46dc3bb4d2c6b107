"""A check that answers rendered by chat templates parse back: `python -m testing.chat_output.corpus FOLDER`.

The folder contains templates (*.jinja), like llama.cpp's models/templates. The check does not expect content that a
template leaves out of an answer. It skips answers that a template cannot render, and several calls if the template
writes each call as a message of its own.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagewire.common.chat.chat_output import Arguments, CallStart, ChatFormat, Content, OutputPart, Reasoning, format_of
from pagewire.common.chat.chat_template import ChatTemplateError, render
from pagewire.common.chat.template_forms import to_template_form
from testing.chat_output.splitting import Functions, in_two, parts_of

_CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "boolean"}},
    },
}
FUNCTIONS: Functions = {"get_weather": _CITY, "look_up": _CITY}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": _CITY}} for name in FUNCTIONS
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "", "unk_token": ""}
QUESTION = {"role": "user", "content": "Hello"}
OSLO, ODD, LIST = {"city": "Oslo"}, {"city": 'São "P" <b>\nx', "days": 3}, {"city": "R", "days": -1, "flags": [True]}
TEXT, THOUGHT = 'It is sunny, I think: {"a": 1}.', "The user asks.\nSo I say."
_MOST_OF_A_TAG = 2  # the number of characters that two different tags may have in common at their beginning
# Content, reasoning, and calls.
ANSWERS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (TEXT, "", []),
    ("", "", [("get_weather", OSLO)]),
    ("", "", [("get_weather", ODD)]),
    ("", "", [("look_up", LIST)]),
    ("", "", [("get_weather", OSLO), ("look_up", ODD)]),
    (TEXT, "", [("look_up", LIST)]),
    (TEXT, THOUGHT, []),
    ("", THOUGHT, [("get_weather", ODD)]),
]


def main(folder: str) -> int:
    num_wrong = 0
    for path in sorted(Path(folder).glob("*.jinja")):
        chat_format = format_of(path.read_text())
        if chat_format.calls is None and chat_format.thinking is None:
            continue
        results = list(_results(path.read_text(), chat_format))
        wrong = [output for output, is_right in results if not is_right]
        print(f"{path.name}: {len(results) - len(wrong)} of {len(results)}")
        for output in wrong:
            print(f"    {output!r}")
        num_wrong += bool(wrong)
    print(f"{num_wrong} templates with answers that are read otherwise")
    return 1 if num_wrong else 0


def _results(template: str, chat_format: ChatFormat) -> Iterator[tuple[str, bool]]:
    """Yield each answer as the template renders it, and whether the parser reads it back correctly."""
    tools = TOOLS if chat_format.calls else None
    prompt = render(template, [QUESTION], special_tokens=SPECIAL_TOKENS, variables={"tools": tools})
    written: list[tuple[str, str, int]] = []
    for number, (content, reasoning, calls) in enumerate(ANSWERS):
        if (calls and tools is None) or (reasoning and not chat_format.has_reasoning):
            continue
        answer = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        answer["tool_calls"] = [_call(*call) for call in calls] or None  # type: ignore[assignment]
        asked = template, tuple(sorted(SPECIAL_TOKENS.items()))
        if len(to_template_form([QUESTION, answer], asked)) > 2:  # in several messages, which are several outputs
            continue
        try:
            history = render(
                template,
                [QUESTION, answer],
                special_tokens=SPECIAL_TOKENS,
                variables={"tools": tools},
                add_generation_prompt=False,
            )
        except ChatTemplateError:
            continue
        written.append((*_divided(prompt, history), number))
    end = _common_end([output for _, output, _ in written])
    for before, output, number in written:
        answer_text = output.removesuffix(end).rstrip("\n")
        yield answer_text, _is_right(chat_format, before, answer_text, *ANSWERS[number])


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _divided(prompt: str, history: str) -> tuple[str, str]:
    """Return the prompt of a history, and the rest, which is the answer.

    An answer without reasoning may lack the tag that the prompt ends with. If the answer ends the reasoning at once,
    the prompt keeps that tag.
    """
    at = len(os.path.commonprefix([prompt, history]))  # noqa: RUF071
    if at == len(prompt):
        return prompt, history[at:].rstrip("\n")
    history = history.rstrip("\n")
    begin = max(at - _MOST_OF_A_TAG, 0)
    tag = max(history.rfind(bracket, begin, at + 1) for bracket in "<[")
    at = tag if tag >= 0 else at
    return (prompt if history.startswith("</", at) else history[:at]), history[at:]


def _common_end(outputs: list[str]) -> str:
    """Return the text, from a tag on, that ends every answer."""
    end = os.path.commonprefix([output[::-1] for output in outputs])[::-1]  # noqa: RUF071
    begins = [place for place in (end.find("<"), end.find("[")) if place >= 0]
    return end[min(begins) :] if begins and len(outputs) > 1 else ""


def _is_right(
    chat_format: ChatFormat, prompt: str, output: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> bool:
    functions = FUNCTIONS if chat_format.calls else {}
    parts = parts_of(chat_format, functions, prompt, [output])
    for pieces in in_two(output):
        if parts_of(chat_format, functions, prompt, pieces) != parts:
            return False
    said = [text if text.partition("\n")[0] in output else "" for text in (content, reasoning)]
    made = [call for call in calls if call[0] in output]
    return [_text(parts, Content), _text(parts, Reasoning)] == said and _calls(parts) == made


def _text(parts: list[OutputPart], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind)).strip()


def _calls(parts: list[OutputPart]) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append([part.name, ""])
        elif isinstance(part, Arguments):
            calls[-1][1] += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
