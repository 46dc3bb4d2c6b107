"""Renders a conversation by a model's chat template, which makes the text of a prompt.

The template is code of the model's author, and runs in the sandbox of `pagewire.common.template_sandbox`.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.common.strict_json import from_json
from pagewire.common.template_sandbox import Overspent, Template, TemplateFailure

# A message of a conversation: its role, its content, and whatever else the template knows.
Message = Mapping[str, Any]
# A template, and the special tokens that it is given.
_Asked = tuple[str, tuple[tuple[str, str], ...]]
# What a template is asked with to learn in which form it takes the content of a message of some role.
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# Of a call's arguments some take a mapping, others the JSON of one.
_CALL_IN_JSON = {**_CALL, "function": {"name": "look", "arguments": "{}"}}
_ANSWER_IN_JSON = {**_ANSWER, "tool_calls": [_CALL_IN_JSON]}
_QUESTION = "Hello"
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]
_RESULT = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": "seen"}
_PROBES = ("first of two texts", "second of two texts")
_UNSET = {"tools": None, "documents": None}  # which templates take for not given
# The names under which reasoning is given; the first is what most templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Said where both are asked for.
GOES_TWO_WAYS = (
    "continue_final_message goes on with the last message, and add_generation_prompt begins another; set one"
)

# What a template is tried with at the start: what it is called, conversations of which it takes one, and the tools.
_QUESTIONER = {"role": "user", "content": _QUESTION}
_KINDS: tuple[tuple[str, list[list[dict[str, Any]]], list[Any] | None], ...] = (
    ("a plain question", [[_QUESTIONER]], None),
    ("a system message", [[{"role": "system", "content": "Be kind."}, _QUESTIONER]], None),
    ("an earlier answer", [[_QUESTIONER, {"role": "assistant", "content": "Hi"}, _QUESTIONER]], None),
    ("tools", [[_QUESTIONER]], _TOOLS),
    ("the result of a tool", [[_QUESTIONER, answer, _RESULT] for answer in (_ANSWER, _ANSWER_IN_JSON)], _TOOLS),
)


class ChatTemplateError(ValueError):
    """The template fails, or the messages are not such as it takes."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of the prompt that continues a conversation, special tokens included. Raises ChatTemplateError.

    `variables` are further variables of the template, such as `enable_thinking` or `tools`. A message's content is a
    text, or OpenAI's list of parts; the template gets it in the form that it takes.
    """
    given = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
    try:
        return _rendered(template, messages, special_tokens, given)
    except TemplateFailure as error:
        raise ChatTemplateError(f"the model's chat template fails: {error}") from None


def text_of(message: Message) -> str:
    """Returns the text of a message's content, that of its last part if it has several."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else ""


def up_to_last(prompt: str, message: Message) -> str:
    """Cuts off what a template writes behind the content of the last message, as transformers does. Raises
    ChatTemplateError."""
    content = text_of(message)
    place = prompt.rfind(content.strip())
    if place < 0 or not content.strip():
        raise ChatTemplateError(
            "the last message does not stand in the prompt as it was sent, or is empty; leave continue_final_message "
            "unset"
        )
    kept = content.lstrip()
    return prompt[: place + len(kept)] if prompt.startswith(kept, place) else prompt[: place + len(content.strip())]


