"""Tool calls and reasoning over HTTP: streamed and whole responses are equal, whatever the model writes."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from pagewire.common.chat.schema_budget import MAX_VALUES
from scheduler_service.config import FrontEndConfig, HttpOptions
from testing.serving.http_server import HttpServer, serve_http, server_of_the_module
from tests.contract.http.scripted import CALL, SECOND, WEATHER, Say, make_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

PATH = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TOOL = {"type": "function", "function": {"name": "weather"}}
MODES = ("auto", "required")
JSON = {"type": "json_object"}
MADE = ("weather", '{"city": "Oslo"}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


def folded(events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Return the content, reasoning, tool calls and finish reason that the events of a stream add up to."""
    content, reasoning, calls, reason = "", "", [], ""
    for event in events:
        ChatCompletionChunk.model_validate(event)
        [choice] = event["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, reasoning, [(name, arguments) for name, arguments in calls], reason


def told(answer: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Return the content, reasoning, tool calls and finish reason of a whole response."""
    ChatCompletion.model_validate(answer)
    [choice] = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return (
        message["content"] or "",
        message["reasoning"] or "",
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )


def last_format(server: HttpServer) -> Any:
    """Return the format in the structural tag of the last grammar."""
    return json.loads(server.stack.worker.grammars[-1].text)["format"]


async def both(server: HttpServer, **asked: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Send a chat whole and streamed, check that both results are equal, and return the result."""
    whole = told(await server.chat("hi", **asked))
    assert folded(await server.events(PATH, messages=[QUESTION], **asked)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ("hello", "", [], "stop")),
        (CALL, ("", "", [MADE], "tool_calls")),
        (f"I look.\n{CALL}\n{SECOND}", ("I look.", "", [MADE, ("now", "{}")], "tool_calls")),
        (f"<think>\nhm\n</think>\n\n{CALL}", ("", "hm", [MADE], "tool_calls")),
        ("<think>\nhm\n</think>\n\nhello", ("hello", "hm", [], "stop")),
        ("<tool_call>\noops\n</tool_call>", ("<tool_call>\noops\n</tool_call>", "", [], "stop")),
    ],
    ids=str,
)
async def test_content_reasoning_and_tool_calls(
    server: HttpServer, say: Say, text: str, expected: tuple[str, str, list[tuple[str, str]], str]
) -> None:
    say(text)
    assert await both(server, tools=TOOLS, max_tokens=150) == expected


async def test_without_tools_calls_are_text(server: HttpServer, say: Say) -> None:
    say(f"<think>hm</think>{CALL}")
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert await both(server, max_tokens=150, **asked) == (CALL, "hm", [], "stop")
    assert (await both(server, max_tokens=150, include_reasoning=False))[1] == ""
    plain = await both(server, max_tokens=150, chat_template="plain")
    assert plain[0] == f"<think>hm</think>{CALL}"


async def test_a_call_that_is_cut_is_the_same_call(server: HttpServer, say: Say) -> None:
    say(CALL)
    answers = [await both(server, tools=TOOLS, max_tokens=num) for num in range(1, 85, 4)]
    for content, _, calls, reason in answers:
        assert (CALL.startswith(content), reason in ("length", "tool_calls")) == (True, True)
        assert all(name == "weather" and MADE[1].startswith(arguments) for name, arguments in calls)
    assert any(calls and calls[0][1] not in ("", MADE[1]) for _, _, calls, _ in answers)


async def test_reasoning_that_the_template_begins(server: HttpServer, say: Say) -> None:
    say("hm\n</think>\n\nhello")
    assert await both(server, chat_template_kwargs={"thinks": True}, max_tokens=50) == ("hello", "hm", [], "stop")
    say("hm")
    assert (await both(server, chat_template_kwargs={"thinks": True}, max_tokens=50))[:2] == ("", "hm")


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("response_format", {"type": "json_object"}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ("guided_json", WEATHER, {"type": "json_schema", "json_schema": WEATHER}),
        ("guided_regex", "a+", {"type": "regex", "pattern": "a+"}),
        (
            "response_format",
            {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<a"]},
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": ""}],
            },
        ),
        ("guided_choice", ["a", "b"], {"type": "or", "elements": [{"type": "const_string", "value": v} for v in "ab"]}),
    ],
    ids=str,
)
async def test_grammars_apply_after_reasoning(
    server: HttpServer, say: Say, field: str, value: Any, form: dict[str, Any]
) -> None:
    say("hm</think>{}")
    thinks: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}, "max_tokens": 50}
    assert await both(server, **thinks, **{field: value}) == ("{}", "hm", [], "stop")
    elements = last_format(server)["elements"]
    assert (elements[0]["end"], elements[-1]) == ("</think>", form)
    say("{}")
    assert await both(server, max_tokens=50, **{field: value}) == ("{}", "", [], "stop")
    assert (await server.refusal(PATH, messages=[QUESTION], **thinks, guided_grammar='start: "a"'))["param"] == (
        "guided_grammar"
    )
    assert (await both(server, **thinks, bad_words=["cat"]))[1] == "{}"


