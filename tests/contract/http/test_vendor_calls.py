"""Conversations with tool calls that ran on a vendor's servers can be continued. The model reads these calls as text.

The items have the forms that OpenAI's and Anthropic's clients return. Each is from a public report or the vendor's
docs.
"""

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.api.http.body import decode_body
from scheduler_service.api.http.messages.requests import MessagesRequest
from scheduler_service.api.http.responses.conversation import items_of, to_chat_request
from scheduler_service.api.http.responses.requests import ResponsesRequest
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.serving.http_server import HttpServer, serve_http
from tests.contract.http.scripted import Say, make_tool_checkpoint
from tests.growth import check_growth

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LENGTH = 2048
IMAGE = "[An image was left out here: the model reads text only.]"
WARNING = '299 - "images, files and lists of tools are left out of calls of tools that ran at the vendor"'
QUESTION, THANKS = {"role": "user", "content": "hi"}, {"role": "user", "content": "thanks"}
SEARCH = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {
        "type": "search",
        "query": "sun in Oslo",
        "queries": ["sun in Oslo"],
        "sources": [{"type": "url", "url": "https://example.com/sun"}],
    },
}
SEARCHED = (
    '[Called web_search: {"type": "search", "query": "sun in Oslo", "queries": ["sun in Oslo"], '
    '"sources": [{"type": "url", "url": "https://example.com/sun"}]}]'
)
# Items of responses, each with the text that the model reads.
CALLS: list[tuple[dict[str, Any], str]] = [
    (SEARCH, SEARCHED),
    (
        SEARCH | {"status": "failed", "action": {"type": "open_page", "url": "https://example.com/a"}},
        '[Called web_search: {"status": "failed", "action": {"type": "open_page", "url": "https://example.com/a"}}]',
    ),
    (
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["tax"]}
        | {"results": [{"file_id": "file-1", "filename": "a.pdf", "score": 0.5, "text": "19 %", "attributes": None}]},
        '[Called file_search: {"queries": ["tax"], "results": [{"file_id": "file-1", "filename": "a.pdf", '
        '"score": 0.5, "text": "19 %"}]}]',
    ),
    (
        {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "cntr_1"}
        | {"code": "print(1)", "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "https://x"}]},
        f'[Called code_interpreter: {{"code": "print(1)", "outputs": [{{"type": "logs", "logs": "1"}}, "{IMAGE}"]}}]',
    ),
    (
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="}
        | {"revised_prompt": "a cat"},
        f'[Called image_generation: {{"result": "{IMAGE}", "revised_prompt": "a cat"}}]',
    ),
    (
        {"type": "computer_call", "id": "cu_1", "call_id": "1", "status": "completed", "pending_safety_checks": []}
        | {"action": {"type": "click", "button": "left", "x": 1, "y": 2}},
        '[Called computer: {"pending_safety_checks": [], "action": {"type": "click", "button": "left", "x": 1, '
        '"y": 2}}]',
    ),
    (
        {"type": "mcp_call", "id": "mcp_1", "server_label": "dice", "name": "roll", "arguments": '{"n": 2}'}
        | {"output": "4", "error": None, "approval_request_id": None, "status": "completed"},
        '[Called roll: {"server_label": "dice", "arguments": "{\\"n\\": 2}", "output": "4"}]',
    ),
    (
        {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "dice", "name": "roll", "arguments": "{}"},
        '[Called roll: {"server_label": "dice", "arguments": "{}"}]',
    ),
    (
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "dice", "tools": [{"name": "roll"}]},
        "[A list of tools was left out here: they do not run here.]",
    ),
    (
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "1", "status": "completed"}
        | {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}}},
        '[Called local_shell: {"type": "exec", "command": ["ls", "-l"], "env": {}}]',
    ),
    (
        {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}, "caller": {"type": "direct"}},
        '[Called shell: {"commands": ["ls"]}]',
    ),
    (
        {"type": "apply_patch_call", "call_id": "1", "status": "completed"}
        | {"operation": {"type": "delete_file", "path": "a"}},
        '[Called apply_patch: {"type": "delete_file", "path": "a"}]',
    ),
]
RESULTS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "computer_call_output", "call_id": "1"}
        | {"output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"}},
        f"[Result of computer: {IMAGE}]",
    ),
    ({"type": "local_shell_call_output", "id": "1", "output": "a.txt"}, "[Result of local_shell: a.txt]"),
    (
        {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a", "stderr": ""}]},
        '[Result of shell: [{"stdout": "a", "stderr": ""}]]',
    ),
    (
        {"type": "apply_patch_call_output", "call_id": "1", "status": "failed", "output": "no file"},
        '[Result of apply_patch: {"status": "failed", "output": "no file"}]',
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False},
        '[Result of mcp_approval: {"approval_request_id": "mcpr_1", "approve": false}]',
    ),
]
# Blocks of messages, each with the text that the model reads.
FETCHED = {"type": "web_fetch_result", "url": "https://example.com/a"}
BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "sun"}},
        '[Called web_search: {"query": "sun"}]',
    ),
    (
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "cache_control": {"type": "ephemeral"}}
        | {
            "content": [
                {"type": "web_search_result", "title": "Sun", "url": "https://example.com/sun", "page_age": None}
                | {"encrypted_content": "EqgfCioI"}
            ]
        },
        '[Result of web_search: [{"type": "web_search_result", "title": "Sun", "url": "https://example.com/sun"}]]',
    ),
    (
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1"}
        | {"content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}},
        '[Result of web_search: {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}]',
    ),
    (
        {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2"}
        | {"content": FETCHED | {"content": {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}}},
        '[Result of web_fetch: {"type": "web_fetch_result", "url": "https://example.com/a", "content": '
        '{"type": "document", "source": "[A file was left out here: the model reads text only.]"}}]',
    ),
    (
        {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_3"}
        | {"content": {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0}},
        '[Result of bash_code_execution: {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", '
        '"return_code": 0}]',
    ),
    (
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "roll", "server_name": "dice", "input": {"n": 2}},
        '[Called roll: {"server_name": "dice", "input": {"n": 2}}]',
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False}
        | {"content": [{"type": "text", "text": "4"}]},
        '[Result of mcp: ["4"]]',
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": True, "content": "broken"},
        '[Result of mcp: {"is_error": true, "content": "broken"}]',
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
async def server(model: Path) -> AsyncIterator[HttpServer]:
    worker = FakeWorker(read_model_info(str(model)).digest, max_model_len=LENGTH)
    await worker.start()
    async with serve_http(model, worker=worker) as server:
        yield server


def turns(messages: Any) -> list[tuple[Any, ...]]:
    """Return the role, the text, and the reasoning of each message."""
    return [(each["role"], each["content"], each.get("reasoning_content") or "") for each in messages]


async def test_items_of_responses_are_texts(
    server: HttpServer, say: Say, rendered: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    say("hello")
    for listed, role in ((CALLS, "assistant"), (RESULTS, "user")):
        for item, text in listed:
            caplog.clear()
            response = await server.post(RESPONSES, input=[QUESTION, item, THANKS], store=False)
            assert response.status_code == 200, response.text
            assert turns(rendered[-1]) == [("user", "hi", ""), (role, text, ""), ("user", "thanks", "")]
            is_whole = "left out" not in text
            assert response.headers.get("warning") == (None if is_whole else WARNING)
            assert ("left out of calls of tools that ran at the vendor" in caplog.text) is not is_whole


async def test_items_of_one_turn_are_one_message(server: HttpServer, say: Say, rendered: list[Any]) -> None:
    """Items of one turn become one message.

    OpenAI's models reason between searches, so a turn may have several items.
    """
    say("hello")
    thoughts = [
        {"type": "reasoning", "id": f"rs_{index}", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for index, text in enumerate(("hm", "oh"))
    ]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It shines."}]}
    asked = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    answered = {"type": "function_call_output", "call_id": "1", "output": "x"}
    turn = [thoughts[0], SEARCH, thoughts[1], SEARCH, said]
    await server.post(RESPONSES, input=[QUESTION, *turn, THANKS])
    assert turns(rendered[-1])[1:-1] == [("assistant", f"{SEARCHED}\n\n{SEARCHED}\n\nIt shines.", "hm\n\noh")]
    for calls in ([SEARCH, asked], [asked, SEARCH]):
        await server.post(RESPONSES, input=[QUESTION, *calls, answered, THANKS])
        assert turns(rendered[-1])[1:-1] == [("assistant", SEARCHED, ""), ("tool", "x", "")]
        assert len(rendered[-1][1]["tool_calls"]) == 1
    # Two assistant messages that do not belong to one turn stay separate.
    await server.post(RESPONSES, input=[QUESTION, said, said, THANKS])
    assert len(rendered[-1]) == 4


async def test_a_stored_response_keeps_vendor_calls(server: HttpServer, say: Say, rendered: list[Any]) -> None:
    say("hello")
    first = (await server.post(RESPONSES, input=[QUESTION, SEARCH])).json()
    second = await server.post(RESPONSES, input="thanks", previous_response_id=first["id"])
    assert second.status_code == 200
    assert turns(rendered[-1])[1] == ("assistant", f"{SEARCHED}\n\nhello", "")
    listed = (await server.client.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    assert [(item["type"], item["id"]) for item in listed if item["role"] == "assistant"] == [("message", "ws_1")]


async def test_blocks_of_messages_are_texts(
    server: HttpServer, say: Say, rendered: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    say("hello")
    cited = {"type": "web_search_result_location", "url": "https://example.com/sun", "title": "Sun"}
    cited |= {"cited_text": "It shines.", "encrypted_index": "x"}
    answer = [{"type": "text", "text": "I look."}, None, {"type": "text", "text": "It shines.", "citations": [cited]}]
    for block, text in BLOCKS:
        caplog.clear()
        content = [each or block for each in answer]
        messages = [QUESTION, {"role": "assistant", "content": content}, THANKS]
        response = await server.post(MESSAGES, messages=messages, max_tokens=5)
        assert response.status_code == 200, response.text
        assert turns(rendered[-1])[1] == ("assistant", f"I look.\n{text}\nIt shines.", "")
        is_whole = "left out" not in text
        assert response.headers.get("warning") == (None if is_whole else WARNING)
        assert ("left out of calls of tools that ran at the vendor" in caplog.text) is not is_whole


async def test_vendor_calls_without_a_text_form_are_refused(server: HttpServer) -> None:
    for kind in ("container_upload", "fallback", "web_searched_tool_result"):
        error = await server.refusal(
            MESSAGES, messages=[{"role": "user", "content": [{"type": kind, "file_id": "x"}]}], max_tokens=5
        )
        assert error["param"] == "messages[0].content[0].type"
    for kind in ("program", "web_call", "shell_call_result"):
        error = await server.refusal(RESPONSES, input=[QUESTION, {"type": kind}])
        assert error["param"] == "input[1].type"


def test_vendor_calls_are_parsed_in_linear_time() -> None:
    def read_blocks(number: int) -> None:
        content = [block for block, _ in BLOCKS] * number
        body = {"max_tokens": 4, "messages": [{"role": "assistant", "content": content}]}
        assert len(decode_body(json.dumps(body).encode(), MessagesRequest).messages[0].content) == len(content)

    def read_items(number: int) -> None:
        request = ResponsesRequest(input=[item for item, _ in CALLS] * number)
        assert len(items_of(request)) == len(CALLS) * number

    for read in (read_blocks, read_items):
        check_growth("calls of a vendor", partial(partial, read), 12)


def test_the_texts_of_a_turn_are_joined_in_linear_time() -> None:
    def prepare(number: int) -> Callable[[], object]:
        long = {"type": "mcp_call", "name": "read", "output": "x" * 2000 * number}
        request = ResponsesRequest(input=[long, *[{"type": "web_search_call"}, {"type": "reasoning"}] * number])
        return partial(to_chat_request, request, items_of(request))

    check_growth("calls of a turn", prepare, 100)
