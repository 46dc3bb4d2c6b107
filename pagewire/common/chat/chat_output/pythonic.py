"""Tool calls in Python syntax, such as [f(a=1, b="x"), g()], with or without tags."""

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from pagewire.common.chat.chat_output.call_object import Rest
from pagewire.common.chat.chat_output.call_tags import CallTags
from pagewire.common.chat.chat_output.lexemes import read_name
from pagewire.common.chat.chat_output.literals import json_of
from pagewire.common.chat.chat_output.parameters import Parameters, values_in
from pagewire.common.chat.chat_output.parts import Arguments, CallStart, Content
from pagewire.common.chat.chat_output.unread import Reading, Unread, collected

_LINE = "\n"
# Python's spellings of the types for which they differ from JSON.
_SPELLINGS = {"string": r"'([^'\\\n]|\\['\\nt])*'", "boolean": "True|False", "null": "None"}
_PLAIN = re.compile(r"""[^"'()\[\]{},]*""")
# Templates and models write these characters unescaped within quotes, but Python does not allow them.
_UNESCAPED = {ord("\n"): "\\n", ord("\r"): "\\r", 0: "\\x00"}
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


class PythonicCalls(NamedTuple):
    begins: tuple[str, ...]  # tags in front of the calls
    ends: tuple[str, ...]
    opener: str  # the bracket that opens a list of calls, or empty
    closer: str
    may_lack: bool = False  # at the beginning of an output the tags may be missing

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)

    def read_calls(self, functions: Mapping[str, Any], unread: Unread) -> Reading[None]:
        """Read the model's output, and yield its content and the tool calls in Python syntax. Text such as f(x) is no
        call if the request has no function of that name.
        """
        tags = CallTags(self.begins, self.ends, is_ended=False, may_lack=self.may_lack)
        yield from tags.read(unread, lambda _: self._read_list(functions, unread))

    def _read_list(self, functions: Mapping[str, Any], unread: Unread) -> Reading[Rest]:
        if self.opener and not (yield from unread.accept(self.opener)):
            return None
        rest = yield from _read_call(functions, unread)
        while rest is Content:
            unread.keep()
            if (yield from unread.accept(self.closer) if self.closer else unread.ahead(*self.ends)):
                break
            is_next = not self.opener or (yield from unread.accept(","))
            rest = (yield from _read_call(functions, unread)) if is_next else None
            if rest is None:
                yield Content(unread.kept())
                return Content
        return rest

    def call_tag(self, name: str, parameters: Parameters) -> dict[str, Any]:
        """Return the part of a structural tag (a grammar in JSON) that allows one tool call in Python syntax between
        the tags of this format.
        """
        tag = bare_call_tag(name, parameters)
        begin, end = f"{self.begins[0]}{self.opener or _LINE}", f"{self.closer or _LINE}{self.ends[0]}"
        return {**tag, "begin": begin + tag["begin"], "end": tag["end"] + end}


def bare_call_tag(name: str, parameters: Parameters) -> dict[str, Any]:
    """Return the part of a structural tag (a grammar in JSON) that allows one tool call in Python syntax, such as
    f(a=1), without tags around the call. The arguments must match the function's JSON Schema and be in the schema's
    order.
    """
    arguments = {
        "type": "tags_in_order",
        "separator": ", ",
        "tags": [_argument_tag(key, parameters) for key in parameters.properties],
        "required": [key in parameters.required for key in parameters.properties],
    }
    return {"type": "tag", "begin": f"{name}(", "content": arguments, "end": ")"}


def _argument_tag(key: str, parameters: Parameters) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [parameters.json_form(key)]
    if values := values_in(parameters.properties[key]):
        forms += [{"type": "const_string", "value": repr(each)} for each in values]
    else:
        patterns = (_SPELLINGS[name] for name in sorted(parameters.types[key] & _SPELLINGS.keys()))
        forms += [{"type": "regex", "pattern": pattern} for pattern in patterns]
    return {"type": "tag", "begin": f"{key}=", "content": {"type": "or", "elements": forms}, "end": ""}


def _read_call(functions: Mapping[str, Any], unread: Unread) -> Reading[Rest]:
    name = yield from read_name(unread)
    if name not in functions or not (yield from unread.accept("(")):
        return None
    if (yield from unread.accept(")")):
        unread.forget()
        yield CallStart(name)
        yield Arguments("{}")
        return Content
    before = "{"
    while True:
        key = yield from read_name(unread)
        text = (yield from _argument(unread)) if (yield from unread.accept("=")) else ""
        value, end = json_of(text), (yield from unread.character())
        if not key or value is None or end not in (",", ")"):
            break
        if before == "{":
            yield CallStart(name)
        yield Arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
        before = ", "
        unread.keep()
        if end == ")" or (yield from unread.accept(")")):
            yield Arguments("}")
            return Content
    if before == "{":
        return None
    yield Arguments(unread.kept())
    return Arguments


def _argument(unread: Unread) -> Generator[None, None, str]:
    """Read one argument of a tool call in Python syntax, up to the comma or bracket that follows. Return the argument's
    text.
    """
    pieces: list[str] = []
    depth = 0
    while True:
        pieces.append((yield from collected(unread.run(_PLAIN)))[0])
        found = yield from unread.next()
        if not found or (depth == 0 and found in ",)]}"):
            return "".join(pieces)
        pieces.append((yield from unread.character()))
        if found in _IN_QUOTES:
            yield from _end_of_quotes(unread, found, pieces)
        depth += (found in "([{") - (found in ")]}")


def _end_of_quotes(unread: Unread, quote: str, pieces: list[str]) -> Generator[None, None, None]:
    while True:
        pieces.append((yield from collected(unread.run(_IN_QUOTES[quote])))[0].translate(_UNESCAPED))
        character = yield from unread.character()
        pieces.append(character)
        if character != "\\":
            return
        pieces.append((yield from unread.character()))


LLAMA = PythonicCalls(("<|python_start|>", "<|python_tag|>"), ("<|python_end|>",), "[", "]", may_lack=True)
LFM = PythonicCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), "[", "]")
OLMO = PythonicCalls(("<function_calls>",), ("</function_calls>",), "", "")