async def test_text_beside_tool_calls_matches_the_response_format(server: HttpServer, say: Say) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "guided_json": {"type": "array"}, "max_tokens": 150}
    text = {"type": "json_schema", "json_schema": {"type": "array"}}
    for output, expected in ((CALL, ("", "", [MADE], "tool_calls")), ("[1]", ("[1]", "", [], "stop"))):
        say(output)
        assert await both(server, **asked) == expected
        [either, _] = last_format(server)["elements"]  # without reasoning, or after reasoning
        assert [form["type"] for form in either["elements"]] == ["tags_with_separator", "json_schema"]
        assert either["elements"][1] == text
    say(CALL)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert (await both(server, **asked, tool_choice=choice))[2] == [MADE]
        assert '"array"' not in server.stack.worker.grammars[-1].text
    say("[1]")
    await server.chat("hi", **asked, tool_choice="none")
    assert server.stack.worker.grammars[-1].text == '{"type":"array"}'


async def test_reasoning_has_a_budget(server: HttpServer, say: Say) -> None:
    say("hm</think>hello")
    thinks: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}, "max_tokens": 150}
    assert await both(server, **thinks, thinking_token_budget=3) == ("hello", "hm", [], "stop")
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text", "max_tokens": 3}, "end": "</think>"}
    space, free = {"type": "regex", "pattern": r"[ \n]{0,2}"}, {"type": "any_text", "excludes": ["<think>"]}
    assert last_format(server) == {"type": "sequence", "elements": [thought, space, free]}
    await server.chat("hi", **thinks, thinking_token_budget=0, guided_regex="a+")
    [thought["content"]["max_tokens"], free] = 0, {"type": "regex", "pattern": "a+", "excludes": ["<think>"]}
    assert last_format(server) == {"type": "sequence", "elements": [thought, space, free]}
    say(f"hm</think>{CALL}")
    assert await both(server, **thinks, thinking_token_budget=3, tools=TOOLS) == ("", "hm", [MADE], "tool_calls")
    assert last_format(server)["elements"][-1]["excludes"] == ["<think>"]
    await server.chat("hi", thinking_token_budget=3)
    assert last_format(server)["type"] == "or"
    parts = [
        {"type": "any_text", "excludes": ["b"]},
        {"type": "json_schema", "json_schema": {"const": {"type": "regex"}}},
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    await server.chat("hi", thinking_token_budget=3, response_format=tag)
    parts[0]["excludes"] = ["b", "<think>"]
    [alone, behind] = last_format(server)["elements"]
    assert alone == behind["elements"][-1] == tag["format"]
    for bad in ("b", 0):
        refused = tag | {"format": {"type": "any_text", "excludes": bad}}
        answer = await server.refusal(PATH, messages=[QUESTION], thinking_token_budget=3, response_format=refused)
        assert "as excludes, which must be a list of texts" in answer["message"]


async def test_what_the_template_is_given(server: HttpServer, model: Path, say: Say) -> None:
    say("x")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = await server.chat(messages=history, tools=TOOLS, return_token_ids=True)
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == 'weather,now,<user>hi<assistant><tool_call>{"city": "Oslo"}</tool_call><assistant>'


async def test_grammars_hold_calls_to_what_is_asked(server: HttpServer, model: Path, say: Say) -> None:
    say(CALL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    named = TOOL
    allowed = {mode: {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}} for mode in MODES}
    for asked, kind, names in (
        ({}, "triggered_tags", ["weather", "now"]),
        ({"tool_choice": "required"}, "tags_with_separator", ["weather", "now"]),
        ({"tool_choice": named}, "tags_with_separator", ["weather"]),
        ({"tool_choice": TOOLS[0]}, "tags_with_separator", ["weather"]),  # some clients send the whole tool
        ({"tool_choice": allowed["auto"]}, "triggered_tags", ["weather"]),
        ({"tool_choice": allowed["required"]}, "tags_with_separator", ["weather"]),
    ):
        answer = await server.chat("hi", tools=TOOLS, max_tokens=100, return_token_ids=True, **asked)
        assert tokenizer.decode(answer["prompt_token_ids"]).startswith("weather,now")
        [calls, _] = last_format(server)["elements"]
        assert (calls["type"], calls["stop_after_first"]) == (kind, asked.get("tool_choice") in (named, TOOLS[0]))
        assert [json.loads(tag["begin"].partition("\n")[2] + "0}")["name"] for tag in calls["tags"]] == names
        assert calls["tags"][0]["content"]["json_schema"] == WEATHER


async def test_formats_may_be_named(model: Path, say: Say) -> None:
    say(f"[THINK]hm[/THINK]{CALL}")
    front = {"tool_call_parser": "hermes", "reasoning_parser": "mistral"}
    async with serve_http(model, front=front) as server:
        for asked in ({}, {"chat_template": "plain"}):
            assert await both(server, tools=TOOLS, max_tokens=150, **asked) == ("", "hm", [MADE], "tool_calls")
    say("<think>hm</think>hello")
    async with serve_http(model, front={"tool_call_parser": "none", "reasoning_parser": "none"}) as server:
        assert (await both(server, max_tokens=150))[:2] == ("<think>hm</think>hello", "")
        for field, asked in (("tools", {"tools": TOOLS}), ("thinking_token_budget", {"thinking_token_budget": 1})):
            assert (await server.refusal(PATH, messages=[QUESTION], **asked))["param"] == field
    for flag in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ValueError, match=rf"^--{flag.replace('_', '-')} is 'poem', but must be one of .*none$"):
            FrontEndConfig(model="m", http=HttpOptions(**{flag: "poem"})).validate()
    for calls, reasoning, agree in (
        ("openai", "openai_gptoss", True),
        ("openai", None, True),
        (None, "openai_gptoss", True),
        ("hermes", "qwen3", True),
        ("hermes", "openai_gptoss", False),
        ("none", "openai_gptoss", False),
        ("openai", "qwen3", False),
        ("openai", "none", False),
    ):
        config = FrontEndConfig(model="m", http=HttpOptions(tool_call_parser=calls, reasoning_parser=reasoning))
        said = f"^--tool-call-parser {calls} and --reasoning-parser {reasoning} cannot go together: .*requires"
        with nullcontext() if agree else pytest.raises(ValueError, match=said):
            config.validate()


