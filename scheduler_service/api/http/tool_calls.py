"""Tool calls and reasoning in chats: the constraints that a request sets on them, and how they are read from an
output."""

import json
import secrets
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any, NamedTuple

from msgspec import UNSET

from pagewire.common.chat.chat_output import (
    Arguments,
    CallStart,
    ChatFormat,
    ChatRules,
    Content,
    OutputParser,
    OutputPart,
    Parameters,
    Reasoning,
)
from pagewire.common.chat.schema_budget import SchemaBudget, SchemaBudgetError
from pagewire.common.chat.template_forms import NOT_AN_OBJECT
from pagewire.common.grammars.json_schema import enforceable
from pagewire.common.grammars.structural_tag import format_in
from pagewire.common.strict_json import from_json
from scheduler_service.api.http.answers import CalledFunction, ToolCall
from scheduler_service.api.http.request_options import OutputConstraint, output_constraints
from scheduler_service.api.http.requests import (
    AllowedToolsChoice,
    AutoMode,
    ChatCompletionRequest,
    NoMode,
    RequiredMode,
    ToolField,
)
from scheduler_service.serving.refusal import RefusedError, invalid

_NO_PARAMETERS = {"type": "object", "additionalProperties": False}
# Returns a new parser for an output.
ParserMaker = Callable[[], OutputParser]


def functions_of(request: ChatCompletionRequest, output: ChatFormat) -> tuple[dict[str, Parameters], set[str]]:
    """Collect the functions that the model may call in its output. Raises RefusedError if a tool or the tool choice is
    invalid, or if the model's format of tool calls is unknown.

    Returns the parameters of each function, keyed by function name, and the set of JSON Schema keywords in the tools
    that are not enforced.
    """
    tools, (mode, names) = request.tools or [], _choice_of(request)
    if not (tools or names or mode == "required"):
        return {}, set()
    budget, given = SchemaBudget(), SchemaBudget()
    functions, left_out = dict[str, Parameters](), set[str]()
    for position, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters
        if name in functions:
            field = f"tools[{position}].function.name"
            raise invalid(field, f"{field} is {name[:80]!r}, the name of an earlier tool; rename one")
        try:
            given.take_tree(schema)
            kept = enforceable(schema, schema, keywords := set[str]())
            if tool.function.strict and mode == "required":
                _check_strict(f"tools[{position}]", name, keywords)
                kept, keywords = schema, set()
            functions[name] = Parameters(_NO_PARAMETERS if schema is None else kept, budget)
            left_out |= keywords
        except SchemaBudgetError as error:
            raise _too_large(f"tools[{position}]", error) from None
    if mode == "none":
        return {}, set()
    missing = names - functions.keys()
    functions = {name: functions[name] for name in functions if name in names} if names else functions
    if not functions or missing:
        required = ", ".join(f"{name[:80]!r}" for name in sorted(missing)) or "a call"
        raise invalid(
            "tool_choice", f"tool_choice requires {required}, but tools has no such tool; add it, or choose another"
        )
    if output.calls is None:
        raise invalid(
            "tools",
            "the model's format of tool calls is unknown: neither its chat template nor --tool-call-parser specifies "
            "it; leave tools unset",
        )
    return functions, left_out


def _check_strict(field: str, name: str, keywords: set[str]) -> None:
    """Check the JSON Schema of a tool that sets `strict`. `keywords` are the keywords in the schema that cannot be
    enforced. Raises RefusedError if there are any, except `oneOf`: the grammar compiler gets a strict schema unchanged,
    with its `oneOf`. `name` is the function's name."""
    if asked := ", ".join(sorted(keywords - {"oneOf"})):
        raise invalid(
            field,
            f"{field} is strict, but the schema of {name[:80]!r} has {asked}, which cannot be enforced; leave "
            "strict unset, or remove them from the schema",
        )


def _too_large(field: str, error: SchemaBudgetError) -> RefusedError:
    return invalid(
        field,
        f"{field}: the JSON Schemas of the request have {error}, including the expansion of each $ref and each "
        "property's copy of $defs; send simpler schemas, or fewer tools",
    )


def _choice_of(request: ChatCompletionRequest) -> tuple[str, set[str]]:
    """Return the mode of a request's tool choice (`none`, `auto` or `required`), and the names of the functions that
    the model may call. An empty set of names means all functions."""
    match request.tool_choice:
        case ToolField(function=function):
            return "required", {function.name}
        case AllowedToolsChoice(allowed_tools=allowed):
            return allowed.mode, {tool.function.name for tool in allowed.tools}
        case AutoMode() | NoMode() | RequiredMode() as mode:
            return str(mode.__struct_config__.tag), set()
        case mode:
            return mode or "auto", set()


