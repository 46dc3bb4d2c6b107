"""Renders agents' conversations with published chat templates: `python -m tests.contract.published_templates FOLDER`.

The folder contains templates (*.jinja), like models/templates of llama.cpp. For each kind of conversation, the program
prints how many templates render it completely, lose a part of it, or refuse it. Then it prints the names and reasons.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pagewire.common.chat.chat_template import ChatTemplateError, render
from testing.chat_output.corpus import SPECIAL_TOKENS, TOOLS

CALLS = [
    {
        "id": f"call_{index:024x}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"city": city})},
    }
    for index, (name, city) in enumerate([("get_weather", "Oslo"), ("look_up", "Rome")])
]
RESULTS = [
    {"role": "tool", "tool_call_id": call["id"], "content": text}
    for call, text in zip(CALLS, ("sunny", "raining"), strict=True)
]
QUESTION = {"role": "user", "content": "Where to?"}


def answered(num_calls: int, **fields: Any) -> list[dict[str, Any]]:
    calls = CALLS[:num_calls]
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": calls} | fields, *RESULTS[:num_calls]]


# For each kind of conversation: its messages, and the texts that its prompt must contain.
HISTORIES: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "a question": ([QUESTION], ("Where to?",)),
    "a system message": ([{"role": "system", "content": "Be kind."}, QUESTION], ("Be kind.",)),
    "a developer's message": ([{"role": "developer", "content": "Be brief."}, QUESTION], ("Be brief.",)),
    "both": (
        [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}, QUESTION],
        ("Be kind.", "Be brief."),
    ),
    "a call": (answered(1), ("Oslo", "sunny")),
    "two calls": (answered(2), ("Oslo", "sunny", "Rome", "raining")),
    "a text beside a call": (answered(1, content="I look."), ("Oslo", "sunny", "I look.")),
    "a text and a thought beside a call": (
        answered(1, content="I look.", reasoning_content="Where?"),
        ("Oslo", "sunny", "I look."),
    ),
    "an empty list of calls": ([*answered(0, content="North."), QUESTION], ("North.",)),
}


def main(folder: str) -> int:
    paths = sorted(Path(folder).glob("*.jinja"))
    found = [(path.name, kind, fault_of(path.read_text(), kind)) for path in paths for kind in HISTORIES]
    for kind in HISTORIES:
        counts = Counter(fault.partition(" ")[0] or "whole" for _, other, fault in found if other == kind)
        print(f"{kind}: {', '.join(f'{number} {what}' for what, number in counts.most_common())}")
    for name, kind, fault in found:
        if fault:
            print(f"    {name}, {kind}: {fault}")
    return 0 if paths else 1


def fault_of(template: str, kind: str) -> str:
    history, texts = HISTORIES[kind]
    try:
        prompt = render(template, history, special_tokens=SPECIAL_TOKENS, variables={"tools": TOOLS})
    except ChatTemplateError as error:
        return f"refused ({error})"
    lost = [text for text in texts if text not in prompt]
    return f"lost {lost}" if lost else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