async def test_calls_that_are_left_to_the_model_may_be_free(model: Path, say: Say) -> None:
    async with serve_http(model, front={"strict_tools": False}) as server:
        say(CALL)
        assert await both(server, tools=TOOLS, max_tokens=150) == ("", "", [MADE], "tool_calls")
        assert not server.stack.worker.grammars
        for asked in ({"tool_choice": "required"}, {"thinking_token_budget": 2}, {"response_format": JSON}):
            assert (await both(server, tools=TOOLS, max_tokens=150, **asked))[2] == [MADE]
            assert '"weather' in json.dumps(last_format(server)).replace("\\", "")


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
        ("tools[1].function.name", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]}),
        ("tools", {"tools": TOOLS, "chat_template": "plain"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        *(
            ("tool_choice", {"tools": given, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})
            for given in (TOOLS, [])
            for allowed in ({"mode": "auto", "tools": [TOOL, {"type": "function", "function": {"name": "other"}}]},)
        ),
        ("thinking_token_budget", {"thinking_token_budget": -2}),
        ("thinking_token_budget", {"thinking_token_budget": 1, "chat_template": "plain"}),
        ("bad_words", {"thinking_token_budget": 1, "bad_words": ["cat"]}),
        ("guided_grammar", {"tools": TOOLS, "guided_grammar": 'start: "a"'}),
        ("response_format", {"tools": TOOLS, "response_format": {"type": "json_object", "schema": []}}),
        ("guided_regex", {"tools": TOOLS, "response_format": {"type": "json_object"}, "guided_regex": "a"}),
    ],
    ids=str,
)
async def test_what_is_refused(server: HttpServer, field: str, asked: dict[str, Any]) -> None:
    assert (await server.refusal(PATH, messages=[QUESTION], **asked))["param"] == field


async def test_schemas_of_too_many_values_are_refused_by_each_api(server: HttpServer) -> None:
    definitions = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{j}"} for j in range(120)]} for i in range(120)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": definitions}
    many = ["x"] * MAX_VALUES
    message, tool = {"messages": [QUESTION]}, {"name": "f"}
    function = {"type": "function", "function": tool | {"parameters": schema}}
    for path, asked in (
        (PATH, message | {"tools": [function]}),
        ("/v1/messages", message | {"max_tokens": 1, "tools": [tool | {"input_schema": schema}]}),
        ("/v1/responses", {"input": "hi", "tools": [tool | {"type": "function", "parameters": schema}]}),
    ):
        error = await server.refusal(path, **asked)
        assert error["param"] == "tools[0]"
        assert f"have more than {MAX_VALUES} values" in error["message"]
        assert "send simpler schemas" in error["message"]
    thinks: dict[str, Any] = {"messages": [QUESTION], "chat_template_kwargs": {"thinks": True}}
    for field, value in (
        ("guided_json", {"enum": many}),
        ("guided_choice", many),
        ("guided_regex", "[a]" * MAX_VALUES),
    ):
        assert (await server.refusal(PATH, **thinks, **{field: value}))["param"] == field


async def test_copies_of_definitions_are_counted(model: Path) -> None:
    schema = {
        "properties": {f"p{i}": {"type": "integer"} for i in range(50)},
        "$defs": {"a": {"enum": ["x"] * (MAX_VALUES // 40)}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with serve_http(model, front={"tool_call_parser": "qwen3_coder"}) as server:
        error = await server.refusal(PATH, messages=[QUESTION], tools=[tool])
    assert error["param"] == "tools"
    assert f"have more than {MAX_VALUES} values" in error["message"]
