"""Agents' conversations as clients send them, with templates as strict as published ones: no text may be lost."""

import itertools
import json
import random
from functools import partial
from typing import Any

import pytest

from pagewire.common.chat.chat_template import ChatTemplateError, render
from pagewire.common.chat.template_forms import QUESTION, AskedTemplate, to_template_form
from testing.seeds import seeded
from tests.growth import check_growth

_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}#{{ c.id }}{% endfor %}"
_NINE = "{% if {0}|length != 9 %}{{ raise_exception('nine') }}{% endif %}"


def _each(before: str, answer: str = "{{ m.content }}") -> str:
    return f"{{% for m in messages %}}{before}<{{{{ m.role }}}}>{answer}{{% endfor %}}"


def _only(roles: str) -> str:
    return f"{{% if m.role not in {roles} %}}{{{{ raise_exception('role') }}}}{{% endif %}}"


_USUAL = f"{{{{ m.content }}}}{{% if m.tool_calls %}}{_CALLS}{{% endif %}}"
# Templates by their restriction, each as in a published template of the named model family.
TEMPLATES = {
    "nothing": _each("", _USUAL),
    "ids of nine characters": _each(  # Mistral Nemo, Small 3.2
        "{% if m.tool_calls %}{% for c in m.tool_calls %}"
        + _NINE.replace("{0}", "c.id")
        + "{% endfor %}{% endif %}{% if m.role == 'tool' %}"
        + _NINE.replace("{0}", "m.tool_call_id")
        + "{% endif %}",
        f"{_USUAL}{{% if m.role == 'tool' %}}#{{{{ m.tool_call_id }}}}{{% endif %}}",
    ),
    "one call is taken": _each(  # Llama 3
        "{% if m.tool_calls is defined and m.tool_calls|length != 1 %}{{ raise_exception('one') }}{% endif %}", _USUAL
    ),
    "one call is written, no text beside reasoning": _each(  # gpt-oss
        "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "<{{ m.thinking }}>{% endif %}",
        "{{ m.content }}{% if 'tool_calls' in m %}<call>{{ m.tool_calls[0].function.arguments|tojson }}{% endif %}",
    ),
    "no content is none": _each(  # DeepSeek R1
        "",
        "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ '<call>' + c.function.arguments }}{% endfor %}{% else %}{{ m.content + '' }}{% endif %}",
    ),
    "no developers": _each(_only("('system', 'user', 'assistant', 'tool')"), _USUAL),
    "developers are left out": _each("", f"{{% if m.role != 'developer' %}}{_USUAL}{{% endif %}}"),  # Qwen
    "one system message": _each(  # Qwen3.5
        _only("('system', 'user', 'assistant', 'tool')")
        + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}",
        _USUAL,
    ),
    "the last system message": (  # DeepSeek R1
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endif %}{% endfor %}{{ ns.s }}" + _each("", f"{{% if m.role != 'system' %}}{_USUAL}{{% endif %}}")
    ),
    "later system messages are left out": _each(  # SmolLM3, MiniMax
        "", f"{{% if m.role != 'system' or loop.first %}}{_USUAL}{{% endif %}}"
    ),
    "no system messages": _each("", f"{{% if m.role not in ('system', 'developer') %}}{_USUAL}{{% endif %}}"),
    "parts alone": _each(
        "", f"{{% for p in m.content %}}{{{{ p.text }}}}{{% endfor %}}{{% if m.tool_calls %}}{_CALLS}{{% endif %}}"
    ),
}

ALTERNATING = (
    "{% set ns = namespace(last='assistant') %}"
    + _each(  # Mistral
        _only("('system', 'user', 'assistant', 'tool')")
        + "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if m.role == ns.last %}"
        "{{ raise_exception('alternate') }}{% endif %}{% set ns.last = m.role %}{% endif %}",
        _USUAL,
    )
)


