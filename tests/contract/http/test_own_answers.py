"""Clients can send the server's own responses back in every API, even if the model's chat template is strict."""

from pathlib import Path
from typing import Any

import anthropic
import pytest

from testing.serving.http_server import HttpServer
from tests.contract.http.scripted import CALL, SECOND, WEATHER, Say, make_tool_checkpoint

# The template accepts one system message, one tool call for each assistant message, ids of nine characters, and no text
# beside reasoning and a tool call.
PARTICULAR = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' "
    "or m.role == 'tool' and m.tool_call_id|length != 9 or m.tool_calls and (m.tool_calls|length != 1 "
    "or m.tool_calls[0].id|length != 9 or m.content and m.thinking) %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.thinking }}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}<assistant>"
    "{# <think> </think> <tool_call> #}"
)
LENGTH = 1024
WRITTEN = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{SECOND}"
ROUNDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tool_checkpoint(tmp_path_factory.mktemp("models") / "particular", max_model_len=LENGTH)
    (path / "chat_template.jinja").write_text(PARTICULAR)
    return path


def tools(**form: Any) -> list[dict[str, Any]]:
    return [{"name": name, **form} for name in ("weather", "now")]


async def test_chats_are_continued(server: HttpServer, say: Say) -> None:
    say(WRITTEN)
    functions = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "now")]
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}]
    messages += [{"role": "user", "content": "q"}]
    for _ in range(ROUNDS):
        answer = await server.openai.chat.completions.create(
            model="particular", messages=messages, tools=functions, max_tokens=300, reasoning_effort="low"
        )
        message = answer.choices[0].message
        calls = message.tool_calls or []
        assert [call.function.name for call in calls] == ["weather", "now"]
        messages += [message.model_dump()]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "r"} for call in calls]


async def test_responses_are_continued(server: HttpServer, say: Say) -> None:
    say(WRITTEN)
    before, given = None, [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
    for _ in range(ROUNDS):
        answer = await server.openai.responses.create(
            model="particular",
            instructions="s",
            input=given,
            previous_response_id=before,
            tools=tools(type="function", parameters={}),
            max_output_tokens=300,
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in calls]
        before = answer.id


async def test_messages_are_continued(server: HttpServer, say: Say) -> None:
    say(WRITTEN)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for _ in range(ROUNDS):
            message = await client.messages.create(
                model="particular", system="s", messages=messages, tools=tools(input_schema=WEATHER), max_tokens=300
            )
            used = [block.id for block in message.content if block.type == "tool_use"]
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            messages += [{"role": "assistant", "content": message.content}]
            results = [{"type": "tool_result", "tool_use_id": tool_id, "content": "r"} for tool_id in used]
            messages += [{"role": "user", "content": results}]
