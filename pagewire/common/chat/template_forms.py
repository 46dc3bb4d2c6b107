"""Conversion of a client's conversation to the form that a chat template supports, without refusing or losing content.

Short test conversations, rendered with the template, show which forms the template supports.
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

# A message of a conversation: its role, its content, and other fields that the template may read.
Message = Mapping[str, Any]
# A template, and the special tokens that it gets as variables.
AskedTemplate = tuple[str, tuple[tuple[str, str], ...]]
UNSET = {"tools": None, "documents": None}  # templates treat these values as not given
QUESTION = {"role": "user", "content": "Hello"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]
_ANSWER = {"role": "assistant", "content": "Good morning"}
_SYSTEM_HEADING = "System message:"  # of a system message that is converted to a user's turn
_PROBES = ("first of two texts", "second of two texts")
_ARGUMENTS = ("argument of a call", "argument of another")
# The names under which clients send reasoning. Most templates read the first name.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The key under which Anthropic's documentation stores arguments that are not JSON.
NOT_AN_OBJECT = "INVALID_JSON"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# Mistral's templates refuse call ids of any other length.
_NUM_ID_CHARS = 9
_ID = re.compile(rf"[a-zA-Z0-9]{{{_NUM_ID_CHARS}}}")
_KNOWN_ROLES = ("user", "assistant", "tool", "system", "developer")
_ROLE = re.compile(r"[\w .-]{1,64}")  # a role that a template may mention
_OTHER_ROLE = "a role of no template"
_LONG_ID = "call_0123456789abcdef"

# The expected types of the fields of messages, of their calls, and of the called functions, with a description of each.
_Fields = Mapping[str, tuple[type | UnionType, str]]
_TEXT, _CALL_ID = (str, "a text"), (str, "the call's id, a text")
_MESSAGE_FIELDS: _Fields = {
    "role": (str, "a text such as 'user'"),
    "content": (object, "a text or a list of parts"),  # `_parts` checks the kinds of the parts
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
# The ability that a model needs for each type of content part that is no text. Types from several APIs.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_file"), "see images"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "hear audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "see videos"),
    **dict.fromkeys(("file", "input_file", "file_url", "document", "base64", "url"), "read files"),
}
# The roles whose messages need content. An answer may consist of calls alone.
_SPEAKING = ("user", "system", "developer")

compiled = functools.lru_cache(maxsize=8)(Template)


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered: the chat template fails, or it supports no form of the given messages.

    Attributes:
        place: the position of the fault in the messages, such as "[2].role", or empty if unknown.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


def to_template_form(messages: Sequence[Message], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Convert the messages of a conversation to the form that a model's chat template supports. Raises
    ChatTemplateError if a message has missing fields, fields of wrong types, or content of an unsupported type.
    """
    for index, message in enumerate(messages):
        _check(message, f"[{index}]")
    plain = _with_one_system([_plain(message, asked) for message in messages], asked)
    kept = _with_system_turns(plain, asked)
    return [_in_form(message, asked) for message in _with_one_call_each(kept, asked)]


def refused_medium(field: str, kind: Any) -> str:
    """Return an error message for a content part that is not text, such as an image. Return an empty text if `kind`,
    the type of the part, is no known medium. `field` is the name of the field that has the type, for the message.
    """
    verb = _MEDIA.get(kind) if isinstance(kind, str) else None
    if verb is None:
        return ""
    return (
        f"{field} is {kind!r}, but only texts are supported: this model does not {verb}; leave the part out, or send "
        "its content as text"
    )