def draw_history(rng: random.Random, *, is_interrupted: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a random conversation, and its texts in order.

    Tool results may be reordered to follow their own calls. If `is_interrupted`, there are system messages between
    turns.
    """
    texts: list[str] = []

    def text() -> str:
        texts.append(f"text{len(texts)}.")
        return texts[-1]

    def interruption() -> dict[str, Any]:
        return {"role": rng.choice(["system", "developer"]), "content": text()}

    history = [{"role": role, "content": text()} for role in rng.choice([[], ["system"], ["developer"]])]
    if rng.random() < 0.5:
        history += [{"role": rng.choice(["system", "developer"]), "content": text()}]
    for turn in range(rng.randint(1, 3)):
        if turn and is_interrupted and rng.random() < 0.3:
            history.append(interruption())
        history.append({"role": "user", "content": text()})
        if is_interrupted and rng.random() < 0.3:
            history += [interruption() for _ in range(rng.randint(1, 2))]
        calls = [
            {
                "id": rng.choice(["call_", "toolu_", ""]) + f"{rng.randrange(1 << 64):x}",
                "type": "function",
                "function": {"name": "look", "arguments": json.dumps({"at": text()})},
            }
            for _ in range(rng.randint(0, 3))
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": None if calls else text(), "tool_calls": calls}
        if rng.random() < 0.3:
            answer["reasoning_content"] = "a thought"
        history.append(answer)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text()} for call in calls]
        history += rng.sample(results, len(results))
        if is_interrupted and results and rng.random() < 0.5:
            history.append(interruption())
    return history, texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_history_stands_whole_in_the_prompt(name: str) -> None:
    rng = seeded()
    for _ in range(40):
        history, texts = draw_history(rng)
        prompt = render(TEMPLATES[name], history, special_tokens={})
        assert [text for text in texts if prompt.count(text) != 1] == [], prompt
        answers = [message for message in history if message.get("tool_calls")]
        for call in (call for answer in answers for call in answer["tool_calls"]):
            (result,) = (message["content"] for message in history if message.get("tool_call_id") == call["id"])
            assert prompt.index(json.loads(call["function"]["arguments"])["at"]) < prompt.index(result)
        turns = [index for index, message in enumerate(history) if message["role"] == "user"]
        before = render(TEMPLATES[name], history[: turns[-1]], special_tokens={}) if turns[-1] else ""
        assert prompt.startswith(before)  # so that the earlier turns are a prefix cache hit


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_system_message_between_turns_stays_where_it_is(name: str) -> None:
    rng = seeded()
    for _ in range(40):
        history, texts = draw_history(rng, is_interrupted=True)
        prompt = render(TEMPLATES[name], history, special_tokens={})
        assert [text for text in texts if prompt.count(text) != 1] == [], prompt
        first = next(index for index, message in enumerate(history) if message["role"] == "user")
        spoken = [message["content"] for message in history[first:] if message["role"] != "tool" and message["content"]]
        assert sorted(spoken, key=prompt.index) == spoken
        turns = [index for index, message in enumerate(history) if message["role"] == "user"]
        before = render(TEMPLATES[name], history[: turns[-1]], special_tokens={}) if turns[-1] else ""
        assert prompt.startswith(before)


CALLING: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "seen"},
]


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (ALTERNATING, "user system", "<user>0\n\nSystem message:\n\n1"),
        (
            ALTERNATING,
            "system user developer system",
            "<system>0<user>1\n\nSystem message:\n\n2\n\nSystem message:\n\n3",
        ),
        (
            ALTERNATING,
            "user assistant system system user assistant user",
            "<user>0<assistant>1<user>System message:\n\n2\n\nSystem message:\n\n3\n\n4<assistant>5<user>6",
        ),
        (
            ALTERNATING,
            "user call system assistant",
            "<user>0<assistant><call>{}#1<tool>seen\n\nSystem message:\n\n1<assistant>2",
        ),
        (TEMPLATES["nothing"], "user system user", "<user>0<system>1<user>2"),
        (TEMPLATES["one system message"], "user system user", "<user>0<user>System message:\n\n1<user>2"),
        (
            TEMPLATES["one system message"],
            "user call system",
            "<user>0<assistant><call>{}#1<tool>seen<user>System message:\n\n1",
        ),
        (TEMPLATES["no system messages"], "system user", "<user>System message:\n\n0<user>1"),
    ],
)
def test_the_form_of_a_system_message_between_turns(template: str, roles: str, expected: str) -> None:
    number = itertools.count()
    history: list[dict[str, Any]] = []
    for role in roles.split():
        history += CALLING if role == "call" else [{"role": role, "content": str(next(number))}]
    assert render(template, history, special_tokens={}) == expected


@pytest.mark.parametrize("template", [ALTERNATING, TEMPLATES["one system message"]])
def test_many_system_messages_take_linear_time(template: str) -> None:
    def history(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "q"}, *[{"role": "system", "content": "s"}] * number]

    asked: AskedTemplate = (template, ())
    check_growth("system messages", lambda number: partial(to_template_form, history(number), asked), 500)


def test_ids_are_changed_where_they_must_be_alone() -> None:
    history, ids = [], ["abcDEF123", "call_0123456789abcdef", "abc-EF123", "é" * 9]
    for call_id in ids:
        function = {"name": "look", "arguments": "{}"}
        history += [{"role": "user", "content": "q"}]
        history += [{"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}]
        history += [{"role": "tool", "tool_call_id": call_id, "content": ""}]
    written = {
        name: [part[:9] for part in render(TEMPLATES[name], history, special_tokens={}).split("#")[1:]]
        for name in ("nothing", "ids of nine characters")
    }
    assert written["nothing"] == [call_id[:9] for call_id in ids]
    called, answered = written["ids of nine characters"][::2], written["ids of nine characters"][1::2]
    assert called == answered
    assert called[0] == ids[0]
    assert all(each.isascii() and each.isalnum() for each in called)
    assert len(set(called)) == len(ids)


def test_what_a_template_refuses_for_itself_is_still_refused() -> None:
    template = _each(_only("('user', 'assistant')"))
    for roles in (["system", "user"], ["developer", "user"], ["system", "developer", "user"]):
        with pytest.raises(ChatTemplateError, match="role"):
            render(template, [{"role": role, "content": role} for role in roles], special_tokens={})


def test_text_and_thought_beside_a_call_are_both_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Where?", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    prompt = render(TEMPLATES["one call is written, no text beside reasoning"], history, special_tokens={})
    assert prompt.count("<Where?\n\nI look.>") == 1
    assert prompt.count("<call>{}") == 2


_ITEMS = "{% for c in m.tool_calls %}<call>{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}"
# The ways in which published templates write tool call arguments.
ARGUMENTS = {
    "item by item": _each(
        "", f"{{{{ m.content }}}}{{% if m.tool_calls %}}{_ITEMS}{{% endfor %}}{{% endif %}}"
    ),  # Qwen3.5
    "as JSON, if a mapping": _each(  # Qwen3
        "",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{% set a = c.function.arguments %}"
        "{{ a if a is string else a | tojson }}{% endfor %}",
    ),
    "a mapping, or a fault": _each(  # GLM 4
        "",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{% set a = c.function.arguments %}"
        "{% if a is not mapping %}{{ raise_exception('no mapping') }}{% endif %}{{ a | tojson }}{% endfor %}",
    ),
    "a text": TEMPLATES["no content is none"],
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"arguments": None}, ""),
        ({}, ""),
        ({"arguments": ""}, ""),
        ({"arguments": " \n"}, ""),
        ({"arguments": "{}"}, ""),
        ({"arguments": "null"}, "null"),
        ({"arguments": "Oslo"}, "Oslo"),
        ({"arguments": "{'at': 'Oslo'}"}, "Oslo"),
        ({"arguments": '["Oslo"]'}, "Oslo"),
        ({"arguments": '{"at": "Oslo"}'}, "Oslo"),
        ({"arguments": {"at": "Oslo"}}, "Oslo"),
        ({"arguments": {}}, ""),
    ],
    ids=str,
)
def test_arguments_of_any_kind_are_written(name: str, given: dict[str, Any], kept: str) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", **given}}
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "call00000", "content": "seen"}, QUESTION]
    prompt = render(ARGUMENTS[name], history, special_tokens={})
    written = prompt.partition("<call>")[2].partition("<tool>")[0]
    assert kept in written
    if not kept:
        assert written in ("", "{}")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_were_cut_off_are_written(name: str) -> None:
    """Tool call arguments that were cut at any character, as `max_tokens` does, are rendered."""
    whole = json.dumps({"at": 'Oslo "é', "days": [1, {"a": None}]}, ensure_ascii=False)
    for end in range(len(whole) + 1):
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": whole[:end]}}
        history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, QUESTION]
        prompt = render(ARGUMENTS[name], history, special_tokens={})
        assert prompt.count("<call>") == 1
        assert "Oslo" in prompt or end < whole.index("slo") + 3


# The ways in which a template depends on the fields of tools.
TOOLS = {
    "nothing": "{{ tools | tojson }}",
    "a description": "{% for t in tools %}{{ '// ' + t.function.description }}{% endfor %}",  # gpt-oss
    "parameters": "{% for t in tools %}{% for k in t.function.parameters.properties %}{{ k }}{% endfor %}{% endfor %}",
    "items": "{% for t in tools %}"
    "{% for k, _ in t.function.parameters.properties|items %}{{ k }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"description": None, "parameters": None},
        {"description": "Looks."},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"parameters": {"properties": {"at": {}}}},
    ],
    ids=str,
)
def test_tools_may_have_a_name_alone(name: str, fields: dict[str, Any]) -> None:
    template = f"{{% if tools %}}{TOOLS[name]}{{% endif %}}{{{{ messages[0].content }}}}"
    tool = {"type": "function", "function": {"name": "look", **fields}}
    prompt = render(template, [QUESTION], special_tokens={}, variables={"tools": [tool]})
    assert prompt.endswith(QUESTION["content"])
    if name == "nothing":  # unchanged
        assert json.loads(prompt.removesuffix(QUESTION["content"])) == [tool]
    if name == "a description":
        assert ("Looks." in prompt) == bool(fields.get("description"))
    if name in ("parameters", "items"):
        assert prompt.startswith("at") == ("properties" in (fields.get("parameters") or {}))