def chat_grammars(
    request: ChatCompletionRequest, output: ChatFormat, functions: dict[str, Parameters], prompt: str, rules: ChatRules
) -> list[OutputConstraint]:
    """Return the constraints on the output of a chat: on tool calls, on the text after the reasoning, and on the number
    of reasoning tokens. `allowed_token_ids` and `bad_words` are not included.

    Raises RefusedError if the output begins with reasoning, and a constraint cannot be limited to the text after the
    reasoning. Raises RefusedError also if the request limits the reasoning tokens of a model without reasoning.
    """
    budget = None if request.thinking_token_budget == -1 else request.thinking_token_budget
    if budget is not None and not output.has_reasoning:
        raise invalid(
            "thinking_token_budget",
            "thinking_token_budget is set, but the model's format of reasoning is unknown: neither its chat template "
            "nor --reasoning-parser specifies it; leave thinking_token_budget unset",
        )
    found = list(output_constraints(request))
    is_required = bool(functions) and _choice_of(request)[0] == "required"
    besides = "thinking_token_budget" if budget is not None else ""
    if functions and (is_required or rules.strict_tools or found):
        besides = "tools"
    if not (besides or (found and (output.is_reasoning(prompt) or output.is_in_channels))):
        return found
    text = _as_tag_format(found, besides, output)
    if found and text is None:
        return found
    try:
        tag = output.structural_tag(
            functions,
            prompt,
            is_required=is_required,
            is_parallel=not isinstance(request.tool_choice, ToolField) and request.parallel_tool_calls is not False,
            text=text,
            max_reasoning_tokens=budget,
        )
    except SchemaBudgetError as error:
        raise _too_large("tools", error) from None
    return [(found[0][0] if found else besides, "structural_tag", json.dumps(tag))]


def _as_tag_format(found: list[OutputConstraint], besides: str, output: ChatFormat) -> dict[str, Any] | None:
    """Convert the constraint in `found` to a format of a structural tag (a grammar that can combine tool calls,
    reasoning and text). Return None if there is not exactly one constraint, or if the constraint is invalid; the
    grammar compiler refuses an invalid constraint later. Raises RefusedError if a structural tag does not support this
    kind of constraint."""
    if len(found) != 1:
        return None
    [(field, kind, value)] = found
    if kind in _FORMS:
        budget = SchemaBudget()
        try:
            budget.take_json(value) if isinstance(value, str) else budget.take_tree(value)
            return _FORMS[kind](value)
        except SchemaBudgetError as error:
            raise _too_large(field, error) from None
        except ValueError:
            return None
    if besides:
        raise invalid(field, f"{besides} and {field} both constrain the output; send only one of them")
    if not output.is_in_channels:
        raise invalid(
            field, f"{field} cannot begin after the reasoning that the chat template begins; turn reasoning off"
        )
    return None


_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json_schema": lambda text: {"type": "json_schema", "json_schema": from_json(text)},
    "json_object": lambda _: {"type": "json_schema", "json_schema": {"type": "object"}},
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "choice": lambda texts: {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]},
    "structural_tag": format_in,
}


class MessageParts(NamedTuple):
    """The content, reasoning and tool calls that a piece of the model's output adds to a chat message."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class SampleReader:
    """An incremental reader of the output of a chat. It splits each new piece of text into the content, reasoning and
    tool calls of a chat message."""

    def __init__(self, parser: OutputParser, *, joins_reasoning: bool = False) -> None:
        """Create a reader of one output of a chat. If `joins_reasoning` is true, the reader adds the reasoning to the
        content. A new line separates the reasoning from other content."""
        self._parser = parser
        self._joins_reasoning = joins_reasoning
        self._last: type[OutputPart] | None = None  # the last part added to the content, if reasoning is joined
        self.num_calls = 0

    def read(self, text: str, *, is_last: bool) -> MessageParts:
        """Read the next piece of the output's text. Return the content, reasoning and tool calls that it adds to the
        message. `is_last` is true for the last piece of the output."""
        content, reasoning = [], []
        calls: list[tuple[ToolCall, list[str]]] = []  # each call, with the pieces of its arguments
        for part in self._parser.feed(text, is_last=is_last):
            match part:
                case Content() | Reasoning() if self._joins_reasoning:
                    content.append(part.text if self._last in (None, type(part)) else f"\n{part.text}")
                    self._last = type(part)
                case Content():
                    content.append(part.text)
                case Reasoning():
                    reasoning.append(part.text)
                case CallStart():
                    calls.append((_begun(self.num_calls, part.name), []))
                    self.num_calls += 1
                case Arguments():
                    if not calls:
                        calls.append((ToolCall(CalledFunction(""), self.num_calls - 1), []))
                    calls[-1][1].append(part.text)
        return MessageParts("".join(content), "".join(reasoning), tuple(starmap(_with_arguments, calls)))


def _begun(index: int, name: str) -> ToolCall:
    return ToolCall(CalledFunction("", name), index, f"call_{secrets.token_hex(12)}", "function")


def _with_arguments(call: ToolCall, pieces: Iterable[str]) -> ToolCall:
    return ToolCall(CalledFunction("".join(pieces), call.function.name), call.index, call.id, call.type)


def object_of(arguments: str) -> dict[str, Any]:
    """Parse the JSON arguments of a tool call, and return the JSON object. If the arguments are not a JSON object,
    return an object that contains their text under the key NOT_AN_OBJECT."""
    try:
        read = from_json(arguments)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {NOT_AN_OBJECT: arguments}


def without_indexes(calls: tuple[ToolCall, ...]) -> list[ToolCall]:
    """Remove the indexes from tool calls, for an answer that is not streamed. Only the events of a streamed answer need
    them."""
    return [ToolCall(call.function, UNSET, call.id, call.type) for call in calls]