def conversation_with_call(
    *call_ids: str, in_json: bool = False, content: str | None = "", reasoning: str | None = None
) -> list[dict[str, Any]]:
    """Return a conversation to test a chat template with: a question, an answer with one tool call for each id, and the
    results of the calls. The arguments of the calls are mappings, or JSON texts if `in_json`.
    """
    calls, results = [], []
    for call_id, text in zip(call_ids, _ARGUMENTS, strict=False):
        arguments: Any = f'{{"at": "{text}"}}' if in_json else {"at": text}
        calls.append({"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}})
        results.append({"role": "tool", "tool_call_id": call_id, "name": "look", "content": "seen"})
    answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if reasoning is not None:
        answer |= {"thinking": reasoning, "reasoning_content": reasoning}
    return [QUESTION, answer, *results]


def tools_in_template_form(tools: Any, asked: AskedTemplate) -> Any:
    """Return tool definitions in the form that a chat template supports.

    Some templates cannot render a tool without a description, parameters or properties. For such a template, the
    missing fields are added with empty values. A value that is no list of functions is returned unchanged.
    """
    if not isinstance(tools, list | tuple) or _takes_bare_tools(asked):
        return tools
    return [_whole_tool(tool) for tool in tools]


def _check(message: Any, place: str) -> None:
    """Raise ChatTemplateError for a value that is no chat message, or for a message whose fields have wrong types.
    `place` is the position of the message in the conversation, such as "[2]", for the error message.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise _wrong_type(place, message, f"an object such as {QUESTION}")
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
    """Simplify a chat message for chat templates. Fields that are None are left out, because templates expect no None.

    A refusal (the model's text in place of an answer) becomes content. The role "developer" becomes "system" if the
    template does not render developer messages. Reasoning is copied to each of the field names that templates read.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    if refusal := plain.pop("refusal", ""):  # the text that the model wrote in place of an answer
        plain["content"] = [*_parts(plain.get("content") or []), _text_part(refusal)]
    if not plain.get("tool_calls"):  # also for an empty list, which some templates treat as calls
        plain.pop("tool_calls", None)
    if plain["role"] == "developer" and not _takes_roles(asked, ("developer",)):
        plain["role"] = "system"
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_one_system(messages: list[dict[str, Any]], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Join the system and developer messages at the beginning of a conversation to one message, if the chat template
    renders one such message but not two. Otherwise return the conversation unchanged.
    """
    first = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    roles = tuple(message["role"] for message in first[:2])
    if len(first) < 2 or _takes_roles(asked, roles) or not _takes_roles(asked, roles[:1]):
        return messages
    return [_joined(first), *messages[len(first) :]]


def _with_system_turns(messages: Sequence[dict[str, Any]], asked: AskedTemplate) -> list[dict[str, Any]]:
    """Convert system messages that a chat template would drop or refuse to user messages with a heading.

    The template may drop a system message at the beginning, or refuse a system message after the first user message. A
    converted message is joined to a neighboring user message if the template does not support the two messages in
    sequence. System messages keep their positions, so the prompt in front of them still hits the prefix cache.
    """
    turns: list[list[dict[str, Any]]] = []  # each entry holds the messages of one turn
    has_begun = was_written = False  # a turn has begun; the last turn contains a system message
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
    """Return one chat message that contains the texts of all given messages, with an empty line between two texts. A
    single message is returned unchanged.
    """
    if len(messages) == 1:
        return messages[0]
    return {**messages[0], "content": "\n\n".join(_text(_parts(each.get("content", ""))) for each in messages)}


@functools.lru_cache(maxsize=64)
def _takes_later(asked: AskedTemplate, role: str) -> bool:
    """Return whether a chat template supports system messages (of this role) after the first user message. The template
    must put the text of the message into the prompt, at the message's place in the conversation.
    """
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
    """Return whether a chat template silently drops the text of a message with this role at the beginning of a
    conversation. If the template fails for such a conversation instead, return False.
    """
    rendered = _rendered([{"role": role, "content": _PROBES[0]}, QUESTION], asked, tools=None)
    return rendered is not None and _PROBES[0] not in rendered


@functools.lru_cache(maxsize=64)
def _takes_turn_after(asked: AskedTemplate, role: str) -> bool:
    """Return whether a chat template supports a user message directly after a message of `role`, which is "user" or
    "tool". The template must put the text of the user message into the prompt.
    """
    before = (
        [QUESTION] if role == "user" else conversation_with_call("call00000", in_json=_form_of_calls(asked).in_json)
    )
    turn = {"role": "user", "content": _PROBES[0]}
    return _shows(_rendered([*before, turn], asked), _PROBES[:1])


@functools.lru_cache(maxsize=64)
def _takes_roles(asked: AskedTemplate, roles: tuple[str, ...]) -> bool:
    """Return whether a chat template puts the texts of one or two messages of the given roles into the prompt. The
    messages are in front of a user's question.
    """
    first = [{"role": role, "content": text} for role, text in zip(roles, _PROBES, strict=False)]
    return _shows(_rendered([*first, QUESTION], asked, tools=None), _PROBES[: len(roles)])


def _with_one_call_each(messages: Sequence[dict[str, Any]], asked: AskedTemplate) -> Iterator[dict[str, Any]]:
    """Split each assistant message that has several tool calls into one message per call, followed by the result of
    this call. Yield all messages of the conversation. Messages are split only if the chat template renders messages
    with one call but not with two.
    """
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or len(calls) < 2 or _takes_calls(asked, 2) or not _takes_calls(asked, 1):
            yield message
            continue
        results: dict[Any, list[dict[str, Any]]] = {}  # by call id
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            results.setdefault(result.get("tool_call_id"), []).append(result)
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            yield from results.pop(call.get("id"), ())
        yield from itertools.chain.from_iterable(results.values())


def _in_form(message: dict[str, Any], asked: AskedTemplate) -> dict[str, Any]:
    """Convert a chat message to a form that the chat template supports. The content, the tool calls and the ids of the
    calls may change. Return the converted message.
    """
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _id(message["tool_call_id"], asked)}
    if isinstance(calls := message.get("tool_calls"), Sequence):
        message = {**_with_one_text(message, asked), "tool_calls": [_call(call, asked) for call in calls]}
    content = message.get("content", "")
    if calls and not content:
        content = _form_of_calls(asked).no_content
    return {**message, "content": _content(content, asked, str(message["role"]))}


def _with_one_text(message: dict[str, Any], asked: AskedTemplate) -> dict[str, Any]:
    """Append the content of a message with tool calls to the message's reasoning, if the chat template refuses messages
    that have both. Otherwise return the message unchanged. The template of gpt-oss, for example, renders only one of
    the two texts, as reasoning.
    """
    match message:
        case {"reasoning_content": str(reasoning), "content": content} if reasoning and content:
            if _takes_calls(asked, 1) and not _takes_both(asked):
                both = f"{reasoning}\n\n{_text(_parts(content))}"
                return {**message, "reasoning_content": both, "thinking": both, "content": ""}
    return message


def _call(call: Any, asked: AskedTemplate) -> Any:
    """Convert a tool call to a form that the chat template supports, and return it. The template may need a short id.
    It may need the arguments as a mapping, or as a JSON text as in OpenAI's API.
    """
    if isinstance(call, Mapping) and "id" in call:
        call = {**call, "id": _id(call["id"], asked)}
    match call:
        case {"function": Mapping() as function, **rest}:
            arguments = _arguments(function.get("arguments"), in_json=_form_of_calls(asked).in_json)
            return {**rest, "function": {**function, "arguments": arguments}}
    return call


def _arguments(given: Any, *, in_json: bool) -> Any:
    """Return the arguments of a tool call as a JSON text if `in_json`, else as a mapping.

    Missing or blank arguments become an empty object. If a mapping is needed but the text is no JSON object, such as
    the text of a truncated call, the text is stored under the key `NOT_AN_OBJECT`.
    """
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
    """Return the id of a tool call. If the chat template refuses ids of this length, return a replacement of 9
    characters that is derived from a hash of the id.
    """
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
    """Return whether a chat template can render incomplete tool definitions, which have only a name or empty
    parameters. The result is also True if the template renders no tools at all.
    """
    fields: list[dict[str, Any]] = [{}, {"description": "Looks."}, {"parameters": _NO_PARAMETERS}, {"parameters": {}}]
    bare = [[{"type": "function", "function": {"name": "look", **each}}] for each in fields]
    return (
        all(_rendered([QUESTION], asked, tools) is not None for tools in bare) or _rendered([QUESTION], asked) is None
    )


class _CallForm(NamedTuple):
    """The form of tool calls that a chat template needs: the type of the arguments, and the content of a message that
    has only calls.
    """

    in_json: bool  # arguments are JSON texts, else mappings
    no_content: str | None  # the content of an answer that has only calls


@functools.lru_cache(maxsize=64)
def _form_of_calls(asked: AskedTemplate) -> _CallForm:
    """Find the form of tool calls that a chat template supports, by rendering a test conversation in each form. Return
    the first form whose arguments appear in the prompt, else the first form that the template renders without an error.
    """
    forms = [_CallForm(in_json, no_content) for no_content in ("", None) for in_json in (False, True)]
    made = {form: _with_call(asked, "call00000", form=form) for form in forms}
    shown = [form for form, rendered in made.items() if _shows(rendered, _ARGUMENTS[:1])]
    return (*shown, *(form for form, rendered in made.items() if rendered is not None), _CallForm(True, ""))[0]


@functools.lru_cache(maxsize=64)
def _takes_calls(asked: AskedTemplate, number: int) -> bool:
    """Return whether a chat template puts all `number` tool calls of an assistant message into the prompt."""
    return _shows(_with_call(asked, *("call00000", "call00001")[:number]), _ARGUMENTS[:number])


@functools.lru_cache(maxsize=64)
def _takes_long_ids(asked: AskedTemplate) -> bool:
    """Return whether a chat template renders tool calls with ids of any length. The result is also True if the template
    renders no tool calls at all.
    """
    return _with_call(asked, _LONG_ID) is not None or _with_call(asked, "call00000") is None


@functools.lru_cache(maxsize=64)
def _takes_both(asked: AskedTemplate) -> bool:
    """Return whether a chat template renders an assistant message that has text, reasoning and a tool call."""
    form = _form_of_calls(asked)._replace(no_content="a")
    return _with_call(asked, "call00000", form=form, reasoning="b") is not None


def _with_call(
    asked: AskedTemplate, *call_ids: str, form: _CallForm | None = None, reasoning: str | None = None
) -> str | None:
    """Render a test conversation that has one tool call for each of the given ids. Return the prompt, or None if the
    chat template fails. If `form` is None, the calls have the form that the template supports.
    """
    in_json, content = form or _form_of_calls(asked)
    conversation = conversation_with_call(*call_ids, in_json=in_json, content=content, reasoning=reasoning)
    return _rendered(conversation, asked)


def _takes(asked: AskedTemplate, role: str, num_parts: int) -> bool:
    """Return whether a chat template supports a list of `num_parts` parts as the content of a message with this role.
    If `num_parts` is 0, return whether the template supports a plain text. If the template renders no content for this
    role, return the result for the role "user".
    """
    role = _probed_role(asked, role)
    if role != "user" and not any(_writes(asked, role, number) for number in (0, 1)):
        role = "user"
    return _writes(asked, role, num_parts)


def _probed_role(asked: AskedTemplate, role: str) -> str:
    """Return the role name under which the results of tests of a chat template are cached.

    A role that is neither well-known nor quoted in the template gets one common name. The cache thus never stores a
    role that a client made up, and the template bounds the number of cached roles.
    """
    template, _ = asked
    if role in _KNOWN_ROLES or (_ROLE.fullmatch(role) and any(f"{quote}{role}{quote}" in template for quote in "'\"")):
        return role
    return _OTHER_ROLE


@functools.lru_cache(maxsize=256)
def _writes(asked: AskedTemplate, role: str, num_parts: int) -> bool:
    """Return whether a chat template puts the content of a message with this role into the prompt. A short test
    conversation is rendered to find out. The content is a plain text if `num_parts` is 0, else a list of that many text
    parts.
    """
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
    # Not if the text shows a part's Python or JSON representation.
    return all(text in rendered and not re.search(rf"""['"]text['"]: ?['"]{text}""", rendered) for text in texts)


def _content(content: Any, asked: AskedTemplate, role: str) -> str | list[dict[str, Any]] | None:
    """Convert the content of a chat message to a form that the chat template supports for this role: a text or a list
    of parts. None stays None. Raises ChatTemplateError for a part of an unsupported type.
    """
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
        raise ChatTemplateError(
            "a message's content has the type 'thinking', but the model's chat template supports only texts; leave it "
            "out"
        )
    return "".join(part["text"] for part in parts)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a chat message as a list of parts. Each part has the type "text", or "thinking" for
    reasoning. Raises ChatTemplateError for any other type of part.
    """
    if isinstance(content, str):
        return [_text_part(content)]
    parts = []
    for part in content if isinstance(content, Sequence) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind == "refusal":
            part, kind = {"type": "text", "text": part.get(kind)}, "text"
        if isinstance(part, Mapping) and kind in ("input_text", "output_text"):  # the Responses API's names for texts
            part, kind = {**part, "type": "text"}, "text"
        if not isinstance(part, Mapping) or kind not in ("text", "thinking"):
            raise ChatTemplateError(
                f"a message's content has the type {reprlib.repr(kind)}, but must be a text or have the type 'text'"
            )
        if kind not in part or (kind == "text" and not isinstance(part["text"], str)):
            shown = reprlib.repr(dict(part))
            raise ChatTemplateError(
                f"a part of a message's content is {shown}, but must have a {kind} in its field {kind!r}"
            )
        parts.append(dict(part))
    return parts


def _rendered(
    messages: Sequence[dict[str, Any]], asked: AskedTemplate, tools: Sequence[Any] | None = TOOLS
) -> str | None:
    """Render a test conversation with a chat template. Return the prompt, or None if the template fails. The contents
    of the messages are first converted to the form that the template supports.
    """
    template, special_tokens = asked
    given = {**dict(special_tokens), **UNSET, "add_generation_prompt": True, "tools": tools}
    taken = [{**each, "content": _content(each["content"], asked, each["role"])} for each in messages]
    try:
        return compiled(template).render({**given, "messages": taken})
    except TemplateFailure:
        return None


def _shows(rendered: str | None, texts: Sequence[str]) -> bool:
    return rendered is not None and all(text in rendered for text in texts)
