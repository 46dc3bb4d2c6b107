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
    """A tool that the model may call. It contains the tool's name and namespace in the client's request, which differ
    from the function name that the model uses."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_search: bool = False


def function_name(name: str, namespace: str | None) -> str:
    """Return the function name that the model uses to call a tool. For a tool in a namespace, it is `namespace__name`.
    Otherwise it is the tool's own name."""
    return f"{namespace}__{name}" if namespace else name


def tool_fields(tools: Iterable[Tool], found: Iterable[Tool]) -> list[ToolField]:
    """Return the functions that the prompt describes to the model. `tools` are the tools of the request, and `found`
    are the tools that tool searches have found. A tool in `found` is left out if its function name occurs earlier.
    Raises RefusedError if two tools in `tools` have the same function name."""
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
    return ToolField(FunctionField(name, _description(tool, preface), parameters=parameters, strict=strict))


def found_tools(conversation: Iterable[InputItem]) -> list[Tool]:
    """Return the tools that earlier tool searches have found. The client runs these searches and sends their results as
    items of the conversation."""
    return [tool for item in conversation if isinstance(item, ToolSearchResultItem) for tool in item.tools]


def found_names(item: ToolSearchResultItem) -> list[str]:
    """Return the function names of the tools in the result of a tool search."""
    return [function_name(tool.name, namespace) for _, tool, namespace, _ in _callable_tools(item.tools)]


def called_tools(tools: Iterable[Tool], found: Iterable[Tool]) -> dict[str, CalledTool]:
    """Return the tools that the model may call, keyed by the function names that the model uses. `tools` are the tools
    of the request, and `found` are the tools that tool searches have found. If a tool of each has the same function
    name, the tool in `tools` is returned."""
    called = {
        function_name(tool.name, namespace): CalledTool(tool.name, namespace, isinstance(tool, CustomTool))
        for each in (found, tools)
        for _, tool, namespace, _ in _callable_tools(each)
    }
    if any(isinstance(tool, ToolSearchTool) and tool.execution == "client" for tool in tools):
        called[SEARCH] = CalledTool(SEARCH, is_search=True)
    return called


def tool_warnings(tools: Iterable[Tool]) -> Iterator[str]:
    """Yield warnings to send to the client about its tools: the tools that the server ignores, and custom tools whose
    grammars are not enforced."""
    left_out = {str(tool.__struct_config__.tag) for tool in tools if isinstance(tool, VendorTool)}
    if left_out:
        yield f"tools that run at the vendor are left out: {', '.join(sorted(left_out))}"
    if any(
        isinstance(tool, CustomTool) and isinstance(tool.format, GrammarFormat)
        for _, tool, *_ in _callable_tools(tools)
    ):
        yield "the grammars of custom tools are given to the model, but not enforced"


def input_arguments(text: str) -> str:
    """Return the JSON arguments of a function call that passes `text` to a custom tool. A custom tool has one text as
    its input; the JSON object contains this text in the field `input`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Extract the input text of a custom tool from the JSON arguments of the model's function call. The arguments may
    be incomplete JSON. If they are not an object with a text field `input`, return the arguments unchanged."""
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
    """Decode the content of a JSON string whose end is missing. `escaped` is the content without the quotes. An
    incomplete escape at the end is dropped."""
    for num_cut in range(min(len(escaped), _MAX_ESCAPE_CHARS) + 1):
        try:
            return str(json.loads(f'"{escaped[: len(escaped) - num_cut]}"', strict=False))
        except ValueError:
            continue
    return escaped


def _callable_tools(tools: Iterable[Tool]) -> Iterator[tuple[str, FunctionTool | CustomTool, str | None, str]]:
    """Yield (path, tool, namespace, preface) for each tool that the model can call. The path is the place of the tool
    in the request, such as `tools[0]`. The preface is a text for the beginning of the tool's description. For the first
    tool of a namespace, it describes the namespace; otherwise it is empty."""
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
    """Return the description of a tool in the prompt. It consists of the preface, the tool's own description and, for a
    custom tool, its grammar. Return None if all of these are missing."""
    parts = [preface, tool.description]
    if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarFormat):
        parts.append(f"The input matches this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return "\n\n".join(filter(None, parts)) or tool.description
