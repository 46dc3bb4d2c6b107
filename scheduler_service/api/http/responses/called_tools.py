"""The tools of a Responses request as functions that the model can call, and the way back from a called function to the
client's tool."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pagewire.common.strict_json import from_json
from scheduler_service.api.http.requests import FunctionField, ToolField
from scheduler_service.api.http.responses.requests import (
    CustomTool,
    FunctionTool,
    GrammarFormat,
    InputItem,
    NamespaceTool,
    Tool,
    ToolSearchResultItem,
    ToolSearchTool,
    VendorTool,
)
from scheduler_service.serving.refusal import invalid

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
SEARCH = "tool_search"  # the function that the model calls to search for tools
_INPUT_BEGINS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_ESCAPE_CHARS = 6


class CalledTool(NamedTuple):
    """A tool that the model may call, with the name and namespace under which the client knows the tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_search: bool = False


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function by which the model calls a tool. The name of a tool without a namespace is
    unchanged; otherwise it becomes `namespace__name`."""
    return f"{namespace}__{name}" if namespace else name


def tool_fields(tools: Iterable[Tool], found: Iterable[Tool]) -> list[ToolField]:
    """Return the functions that the prompt describes. These are the functions for `tools`, which the request lists. The
    functions for `found`, tools that a tool search has found, follow if they have new names. Raises RefusedError if two
    tools in `tools` have the same function name."""
    fields: dict[str, ToolField] = {}
    for place, tool, namespace, preface in _callable_tools(tools):
        name = function_name(tool.name, namespace)
        if name in fields:
            raise invalid(f"{place}.name", f"{place}.name: two tools are called as {name!r}; rename one")
        fields[name] = _field(name, tool, preface)
    for _, tool, namespace, preface in _callable_tools(found):
        name = function_name(tool.name, namespace)
        fields.setdefault(name, _field(name, tool, preface))
    return list(fields.values())


def _field(name: str, tool: FunctionTool | CustomTool, preface: str) -> ToolField:
    parameters, strict = (_INPUT, None) if isinstance(tool, CustomTool) else (tool.parameters, tool.strict)
    return ToolField(FunctionField(name, _description(tool, preface), parameters, strict))


def found_tools(conversation: Iterable[InputItem]) -> list[Tool]:
    """Return the tools that earlier tool searches by the client have found. Their results are items of the
    conversation."""
    return [tool for item in conversation if isinstance(item, ToolSearchResultItem) for tool in item.tools]


def found_names(item: ToolSearchResultItem) -> list[str]:
    """Return the function names of the tools that are listed in the result of a tool search."""
    return [function_name(tool.name, namespace) for _, tool, namespace, _ in _callable_tools(item.tools)]


def called_tools(tools: Iterable[Tool], found: Iterable[Tool]) -> dict[str, CalledTool]:
    """Return the tools that the model may call, keyed by the function names that the model uses. `tools` are the
    request's tools, and `found` are the tools that a tool search has found. If both have the same function name, the
    tool in `tools` takes precedence."""
    called = {
        function_name(tool.name, namespace): CalledTool(tool.name, namespace, isinstance(tool, CustomTool))
        for each in (found, tools)
        for _, tool, namespace, _ in _callable_tools(each)
    }
    if any(isinstance(tool, ToolSearchTool) and tool.execution == "client" for tool in tools):
        called[SEARCH] = CalledTool(SEARCH, is_search=True)
    return called


def tool_warnings(tools: Iterable[Tool]) -> Iterator[str]:
    """Yield warnings for the client about tools that are ignored or whose grammars are not enforced."""
    left_out = {str(tool.__struct_config__.tag) for tool in tools if isinstance(tool, VendorTool)}
    if left_out:
        yield f"tools that run at the vendor are left out: {', '.join(sorted(left_out))}"
    if any(
        isinstance(tool, CustomTool) and isinstance(tool.format, GrammarFormat)
        for _, tool, *_ in _callable_tools(tools)
    ):
        yield "the grammars of custom tools are given to the model, but not enforced"


def input_arguments(text: str) -> str:
    """Return the JSON arguments with which the model calls a custom tool. A custom tool has one text as its input, so
    the arguments are an object with the field `input`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input text of a custom tool from the JSON arguments of the model's function call. The arguments may be
    truncated JSON. If the arguments are no object with a text `input`, return the arguments unchanged."""
    try:
        read = from_json(arguments)
    except ValueError:
        begins = _INPUT_BEGINS.match(arguments)
        return arguments if begins is None else _cut_text(arguments[begins.end() :])
    match read:
        case {"input": str(text)}:
            return text
    return arguments


def _cut_text(escaped: str) -> str:
    """Return the text of a JSON string whose end is missing. An incomplete escape at the end is dropped. `escaped` is
    the content of the string without the quotes."""
    for num_cut in range(min(len(escaped), _MAX_ESCAPE_CHARS) + 1):
        try:
            return str(json.loads(f'"{escaped[: len(escaped) - num_cut]}"', strict=False))
        except ValueError:
            continue
    return escaped


def _callable_tools(tools: Iterable[Tool]) -> Iterator[tuple[str, FunctionTool | CustomTool, str | None, str]]:
    """Yield each callable tool with its path in the request, its namespace, and a preface for its description. The
    preface contains the description of the namespace. It is empty except for the first tool of a namespace."""
    for index, tool in enumerate(tools):
        match tool:
            case FunctionTool() | CustomTool():
                yield f"tools[{index}]", tool, None, ""
            case ToolSearchTool(execution="client"):
                yield f"tools[{index}]", _search(tool), None, ""
            case NamespaceTool(name=namespace, description=description):
                preface = f"Tools of {namespace}: {description}" if description else ""
                for position, inner in enumerate(tool.tools):
                    yield f"tools[{index}].tools[{position}]", inner, namespace, "" if position else preface


def _search(tool: ToolSearchTool) -> FunctionTool:
    return FunctionTool(name=SEARCH, description=tool.description, parameters=tool.parameters)


def _description(tool: FunctionTool | CustomTool, preface: str) -> str | None:
    """Return the description that the prompt gives for a tool's function. It includes the preface and the grammar of a
    custom tool. Return None if the tool has no description, no preface and no grammar."""
    parts = [preface, tool.description]
    if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarFormat):
        parts.append(f"The input matches this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return "\n\n".join(filter(None, parts)) or tool.description
