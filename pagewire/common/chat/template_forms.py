"""The form in which a chat template takes a conversation. What clients send is brought into it, so that nothing of it
is refused or lost for its form alone.

What a template takes is found by having it render short conversations.
"""

import functools
import hashlib
import itertools
import json
import re
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple

from pagewire.common.chat.template_sandbox import Template, TemplateFailure
from pagewire.common.strict_json import from_json

# A message of a conversation: its role, its content, and whatever else the template knows.
Message = Mapping[str, Any]
# A template, and the special tokens that it is given.
AskedTemplate = tuple[str, tuple[tuple[str, str], ...]]
UNSET = {"tools": None, "documents": None}  # which templates take for not given
QUESTION = {"role": "user", "content": "Hello"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]
_ANSWER = {"role": "assistant", "content": "Good morning"}
_SYSTEM_HEADING = "System message:"  # of one that is written as a turn of the user
_PROBES = ("first of two texts", "second of two texts")
_ARGUMENTS = ("argument of a call", "argument of another")
# The names under which reasoning is given; the first is what most templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The key that Anthropic's documentation gives to arguments that are not JSON.
NOT_AN_OBJECT = "INVALID_JSON"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# Mistral's templates refuse other ids of calls.
_NUM_ID_CHARS = 9
_ID = re.compile(rf"[a-zA-Z0-9]{{{_NUM_ID_CHARS}}}")
_KNOWN_ROLES = ("user", "assistant", "tool", "system", "developer")
_ROLE = re.compile(r"[\w .-]{1,64}")  # one that a template may name
_OTHER_ROLE = "a role of no template"
_LONG_ID = "call_0123456789abcdef"

# What fields of messages, of their calls, and of what is called are where they are set, and what would do.
_Fields = Mapping[str, tuple[type | UnionType, str]]
_TEXT, _CALL_ID = (str, "a text"), (str, "the call's id, a text")
_MESSAGE_FIELDS: _Fields = {
    "role": (str, "a text such as 'user'"),
    "content": (object, "a text or a list of parts"),  # of which kinds, `_parts` says
    "name": _TEXT,
    "tool_call_id": _CALL_ID,
    "tool_calls": (list | tuple, "a list of calls"),
    "refusal": _TEXT,
    "function_call": (NoneType, "unset; send tool_calls"),
    "audio": (NoneType, "unset; messages are texts"),
}
_CALL_FIELDS: _Fields = {
    "id": _CALL_ID,
    "function": (Mapping, "an object with name and arguments"),
    "custom": (NoneType, "unset; send calls of functions"),
}
_FUNCTION_FIELDS: _Fields = {"name": _TEXT, "arguments": (str | Mapping, "the JSON of an object, or the object")}
# What a model would do with the parts of a content that are no texts, by their types in several APIs.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_file"), "see images"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "hear audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "see videos"),
    **dict.fromkeys(("file", "input_file", "file_url", "document", "base64", "url"), "read files"),
}
# The roles of messages that say something; an answer may have calls alone.
_SPEAKING = ("user", "system", "developer")

compiled = functools.lru_cache(maxsize=8)(Template)


class ChatTemplateError(ValueError):
    """The template fails, or the messages are not such as it takes.

    Attributes:
        place: where in the messages, such as "[2].role", if it is known.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


def as_taken(messages: Sequence[Message], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Returns messages as a template takes them. Raises ChatTemplateError for those that are none."""
    for index, message in enumerate(messages):
        _check(message, f"[{index}]")
    plain = _with_one_system([_plain(message, asked) for message in messages], asked)
    kept = _with_system_turns(plain, asked)
    return [_in_form(message, asked) for message in _with_one_call_each(kept, asked)]


def refused_medium(field: str, kind: Any) -> str:
    """Returns why a part of a content is refused whose type `field` has, or an empty text for a part that is no
    medium."""
    verb = _MEDIA.get(kind) if isinstance(kind, str) else None
    if verb is None:
        return ""
    return (
        f"{field} is {kind!r}, but only texts are supported: this model does not {verb}; leave the part out, or send "
        "what it holds as a text"
    )


