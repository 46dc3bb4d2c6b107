"""The scripted model's texts: tool calls one after another, or a helpful answer."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.clients.scripted_model import Conversation, Script, text_of

HELLO = "Hello, here is a short text of a model that follows a script."
Call = tuple[str, Mapping[str, Any]]


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def loop(calls: Sequence[Call], last: str) -> Script:
    """Return a script that writes one call in each turn, with reasoning before it, and then `last`.

    Requests that lack the first call's tool, such as a client's side requests, get a helpful answer.
    """

    def write(conversation: Conversation) -> str:
        if calls[0][0] not in conversation.tool_names:
            return helpful(conversation)
        num_results = len(conversation.texts_of("tool"))
        text = call_text(*calls[num_results]) if num_results < len(calls) else last
        return f"<think>\nstep {num_results}\n</think>\n\n{text}"

    return write


def helpful(conversation: Conversation) -> str:
    """Call a tool that the question mentions, answer with a tool's result, think, or write JSON or a text."""
    if not conversation.messages:
        return HELLO
    last = conversation.messages[-1]
    if last["role"] == "tool":
        return f"The result is {text_of(last)}."
    question = (conversation.texts_of("user") or [""])[-1]
    tools = [tool for tool in conversation.tools if _is_about(question, tool["name"])]
    if tools:
        return call_text(tools[0]["name"], _value(tools[0].get("parameters") or {}, question))
    if "1000 lines" in question:
        return f"{HELLO}\n" * 1000
    if "Think" in question:
        return f"<think>\nI think.\n</think>\n\n{HELLO}"
    if "JSON" in question:
        return json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", question), question[:20]))
    return HELLO


def forced(conversation: Conversation) -> str:
    """Call the first tool, for a client that requires a tool call; without tools, begin an object."""
    question = (conversation.texts_of("user") or [""])[-1]
    for tool in conversation.tools:
        return call_text(tool["name"], _value(tool.get("parameters") or {}, question))
    return "{"


def _is_about(question: str, tool: str) -> bool:
    return any(word in question.lower() for word in re.split(r"[_\W]+", tool.lower()) if len(word) > 3)


def _value(schema: Mapping[str, Any], question: str, whole: Mapping[str, Any] | None = None) -> Any:
    """Return a value that a schema permits, with a number or a name from the question if it contains one."""
    whole = whole or schema
    if "$ref" in schema:
        return _value(whole["$defs"][schema["$ref"].rpartition("/")[2]], question, whole)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], question, whole)
    match schema.get("type", "object"):
        case "integer" | "number":
            return int((re.findall(r"\d+", question) or ["1"])[0])
        case "boolean":
            return True
        case "null":
            return None
        case "string":
            return (re.findall(r"'([^']+)'", question) or [question])[0]
        case "array":
            return [_value(schema.get("items", {"type": "string"}), question, whole)]
    return {name: _value(each, question, whole) for name, each in schema.get("properties", {}).items()}
