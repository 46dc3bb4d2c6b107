"""Calls of tools, and reasoning, in chats: which calls a request allows, and what an output holds of both."""

import json
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import UNSET

from pagewire.common.chat_output import Arguments, CallStart, ChatFormat, Content, OutputParser, Reasoning
from scheduler_service.doors.http.answers import CalledFunction, ToolCall
from scheduler_service.doors.http.options import FoundGrammar
from scheduler_service.doors.http.requests import ChatCompletionRequest, FunctionChoice
from scheduler_service.serving.refusal import invalid

_NO_PARAMETERS = {"type": "object", "additionalProperties": False}
# Makes what reads an output; it makes None where an output is content alone.
ParserMaker = Callable[[], OutputParser | None]


def functions_of(request: ChatCompletionRequest, output: ChatFormat) -> dict[str, Any]:
    """Return the JSON Schemas of the parameters of the functions that an output may call, by name. Raises
    RefusedError."""
    tools, choice = request.tools or [], request.tool_choice
    functions: dict[str, Any] = {}
    for position, tool in enumerate(tools):
        name = tool.function.name
        if name in functions:
            raise invalid(f"tools[{position}].function.name", f"another tool is called {name!r} too; rename one")
        functions[name] = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if choice == "none" or not (functions or choice not in (None, "auto")):
        return {}
    if isinstance(choice, FunctionChoice):
        functions = {name: functions[name] for name in functions if name == choice.function.name}
    if not functions:
        raise invalid(
            "tool_choice", "tool_choice asks for a call of what is not among tools; add it, or choose another"
        )
    if output.calls is None:
        raise invalid(
            "tools", "the model's chat template has calls of tools in no form that is known; leave tools unset"
        )
    return functions


def call_grammars(
    request: ChatCompletionRequest, output: ChatFormat, functions: dict[str, Any], prompt: str
) -> list[FoundGrammar]:
    """Return what holds an output's calls to their schemas, and to what the request asks for, if there are any."""
    if not functions:
        return []
    is_one = isinstance(request.tool_choice, FunctionChoice) or request.parallel_tool_calls is False
    is_required = request.tool_choice not in (None, "auto")
    tag = output.structural_tag(functions, prompt, is_required=is_required, is_parallel=not is_one)
    return [("tools", "structural_tag", json.dumps(tag))]


def move_behind_reasoning(options: dict[str, Any], names: dict[str, str], output: ChatFormat, prompt: str) -> None:
    """Have an output match what it must once its reasoning has ended, which the prompt has begun. What rules tokens and
    texts out holds from its beginning. Raises RefusedError for a grammar, which cannot be told where to begin."""
    for kind, make_form in _FORMS.items():
        if kind in options:
            try:
                form = make_form(options[kind])
            except (ValueError, LookupError, TypeError):
                return  # it is refused for what it is
            del options[kind]
            options["structural_tag"] = json.dumps(output.behind_reasoning(form, prompt))
            names["structural_tag"] = names.pop(kind)
            return
    if "grammar" in options and names["grammar"].endswith("grammar"):
        field = names["grammar"]
        raise invalid(field, f"{field} cannot begin behind the reasoning that the chat template begins; turn that off")


_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json_schema": lambda text: {"type": "json_schema", "json_schema": json.loads(text)},
    "json_object": lambda _: {"type": "json_schema", "json_schema": {"type": "object"}},
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "choice": lambda texts: {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]},
    "structural_tag": lambda text: json.loads(text)["format"],
}


class Told(NamedTuple):
    """What a piece of an output adds to its message."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class SampleReader:
    """Reads one output of a chat as it comes."""

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self.num_calls = 0

    def read(self, text: str, *, is_last: bool) -> Told:
        if self._parser is None:
            return Told(text)
        content, reasoning = [], []
        calls: list[ToolCall] = []
        for part in self._parser.feed(text, is_last=is_last):
            match part:
                case Content():
                    content.append(part.text)
                case Reasoning():
                    reasoning.append(part.text)
                case CallStart():
                    calls.append(_begun(self.num_calls, part.name))
                    self.num_calls += 1
                case Arguments():
                    before = calls.pop() if calls else ToolCall(CalledFunction(""), self.num_calls - 1)
                    calls.append(_with_arguments(before, part.text))
        return Told("".join(content), "".join(reasoning), tuple(calls))


def _begun(index: int, name: str) -> ToolCall:
    return ToolCall(CalledFunction("", name), index, f"call_{secrets.token_hex(12)}", "function")


def _with_arguments(call: ToolCall, text: str) -> ToolCall:
    function = CalledFunction(call.function.arguments + text, call.function.name)
    return ToolCall(function, call.index, call.id, call.type)


def without_indexes(calls: tuple[ToolCall, ...]) -> list[ToolCall]:
    """Return calls as a whole message has them."""
    return [ToolCall(call.function, UNSET, call.id, call.type) for call in calls]
