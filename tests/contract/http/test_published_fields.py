"""Every request field that OpenAI, Anthropic and vLLM publish is honored, has no effect at one value, or is refused.

Each top-level field has a row in docs/http_api.md, which test_fields.py tests. This file tests the fields of nested
objects. A new field of a pinned package fails here until it has a case.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from scheduler_service.api.http.openapi import field_rows
from scheduler_service.api.http.routes import POSTED
from scheduler_service.core.request import Request
from testing.serving.http_server import Begun, HttpServer, make_chat_checkpoint, noting_requests, serve_http, steady
from tests.contract.http.published_fields import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TYPED,
    VLLM,
    fields_of,
    is_tag,
    published,
    variants,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 2048
QUESTION = {"role": "user", "content": "hello"}
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [QUESTION], "seed": 0, "max_tokens": 4, "request_id": "same"},
    COMPLETIONS: {"prompt": "hello", "seed": 0, "max_tokens": 4, "request_id": "same"},
    RESPONSES: {"input": "hello", "seed": 0, "max_output_tokens": 4, "request_id": "same", "store": False},
    MESSAGES: {"messages": [QUESTION], "seed": 0, "max_tokens": 4, "request_id": "same"},
}
# Renders every message and every tool with all fields.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}"
    "{% for message in messages %}{{ message | tojson }}{% endfor %}{# <tool_call> <think> </think> #}"
)


@dataclass(frozen=True)
class Part:
    """An object within a request: its required fields, and other values for its fields."""

    least: dict[str, Any]
    honoured: dict[str, Any] = field(default_factory=dict)  # values that change the request or its response
    inert: dict[str, Any] = field(default_factory=dict)  # values without an effect
    refused: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)  # fields of the request itself


CACHED = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ANSWER = {"role": "assistant", "content": "once "}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOLS = {"tools": [FUNCTION]}
USED = {"name": "f", "input_schema": SCHEMA}
ITEM_CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "b"}'}
ITEM_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
DIRECT, PROGRAM = {"type": "direct"}, {"type": "program", "caller_id": "x"}
DESCRIBED = {"name": "g", "description": "Tells.", "parameters": {"type": "object"}}
LOADED = {"defer_loading": True}
CHAT_PARTS: dict[str, Part] = {
    "messages[](developer)": Part({"role": "developer", "content": "be"}, {"content": "see", "name": "n"}),
    "messages[](system)": Part({"role": "system", "content": "be"}, {"content": "see", "name": "n"}),
    "messages[](user)": Part({"role": "user", "content": "hi"}, {"content": "see", "name": "n"}),
    "messages[](user).content[](text)": Part({"type": "text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "messages[](developer).content[](text)": Part({"type": "text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "messages[](system).content[](text)": Part({"type": "text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "messages[](assistant)": Part(
        ANSWER,
        {"content": "see", "name": "n", "refusal": "no", "tool_calls": [CALLED]},
        {"audio": None, "function_call": None},
        {"audio": {"id": "x"}, "function_call": {"name": "f", "arguments": "{}"}},
    ),
    "messages[](assistant).tool_calls[](function)": Part(CALLED, {"id": "2"}),
    "messages[](assistant).tool_calls[](function).function": Part(
        CALLED["function"],  # type: ignore[arg-type]
        {"name": "g", "arguments": "{}"},
    ),
    "messages[](function)": Part({"role": "function", "name": "f", "content": "x"}, {"content": "y", "name": "g"}),
    "response_format(text)": Part({"type": "text"}),
    "response_format(json_object)": Part({"type": "json_object"}),
    "messages[](assistant).content[](text)": Part({"type": "text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "messages[](assistant).content[](refusal)": Part({"type": "refusal", "refusal": "a"}, {"refusal": "b"}),
    "messages[](tool)": Part({"role": "tool", "content": "x", "tool_call_id": "1"}, {"content": "y"}),
    "messages[](tool).content[](text)": Part({"type": "text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "stream_options": Part({}, {"include_usage": True}, {"include_obfuscation": True}, beside={"stream": True}),
    "response_format(json_schema)": Part({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    "response_format(json_schema).json_schema": Part(
        {"name": "a", "schema": SCHEMA},
        {"schema": {"type": "array"}},
        {"name": "b", "description": "c", "strict": True},
    ),
    "tools[](function)": Part(FUNCTION),
    "tools[](function).function": Part({"name": "f"}, DESCRIBED, {"strict": True}),
    "tool_choice(allowed_tools)": Part(
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}, beside=TOOLS
    ),
    "tool_choice(allowed_tools).allowed_tools": Part(
        {"mode": "auto", "tools": [FUNCTION]}, {"mode": "required"}, refused={"tools": []}, beside=TOOLS
    ),
    "tool_choice(function)": Part({"type": "function", "function": {"name": "f"}}, beside=TOOLS),
    "tool_choice(function).function": Part({"name": "f"}, refused={"name": "g"}, beside=TOOLS),
}
ITEM_LEAST = {"type": "message", "role": "user", "content": "hi"}
RESPONSE_PARTS: dict[str, Part] = {
    "input[](message)": Part(
        ITEM_LEAST,
        {"content": "see", "role": "developer"},
        {"id": "msg_1", "status": "completed", "phase": "commentary"},
    ),
    "input[](message).content[](input_text)": Part({"type": "input_text", "text": "a"}, {"text": "b"}, BREAKPOINT),
    "input[](message).content[](output_text)": Part(
        {"type": "output_text", "text": "a"}, {"text": "b"}, {"annotations": [], "logprobs": []}
    ),
    "input[](message).content[](refusal)": Part({"type": "refusal", "refusal": "a"}, {"refusal": "b"}),
    "input[](function_call)": Part(
        ITEM_CALL,
        {"arguments": "{}", "name": "g", "call_id": "2", "namespace": "n"},
        {"id": "fc_1", "status": "completed", "async": False},
        {"async": True},
    ),
    "input[](function_call).caller(direct)": Part(DIRECT),
    "input[](function_call_output)": Part(
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"output": "y", "call_id": "2"},
        {"id": "fco_1", "status": "completed", "name": "f", "namespace": "n"},
    ),
    "input[](function_call_output).caller(direct)": Part(DIRECT),
    "input[](function_call_output).output[](input_text)": Part(
        {"type": "input_text", "text": "a"}, {"text": "b"}, BREAKPOINT
    ),
    "input[](function_call_output).output[](input_image)": Part(
        {"type": "input_image"}, {}, {"detail": "auto", "file_id": "f", "image_url": "data:,"} | BREAKPOINT
    ),
    "input[](custom_tool_call)": Part(
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"},
        {"input": "y", "name": "g", "call_id": "2", "namespace": "n"},
        {"id": "ctc_1", "async": False},
        {"async": True},
    ),
    "input[](custom_tool_call).caller(direct)": Part(DIRECT),
    "input[](custom_tool_call_output)": Part(
        {"type": "custom_tool_call_output", "call_id": "1", "output": "x"},
        {"output": "y", "call_id": "2"},
        {"id": "ctco_1"},
    ),
    "input[](custom_tool_call_output).caller(direct)": Part(DIRECT),
    "input[](custom_tool_call_output).output[](input_text)": Part(
        {"type": "input_text", "text": "a"}, {"text": "b"}, BREAKPOINT
    ),
    "input[](custom_tool_call_output).output[](input_image)": Part(
        {"type": "input_image"}, {}, {"detail": "auto", "file_id": "f", "image_url": "data:,"} | BREAKPOINT
    ),
    "input[](reasoning)": Part(
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"content": [{"type": "reasoning_text", "text": "oh"}]},
        {"id": "rs_1", "status": "completed", "encrypted_content": "x", "summary": []},
    ),
    "input[](reasoning).content[](reasoning_text)": Part({"type": "reasoning_text", "text": "a"}, {"text": "b"}),
    "input[](compaction)": Part(
        {"type": "compaction", "encrypted_content": "a"}, {"encrypted_content": "b"}, {"id": "cmp_1"}
    ),
    "input[](tool_search_call)": Part(
        {"type": "tool_search_call", "call_id": "1", "arguments": {"a": "b"}},
        {"arguments": {"a": "c"}, "call_id": "2"},
        {"id": "tsc_1", "status": "completed", "execution": "client"},
    ),
    "input[](tool_search_output)": Part(
        {"type": "tool_search_output", "call_id": "1", "tools": [ITEM_TOOL]},
        {"tools": [ITEM_TOOL | {"name": "g"}], "call_id": "2"},
        {"id": "tso_1", "status": "completed", "execution": "client"},
        {"tools": [{"type": "computer"}]},  # the tools are checked like the tools of a request
    ),
    "tools[](tool_search)": Part(
        {"type": "tool_search", "execution": "client"},
        {"execution": "server", "description": "x", "parameters": SCHEMA},
    ),
    "text": Part({}, {"verbosity": "low"}, {"verbosity": "medium"}, {"verbosity": "loud"}),
    "text.format(text)": Part({"type": "text"}),
    "text.format(json_object)": Part({"type": "json_object"}),
    "text.format(json_schema)": Part(
        {"type": "json_schema", "name": "a", "schema": SCHEMA},
        {"schema": {"type": "array"}, "name": "b", "description": "c", "strict": True},  # the response repeats it
    ),
    "reasoning": Part(
        {},
        {"effort": "low", "summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"},
        refused={"context": "current_turn", "mode": "pro"},
    ),
    "tool_choice(allowed_tools)": Part(
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        {"mode": "required"},
        refused={"tools": []},
        beside={"tools": [ITEM_TOOL]},
    ),
    "tool_choice(function)": Part(
        {"type": "function", "name": "f"}, refused={"name": "g"}, beside={"tools": [ITEM_TOOL]}
    ),
    "tool_choice(custom)": Part(
        {"type": "custom", "name": "f"}, refused={"name": "g"}, beside={"tools": [{"type": "custom", "name": "f"}]}
    ),
    "tools[](function)": Part(
        ITEM_TOOL,
        # The response repeats the tools.
        DESCRIBED | LOADED | {"strict": True, "output_schema": SCHEMA, "allowed_callers": ["direct"], "async": False},
        refused={"async": True, "allowed_callers": ["programmatic"]},
    ),
    "tools[](custom)": Part(
        {"type": "custom", "name": "f"},
        {"name": "g", "description": "x", "allowed_callers": ["direct"], "async": False} | LOADED,
        refused={"async": True, "allowed_callers": ["programmatic"]},
    ),
    "tools[](custom).format(text)": Part({"type": "text"}),
    "tools[](custom).format(grammar)": Part(
        {"type": "grammar", "syntax": "regex", "definition": "a"}, {"syntax": "lark", "definition": "b"}
    ),
    "tools[](namespace)": Part(
        {"type": "namespace", "name": "n", "description": "x", "tools": [ITEM_TOOL]},
        {"name": "m", "description": "y"},
    ),
    "tools[](namespace).tools[](function)": Part(
        ITEM_TOOL,
        DESCRIBED | LOADED | {"strict": True, "output_schema": SCHEMA, "allowed_callers": ["direct"], "async": False},
        refused={"async": True, "allowed_callers": ["programmatic"]},
    ),
}
TEXT_BLOCK = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [TEXT_BLOCK]}
MESSAGE_PARTS: dict[str, Part] = {
    "messages[](user)": Part({"role": "user", "content": "hi"}, {"content": "see"}),
    "messages[](assistant)": Part({"role": "assistant", "content": "hi"}, {"content": "see"}),
    "messages[](system)": Part(
        {"role": "system", "content": "hi"},
        {"content": "see"},
        {"clear_at": "never", "output_config": {}},
        {"clear_at": "next_user_message", "output_config": {"effort": "low"}},
    ),
    "output_config": Part({}, {"effort": "low"}, refused={"task_budget": {"type": "tokens", "total": 1}}),
    "output_config.format(json_schema)": Part({"type": "json_schema", "schema": SCHEMA}, {"schema": {"type": "array"}}),
    "system[](text)": Part(TEXT_BLOCK, {"text": "b"}, {"citations": [{}]} | CACHED),
    "thinking(enabled)": Part(
        {"type": "enabled", "budget_tokens": 3},
        {"budget_tokens": 2},
        {"block_binding": {"prefix_mismatch_behavior": "drop_block"}, "display": "summarized"},
    ),
    "thinking(disabled)": Part({"type": "disabled"}),
    "thinking(adaptive)": Part(
        {"type": "adaptive"},
        {},
        {"block_binding": {"prefix_mismatch_behavior": "error"}, "display": "summarized"},
    ),
    "tool_choice(auto)": Part({"type": "auto"}, {"disable_parallel_tool_use": True}, beside={"tools": [USED]}),
    "tool_choice(any)": Part({"type": "any"}, {"disable_parallel_tool_use": True}, beside={"tools": [USED]}),
    "tool_choice(tool)": Part(
        {"type": "tool", "name": "f"}, {}, {"disable_parallel_tool_use": True}, {"name": "g"}, {"tools": [USED]}
    ),
    "tool_choice(none)": Part({"type": "none"}),
    "tools[](custom)": Part(
        USED,
        {"name": "g", "description": "x", "input_schema": {"type": "object"}, "input_examples": [{"a": "b"}]},
        LOADED
        | CACHED
        | {"type": "custom", "eager_input_streaming": True, "strict": True}
        | {"allowed_callers": ["direct"]},
        {"allowed_callers": ["code_execution_20260120"]},
    ),
    "messages[](user).content[](text)": Part(TEXT_BLOCK, {"text": "b"}, {"citations": [{}]} | CACHED),
    "messages[](user).content[](document)": Part(
        DOCUMENT,
        {"title": "t", "context": "c"},
        {"citations": {"enabled": False}} | CACHED,
        {"citations": {"enabled": True}},
    ),
    "messages[](user).content[](document).source(text)": Part(
        {"type": "text", "media_type": "text/plain", "data": "x"}, {"data": "y"}
    ),
    "messages[](user).content[](document).source(content)": Part({"type": "content", "content": "x"}, {"content": "y"}),
    "messages[](user).content[](search_result)": Part(
        FOUND,
        {"source": "q", "title": "u", "content": [{"type": "text", "text": "b"}]},
        {"citations": {"enabled": False}} | CACHED,
        {"citations": {"enabled": True}},
    ),
    "messages[](user).content[](tool_result)": Part(
        RESULT,
        {"content": "y", "tool_use_id": "2"},
        {"is_error": True, "toolset_name": None} | CACHED,
        {"toolset_name": "t"},
    ),
    "messages[](user).content[](tool_result).content[](image)": Part(
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {},
        {"source": {"type": "file", "file_id": "f"}, "transformations": {}} | CACHED,
    ),
    "messages[](user).content[](tool_result).content[](tool_reference)": Part(
        {"type": "tool_reference", "tool_name": "f"}, {"tool_name": "g"}, CACHED
    ),
    "messages[](assistant).content[](thinking)": Part(
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"thinking": "oh"}, {"signature": "y"}
    ),
    "messages[](assistant).content[](redacted_thinking)": Part(
        {"type": "redacted_thinking", "data": "x"}, {}, {"data": "y"}
    ),
    "messages[](assistant).content[](tool_use)": Part(
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        {"id": "2", "name": "g", "input": {"a": "b"}},
        {"caller": {"type": "direct"}, "toolset_name": None} | CACHED,
        {"toolset_name": "t"},
    ),
    "context_management": Part({}),
    "context_management.edits[](clear_thinking_20251015)": Part(
        {"type": "clear_thinking_20251015"}, {}, {"keep": "all"}
    ),
    "context_management.edits[](clear_tool_uses_20250919)": Part(
        {"type": "clear_tool_uses_20250919"},
        {},
        {
            "trigger": {"type": "input_tokens", "value": 5000},
            "keep": {"type": "tool_uses", "value": 3},
            "clear_at_least": {"type": "input_tokens", "value": 5},
            "clear_tool_inputs": True,
            "exclude_tools": ["f"],
        },
    ),
    "context_management.edits[](compact_20260112)": Part(
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}},
        {},
        {"instructions": "x", "pause_after_compaction": True, "trigger": {"type": "input_tokens", "value": 60_000}},
    ),
    "tools[](custom).input_schema(object)": Part(
        {"type": "object"}, {"properties": {"b": {"type": "integer"}}, "required": ["a"]}
    ),
    "diagnostics": Part({}, {}, {"previous_message_id": None}, {"previous_message_id": "msg_1"}),
}
PARTS = {CHAT: CHAT_PARTS, RESPONSES: RESPONSE_PARTS, MESSAGES: MESSAGE_PARTS}

# Blocks that only Anthropic's servers can interpret.
_OF_VENDOR = "container_upload|compaction|tool_addition|tool_removal|fallback"
# Objects that are refused by their tags or left out with a warning, keyed by the list that contains them.
REFUSED: dict[str, dict[str, str]] = {
    CHAT: {
        "function_call": "",
        "tool_choice": "custom",
        "tools[]": "custom",
        "messages[](user).content[]": "image_url|input_audio|file",
        "messages[](assistant).tool_calls[]": "custom",
    },
    RESPONSES: {
        "input[]": "additional_tools|program|configuration_update|compaction_trigger|program_output",
        "tool_choice": "file_search|mcp|programmatic_tool_calling|apply_patch|shell",
        "tools[]": "computer|computer_use_preview|programmatic_tool_calling|local_shell|shell|apply_patch",
        "input[](message).content[]": "input_file",
        "input[](function_call).caller": "program",
        "input[](function_call_output).caller": "program",
        "input[](custom_tool_call_output).caller": "program",
        "input[](custom_tool_call).caller": "program",
    },
    MESSAGES: {
        "thinking": "between_tools",
        # Tools whose schemas only Anthropic's models know.
        "tools[]": "(bash|memory|text_editor|computer)_[0-9]{8}|(browser|computer)_toolset_[0-9]{8}|mcp_toolset",
        "messages[](user).content[]": _OF_VENDOR,
        "messages[](assistant).content[]": _OF_VENDOR,
        "messages[](system).content[]": "tool_addition|tool_removal",
        "messages[](user).content[](document).source": "base64|url|file",
        "messages[](user).content[](tool_result).content[]": "browser_state",
    },
}
LEFT_OUT: dict[str, dict[str, str]] = {
    CHAT: {},
    RESPONSES: {"tools[]": "file_search|web_search|web_search_preview|mcp|code_interpreter|image_generation"},
    MESSAGES: {
        "tools[]": "(web_search|web_fetch|code_execution|tool_search_tool_bm25|tool_search_tool_regex|advisor)_[0-9]{8}"
    },
}
# Objects that the model reads as text.
_USED = "server_tool_use|.*_tool_result|mcp_tool_use|mcp_tool_listing"
AS_TEXTS: dict[str, dict[str, str]] = {
    CHAT: {},
    RESPONSES: {
        "input[]": "(web_search|file_search|computer|image_generation|code_interpreter|local_shell|shell|apply_patch)"
        "_call|(computer|local_shell|shell|apply_patch)_call_output|mcp_.*",
        "input[](function_call_output).output[]": "input_file",
        "input[](custom_tool_call_output).output[]": "input_file",
    },
    MESSAGES: {"messages[](user).content[]": _USED, "messages[](assistant).content[]": _USED},
}

# Objects that another test covers.
ELSEWHERE = {"input[](item_reference)": "test_items_may_be_named"}


def whole_fields(path: str) -> set[str]:
    """Return the fields of a request that are refused, or have no effect, together with all nested fields."""
    kind = next(route.request for route in POSTED if route.path == path)
    rows = list(field_rows(kind))
    return {row.name for row in rows if not row.takes or "no effect" in row.note} | {"access_programs"}


def objects(path: str) -> list[tuple[str, Any]]:
    """Return the paths and types of all objects within the requests of a path."""
    waiting: list[tuple[str, Any]] = [("", kind) for kind in TYPED[path]]
    for at, kind in waiting:
        part = PARTS[path].get(at)
        whole = whole_fields(path) if not at else {} if part is None else {**part.inert, **part.refused}
        for name, hint in fields_of(kind).items() if part or not at else ():
            if name not in whole:
                found = [each for each in variants(f"{at}.{name}".lstrip("."), hint) if each not in waiting]
                waiting += found
    return [(at, kind) for at, kind in waiting if at and at not in ELSEWHERE]


def body_with(path: str, at: str, value: Any) -> dict[str, Any]:
    """Return a request that has an object at the path `at`."""
    above, _, last = at.rpartition(".")
    name, _, _ = last.partition("(")
    given = [value] if name.endswith("[]") else value
    name = name.removesuffix("[]")
    if name == "messages" and not above:
        given = [QUESTION, value]
    if above:
        return body_with(path, above, PARTS[path][above].least | {name: given})
    return PLAIN[path] | {name: given}


def joined(answers: list[Any]) -> list[Any]:
    """Return the responses, with the text of a chat's chunks joined and appended as the last element.

    The number of tokens in a chunk depends on timing.
    """
    kept, text = [], ""
    for answer in answers:
        choices = [choice for choice in answer.get("choices", ()) if "delta" in choice]
        text += "".join(choice["delta"].pop("content", None) or "" for choice in choices)
        if not choices or any(choice["delta"] or choice["finish_reason"] for choice in choices):
            kept.append(answer)
    return [*kept, text]


@dataclass
class ApiServer:
    server: HttpServer
    begun: list[Begun]

    async def send(self, path: str, body: dict[str, Any]) -> tuple[int, Any, Request | None, str | None]:
        """Send a request.

        Returns the status, the response without the parts that vary, the request that was started, and the warning.
        """
        self.begun.clear()
        response = await self.server.post(path, **body)
        texts = [response.text]
        if response.headers["content-type"].startswith("text/event-stream"):
            texts = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        answers = joined([json.loads(text, object_hook=steady) for text in texts])
        begun = self.begun[0][2] if self.begun else None
        return response.status_code, answers, begun, response.headers.get("warning")

    async def refusal(self, path: str, body: dict[str, Any]) -> str:
        """Return the name of the refused field, without its indexes."""
        response = await self.server.post(path, **body)
        assert response.status_code == 400, response.text
        return re.sub(r"\[\d+\]", "", response.json()["error"]["param"] or "")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    model = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "chatty", max_model_len=LENGTH)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with noting_requests() as begun:
        async with serve_http(model) as server:
            yield ApiServer(server, begun)


def without_tags(at: str) -> str:
    return re.sub(r"\[\]|\([^)]*\)", "", at)


@pytest.mark.parametrize("path", sorted({*TYPED, *VLLM}))
async def test_every_field_of_a_request_is_known(path: str) -> None:
    """The field has a row in docs/http_api.md, whose statement test_fields.py tests."""
    kind = next(route.request for route in POSTED if route.path == path)
    assert published(path) <= {row.name for row in field_rows(kind)}


@pytest.mark.parametrize("path", PARTS)
async def test_every_field_of_an_object_is_known(path: str) -> None:
    found = objects(path)
    shown = {kind for at, kind in found if at in PARTS[path]}
    assert {*PARTS[path]} == {at for at, _ in found if at in PARTS[path]}
    unknown = []
    for at, kind in found:
        part = PARTS[path].get(at)
        if part is not None:
            named = {*part.least, *part.honoured, *part.inert, *part.refused}
            within = {name.removeprefix(f"{at}.") for name in map(_field_above, PARTS[path])}
            fields = {name for name, hint in fields_of(kind).items() if not is_tag(hint)}
            unknown += [f"{at}.{name}" for name in fields - named - within]
        elif kind not in shown and not any(is_listed(each[path], at) for each in (REFUSED, LEFT_OUT, AS_TEXTS)):
            unknown.append(at)
    assert unknown == []


def _field_above(at: str) -> str:
    return re.sub(r"(\[\])?(\([^)]*\))?$", "", at)


def is_listed(known: dict[str, str], at: str) -> bool:
    above, tag = apart(at)
    return above in known and re.fullmatch(known[above], tag) is not None


def apart(at: str) -> tuple[str, str]:
    """Return the list or field that contains an object, and the object's tag or an empty string."""
    found = re.fullmatch(r"(.*?)(?:\(([^()]*)\))?", at)
    assert found is not None
    return found[1], found[2] or ""