def conversation_with_call(
    *call_ids: str, in_json: bool = False, content: str | None = "", reasoning: str | None = None
) -> list[dict[str, Any]]:
    """Returns a question, an answer with a call of each id, and the calls' results. Arguments are mappings, or the JSON
    of one."""
    calls, results = [], []
    for call_id, text in zip(call_ids, _ARGUMENTS, strict=False):
        arguments: Any = f'{{"at": "{text}"}}' if in_json else {"at": text}
        calls.append({"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}})
        results.append({"role": "tool", "tool_call_id": call_id, "name": "look", "content": "seen"})
    answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if reasoning is not None:
        answer |= {"thinking": reasoning, "reasoning_content": reasoning}
    return [QUESTION, answer, *results]


def tools_as_taken(tools: Any, asked: AskedTemplate) -> Any:
    """Returns tools whose functions have a description, parameters and properties, empty ones if need be, where a
    template makes no prompt of tools without. Whatever is no list of functions is returned as it is."""
    if not isinstance(tools, list | tuple) or _takes_bare_tools(asked):
        return tools
    return [_whole_tool(tool) for tool in tools]


def _check(message: Any, place: str) -> None:
    """Raises ChatTemplateError for what is no message, or has fields of other types than a message's."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise ChatTemplateError(f"{reprlib.repr(message)} is not a message; one is a mapping such as {QUESTION}")
    needed = ("role", "content") if message["role"] in _SPEAKING else ("role",)
    _check_fields(message, place, _MESSAGE_FIELDS, needed)
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
        type_place = f"{place}.content[{index}].type"
        if isinstance(part, Mapping) and (reason := refused_medium(f"messages{type_place}", part.get("type"))):
            raise ChatTemplateError(reason, type_place)
    for index, call in enumerate(message.get("tool_calls") or ()):
        place_of_call = f"{place}.tool_calls[{index}]"
        if not isinstance(call, Mapping):
            raise _wrong_type(place_of_call, call, "an object with id, type and function")
        _check_fields(call, place_of_call, _CALL_FIELDS)
        _check_fields(call.get("function") or {}, f"{place_of_call}.function", _FUNCTION_FIELDS)


def _check_fields(given: Mapping[str, Any], place: str, fields: _Fields, needed: Sequence[str] = ()) -> None:
    for name, (kind, expected) in fields.items():
        value = given.get(name)
        if name in needed if value is None else not isinstance(value, kind):
            raise _wrong_type(f"{place}.{name}", value, expected)


def _wrong_type(place: str, value: Any, expected: str) -> ChatTemplateError:
    shown = "not set" if value is None else reprlib.repr(value)
    return ChatTemplateError(f"messages{place} is {shown}, but must be {expected}", place)


def _plain(message: Message, asked: AskedTemplate) -> dict[str, Any]:
    """Returns a message in which nothing is None, as templates expect, of a role that the template writes out, and with
    reasoning under each name that they read."""
    plain = {name: value for name, value in message.items() if value is not None}
    if refusal := plain.pop("refusal", ""):  # which the model has written in place of an answer
        plain["content"] = [*_parts(plain.get("content") or []), _text_part(refusal)]
    if not plain.get("tool_calls"):  # an empty list too, which some take for calls
        plain.pop("tool_calls", None)
    if plain["role"] == "developer" and not _takes_roles(asked, ("developer",)):
        plain["role"] = "system"
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_one_system(messages: list[dict[str, Any]], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Joins the system messages at the beginning, developers' too, where a template writes out one alone."""
    first = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    roles = tuple(message["role"] for message in first[:2])
    if len(first) < 2 or _takes_roles(asked, roles) or not _takes_roles(asked, roles[:1]):
        return messages
    return [_joined(first), *messages[len(first) :]]


def _with_system_turns(messages: Sequence[dict[str, Any]], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Writes system messages that a template would leave out, or refuse after the first turn, as turns of the user with
    a heading. A turn is joined to its neighbor where the template does not take both.

    A system message stays where it is, so that the prompt before it is found in the prefix cache.
    """
    turns: list[list[dict[str, Any]]] = []  # messages that are one turn
    has_begun = was_written = False  # a turn; whether the last turn holds a system message
    for message in messages:
        role = message["role"]
        is_system = role in ("system", "developer")
        is_kept = not is_system or (_takes_later(asked, role) if has_begun else not _leaves_out(asked, role))
        if not is_kept:
            text = _text(_parts(message.get("content", "")))
            message = {"role": "user", "content": f"{_SYSTEM_HEADING}\n\n{text}"}
        has_begun |= not is_system
        before = turns[-1][0]["role"] if turns else ""
        is_next = before in ("user", "tool") and message["role"] == "user" and (was_written or not is_kept)
        if is_next and not _takes_turn_after(asked, before):
            turns[-1].append(message)
            was_written |= not is_kept
        else:
            turns.append([message])
            was_written = not is_kept
    return [_joined(turn) for turn in turns]


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one message with the texts of all, or the message if it is the only one."""
    if len(messages) == 1:
        return messages[0]
    return {**messages[0], "content": "\n\n".join(_text(_parts(each.get("content", ""))) for each in messages)}


@functools.lru_cache(maxsize=64)
def _takes_later(asked: AskedTemplate, role: str) -> bool:
    """Tells whether a template writes messages of a system's role out where they are, behind the first turn."""
    first = [{"role": "system", "content": _PROBES[0]}] if _takes_roles(asked, ("system",)) else []
    later = {"role": role, "content": _PROBES[1]}
    conversations = [[*first, QUESTION, later], [*first, QUESTION, _ANSWER, later, QUESTION]]
    expected = "|".join(re.escape(text) for text in (QUESTION["content"], _ANSWER["content"], *_PROBES))
    return all(
        re.findall(expected, _rendered(messages, asked, tools=None) or "") == [each["content"] for each in messages]
        for messages in conversations
    )


@functools.lru_cache(maxsize=64)
def _leaves_out(asked: AskedTemplate, role: str) -> bool:
    """Tells whether a template makes a prompt of a first message of a role, but without its text."""
    rendered = _rendered([{"role": role, "content": _PROBES[0]}, QUESTION], asked, tools=None)
    return rendered is not None and _PROBES[0] not in rendered


@functools.lru_cache(maxsize=64)
def _takes_turn_after(asked: AskedTemplate, role: str) -> bool:
    """Tells whether a template writes out a user's turn after a turn of the user, or after the result of a tool."""
    before = (
        [QUESTION] if role == "user" else conversation_with_call("call00000", in_json=_form_of_calls(asked).in_json)
    )
    turn = {"role": "user", "content": _PROBES[0]}
    return _shows(_rendered([*before, turn], asked), _PROBES[:1])


@functools.lru_cache(maxsize=64)
def _takes_roles(asked: AskedTemplate, roles: tuple[str, ...]) -> bool:
    """Tells whether a template writes out messages of one or two roles that come before a question."""
    first = [{"role": role, "content": text} for role, text in zip(roles, _PROBES, strict=False)]
    return _shows(_rendered([*first, QUESTION], asked, tools=None), _PROBES[: len(roles)])


def _with_one_call_each(messages: Sequence[dict[str, Any]], asked: AskedTemplate) -> Iterator[dict[str, Any]]:
    """Makes a message of each call of an answer, with its result behind it, where a template writes out one alone."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or len(calls) < 2 or _takes_calls(asked, 2) or not _takes_calls(asked, 1):
            yield message
            continue
        results: dict[Any, list[dict[str, Any]]] = {}  # by the ids of their calls
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            results.setdefault(result.get("tool_call_id"), []).append(result)
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            yield from results.pop(call.get("id"), ())
        yield from itertools.chain.from_iterable(results.values())


def _in_form(message: dict[str, Any], asked: AskedTemplate) -> dict[str, Any]:
    """Returns a message with its content, its calls, and their ids in a form that the template writes out."""
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _id(message["tool_call_id"], asked)}
    if isinstance(calls := message.get("tool_calls"), Sequence):
        message = {**_with_one_text(message, asked), "tool_calls": [_call(call, asked) for call in calls]}
    content = message.get("content", "")
    if calls and not content:
        content = _form_of_calls(asked).no_content
    return {**message, "content": _content(content, asked, str(message["role"]))}


def _with_one_text(message: dict[str, Any], asked: AskedTemplate) -> dict[str, Any]:
    """Puts the content of an answer with calls behind its reasoning, where a template refuses both: gpt-oss's writes
    either as what was thought."""
    match message:
        case {"reasoning_content": str(reasoning), "content": content} if reasoning and content:
            if _takes_calls(asked, 1) and not _takes_both(asked):
                both = f"{reasoning}\n\n{_text(_parts(content))}"
                return {**message, "reasoning_content": both, "thinking": both, "content": ""}
    return message


def _call(call: Any, asked: AskedTemplate) -> Any:
    """Returns a call of a tool with an id that the template takes, and its arguments as the template takes them: as a
    mapping, or as the JSON of one, which is how OpenAI's API has them."""
    if isinstance(call, Mapping) and "id" in call:
        call = {**call, "id": _id(call["id"], asked)}
    match call:
        case {"function": Mapping() as function, **rest}:
            arguments = _arguments(function.get("arguments"), in_json=_form_of_calls(asked).in_json)
            return {**rest, "function": {**function, "arguments": arguments}}
    return call


def _arguments(given: Any, *, in_json: bool) -> Any:
    """Returns the arguments of a call as a mapping, or as JSON. Arguments that are missing or blank are empty; a text
    that is not the JSON of an object, of a call that was cut off say, is kept under a key of its own."""
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    if isinstance(given, str) is in_json:
        return given
    if in_json:
        return json.dumps(given, ensure_ascii=False)
    try:
        read = from_json(given)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {NOT_AN_OBJECT: given}


def _id(call_id: Any, asked: AskedTemplate) -> Any:
    """Returns the id of a call, or another, the same each time, where a template refuses ids of its length."""
    if not isinstance(call_id, str) or _ID.fullmatch(call_id) or _takes_long_ids(asked):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_NUM_ID_CHARS]


def _whole_tool(tool: Any) -> Any:
    match tool:
        case {"function": Mapping() as function, **rest} if isinstance(function.get("parameters") or {}, Mapping):
            given = (function.get("parameters") or {}).items()
            parameters = _NO_PARAMETERS | {name: value for name, value in given if value is not None}
            whole = {**function, "description": function.get("description") or "", "parameters": parameters}
            return {**rest, "function": whole}
    return tool


@functools.lru_cache(maxsize=64)
def _takes_bare_tools(asked: AskedTemplate) -> bool:
    """Tells whether a template makes a prompt of tools that have a name alone, or empty parameters, or of no tools at
    all."""
    fields: list[dict[str, Any]] = [{}, {"description": "Looks."}, {"parameters": _NO_PARAMETERS}, {"parameters": {}}]
    bare = [[{"type": "function", "function": {"name": "look", **each}}] for each in fields]
    return (
        all(_rendered([QUESTION], asked, tools) is not None for tools in bare) or _rendered([QUESTION], asked) is None
    )


class _CallForm(NamedTuple):
    """How an answer with calls is given to a template."""

    in_json: bool  # their arguments, or else as mappings
    no_content: str | None  # what stands for none


@functools.lru_cache(maxsize=64)
def _form_of_calls(asked: AskedTemplate) -> _CallForm:
    """Returns the form in which a template writes a call out, or at least makes a prompt of one."""
    forms = [_CallForm(in_json, no_content) for no_content in ("", None) for in_json in (False, True)]
    made = {form: _with_call(asked, "call00000", form=form) for form in forms}
    shown = [form for form, rendered in made.items() if _shows(rendered, _ARGUMENTS[:1])]
    return (*shown, *(form for form, rendered in made.items() if rendered is not None), _CallForm(True, ""))[0]


@functools.lru_cache(maxsize=64)
def _takes_calls(asked: AskedTemplate, number: int) -> bool:
    """Tells whether a template writes out so many calls of one answer."""
    return _shows(_with_call(asked, *("call00000", "call00001")[:number]), _ARGUMENTS[:number])


@functools.lru_cache(maxsize=64)
def _takes_long_ids(asked: AskedTemplate) -> bool:
    """Tells whether a template makes a prompt of calls with ids of any length, or of none at all."""
    return _with_call(asked, _LONG_ID) is not None or _with_call(asked, "call00000") is None


@functools.lru_cache(maxsize=64)
def _takes_both(asked: AskedTemplate) -> bool:
    """Tells whether a template makes a prompt of a text and reasoning beside a call."""
    form = _form_of_calls(asked)._replace(no_content="a")
    return _with_call(asked, "call00000", form=form, reasoning="b") is not None


def _with_call(
    asked: AskedTemplate, *call_ids: str, form: _CallForm | None = None, reasoning: str | None = None
) -> str | None:
    """Returns what a template makes of calls with these ids and their results, in the form that it takes. None: it
    fails."""
    in_json, content = form or _form_of_calls(asked)
    conversation = conversation_with_call(*call_ids, in_json=in_json, content=content, reasoning=reasoning)
    return _rendered(conversation, asked)


def _takes(asked: AskedTemplate, role: str, num_parts: int) -> bool:
    """Tells whether a template writes out a content of so many parts, or of one text where that is 0, of a message of a
    role. A role that it fails on is as the user's."""
    role = _probed_role(asked, role)
    if role != "user" and not any(_writes(asked, role, number) for number in (0, 1)):
        role = "user"
    return _writes(asked, role, num_parts)


def _probed_role(asked: AskedTemplate, role: str) -> str:
    """Returns the role with which a template is tried. Those that it does not name in quotes are one to it, so that no
    role of a client's is kept, and there are only as many as the template names."""
    template, _ = asked
    if role in _KNOWN_ROLES or (_ROLE.fullmatch(role) and any(f"{quote}{role}{quote}" in template for quote in "'\"")):
        return role
    return _OTHER_ROLE


@functools.lru_cache(maxsize=256)
def _writes(asked: AskedTemplate, role: str, num_parts: int) -> bool:
    """Renders a short conversation with texts in a form, and looks for them."""
    template, special_tokens = asked
    texts = _PROBES[: max(num_parts, 1)]
    message = {"role": role, "content": [_text_part(text) for text in texts] if num_parts else texts[0]}
    before: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    if role != "user":
        is_text = _writes(asked, "user", 0) or not _writes(asked, "user", 1)
        question: dict[str, Any] = QUESTION if is_text else {"role": "user", "content": [_text_part("Hello")]}
        _, answer, _ = conversation_with_call("call00000")
        before = {"assistant": [question], "tool": [question, answer]}.get(role, [])
        after = [] if before else [question]
    given = {**dict(special_tokens), **UNSET, "add_generation_prompt": False}
    try:
        rendered = compiled(template).render({**given, "messages": [*before, message, *after]})
    except TemplateFailure:
        return False
    # Not a part as Python or JSON would write it.
    return all(text in rendered and not re.search(rf"""['"]text['"]: ?['"]{text}""", rendered) for text in texts)


def _content(content: Any, asked: AskedTemplate, role: str) -> str | list[dict[str, Any]] | None:
    """Returns a content, if there is one, in a form that the template writes out of a message of a role."""
    if content is None:
        return None
    parts = _parts(content)
    if not isinstance(content, str):
        if _takes(asked, role, 2 if len(parts) > 1 else 1):
            return parts
        content = _text(parts)
    return content if _takes(asked, role, 0) or not _takes(asked, role, 1) else [_text_part(content)]


def _text(parts: Sequence[dict[str, Any]]) -> str:
    if any(part["type"] != "text" for part in parts):
        raise ChatTemplateError("a message's content holds 'thinking', but the model's chat template takes texts alone")
    return "".join(part["text"] for part in parts)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(content: Any) -> list[dict[str, Any]]:
    """Returns a content as a list of parts, which are texts, or thoughts that came before them."""
    if isinstance(content, str):
        return [_text_part(content)]
    parts = []
    for part in content if isinstance(content, Sequence) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind == "refusal":
            part, kind = {"type": "text", "text": part.get(kind)}, "text"
        if isinstance(part, Mapping) and kind in ("input_text", "output_text"):  # as the Responses API names texts
            part, kind = {**part, "type": "text"}, "text"
        if not isinstance(part, Mapping) or kind not in ("text", "thinking"):
            raise ChatTemplateError(f"a message's content holds {reprlib.repr(kind)}, but only texts are supported")
        if kind not in part or (kind == "text" and not isinstance(part["text"], str)):
            shown = reprlib.repr(dict(part))
            raise ChatTemplateError(f"a part of a message's content is {shown}, which has no {kind} in {kind!r}")
        parts.append(dict(part))
    return parts


def _rendered(
    messages: Sequence[dict[str, Any]], asked: AskedTemplate, tools: Sequence[Any] | None = TOOLS
) -> str | None:
    """Returns what a template makes of messages and tools, with contents in its form. None: it fails."""
    template, special_tokens = asked
    given = {**dict(special_tokens), **UNSET, "add_generation_prompt": True, "tools": tools}
    taken = [{**each, "content": _content(each["content"], asked, each["role"])} for each in messages]
    try:
        return compiled(template).render({**given, "messages": taken})
    except TemplateFailure:
        return None


def _shows(rendered: str | None, texts: Sequence[str]) -> bool:
    return rendered is not None and all(text in rendered for text in texts)
