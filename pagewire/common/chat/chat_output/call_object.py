"""Readers of tool calls that are JSON objects, {"name": NAME, "arguments": {...}}, alone or in a list."""

import json
from collections.abc import Container, Generator
from typing import Any

from pagewire.common.chat.chat_output.lexemes import read_string, read_value
from pagewire.common.chat.chat_output.parts import Arguments, CallStart, Content
from pagewire.common.chat.chat_output.unread import Reading, Unread, as_parts, collected

# Llama models use the key "parameters".
_ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"


# The kind of the text after a call, up to the tag that ends the call: more (broken) arguments, or content. None: the
# text is no call, no part was yielded, and `Unread` keeps the text.
Rest = type[Content | Arguments] | None


def read_one_or_several(unread: Unread) -> Reading[Rest]:
    """Parse one JSON tool call, or a JSON list of tool calls, from the model's output, and yield the parts of the
    calls.

    Return how the caller must treat the text that follows the calls: as `Content`, as further `Arguments` (the JSON of
    the last call is broken), or None (the text is no tool call, and no part was yielded).
    """
    if not (yield from unread.accept("[")):
        return (yield from read_call(unread))
    rest = yield from read_call(unread)
    while rest is Content:
        unread.keep()
        if (yield from unread.accept("]")):
            break
        if not (yield from unread.accept(",")) or (rest := (yield from read_call(unread))) is None:
            yield Content(unread.kept())
            return Content
    return rest


def read_call(unread: Unread, names: Container[str] | None = None, *, is_open: bool = False) -> Reading[Rest]:
    """Parse one tool call that is a JSON object, and yield its parts. `is_open` means that the opening brace was
    already read.

    Pass `names`, the names of the functions, if no tag marks the object as a call. The object is then a call only if
    its function name is in `names`, it has arguments, and its only other key is "type". Return how the caller must
    treat the text that follows the call: as `Content`, as further `Arguments` (the JSON of the call is broken), or None
    (the text is no call, and no part was yielded).
    """
    name: str | None = None
    early: str | None = None  # arguments that preceded the name
    has_begun = False
    is_member = is_open or (yield from unread.accept("{"))
    while is_member:
        key = yield from read_string(unread)
        if key is None or not (yield from unread.accept(":")):
            break
        if key == "name" and name is None:
            name = yield from read_string(unread)
            if name is None or not (names is None or name in names):
                break
            if early is not None:
                yield from _begin(unread, name)
                yield Arguments(early)
                has_begun = True
        elif key in _ARGUMENTS and name is not None and not has_begun:
            yield from _begin(unread, name)
            has_begun = True
            if not (yield from _read_arguments_text(unread)):
                return Arguments
        elif key in _ARGUMENTS and early is None and not has_begun:
            early = yield from _held_arguments(unread)
            if early is None:
                break
        elif (names is not None and key != "type") or not (yield from collected(read_value(unread)))[1]:
            break
        if (yield from unread.accept("}")):
            if name is not None and not has_begun and names is None:
                yield from _begin(unread, name)
                yield Arguments(NO_ARGUMENTS)
                has_begun = True
            break
        is_member = yield from unread.accept(",")
    return Content if has_begun else None


def _begin(unread: Unread, name: str) -> Reading[None]:
    unread.forget()
    yield CallStart(name)


def _read_arguments_text(unread: Unread) -> Reading[bool]:
    """Read the arguments of a tool call, and yield them as they arrive. Return whether the arguments are complete."""
    if (yield from unread.next()) == "{":
        return (yield from as_parts(Arguments, read_value(unread)))
    text, is_whole = yield from collected(read_value(unread))
    yield Arguments(_unwrapped(text))
    return is_whole


def _held_arguments(unread: Unread) -> Generator[None, None, str | None]:
    text, is_whole = yield from collected(read_value(unread))
    return _unwrapped(text) if is_whole else None


def _unwrapped(text: str) -> str:
    """Return the arguments of a tool call as the text of a JSON object. If the model wrote a string that contains a
    JSON object, return the content of the string. If the model wrote null, return an empty object. Return other texts
    unchanged.
    """
    value = _loaded(text)
    if isinstance(value, str) and isinstance(_loaded(value), dict):
        return value
    return NO_ARGUMENTS if text == "null" else text


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
