"""`/v1/responses` as Codex calls it, in its first request and later turns, through OpenAI's client."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from tokenizers import Tokenizer

from scheduler_service.api.http import prompts
from testing.serving.http_server import HttpServer, server_of_the_module
from tests.contract.http.response_items import PATH
from tests.contract.http.scripted import Say, make_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

LENGTH = 1024
COMMAND = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}, "tty": {"type": "boolean"}},
    "required": ["cmd"],
    "additionalProperties": False,
}
TARGETS = {"type": "object", "properties": {"targets": {"type": "array", "items": {"type": "string"}}}}
PATCH_GRAMMAR = 'start: "*** Begin Patch" LF\nLF: /\\n/'
PATCH = '*** Begin Patch\n+ "a" \\ 𝄞\n'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": COMMAND},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Agents.",
        "tools": [
            {"type": "function", "name": "close_agent", "description": "Closes.", "strict": False, "parameters": {}},
            {"type": "function", "name": "wait_agent", "description": "Waits.", "strict": False, "parameters": TARGETS},
        ],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Patches.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]


def of_role(role: str, number: int, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": parts}


# The form of the first request of Codex CLI 0.171.0, with fewer tools.
FIRST: dict[str, Any] = {
    "model": "chatty",
    "input": [
        of_role("developer", 1, "You code."),
        of_role("developer", 2, "Be kind.", " Be brief."),
        of_role("user", 3, "The folder is /x."),
        of_role("user", 4, "Look."),
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a key",
}
METADATA = {"client_metadata": {"thread_id": "1", "x-codex-turn-metadata": "{}"}}
VENDOR = "tools that run at the vendor are left out: image_generation, web_search"
GRAMMARS = "the grammars of custom tools are given to the model, but not enforced"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty", max_model_len=LENGTH)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The messages and the template variables of each chat that is rendered."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    render = prompts.render

    def noted(template: str, messages: Any, **options: Any) -> str:
        seen.append((messages, options["variables"]))
        return render(template, messages, **options)

    monkeypatch.setattr(prompts, "render", noted)
    return seen


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def both(server: HttpServer, **asked: Any) -> tuple[Response, list[Any]]:
    """Create a response twice, whole and streamed. Return the whole response and the events of the stream."""
    asked = FIRST | {"extra_body": METADATA} | asked
    whole = await server.openai.responses.create(**asked)
    Response.model_validate(whole.model_dump(warnings="error", by_alias=True))
    events = [event async for event in await server.openai.responses.create(**asked, stream=True)]
    dumps = [[item.model_dump(exclude={"id", "call_id"}) for item in it.output] for it in (events[-1].response, whole)]
    assert dumps[0] == dumps[1]
    return whole, events


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_first_request(
    server: HttpServer, say: Say, rendered: list[Any], caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    say("hello")
    answer = await server.post(PATH, **FIRST, **METADATA, stream=is_streamed)
    assert (answer.status_code, "hello" in answer.text) == (200, True), answer.text
    assert answer.headers["warning"] == f'299 - "{VENDOR}", 299 - "{GRAMMARS}"'
    assert [text for text in (VENDOR, GRAMMARS) if text in caplog.text] == [VENDOR, GRAMMARS]
    [(messages, variables)] = rendered
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "You code."),
        ("system", "Be kind. Be brief."),
        ("user", "The folder is /x."),
        ("user", "Look."),
    ]
    functions = {tool["function"]["name"]: tool["function"] for tool in variables["tools"]}
    names = ["exec_command", "multi_agent_v1__close_agent", "multi_agent_v1__wait_agent", "apply_patch"]
    assert [*functions] == names
    assert functions["multi_agent_v1__close_agent"]["description"] == "Tools of multi_agent_v1: Agents.\n\nCloses."
    assert functions["multi_agent_v1__wait_agent"] == {
        "name": "multi_agent_v1__wait_agent",
        "description": "Waits.",
        "parameters": TARGETS,
    }
    assert functions["apply_patch"]["parameters"]["required"] == ["input"]
    assert PATCH_GRAMMAR in functions["apply_patch"]["description"]


async def test_an_answer_without_warnings_has_no_header(server: HttpServer, say: Say) -> None:
    say("hello")
    for is_streamed in (False, True):
        answer = await server.post(PATH, input="hi", tools=TOOLS[:2], stream=is_streamed)
        assert "warning" not in answer.headers


async def test_a_call_of_a_namespace_has_namespace_and_name_apart(server: HttpServer, say: Say) -> None:
    say(call("multi_agent_v1__wait_agent", '{"targets": ["a"]}') + call("exec_command", '{"cmd": "ls"}'))
    response, events = await both(server)
    called = [(item.type, item.namespace, item.name, item.arguments) for item in response.output]
    assert called == [
        ("function_call", "multi_agent_v1", "wait_agent", '{"targets": ["a"]}'),
        ("function_call", None, "exec_command", '{"cmd": "ls"}'),
    ]
    assert [tool.type for tool in response.tools] == ["function", "namespace", "custom"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in added] == [("multi_agent_v1", "wait_agent"), (None, "exec_command")]


async def test_a_custom_tool_is_called_with_a_text(server: HttpServer, say: Say) -> None:
    say(call("apply_patch", json.dumps({"input": PATCH})))
    response, events = await both(server)
    [item] = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH)
    told = [(event.type, getattr(event, "delta", None) or event.input) for event in events if ".custom" in event.type]
    kinds = ("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done")
    assert told == [(kind, PATCH) for kind in kinds]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": ""}', ""),
        ('{"patch": "x"}', '{"patch": "x"}'),  # the text that the model wrote is kept
        ('{"input": "a", "more": 1}', "a"),
    ],
)
async def test_what_a_custom_tool_is_given(server: HttpServer, say: Say, arguments: str, expected: str) -> None:
    say(call("apply_patch", arguments))
    response, _ = await both(server)
    assert [item.input for item in response.output] == [expected]


@pytest.mark.parametrize("end", ["Patch", "Patch\\n+ \\", "Patch\\n+ \\ud834", "Patch\\n+ \\ud834\\udd", "{"])
async def test_a_call_of_a_custom_tool_that_is_cut(server: HttpServer, model: Path, say: Say, end: str) -> None:
    text = call("apply_patch", json.dumps({"input": f"Patch\n+ 𝄞{PATCH}"}))
    say(text)
    cut = text.partition(end)[0] + end
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    response, _ = await both(server, max_output_tokens=len(tokenizer.encode(cut).ids))
    assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    for item in response.output:
        if item.type == "message":  # no tool call has begun
            assert end == "{"
            continue
        assert f"Patch\n+ 𝄞{PATCH}".startswith(item.input.rstrip("\ufffd"))
        assert item.input


@pytest.mark.parametrize("kind", ["function", "custom"])
async def test_a_tool_may_be_chosen(server: HttpServer, say: Say, kind: str) -> None:
    name, arguments = {"function": ("exec_command", '{"cmd": "a"}'), "custom": ("apply_patch", '{"input": "a"}')}[kind]
    say(call(name, arguments))
    response, _ = await both(server, tool_choice={"type": kind, "name": name})
    assert [item.name for item in response.output] == [name]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind, "name": name}]}
    response, _ = await both(server, tool_choice=allowed)
    assert [item.name for item in response.output] == [name]


@pytest.mark.parametrize(
    "asked",
    [
        {"truncation": "auto"},
        {"text": {"verbosity": "medium"}},
        {"max_tool_calls": 3},
        {"reasoning": {"context": "auto", "summary": "auto", "mode": "standard"}},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"tools": [{**TOOLS[0], "defer_loading": False, "allowed_callers": ["direct"], "async": False}]},
        {"tools": [{**TOOLS[0], "defer_loading": None, "output_schema": None, "allowed_callers": None, "async": None}]},
    ],
    ids=str,
)
async def test_fields_without_effect_are_accepted(server: HttpServer, say: Say, asked: dict[str, Any]) -> None:
    say("hello")
    answer = await server.post(PATH, input="hi", **asked)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("text.verbosity", {"text": {"verbosity": "loud"}}),
        ("reasoning.context", {"reasoning": {"context": "current_turn"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("include[1]", {"include": ["reasoning.encrypted_content", "message.output_text.words"]}),
        ("tools[0].type", {"tools": [{"type": "local_shell"}]}),
        ("tools[0].async", {"tools": [{**TOOLS[0], "async": True}]}),
        ("tools[0].allowed_callers[0]", {"tools": [{**TOOLS[0], "allowed_callers": ["programmatic"]}]}),
        ("tools[2].name", {"tools": [*TOOLS[:2], {"type": "custom", "name": "multi_agent_v1__wait_agent"}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tools": TOOLS[3:], "tool_choice": "required"}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (
            "input[0].caller.type",
            {
                "input": [
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
                    | {"caller": {"type": "program", "caller_id": "p"}}
                ]
            },
        ),
    ],
    ids=str,
)
async def test_unsupported_fields_are_refused_by_name(server: HttpServer, param: str, asked: dict[str, Any]) -> None:
    assert (await server.refusal(PATH, **{"input": "hi"} | asked))["param"].startswith(param)


@pytest.mark.parametrize(
    ("named", "heading"),
    [
        ({"name": "goal_objective", "namespace": "agent"}, "Output of agent__goal_objective:"),
        ({"name": "clock"}, "Output of clock:"),
        ({"call_id": None}, "Output of a tool:"),
    ],
    ids=str,
)
async def test_an_output_without_a_call_is_a_turn_of_the_user(
    server: HttpServer, say: Say, rendered: list[Any], named: dict[str, Any], heading: str
) -> None:
    """A tool output without a call becomes a user message.

    Codex sends the objective of a goal this way, as text that the user did not write.
    """
    say("done")
    result = {"type": "function_call_output", "id": "fco_1", "output": "see it through", **named}
    call = {"type": "function_call", "call_id": "1", "name": "exec_command", "arguments": "{}"}
    answer = {"type": "function_call_output", "call_id": "1", "name": "exec_command", "output": "ok"}
    for items in ([call, answer, result], [call, result, answer]):
        response = await server.openai.responses.create(**FIRST | {"input": [*FIRST["input"], *items]})
        assert response.output_text == "done"
        turns = [(message["role"], message["content"]) for message in rendered[-1][0][4:]]
        assert ("tool", "ok") in turns
        assert ("user", f"{heading}\n\nsee it through") in turns


async def test_fields_of_other_item_types_are_accepted(server: HttpServer) -> None:
    error = await server.refusal(PATH, input=[of_role("user", 1, "hi") | {"namespace": "a"}])
    assert error["message"].startswith("input[0].namespace is not a field of this request; remove it")


@pytest.mark.parametrize("store", [False, True])
async def test_a_loop_of_tools(server: HttpServer, say: Say, rendered: list[Any], store: bool) -> None:
    """A loop of tool calls continues if the client sends whole conversations, as Codex does.

    Items may contain null fields.
    """
    said = [
        "<think>\nhm\n</think>\n\n" + call("exec_command", '{"cmd": "ls"}'),
        call("multi_agent_v1__wait_agent", '{"targets": []}'),
        call("apply_patch", json.dumps({"input": PATCH})),
        "done",
    ]
    conversation: list[Any] = [*FIRST["input"]]
    last = None
    for text in said:
        say(text)
        since = {"previous_response_id": last.id, "input": conversation[-1:]} if store and last else {}
        asked = FIRST | {"input": conversation, "store": store} | since
        last = await server.openai.responses.create(**asked, extra_body=METADATA)
        for item in last.output:
            conversation.append(item.model_dump())
            if item.type.endswith("_call"):
                result = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "seen"}
                conversation.append(result | {"name": item.name, "namespace": item.namespace})
    assert last is not None
    assert last.output_text == "done"
    messages = rendered[-1][0]
    assert messages[4]["reasoning_content"] == "hm"
    called = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert [(function["name"], json.loads(function["arguments"])) for function in called] == [
        ("exec_command", {"cmd": "ls"}),
        ("multi_agent_v1__wait_agent", {"targets": []}),
        ("apply_patch", {"input": PATCH}),
    ]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["seen"] * 3


async def test_a_stored_response_goes_on_by_its_id_alone(server: HttpServer, say: Say, rendered: list[Any]) -> None:
    say(call("apply_patch", json.dumps({"input": PATCH})))
    for is_background in (False, True):
        first = await server.openai.responses.create(**FIRST | {"store": True, "background": is_background})
        async for _ in await server.openai.responses.retrieve(first.id, stream=True) if is_background else _nothing():
            pass
        found = await server.openai.responses.retrieve(first.id)
        [item] = found.output
        assert (item.type, item.input) == ("custom_tool_call", PATCH)
        result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "patched"}
        second = await server.openai.responses.create(**FIRST | {"previous_response_id": first.id, "input": [result]})
        assert second.status == "completed"
        *_, called, answered = rendered[-1][0]
        assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"input": PATCH}
        assert answered == {"role": "tool", "tool_call_id": item.call_id, "content": "patched"}
        listed = [each.type async for each in await server.openai.responses.input_items.list(first.id)]
        assert listed == ["message"] * 4


async def test_a_conversation_is_compacted(server: HttpServer, say: Say, rendered: list[Any]) -> None:
    say("<think>hm</think>They look at x.")
    conversation: Any = [
        *FIRST["input"][2:],
        {"type": "function_call", "call_id": "1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"role": "assistant", "content": "There is x."},
    ]
    kept = await server.openai.responses.create(model="chatty", input=conversation)
    asked: Any
    for asked in ({"input": conversation}, {"previous_response_id": kept.id}):
        answer = await server.openai.responses.compact(model="chatty", instructions="Be brief.", **asked)
        assert answer.object == "response.compaction"
        # Open Responses requires the phase of a message to be a string, so a null phase is omitted.
        assert all("phase" not in item.model_fields_set for item in answer.output)
        assert [(item.type, getattr(item, "role", None)) for item in answer.output] == [
            ("message", "user"),
            ("message", "user"),
            ("compaction", None),
        ]
        assert answer.usage.output_tokens_details.reasoning_tokens
        [first, *_, last] = rendered[-1][0]
        assert first == {"role": "system", "content": "Be brief."}
        assert last["content"].startswith("Summarize this conversation")
        goes_on = [
            *(item.model_dump(warnings=False) for item in answer.output),
            {"role": "user", "content": "And now?"},
        ]
        await server.openai.responses.create(model="chatty", input=goes_on, store=False)
        assert [message["content"] for message in rendered[-1][0]] == [
            "The folder is /x.",
            "Look.",
            "Summary of the conversation so far:\n\nThey look at x.",
            "And now?",
        ]
    compact = f"{PATH}/compact"
    for param, refused in (("input", {}), ("stream", {"stream": True}), ("background", {"background": True})):
        body = {"model": "chatty"} if param == "input" else {"model": "chatty", "input": "hi"}
        assert (await server.refusal(compact, **body, **refused))["param"] == param
    assert (await server.refusal(compact, input="hi"))["param"] == "model"
    assert (await server.refusal(PATH))["param"] == "input"
    say("<think>hm")
    error = await server.refusal(compact, status=500, model="chatty", input="hi")
    assert "no summary; raise max_output_tokens" in error["message"]


async def _nothing() -> Any:
    for never in ():
        yield never


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
async def test_an_image_in_a_result_is_left_out(
    server: HttpServer, say: Say, rendered: list[Any], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    say("hello")
    given = {"function_call": {"arguments": "{}"}, "custom_tool_call": {"input": "x"}}[kind]
    parts = [
        {"type": "input_text", "text": "seen: "},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto", "file_id": None},
    ]
    asked = [
        {"type": kind, "call_id": "1", "name": "look", **given},
        {"type": f"{kind}_output", "call_id": "1", "output": parts},
    ]
    answer = await server.post(PATH, input=[*FIRST["input"], *asked])
    assert answer.status_code == 200, answer.text
    warning = "images in the results of tools are left out: the model reads text only"
    assert answer.headers["warning"] == f'299 - "{warning}"'
    assert warning in caplog.text
    expected = "seen: [An image was left out here: the model reads text only.]"
    assert rendered[-1][0][-1]["content"] == expected


SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Searches for tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
FOUND = {"type": "function", "name": "read_mail", "description": "Reads.", "parameters": COMMAND}
LISTED = {"type": "namespace", "name": "mail", "description": "Mails.", "tools": [{"type": "custom", "name": "send"}]}


@pytest.mark.parametrize("store", [False, True])
async def test_the_client_searches_for_tools(server: HttpServer, say: Say, rendered: list[Any], store: bool) -> None:
    """The client itself executes tool searches, as Codex does if the model has an OpenAI name."""
    say(call("tool_search", '{"query": "mail"}'))
    tools = [*TOOLS[:1], SEARCH]
    response, events = await both(server, tools=tools, store=store)
    [item] = response.output
    assert (item.type, item.arguments, item.execution, item.status) == (
        "tool_search_call",
        {"query": "mail"},
        "client",
        "completed",
    )
    assert [event.type for event in events if "output_item" in event.type] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    functions = {tool["function"]["name"]: tool["function"] for tool in rendered[-1][1]["tools"]}
    assert [*functions] == ["exec_command", "tool_search"]
    assert functions["tool_search"]["description"] == "Searches for tools."
    assert functions["tool_search"]["parameters"] == SEARCH["parameters"]
    found = {"type": "tool_search_output", "call_id": item.call_id, "execution": "client", "status": "completed"}
    found |= {"tools": [FOUND, LISTED, {"type": "web_search"}]}
    say(call("read_mail", '{"cmd": "a"}') + call("mail__send", '{"input": "hi"}'))
    items: list[Any] = [found, found] if store else [*FIRST["input"], item.model_dump(), found]
    more = {"previous_response_id": response.id} if store else {}
    answer, _ = await both(server, tools=tools, input=items, store=store, **more)
    called = [(each.type, each.namespace, each.name) for each in answer.output]
    assert called == [("function_call", None, "read_mail"), ("custom_tool_call", "mail", "send")]
    messages, variables = rendered[-1]
    names = [tool["function"]["name"] for tool in variables["tools"]]
    assert names == ["exec_command", "tool_search", "read_mail", "mail__send"]
    [search] = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert search == {"name": "tool_search", "arguments": {"query": "mail"}}
    results = {message["content"] for message in messages if message["role"] == "tool"}
    assert results == {"Tools that may be called now: read_mail, mail__send"}
    if store:  # also in the background
        began = await server.openai.responses.create(
            **FIRST | {"tools": tools, "input": items, "store": True, "background": True} | more
        )
        async for _ in await server.openai.responses.retrieve(began.id, stream=True):
            pass
        read = await server.openai.responses.retrieve(began.id)
        assert [(each.type, each.name) for each in read.output] == [
            ("function_call", "read_mail"),
            ("custom_tool_call", "send"),
        ]


async def test_a_search_for_tools_that_no_client_makes(server: HttpServer, say: Say, rendered: list[Any]) -> None:
    """The model sees all tools from the start. The search results of the vendor's server become text."""
    say("hello")
    search = {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["a"]}}
    listed = {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [FOUND]}
    for tool in ({"type": "tool_search"}, {"type": "tool_search", "execution": "server"}):
        items = [*FIRST["input"], search, listed, of_role("user", 5, "And?")]
        response = await server.post(PATH, input=items, tools=[*TOOLS[:1], tool])
        assert response.status_code == 200, response.text
        assert [each["function"]["name"] for each in rendered[-1][1]["tools"]] == ["exec_command"]
        [answer] = [message for message in rendered[-1][0] if message["role"] == "assistant"]
        assert answer["content"].startswith('[Called tool_search: {"execution": "server", "arguments"')
        assert "lists of tools are left out" in response.headers["warning"]
    say(call("tool_search", "[1]"))
    answered = await server.openai.responses.create(**FIRST | {"tools": [SEARCH]})
    assert answered.output[0].arguments == {"INVALID_JSON": "[1]"}
    own = {"type": "function", "name": "tool_search", "parameters": COMMAND}
    answered = await server.openai.responses.create(**FIRST | {"tools": [own, {"type": "tool_search"}]})
    assert [(item.type, item.name) for item in answered.output] == [("function_call", "tool_search")]