def refusals(template: str, special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Returns the kinds of conversation that a template makes no prompt of, and its reasons; of equal ones the kinds
    are one entry.

    Raises Overspent for a template that does not end: what renders it, a gateway say, would be busy with it for
    ever.
    """
    kinds: dict[str, list[str]] = {}
    for kind, conversations, tools in _KINDS:
        reasons = [_failure(template, messages, special_tokens, tools) for messages in conversations]
        if all(reasons):
            kinds.setdefault(reasons[0], []).append(kind)
    return {
        "any conversation" if len(names) == len(_KINDS) else ", ".join(names): reason for reason, names in kinds.items()
    }


def _failure(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], tools: Sequence[Any] | None
) -> str:
    """Returns why a template makes no prompt of a conversation, or nothing. Raises Overspent."""
    try:
        _rendered(template, messages, special_tokens, {"add_generation_prompt": True, "tools": tools})
    except Overspent:
        raise
    except TemplateFailure as error:
        return str(error)
    return ""


def _rendered(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], variables: Mapping[str, Any]
) -> str:
    """Raises ChatTemplateError for messages that are none, and TemplateFailure."""
    asked = template, tuple(sorted(special_tokens.items()))
    plain = [_plain(message, asked) for message in messages]
    return _compile(template).render({**special_tokens, **_UNSET, **variables, "messages": plain})


_compile = functools.lru_cache(maxsize=8)(Template)


def _takes(asked: _Asked, role: str, num_parts: int) -> bool:
    """Tells whether a template writes out a content of so many parts, or of one text where that is 0, of a message of a
    role. A role that it fails on is as the user's."""
    if role != "user" and not any(_writes(asked, role, number) for number in (0, 1)):
        role = "user"
    return _writes(asked, role, num_parts)


@functools.lru_cache(maxsize=256)
def _writes(asked: _Asked, role: str, num_parts: int) -> bool:
    """Renders a short conversation with texts in a form, and looks for them."""
    template, special_tokens = asked
    texts = _PROBES[: max(num_parts, 1)]
    message = {"role": role, "content": [_text_part(text) for text in texts] if num_parts else texts[0]}
    before: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    if role != "user":
        is_text = _writes(asked, "user", 0) or not _writes(asked, "user", 1)
        question: dict[str, Any] = {"role": "user", "content": _QUESTION if is_text else [_text_part(_QUESTION)]}
        before = {"assistant": [question], "tool": [question, _ANSWER]}.get(role, [])
        after = [] if before else [question]
    given = {**dict(special_tokens), **_UNSET, "add_generation_prompt": False}
    try:
        rendered = _compile(template).render({**given, "messages": [*before, message, *after]})
    except TemplateFailure:
        return False
    # Not a part as Python or JSON would write it.
    return all(text in rendered and not re.search(rf"""['"]text['"]: ?['"]{text}""", rendered) for text in texts)


def _plain(message: Message, asked: _Asked) -> dict[str, Any]:
    """Returns a message as the template takes it: what is None is not there, as templates expect, reasoning stands
    under each name that they read, and the content has a form that the template writes out."""
    if not isinstance(message, Mapping) or "role" not in message:
        example = {"role": "user", "content": "Hello"}
        raise ChatTemplateError(f"{message!r} is not a message; one is a mapping such as {example}")
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if isinstance(plain.get("tool_calls"), Sequence):
        plain["tool_calls"] = [_call(call, asked) for call in plain["tool_calls"]]
    if "content" in plain:
        plain["content"] = _content(plain["content"], asked, str(message["role"]))
    return plain


def _call(call: Any, asked: _Asked) -> Any:
    """Returns a call of a tool with its arguments as the template takes them: as a mapping, or as the JSON of one,
    which is how OpenAI's API has them."""
    match call:
        case {"function": {"arguments": str(arguments), **function}, **rest} if _takes_mappings(asked):
            try:
                read = from_json(arguments or "{}")
            except ValueError:
                return call
            return {**rest, "function": {**function, "arguments": read}} if isinstance(read, dict) else call
    return call


@functools.lru_cache(maxsize=64)
def _takes_mappings(asked: _Asked) -> bool:
    """Tells whether a template makes a prompt of a call whose arguments are a mapping."""
    template, special_tokens = asked
    return not _failure(template, [_QUESTIONER, _ANSWER, _RESULT], dict(special_tokens), _TOOLS)


def _content(content: Any, asked: _Asked, role: str) -> str | list[dict[str, Any]]:
    """Returns a content in a form that the template writes out of a message of a role."""
    parts = _parts(content)
    if not isinstance(content, str):
        if _takes(asked, role, 2 if len(parts) > 1 else 1):
            return parts
        if any(part["type"] != "text" for part in parts):
            raise ChatTemplateError(
                "a message's content holds 'thinking', but the model's chat template takes texts alone"
            )
        content = "".join(part["text"] for part in parts)
    return content if _takes(asked, role, 0) or not _takes(asked, role, 1) else [_text_part(content)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(content: Any) -> list[dict[str, Any]]:
    """Returns a content as a list of parts, which are texts, or thoughts that came before them."""
    if isinstance(content, str):
        return [_text_part(content)]
    parts = []
    for part in content if isinstance(content, Sequence) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in ("text", "thinking"):
            raise ChatTemplateError(f"a message's content holds {kind!r}, but only texts are supported")
        if kind not in part or (kind == "text" and not isinstance(part["text"], str)):
            raise ChatTemplateError(f"a part of a message's content is {dict(part)!r}, which has no {kind} in {kind!r}")
        parts.append(dict(part))
    return parts