CASES = [(path, at) for path, parts in PARTS.items() for at in parts]


@pytest.mark.parametrize(("path", "at"), CASES)
async def test_nested_fields_are_honored_inert_or_refused(door: ApiServer, path: str, at: str) -> None:
    part = PARTS[path][at]
    sent = await door.send(path, body_with(path, at, part.least) | part.beside)
    assert sent[0] == 200, sent
    for name, value in part.honoured.items():
        seen = await door.send(path, body_with(path, at, part.least | {name: value}) | part.beside)
        assert (name, seen[0]) == (name, 200), seen
        assert seen[1:3] != sent[1:3], name
    for name, value in part.inert.items():
        seen = await door.send(path, body_with(path, at, part.least | {name: value}) | part.beside)
        assert (name, seen) == (name, sent)
    for name, value in part.refused.items():
        refused = await door.refusal(path, body_with(path, at, part.least | {name: value}) | part.beside)
        assert refused.startswith(f"{without_tags(at)}.{name}") or without_tags(at).startswith(refused), refused


@pytest.mark.parametrize("path", PARTS)
async def test_an_object_that_is_refused_or_left_out_or_a_text(door: ApiServer, path: str) -> None:
    plain = await door.send(path, PLAIN[path])
    shown = {kind for at, kind in objects(path) if at in PARTS[path]}
    for at, kind in objects(path):
        above, tag = apart(at)
        if at in PARTS[path] or kind in shown:
            continue
        value = {"type": tag, "name": "f"}
        if is_listed(REFUSED[path], at):
            refused = await door.refusal(path, body_with(path, at, value | {tag: {"name": "f"}}))
            assert refused, at
            assert refused.startswith(without_tags(above)) or without_tags(above).startswith(refused), (at, refused)
        elif is_listed(AS_TEXTS[path], at):
            status, _, begun, _ = await door.send(path, body_with(path, at, value))
            assert (at, status, begun == plain[2]) == (at, 200, False)
        else:
            status, *seen, warning = await door.send(path, body_with(path, at, value))
            assert (at, status) == (at, 200), seen
            assert "left out" in (warning or "")
            assert seen == [*plain[1:3]]
