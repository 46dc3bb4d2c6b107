"""Texts in place of tool calls that ran at a vendor, and in place of their results. Such calls occur in conversations
that began at that vendor. The prompt contains the texts."""

import json
import re
from typing import Any

from scheduler_service.api.http.prompts import FILE_LEFT_OUT, IMAGE_LEFT_OUT

_CALLED = re.compile(
    "(?:web_search|file_search|tool_search|code_interpreter|image_generation|computer|mcp|local_shell|shell|apply_patch)_call"
    "|server_tool_use|mcp_tool_use|mcp_approval_request"
)
_RESULT = re.compile(
    "(?:computer|local_shell|shell|apply_patch)_call_output|mcp_approval_response"
    "|(?:web_search|web_fetch|(?:bash_|text_editor_)?code_execution|tool_search|advisor|mcp)_tool_result"
)
_LISTS = ("mcp_list_tools", "mcp_tool_listing", "tool_search_output")
_KIND_END = re.compile("(_call|_tool)?(_output|_result|_use|_response)?$")
_LIST_LEFT_OUT = "[A list of tools was left out here: they do not run here.]"
# Fields that only identify an item, and field values without information.
_UNTOLD = ("type", "id", "name", "call_id", "tool_use_id", "container_id", "cache_control", "caller", "created_by")
_USUAL = {"status": "completed", "is_error": False}
VENDOR_WARNING = "images, files and lists of tools are left out of calls of tools that ran at the vendor"


def vendor_text(item: dict[str, Any]) -> str:
    """Describe the call or the result of a tool that ran on the servers of a vendor such as OpenAI, as a text for the
    prompt. `item` is an item or content block of a conversation. Return an empty string if it is not such a call or
    result."""
    kind, name = str(item.get("type")), item.get("name")
    if kind.startswith("tool_search_") and item.get("call_id"):
        return ""  # the client ran this search
    if kind in _LISTS:
        return _LIST_LEFT_OUT
    is_result = is_vendor_result(item)
    if not is_result and not _CALLED.fullmatch(kind):
        return ""
    told = {key: _readable(value) for key, value in item.items() if key not in _UNTOLD and value != _USUAL.get(key)}
    if kind == "image_generation_call" and "result" in told:
        told["result"] = IMAGE_LEFT_OUT
    [whole] = told.values() if len(told) == 1 else [told]
    text = whole if isinstance(whole, str) else json.dumps(whole, ensure_ascii=False)
    return f"[{'Result of' if is_result else 'Called'} {name or _KIND_END.sub('', kind)}: {text}]"


def is_vendor_result(item: dict[str, Any]) -> bool:
    """Return whether a conversation item is the result of a tool that ran on a vendor's servers. Return False for an
    item that contains both the call and the result, as some tools have."""
    return _RESULT.fullmatch(str(item.get("type"))) is not None


def leaves_out(text: str) -> bool:
    """Return whether a text of `vendor_text` contains a placeholder for an omitted part, such as an image."""
    return text.lstrip().startswith("[") and " was left out here: " in text


def _readable(value: Any) -> Any:
    match value:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image" | "computer_screenshot"}:
            return IMAGE_LEFT_OUT
        case {"type": "base64"}:
            return FILE_LEFT_OUT
        case dict():
            given = {key: inner for key, inner in value.items() if inner is not None}
            return {key: _readable(inner) for key, inner in given.items() if not key.startswith("encrypted_")}
        case list():
            return [_readable(inner) for inner in value]
    return value
